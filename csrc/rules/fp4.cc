#include "rules/fp4.h"

#include <cmath>

#include "desc/affine.h"
#include "desc/memory.h"
#include "desc/scale.h"
#include "desc/tensor.h"
#include "rules/struct.h"
#include "rules/tensor.h"

namespace kvx {
namespace {

// Numbers that share a scale: 16 of NVFP4, 32 of MX.
int64_t group_of(kvx_dtype_t scales) { return scales == KVX_DTYPE_F8_E4M3 ? 16 : 32; }

kvx_status_t check_shape(const Path &path, const kvx_scale_desc_t &scales,
                         const kvx_cache_desc_t &cache, const kvx_tensor_desc_t &tensor) {
  const int64_t group = group_of(scales.dtype), dim = dim_of(tensor);
  if (dim % group != 0) {
    return KVX_INVALID(
        "%s.dtype is %s, a scale for each %lld numbers, but head_dim is %lld, expected a multiple "
        "(spec E.18)",
        KVX_AT(path), name_of(scales.dtype), static_cast<ll>(group), static_cast<ll>(dim));
  }
  if (scales.ndim != 4) {
    return KVX_INVALID("%s.ndim is %u, expected 4 for granularity %d (spec E.18)", KVX_AT(path),
                       scales.ndim, scales.granularity);
  }
  const int64_t expected[] = {cache.num_blocks, cache.block_size, cache.num_kv_heads, dim / group};
  for (uint32_t axis = 0; axis < 4; ++axis) {
    if (scales.shape[axis] == expected[axis]) continue;
    return KVX_INVALID(
        "%s.shape[%u] is %lld, expected %lld: [num_blocks, block_size, num_kv_heads, groups of "
        "%lld numbers] (spec E.18)",
        KVX_AT(path), axis, static_cast<ll>(scales.shape[axis]), static_cast<ll>(expected[axis]),
        static_cast<ll>(group));
  }
  if (!swaps_fours(scales) || (scales.shape[1] % 4 == 0 && scales.shape[3] % 4 == 0))
    return KVX_STATUS_OK;
  return KVX_INVALID(
      "%s.granularity is PER_GROUP_4X4 (34) with %lld tokens of a block and %lld groups, expected "
      "multiples of 4 (spec E.18)",
      KVX_AT(path), static_cast<ll>(scales.shape[1]), static_cast<ll>(scales.shape[3]));
}

kvx_status_t check_tensor_scale(const Path &path, const kvx_scale_desc_t &scale,
                                const Path &scales_path, const kvx_scale_desc_t &scales,
                                const kvx_tensor_desc_t &tensor) {
  KVX_TRY(check_struct(path, &scale));
  if (!scale.data) return KVX_STATUS_OK;
  if (scales.dtype != KVX_DTYPE_F8_E4M3) {
    return KVX_INVALID(
        "%s is given, but %s.dtype is %s, expected none: MX has no such scale (spec "
        "E.18)",
        KVX_AT(path), KVX_AT(scales_path), name_of(scales.dtype));
  }
  if (scale.dtype != KVX_DTYPE_F32 || scale.granularity != KVX_SCALE_PER_TENSOR) {
    return KVX_INVALID(
        "%s is %s of granularity %d, expected one F32 (PER_TENSOR, 1), the scale of all numbers "
        "(spec E.18)",
        KVX_AT(path), name_of(scale.dtype), scale.granularity);
  }
  KVX_TRY(check_aligned(path, scale.data, scale.dtype));
  const float value = is_readable(tensor.memory) ? read_scale(scale.data, scale.dtype) : 1.0f;
  // Encoders multiply by the inverse, which is infinite for some subnormal scales.
  if (is_usable_scale(value) && std::isfinite(1.0f / value)) return KVX_STATUS_OK;
  return KVX_INVALID(
      "%s is %g, expected a finite scale above 0 whose inverse is finite, above 2^-128 (spec E.18)",
      KVX_AT(path), static_cast<double>(value));
}

}  // namespace

kvx_status_t check_group_scales(const Path &path, const kvx_scale_desc_t *scales,
                                const Path &tensor_scale_path, const kvx_scale_desc_t *tensor_scale,
                                const kvx_cache_desc_t &cache, const kvx_tensor_desc_t &tensor,
                                const Path &tensor_path) {
  if (scales) KVX_TRY(check_struct(path, scales));
  if (!scales || !scales->data) {
    return KVX_INVALID(
        "%s is NULL, but %s.dtype is F4_E2M1: each group of numbers has a scale (spec E.18)",
        KVX_AT(path), KVX_AT(tensor_path));
  }
  if (scales->dtype != KVX_DTYPE_F8_E4M3 && scales->dtype != KVX_DTYPE_F8_E8M0) {
    return KVX_INVALID("%s.dtype is %d (%s), expected F8_E4M3 (NVFP4) or F8_E8M0 (MX) (spec E.18)",
                       KVX_AT(path), scales->dtype, name_of(scales->dtype));
  }
  if (!has_groups(*scales)) {
    return KVX_INVALID(
        "%s.granularity is %d, expected PER_GROUP (33) or PER_GROUP_4X4 (34) for F4_E2M1 (spec "
        "E.18)",
        KVX_AT(path), scales->granularity);
  }
  KVX_TRY(check_shape(path, *scales, cache, tensor));
  int64_t extent;
  KVX_TRY(check_strides(path, 4, scales->shape, scales->stride, scales->dtype, &extent));
  if (!tensor_scale) return KVX_STATUS_OK;
  return check_tensor_scale(tensor_scale_path, *tensor_scale, path, *scales, tensor);
}

}  // namespace kvx
