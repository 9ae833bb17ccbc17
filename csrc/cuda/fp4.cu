// Into F4_E2M1, from any format: a lane per group, whose numbers are read twice. Spec: E.18
#include "cuda/affine.cuh"
#include "cuda/kernels.h"
#include "cuda/lookup.cuh"

namespace kvx::cuda {
namespace {

__global__ void __launch_bounds__(kThreads, 4)
    to_fp4_kernel(const __grid_constant__ AffineParams p) {
  const uint32_t lane = threadIdx.x % kWarp;
  const Pair pair = this_pair(p);
  const PlanePair &shape = p.shape;
  const UnitsAt src = src_units(p, blockIdx.y), dst = dst_units(p, blockIdx.y);
  const uint32_t size = p.affine.dst.group;
  each_token_of_warp<true>(p, pair, [&](const Token &token, uint32_t first, uint32_t last) {
    KVX_LOOP
    for (uint32_t unit = first + lane; unit < last; unit += kWarp) {
      const uint32_t head = p.units.per_head.quotient(unit);
      const uint32_t group = unit - head * p.units.per_head.divisor;
      uint8_t *const to = token.dst + head * shape.dst.head_stride;
      const uint8_t *const from = token.src ? token.src + head * shape.src.head_stride : nullptr;
      const float scale =
          from ? scale_at(shape.src_scales, pair.bases.src_scales, token.from, head) : 1.0f;
      if (!is_usable(scale)) {
        if (group == 0) report_scale(p, pair, token, head, scale, 1.0f);
        continue;
      }
      const auto value_at = [&](uint32_t i) {
        return number_from(shape.src, src, from, token.from, head, group * size + i, scale);
      };
      float found = 0.0f, inverse = 0.0f;
      if (from) {
        const Fp4 with(dst.tensor_scale());
        int32_t most = 0;
        KVX_LOOP
        for (uint32_t i = 0; i < size; ++i) most = largest_magnitude(most, value_at(i));
        found = with.find(most, dst.end.scales.dtype);
        inverse = with.inverse(found);
      }
      KVX_LOOP
      for (uint32_t i = 0; i < size; i += 2) {
        uint32_t byte = 0;
        if (from)
          byte = E2m1::encode(value_at(i) * inverse) | E2m1::encode(value_at(i + 1) * inverse) << 4;
        to[offset_of(shape.dst, (group * size + i) / 2)] = static_cast<uint8_t>(byte);
      }
      store_group_scale(dst.group_scale(token.to, head, group), dst.end.scales.dtype, found);
    }
  });
}

}  // namespace

void launch_fp4(const AffineParams &params, dim3 grid, cudaStream_t stream) {
  KVX_LAUNCH((to_fp4_kernel), grid, kThreads, 0, stream, params);
}

}  // namespace kvx::cuda
