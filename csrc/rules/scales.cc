#include "rules/scales.h"

#include "desc/memory.h"
#include "desc/scale.h"
#include "rules/struct.h"
#include "rules/tensor.h"

namespace kvx {
namespace {

kvx_status_t check_one(const Path &path, const kvx_scale_desc_t &scales) {
  if (scales.ndim > KVX_MAX_TENSOR_DIMS) {
    return KVX_INVALID("%s.ndim is %u, expected at most %d (spec 6.6)", KVX_AT(path), scales.ndim,
                       KVX_MAX_TENSOR_DIMS);
  }
  for (uint32_t axis = 0; axis < scales.ndim; ++axis) {
    if (scales.shape[axis] != 1) {
      return KVX_INVALID("%s.shape[%u] is %lld, expected 1 (PER_TENSOR, spec 6.6)", KVX_AT(path),
                         axis, static_cast<ll>(scales.shape[axis]));
    }
  }
  return KVX_STATUS_OK;
}

kvx_status_t check_granularity(const Path &path, const kvx_scale_desc_t &scales,
                               const kvx_cache_desc_t &cache) {
  const int64_t blocks = cache.num_blocks, tokens = cache.block_size, heads = cache.num_kv_heads;
  int64_t expected[3];
  uint32_t ndim;
  switch (scales.granularity) {
    case KVX_SCALE_PER_TENSOR:
      return check_one(path, scales);
    case KVX_SCALE_PER_BLOCK:
      ndim = 1, expected[0] = blocks;
      break;
    case KVX_SCALE_PER_HEAD:
      ndim = 1, expected[0] = heads;
      break;
    case KVX_SCALE_PER_BLOCK_HEAD:
      ndim = 2, expected[0] = blocks, expected[1] = heads;
      break;
    case KVX_SCALE_PER_TOKEN_HEAD:
      ndim = 3, expected[0] = blocks, expected[1] = tokens, expected[2] = heads;
      break;
    default:
      return KVX_INVALID(
          "%s.granularity is %d, expected PER_TENSOR (1), PER_BLOCK (2), PER_HEAD (3), "
          "PER_BLOCK_HEAD (4) or PER_TOKEN_HEAD (16) (spec 6.6)",
          KVX_AT(path), scales.granularity);
  }
  if (scales.ndim != ndim) {
    return KVX_INVALID("%s.ndim is %u, expected %u for granularity %d (spec 6.6)", KVX_AT(path),
                       scales.ndim, ndim, scales.granularity);
  }
  for (uint32_t axis = 0; axis < ndim; ++axis) {
    if (scales.shape[axis] != expected[axis]) {
      return KVX_INVALID("%s.shape[%u] is %lld, expected %lld for granularity %d (spec 6.6)",
                         KVX_AT(path), axis, static_cast<ll>(scales.shape[axis]),
                         static_cast<ll>(expected[axis]), scales.granularity);
    }
  }
  int64_t extent;
  return check_strides(path, ndim, scales.shape, scales.stride, scales.dtype, &extent);
}

// Checks the one scale of a tensor, if the host can read it.
kvx_status_t check_value(const Path &path, const kvx_scale_desc_t &scales,
                         const kvx_tensor_desc_t &tensor, const Path &tensor_path) {
  const bool one = scales.granularity == KVX_SCALE_PER_TENSOR;
  const bool is_read = one && is_readable(tensor.memory);
  const float scale = is_read ? read_scale(scales.data, scales.dtype) : 1.0f;
  if (!takes_scale(tensor.dtype) && !(one && scale == 1.0f)) {
    return KVX_INVALID(
        "%s is given, but %s.dtype is %s: scales apply to FP8 and S8; pass no scale, or 1.0 per "
        "tensor (spec E.6)",
        KVX_AT(path), KVX_AT(tensor_path), name_of(tensor.dtype));
  }
  if (!is_usable_scale(scale)) {
    return KVX_INVALID("%s is %g, expected a finite scale above 0 (spec E.6)", KVX_AT(path),
                       static_cast<double>(scale));
  }
  return KVX_STATUS_OK;
}

bool varies_by_block(const kvx_scale_desc_t &scales) {
  return scales.granularity != KVX_SCALE_PER_TENSOR && scales.granularity != KVX_SCALE_PER_HEAD;
}

}  // namespace

kvx_status_t check_scales(const Path &path, const kvx_scale_desc_t &scales,
                          const kvx_cache_desc_t &cache, const kvx_tensor_desc_t &tensor,
                          const Path &tensor_path) {
  if (!scales.data) return KVX_STATUS_OK;
  KVX_TRY(check_struct(path, &scales));
  if (is_absent(tensor)) {
    return KVX_INVALID("%s is given, but %s is absent (spec E.1)", KVX_AT(path),
                       KVX_AT(tensor_path));
  }
  if (!is_scale_type(scales.dtype)) {
    return KVX_INVALID("%s.dtype is %d (%s), expected %s (spec 6.6)", KVX_AT(path), scales.dtype,
                       name_of(scales.dtype), kScaleTypes);
  }
  KVX_TRY(check_granularity(path, scales, cache));
  KVX_TRY(check_aligned(path, scales.data, scales.dtype));
  return check_value(path, scales, tensor, tensor_path);
}

kvx_status_t check_secondary_scales(const Path &path, const kvx_cache_desc_t &cache,
                                    const kvx_scale_desc_t &scales) {
  if (!cache.pool.secondary || !scales.data || !varies_by_block(scales)) return KVX_STATUS_OK;
  return fail(
      KVX_STATUS_UNSUPPORTED,
      "%s varies by block, but the pool has a secondary pool whose blocks it cannot number; "
      "use PER_TENSOR or PER_HEAD (spec E.8)",
      KVX_AT(path));
}

kvx_status_t check_pointer_scales(const Path &path, const kvx_scale_desc_t &scales) {
  if (!scales.data || !varies_by_block(scales)) return KVX_STATUS_OK;
  return fail(KVX_STATUS_UNSUPPORTED,
              "%s varies by block, but a POINTERS table does not number blocks; use PER_TENSOR or "
              "PER_HEAD (spec E.12)",
              KVX_AT(path));
}

kvx_status_t check_found_scales(const Path &path, const kvx_scale_desc_t *scales,
                                const Path &tensor_path, const kvx_tensor_desc_t &tensor) {
  if (is_absent(tensor)) return KVX_STATUS_OK;
  if (!takes_scale(tensor.dtype)) {
    return KVX_INVALID(
        "%s.dtype is %s, expected FP8 or S8 with FIND_SCALES; call without it for layers of "
        "other dtypes (spec E.9)",
        KVX_AT(tensor_path), name_of(tensor.dtype));
  }
  if (!scales || !scales->data) {
    return KVX_INVALID("%s is NULL, expected room for the scales with FIND_SCALES (spec E.9)",
                       KVX_AT(path));
  }
  if (scales->granularity != KVX_SCALE_PER_TOKEN_HEAD) {
    return KVX_INVALID(
        "%s.granularity is %d, expected PER_TOKEN_HEAD (16) with FIND_SCALES "
        "(spec E.9)",
        KVX_AT(path), scales->granularity);
  }
  return check_disjoint(path, scales->ndim, scales->shape, scales->stride);
}

}  // namespace kvx
