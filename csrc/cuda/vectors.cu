// Same bytes, a warp per token: any layouts whose vectors consist of units of 1 to 16 bytes at both
// ends. The number of a unit gives its address, so that heads may have any stride.
#include "cuda/kernels.h"
#include "cuda/lookup.cuh"
#include "cuda/vector.h"

namespace kvx::cuda {
namespace {

// Loads in flight per lane: as many as fit into the registers.
template <class V>
__device__ constexpr uint32_t loads_in_flight() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
  return sizeof(V) == 16 ? 3 : 4;
#else
  return 4;
#endif
}

template <class V, class P>
__global__ void __launch_bounds__(kThreads, 4) vectors_kernel(const __grid_constant__ P p) {
  constexpr uint32_t kUnroll = loads_in_flight<V>();
  const uint32_t lane = threadIdx.x % kWarp;
  const Pair pair = this_pair(p);
  const Plane &src = p.shape.src, &dst = p.shape.dst;
  each_token_of_warp<false>(p, pair, [&](const Token &token, uint32_t first, uint32_t last) {
    for (uint32_t unit = first + lane; unit < last; unit += kWarp * kUnroll) {
      V units[kUnroll];
      int64_t to[kUnroll];
#pragma unroll
      for (uint32_t i = 0; i < kUnroll; ++i) {
        const uint32_t u = unit + i * kWarp;
        const uint32_t head = p.units.per_head.quotient(u);
        const uint32_t in_head = u - head * p.units.per_head.divisor;
        to[i] = unit_offset(dst, p.units.dst_per_pack, sizeof(V), head, in_head);
        const int64_t from = unit_offset(src, p.units.src_per_pack, sizeof(V), head, in_head);
        units[i] = load<V>(token.src && u < last ? token.src + from : nullptr);
      }
#pragma unroll
      for (uint32_t i = 0; i < kUnroll; ++i)
        if (unit + i * kWarp < last) store(token.dst + to[i], units[i]);
    }
  });
}

}  // namespace

template <class P>
void launch_vectors(const P &params, const Choice &choice, dim3 grid, cudaStream_t stream) {
  with_vector(choice.unit_bytes, [&](auto vector) {
    KVX_LAUNCH((vectors_kernel<decltype(vector), P>), grid, kThreads, 0, stream, params);
  });
}

}  // namespace kvx::cuda

KVX_INSTANTIATE(launch_vectors);
