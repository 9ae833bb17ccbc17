#include "plan/attend.h"

#include "desc/scale.h"
#include "error.h"

namespace kvx {
namespace {

// The scales from one block and token on; none if all are 1.
Scales scales_from(const kvx_scale_desc_t *scales, kvx_dtype_t dtype, uint32_t block,
                   uint32_t start) {
  if (!scales || !scales->data || !takes_scale(dtype)) return {};
  const auto step = [&](int axis) {
    return scales->shape[axis] > 1 ? scales->stride[axis] * size_of(scales->dtype) : 0;
  };
  Scales found = {static_cast<const uint8_t *>(scales->data), scales->dtype, 0, 0, 0};
  switch (scales->granularity) {
    case KVX_SCALE_PER_BLOCK:
      found.block_stride = step(0);
      break;
    case KVX_SCALE_PER_HEAD:
      found.head_stride = step(0);
      break;
    case KVX_SCALE_PER_BLOCK_HEAD:
      found.block_stride = step(0), found.head_stride = step(1);
      break;
    case KVX_SCALE_PER_TOKEN_HEAD:
      found.block_stride = step(0), found.token_stride = step(1), found.head_stride = step(2);
      break;
    default:
      break;
  }
  found.data += block * found.block_stride + start * found.token_stride;
  return found;
}

Vectors vectors_of(const kvx_tensor_desc_t &half, const kvx_scale_desc_t *scales,
                   const kvx_attend_desc_t &attend) {
  const Axes axes = axes_of(half);
  // Of an axis without a second element any stride is right.
  const auto step = [&](int axis) {
    return half.shape[axis] > 1 ? stride_bytes(half, axis) : int64_t{0};
  };
  const int64_t token_stride = step(axes.token);
  const auto *const base = static_cast<const uint8_t *>(half.data) +
                           attend.block * step(axes.block) + attend.start * token_stride;
  return {base,
          token_stride,
          step(axes.head),
          static_cast<uint32_t>(dim_of(half)),
          half.dtype,
          scales_from(scales, half.dtype, attend.block, attend.start)};
}

// Scales may be used while the caller changes them; then numbers are wrong, and no memory is.
kvx_status_t check_scales(const char *name, const Scales &scales, const Attention &plan,
                          uint32_t start) {
  if (!scales.data) return KVX_STATUS_OK;
  const uint32_t tokens = scales.token_stride ? plan.num_tokens : 1;
  const uint32_t heads = scales.head_stride ? plan.num_kv_heads : 1;
  for (uint32_t t = 0; t < tokens; ++t) {
    for (uint32_t h = 0; h < heads; ++h) {
      const float scale =
          read_scale(scales.data + t * scales.token_stride + h * scales.head_stride, scales.dtype);
      if (is_usable_scale(scale)) continue;
      return KVX_INVALID(
          "attend.%s is %g for token %u and head %u, expected a finite scale above 0 (spec E.6)",
          name, static_cast<double>(scale), start + t, h);
    }
  }
  return KVX_STATUS_OK;
}

}  // namespace

kvx_status_t plan_attend(const kvx_cache_desc_t &cache, const kvx_attend_desc_t &attend,
                         Attention *plan) {
  const kvx_tensor_desc_t &query = attend.query, &out = attend.out;
  *plan = {vectors_of(cache.k, attend.k_scale, attend),
           vectors_of(cache.v, attend.v_scale, attend),
           cache.num_kv_heads,
           static_cast<uint32_t>(query.shape[0]) / cache.num_kv_heads,
           attend.end - attend.start,
           static_cast<const float *>(query.data),
           static_cast<float *>(out.data),
           {query.stride[0], query.stride[1]},
           {out.stride[0], out.stride[1]},
           attend.scale};
  KVX_TRY(check_scales("k_scale", plan->k.scales, *plan, attend.start));
  return check_scales("v_scale", plan->v.scales, *plan, attend.start);
}

}  // namespace kvx
