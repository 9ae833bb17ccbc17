// Formats whose units hold several numbers, at one end or both: a lane per unit, any strides, any
// scales. Units of the same format move byte by byte if no copy kernel takes them.
#include "cuda/kernels.h"
#include "cuda/lookup.cuh"
#include "cuda/numbers.cuh"

namespace kvx::cuda {
namespace {

template <class P>
__global__ void __launch_bounds__(kThreads, 4) units_kernel(const __grid_constant__ P p) {
  const uint32_t lane = threadIdx.x % kWarp;
  const Pair pair = this_pair(p);
  const PlanePair &shape = p.shape;
  each_token_of_warp<true>(p, pair, [&](const Token &token, uint32_t first, uint32_t last) {
    for (uint32_t unit = first + lane; unit < last; unit += kWarp) {
      const uint32_t head = p.units.per_head.quotient(unit);
      const uint32_t in_head = unit - head * p.units.per_head.divisor;
      const uint8_t *const from = token.src ? token.src + head * shape.src.head_stride : nullptr;
      uint8_t *const to = token.dst + head * shape.dst.head_stride;
      if (!shape.convert || !from) {
        const uint32_t per_unit = p.units.dst_units;
        KVX_LOOP
        for (uint32_t i = 0; i < per_unit * p.units.dst_bytes; ++i) {
          const uint32_t u = in_head * per_unit + i / p.units.dst_bytes;
          const uint32_t byte = i % p.units.dst_bytes;
          to[offset_of(shape.dst, u) + byte] = from ? from[offset_of(shape.src, u) + byte] : 0;
        }
        continue;
      }
      const float scale = scale_at(shape.src_scales, pair.bases.src_scales, token.from, head);
      const float divisor = scale_at(shape.dst_scales, pair.bases.dst_scales, token.to, head);
      if (is_usable(scale) && is_usable(divisor)) {
        store_numbers(shape.dst, to, in_head * p.units.elements, p.units.elements,
                      [&](uint32_t d) { return number_at(shape.src, from, d) * scale / divisor; });
      } else if (in_head == 0) {
        report_scale(p, pair, token, head, scale, divisor);
      }
    }
  });
}

}  // namespace

template <class P>
void launch_units(const P &params, const Choice &, dim3 grid, cudaStream_t stream) {
  KVX_LAUNCH((units_kernel<P>), grid, kThreads, 0, stream, params);
}

}  // namespace kvx::cuda

KVX_INSTANTIATE(launch_units);
