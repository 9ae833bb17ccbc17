#include "rules/cache.h"

#include "rules/format.h"
#include "rules/struct.h"
#include "rules/tensor.h"
#include "rules/validate.h"

namespace kvx {
namespace {

const char *section_of(kvx_layout_t layout) {
  switch (layout) {
    case KVX_LAYOUT_BLOCK_NHD:
      return "BLOCK_NHD, spec 4.2";
    case KVX_LAYOUT_BLOCK_HND:
      return "BLOCK_HND, spec 4.2";
    case KVX_LAYOUT_BLOCK_HND_PACKED:
      return "BLOCK_HND_PACKED, spec 4.2";
    default:
      return "BLOCK_CUSTOM, spec 4.2";
  }
}

// Checks that the extents of a CUSTOM tensor say which axis is which.
kvx_status_t check_distinct(const Path &path, const kvx_tensor_desc_t &tensor) {
  if (tensor.layout != KVX_LAYOUT_BLOCK_CUSTOM) return KVX_STATUS_OK;
  for (uint32_t axis = 1; axis < tensor.ndim; ++axis) {
    for (uint32_t other = 0; other < axis; ++other) {
      if (tensor.shape[axis] <= 1 || tensor.shape[axis] != tensor.shape[other]) continue;
      return KVX_INVALID(
          "%s.shape[%u] and shape[%u] are both %lld, expected extents that differ, since they "
          "alone "
          "say which axis of BLOCK_CUSTOM is which; name the order by %s, whose strides are as "
          "free, "
          "or by the axes of a plane (spec 4.2)",
          KVX_AT(path), other, axis, static_cast<ll>(tensor.shape[axis]),
          tensor.ndim == 5 ? "BLOCK_HND_PACKED" : "BLOCK_HND or BLOCK_NHD");
    }
  }
  return KVX_STATUS_OK;
}

// Checks size, dtype, layout, memory and ndim, before axes_of() may be called.
kvx_status_t check_layout(const Path &path, const kvx_tensor_desc_t &tensor) {
  KVX_TRY(check_struct(path, &tensor));
  KVX_TRY(check_element_type(path, tensor.dtype));
  uint32_t ndim = 4;
  switch (tensor.layout) {
    case KVX_LAYOUT_BLOCK_NHD:
    case KVX_LAYOUT_BLOCK_HND:
      break;
    case KVX_LAYOUT_BLOCK_HND_PACKED:
      ndim = 5;
      break;
    case KVX_LAYOUT_BLOCK_CUSTOM:
      if (tensor.ndim == 5) ndim = 5;
      break;
    default:
      return KVX_INVALID(
          "%s.layout is %d, expected BLOCK_NHD (1), BLOCK_HND (2), BLOCK_HND_PACKED (3) or "
          "BLOCK_CUSTOM (15) (spec 4.2)",
          KVX_AT(path), tensor.layout);
  }
  KVX_TRY(check_memory(path, tensor.memory));
  if (tensor.ndim != ndim) {
    return KVX_INVALID("%s.ndim is %u, expected %u (%s)", KVX_AT(path), tensor.ndim, ndim,
                       section_of(tensor.layout));
  }
  return KVX_STATUS_OK;
}

// Checks the axis or the two axes of dim. `head_dim` 0: any, as V's may differ from K's.
kvx_status_t check_dim(const Path &path, const kvx_tensor_desc_t &tensor, const Axes &axes,
                       int64_t head_dim, const char *section) {
  if (tensor.shape[axes.inner] < 1 || (axes.outer >= 0 && tensor.shape[axes.outer] < 1)) {
    const int axis = tensor.shape[axes.inner] < 1 ? axes.inner : axes.outer;
    return KVX_INVALID("%s.shape[%d] is %lld, expected at least 1 (%s)", KVX_AT(path), axis,
                       static_cast<ll>(tensor.shape[axis]), section);
  }
  KVX_TRY(check_whole_units(path, tensor.dtype, head_dim));
  head_dim = units_of(tensor.dtype, head_dim);
  if (axes.outer < 0) {
    if (head_dim) {
      KVX_TRY(check_shape(path, tensor, axes.inner, head_dim, dim_name(tensor.dtype), section));
    }
  } else if (head_dim) {
    const int64_t pack = tensor.shape[axes.inner];
    if (head_dim % pack != 0) {
      return KVX_INVALID("%s.shape[%d] (pack) is %lld, expected a divisor of head_dim %lld (%s)",
                         KVX_AT(path), axes.inner, static_cast<ll>(pack), static_cast<ll>(head_dim),
                         section);
    }
    KVX_TRY(check_shape(path, tensor, axes.outer, head_dim / pack, "head_dim / pack", section));
  }
  int64_t dim;
  if (__builtin_mul_overflow(tensor.shape[axes.inner],
                             axes.outer < 0 ? 1 : tensor.shape[axes.outer], &dim) ||
      dim > units_of(tensor.dtype, INT32_MAX)) {
    return KVX_INVALID("%s.shape gives a head_dim past 2^31 (%s)", KVX_AT(path), section);
  }
  return KVX_STATUS_OK;
}

kvx_status_t check_tensor(const Path &path, const kvx_cache_desc_t &cache,
                          const kvx_tensor_desc_t &tensor, int64_t head_dim) {
  KVX_TRY(check_layout(path, tensor));
  const Axes axes = axes_of(tensor);
  const char *const section = section_of(tensor.layout);
  KVX_TRY(check_shape(path, tensor, axes.block, cache.num_blocks, "num_blocks", section));
  KVX_TRY(check_shape(path, tensor, axes.token, cache.block_size, "block_size", section));
  KVX_TRY(check_shape(path, tensor, axes.head, cache.num_kv_heads, "num_kv_heads", section));
  KVX_TRY(check_dim(path, tensor, axes, head_dim, section));
  KVX_TRY(check_distinct(path, tensor));
  int64_t extent;
  KVX_TRY(check_strides(path, tensor.ndim, tensor.shape, tensor.stride, tensor.dtype, &extent));
  KVX_TRY(check_disjoint(path, tensor.ndim, tensor.shape, tensor.stride));
  return check_data_pointer(path, tensor, extent);
}

// The rules of check_tensor that a tensor's form does not settle.
kvx_status_t check_place(const Path &path, const kvx_tensor_desc_t &tensor) {
  return check_data_pointer(path, tensor, extent_elements(tensor));
}

}  // namespace

kvx_status_t check_cache(const Path &path, const kvx_cache_desc_t *cache) {
  KVX_TRY(check_struct(path, cache));
  KVX_TRY(check_nonzero(path, "num_blocks", cache->num_blocks));
  KVX_TRY(check_nonzero(path, "block_size", cache->block_size));
  KVX_TRY(check_nonzero(path, "num_kv_heads", cache->num_kv_heads));
  KVX_TRY(check_nonzero(path, "head_dim", cache->head_dim));
  KVX_TRY(check_unused({&path, "pool"}, cache->pool));
  KVX_TRY(check_tensor({&path, "k"}, *cache, cache->k, cache->head_dim));
  if (is_absent(cache->v)) return check_unused({&path, "v"}, cache->v);
  // The usual V is a K elsewhere in memory.
  if (have_same_form(cache->k, cache->v)) return check_place({&path, "v"}, cache->v);
  return check_tensor({&path, "v"}, *cache, cache->v, 0);
}

kvx_status_t check_cache(const Path &path, const kvx_cache_desc_t *cache,
                         const kvx_cache_desc_t &valid) {
  KVX_TRY(check_struct(path, cache));
  if (cache->num_blocks != valid.num_blocks || cache->block_size != valid.block_size ||
      cache->num_kv_heads != valid.num_kv_heads || cache->head_dim != valid.head_dim ||
      !have_same_form(cache->k, valid.k) || !have_same_form(cache->v, valid.v) ||
      cache->pool.size != valid.pool.size || is_absent(cache->v) != is_absent(valid.v)) {
    return check_cache(path, cache);
  }
  KVX_TRY(check_place({&path, "k"}, cache->k));
  return is_absent(cache->v) ? KVX_STATUS_OK : check_place({&path, "v"}, cache->v);
}

kvx_status_t validate_cache(const kvx_cache_desc_t *cache) {
  return check_cache({nullptr, "cache"}, cache);
}

}  // namespace kvx
