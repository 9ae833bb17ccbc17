// To and from U8_ZERO and U8_BIAS, where units at the destination lie within a token. Spec: E.14
#include "cuda/affine.cuh"
#include "cuda/kernels.h"
#include "cuda/lookup.cuh"

namespace kvx::cuda {
namespace {

// The bounds of the numbers that the lanes of a warp have seen.
__device__ __forceinline__ Bounds warp_bounds(Bounds of) {
  for (uint32_t step = kWarp / 2; step > 0; step /= 2) {
    Bounds other;
    other.least = __shfl_xor_sync(~0u, of.least, step);
    other.largest = __shfl_xor_sync(~0u, of.largest, step);
    of.merge(other);
  }
  return of;
}

// Not within the template: there g++ puts a static array into no section (tests/hostgrid).
__device__ __forceinline__ Staged &staged_of_warp() {
  __shared__ Staged staged[kWarps];
  return staged[threadIdx.x / kWarp];
}

// Into another format: a lane encodes a unit of that.
template <bool kToTurboQuant>
__global__ void __launch_bounds__(kThreads, 4)
    from_affine_kernel(const __grid_constant__ AffineParams p) {
  Staged &staged = staged_of_warp();
  const uint32_t lane = threadIdx.x % kWarp;
  const Pair pair = this_pair(p);
  const PlanePair &shape = p.shape;
  each_token_of_warp<true>(p, pair, [&](const Token &token, uint32_t first, uint32_t last) {
    if (token.src) {
      const auto divisor_of = [&](const Token &t, uint32_t head) {  // TurboQuant has no scales
        return kToTurboQuant ? 1.0f : scale_at(shape.dst_scales, pair.bases.dst_scales, t.to, head);
      };
      return convert_units<kToTurboQuant>(
          p, staged, token, first, last,
          [&](const Token &t, uint32_t head) { return is_usable(divisor_of(t, head)); },
          [&](const Token &t, uint32_t head, uint32_t d) {
            const uint8_t *const from = t.src + head * shape.src.head_stride;
            return number_from(shape.src, src_units(p, blockIdx.y), from, t.from, head, d, 1.0f);
          },
          [&](const Token &, uint32_t, float number) { return number; },
          [&](const Token &t, uint32_t head, float number) { return number / divisor_of(t, head); },
          [&](const Token &t, uint32_t head) {
            report_scale(p, pair, t, head, 1.0f, divisor_of(t, head));
          });
    }
    for (uint32_t unit = first + lane; unit < last; unit += kWarp) {
      const uint32_t head = p.units.per_head.quotient(unit);
      const uint32_t in_head = unit - head * p.units.per_head.divisor;
      uint8_t *const at = token.dst + head * shape.dst.head_stride + offset_of(shape.dst, in_head);
      KVX_LOOP
      for (uint32_t byte = 0; byte < p.units.dst_bytes; ++byte) at[byte] = 0;
    }
  });
}

// Into a format with zero points: a warp per unit, whose numbers are read twice.
__global__ void __launch_bounds__(kThreads, 4)
    to_affine_kernel(const __grid_constant__ AffineParams p) {
  __shared__ Token tokens[kWarps];   // reading any format takes all registers
  __shared__ uint32_t ends[kWarps];  // of the units of a token
  const uint32_t lane = threadIdx.x % kWarp;
  const Pair pair = this_pair(p);
  const PlanePair &shape = p.shape;
  const UnitsAt src = src_units(p, blockIdx.y), dst = dst_units(p, blockIdx.y);
  const uint32_t size = p.affine.dst.group;
  each_token_of_warp<true>(p, pair, [&](const Token &of, uint32_t first, uint32_t last) {
    Token &token = tokens[threadIdx.x / kWarp];
    __syncwarp();
    if (lane == 0) {
      token = of;
      ends[threadIdx.x / kWarp] = last;
    }
    __syncwarp();
    KVX_LOOP
    for (uint32_t unit = first; unit < ends[threadIdx.x / kWarp]; ++unit) {
      const uint32_t head = p.units.per_head.quotient(unit);
      const uint32_t group = unit - head * p.units.per_head.divisor;
      const float scale =
          token.src ? scale_at(shape.src_scales, pair.bases.src_scales, token.from, head) : 1.0f;
      if (!is_usable(scale)) {
        if (lane == 0 && group == 0) report_scale(p, pair, token, head, scale, 1.0f);
        continue;
      }
      // Asked for again in each loop, rather than kept in registers.
      const auto value_at = [&](uint32_t i) {
        const float by = scale_at(shape.src_scales, pair.bases.src_scales, token.from, head);
        const uint8_t *const from = token.src + head * shape.src.head_stride;
        return number_from(shape.src, src, from, token.from, head, group * size + i, by);
      };
      Bounds bounds;
      ScaleZero found{0.0f, 0.0f};
      // First the bounds, then the bytes: one loop, since reading any format is much code.
      KVX_LOOP
      for (uint32_t is_second = token.src ? 0 : 1; is_second < 2; ++is_second) {
        KVX_LOOP
        for (uint32_t i = lane; i < size; i += kWarp) {
          const float x = token.src ? value_at(i) : 0.0f;
          if (is_second) {
            uint8_t *const to = token.dst + head * shape.dst.head_stride;
            to[offset_of(shape.dst, group * size + i)] = token.src ? dst.encode(x, found) : 0;
          } else {
            bounds.add(x);
          }
        }
        if (!is_second) found = dst.find(warp_bounds(bounds));
      }
      if (lane == 0) dst.store(token.to, head, group, found);
    }
  });
}

}  // namespace

void launch_affine(const AffineParams &params, dim3 grid, cudaStream_t stream) {
  if (params.affine.dst.group)
    return KVX_LAUNCH((to_affine_kernel), grid, kThreads, 0, stream, params);
  if (bits_of_turboquant(params.shape.dst.dtype))
    return KVX_LAUNCH((from_affine_kernel<true>), grid, kThreads, 0, stream, params);
  KVX_LAUNCH((from_affine_kernel<false>), grid, kThreads, 0, stream, params);
}

}  // namespace kvx::cuda
