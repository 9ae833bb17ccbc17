// Moves everything: an element at a time, any strides, any dtypes, any scales. Slow and always
// right.
#include "cuda/codec.cuh"
#include "cuda/kernels.h"
#include "cuda/lookup.cuh"

namespace kvx::cuda {
namespace {

template <class P>
__global__ void __launch_bounds__(kThreads, 4) generic_kernel(const __grid_constant__ P p) {
  const uint32_t lane = threadIdx.x % kWarp;
  const Pair pair = this_pair(p);
  const PlanePair &shape = p.shape;
  const int64_t src_step = shape.src.inner_stride, dst_step = shape.dst.inner_stride;
  each_token_of_warp<true>(p, pair, [&](const Token &token, uint32_t first, uint32_t last) {
    for (uint32_t element = first + lane; element < last; element += kWarp) {
      const uint32_t head = p.units.per_head.quotient(element);
      const uint32_t d = element - head * p.units.per_head.divisor;
      const int64_t from = unit_offset(shape.src, p.units.src_per_pack, src_step, head, d);
      uint8_t *const to =
          token.dst + unit_offset(shape.dst, p.units.dst_per_pack, dst_step, head, d);
      if (!shape.convert || !token.src) {
        copy_element(to, token.src ? token.src + from : nullptr, p.units.dst_bytes);
        continue;
      }
      const float scale = scale_at(shape.src_scales, pair.bases.src_scales, token.from, head);
      const float divisor = scale_at(shape.dst_scales, pair.bases.dst_scales, token.to, head);
      if (is_usable(scale) && is_usable(divisor)) {
        const float value = load_element(token.src + from, shape.src.dtype) * scale;
        store_element(to, value / divisor, shape.dst.dtype);
      } else if (d == 0) {
        report_scale(p, pair, token, head, scale, divisor);
      }
    }
  });
}

}  // namespace

template <class P>
void launch_generic(const P &params, const Choice &, dim3 grid, cudaStream_t stream) {
  KVX_LAUNCH((generic_kernel<P>), grid, kThreads, 0, stream, params);
}

}  // namespace kvx::cuda

KVX_INSTANTIATE(launch_generic);
