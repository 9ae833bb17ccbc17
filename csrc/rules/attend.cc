// Rules of kvx_attend_desc_t.
#include <cmath>

#include "kvx/kvx_attend.h"
#include "rules/affine.h"
#include "rules/cache.h"
#include "rules/scales.h"
#include "rules/struct.h"
#include "rules/tensor.h"
#include "rules/validate.h"

namespace kvx {
namespace {

// K or V of the cache.
kvx_status_t check_half(const Path &path, const kvx_tensor_desc_t &half) {
  KVX_TRY(check_no_zeros(path, half.dtype));
  if (!is_number(half.dtype)) {
    return KVX_INVALID("%s.dtype is %s, expected numbers to compute with (spec E.21)", KVX_AT(path),
                       name_of(half.dtype));
  }
  if (half.memory != KVX_MEMORY_HOST) {
    return fail(KVX_STATUS_UNSUPPORTED,
                "%s.memory is %d, expected HOST (1): gather the tokens and attend to them on the "
                "device (spec E.21)",
                KVX_AT(path), half.memory);
  }
  const Axes axes = axes_of(half);
  const bool is_split = axes.outer >= 0 && half.shape[axes.outer] > 1;
  if (is_split || (half.shape[axes.inner] > 1 && half.stride[axes.inner] != 1)) {
    return fail(KVX_STATUS_UNSUPPORTED,
                "%s has the numbers of a token and head apart from each other, expected them "
                "contiguous: gather the tokens first (spec E.21)",
                KVX_AT(path));
  }
  return KVX_STATUS_OK;
}

// The query or the output; `dim` is head_dim of K or of V.
kvx_status_t check_vectors(const Path &path, const kvx_tensor_desc_t &vectors, int64_t dim) {
  KVX_TRY(check_struct(path, &vectors));
  if (vectors.dtype != KVX_DTYPE_F32) {
    return KVX_INVALID("%s.dtype is %d (%s), expected F32 (spec E.21)", KVX_AT(path), vectors.dtype,
                       name_of(vectors.dtype));
  }
  if (vectors.memory != KVX_MEMORY_HOST) {
    return fail(KVX_STATUS_UNSUPPORTED, "%s.memory is %d, expected HOST (1) (spec E.21)",
                KVX_AT(path), vectors.memory);
  }
  if (vectors.ndim != 2) {
    return KVX_INVALID("%s.ndim is %u, expected 2: num_q_heads, head_dim (spec E.21)", KVX_AT(path),
                       vectors.ndim);
  }
  KVX_TRY(check_shape(path, vectors, 1, dim, "head_dim", "spec E.21"));
  int64_t extent;
  KVX_TRY(check_strides(path, vectors.ndim, vectors.shape, vectors.stride, vectors.dtype, &extent));
  return check_data_pointer(path, vectors, extent);
}

kvx_status_t check_scale(const Path &path, const kvx_scale_desc_t *scales,
                         const kvx_cache_desc_t &cache, const kvx_tensor_desc_t &half,
                         const Path &half_path) {
  if (!scales) return KVX_STATUS_OK;
  KVX_TRY(check_struct(path, scales));
  return check_scales(path, *scales, cache, half, half_path);
}

kvx_status_t check_out_apart(const Path &path, const kvx_cache_desc_t &cache,
                             const kvx_attend_desc_t &attend) {
  const Extent out = extent_of(attend.out);
  const auto meets = [&](const auto &read) { return intersect(out, extent_of(read)); };
  const char *met = nullptr;
  if (meets(attend.query)) met = "attend.query";
  if (meets(cache.k)) met = "cache.k";
  if (meets(cache.v)) met = "cache.v";
  if (attend.k_scale && attend.k_scale->data && meets(*attend.k_scale)) met = "attend.k_scale";
  if (attend.v_scale && attend.v_scale->data && meets(*attend.v_scale)) met = "attend.v_scale";
  if (!met) return KVX_STATUS_OK;
  return KVX_INVALID(
      "%s.data is %p: it meets memory of %s, which the call reads; expected them "
      "apart (spec E.21)",
      KVX_AT(path), attend.out.data, met);
}

}  // namespace

kvx_status_t validate_attend(const kvx_cache_desc_t *cache, const kvx_attend_desc_t *attend) {
  const Path cache_path{nullptr, "cache"}, path{nullptr, "attend"};
  const Path k{&cache_path, "k"}, v{&cache_path, "v"}, query{&path, "query"}, out{&path, "out"};
  KVX_TRY(check_cache(cache_path, cache));
  KVX_TRY(check_struct(path, attend));
  if (is_absent(cache->v)) return KVX_INVALID("%s is absent, expected a V (spec E.21)", KVX_AT(v));
  KVX_TRY(check_half(k, cache->k));
  KVX_TRY(check_half(v, cache->v));
  if (attend->block >= cache->num_blocks) {
    return KVX_OUT_OF_RANGE("%s.block is %u, expected less than cache.num_blocks %u (spec E.21)",
                            KVX_AT(path), attend->block, cache->num_blocks);
  }
  if (attend->end > cache->block_size || attend->start >= attend->end) {
    return KVX_OUT_OF_RANGE(
        "%s.start and end are %u and %u, expected at least one token, within cache.block_size %u "
        "(spec E.21)",
        KVX_AT(path), attend->start, attend->end, cache->block_size);
  }
  KVX_TRY(check_vectors(query, attend->query, cache->head_dim));
  const int64_t num_q_heads = attend->query.shape[0];
  if (num_q_heads < 1 || num_q_heads > UINT32_MAX || num_q_heads % cache->num_kv_heads) {
    return KVX_INVALID(
        "%s.shape[0] is %lld, expected a multiple of cache.num_kv_heads %u, below 2^32 (spec E.21)",
        KVX_AT(query), static_cast<ll>(num_q_heads), cache->num_kv_heads);
  }
  KVX_TRY(check_vectors(out, attend->out, dim_of(cache->v)));
  KVX_TRY(check_shape(out, attend->out, 0, num_q_heads, "that of query,", "spec E.21"));
  KVX_TRY(check_disjoint(out, attend->out.ndim, attend->out.shape, attend->out.stride));
  KVX_TRY(check_scale({&path, "k_scale"}, attend->k_scale, *cache, cache->k, k));
  KVX_TRY(check_scale({&path, "v_scale"}, attend->v_scale, *cache, cache->v, v));
  if (!std::isfinite(attend->scale)) {
    return KVX_INVALID("%s.scale is %g, expected a finite number (spec E.21)", KVX_AT(path),
                       static_cast<double>(attend->scale));
  }
  if (attend->reserved) {
    return KVX_INVALID("%s.reserved is %u, expected 0 (spec E.21)", KVX_AT(path), attend->reserved);
  }
  return check_out_apart(out, *cache, *attend);
}

}  // namespace kvx
