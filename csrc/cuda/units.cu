// Formats whose units hold several numbers, at one end or both: any strides, any scales. A lane
// encodes a unit of numbers that its warp has decoded. Units of the same format move byte by byte
// if no copy kernel takes them.
#include "cuda/kernels.h"
#include "cuda/lookup.cuh"
#include "cuda/numbers.cuh"

namespace kvx::cuda {
namespace {

// Not within the template: there g++ puts a static array into no section (tests/hostgrid).
__device__ __forceinline__ Staged &staged_of_warp() {
  __shared__ Staged staged[kWarps];
  return staged[threadIdx.x / kWarp];
}

template <class P, bool kToTurboQuant>
__global__ void __launch_bounds__(kThreads, 4) units_kernel(const __grid_constant__ P p) {
  Staged &staged = staged_of_warp();
  const uint32_t lane = threadIdx.x % kWarp;
  const Pair pair = this_pair(p);
  const PlanePair &shape = p.shape;
  each_token_of_warp<true>(p, pair, [&](const Token &token, uint32_t first, uint32_t last) {
    if (shape.convert && token.src) {
      const auto scale_of = [&](const Token &t, uint32_t head) {
        return scale_at(shape.src_scales, pair.bases.src_scales, t.from, head);
      };
      const auto divisor_of = [&](const Token &t, uint32_t head) {
        return scale_at(shape.dst_scales, pair.bases.dst_scales, t.to, head);
      };
      return convert_units<kToTurboQuant>(
          p, staged, token, first, last,
          [&](const Token &t, uint32_t head) {
            return is_usable(scale_of(t, head)) && is_usable(divisor_of(t, head));
          },
          [&](const Token &t, uint32_t head, uint32_t d) {
            return number_at(shape.src, t.src + head * shape.src.head_stride, d);
          },
          [&](const Token &t, uint32_t head, float number) { return number * scale_of(t, head); },
          [&](const Token &t, uint32_t head, float number) { return number / divisor_of(t, head); },
          [&](const Token &t, uint32_t head) {
            report_scale(p, pair, t, head, scale_of(t, head), divisor_of(t, head));
          });
    }
    KVX_LOOP
    for (uint32_t unit = first + lane; unit < last; unit += kWarp) {
      const uint32_t head = p.units.per_head.quotient(unit);
      const uint32_t in_head = unit - head * p.units.per_head.divisor;
      const uint8_t *const from = token.src ? token.src + head * shape.src.head_stride : nullptr;
      uint8_t *const to = token.dst + head * shape.dst.head_stride;
      const uint32_t per_unit = p.units.dst_units;
      KVX_LOOP
      for (uint32_t i = 0; i < per_unit * p.units.dst_bytes; ++i) {
        const uint32_t u = in_head * per_unit + i / p.units.dst_bytes;
        const uint32_t byte = i % p.units.dst_bytes;
        to[offset_of(shape.dst, u) + byte] = from ? from[offset_of(shape.src, u) + byte] : 0;
      }
    }
  });
}

}  // namespace

template <class P>
void launch_units(const P &params, const Choice &, dim3 grid, cudaStream_t stream) {
  if (params.shape.convert && bits_of_turboquant(params.shape.dst.dtype)) {
    KVX_LAUNCH((units_kernel<P, true>), grid, kThreads, 0, stream, params);
  } else {
    KVX_LAUNCH((units_kernel<P, false>), grid, kThreads, 0, stream, params);
  }
}

}  // namespace kvx::cuda

KVX_INSTANTIATE(launch_units);
