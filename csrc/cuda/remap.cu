// Same bytes, tokens innermost at one end or at both, as in packed layouts: a warp moves several
// tokens at a time, so that tokens which follow each other there are moved together.
#include "cuda/kernels.h"
#include "cuda/lookup.cuh"
#include "cuda/vector.h"

namespace kvx::cuda {
namespace {

constexpr uint32_t kUnroll = 4;  // loads in flight per lane

// Bytes from one unit to the next; single elements of at most 4 bytes may have any stride.
template <class V>
__device__ __forceinline__ int64_t step_of(const Plane &plane, const Units &units) {
  return sizeof(V) <= 4 && units.elements == 1 ? plane.inner_stride : int64_t{sizeof(V)};
}

template <class V, class P>
__global__ void __launch_bounds__(kThreads, 4) remap_kernel(const __grid_constant__ P p) {
  const uint32_t tokens = min(p.tokens_per_chunk, kWarp), lanes = kWarp / tokens;  // of a token
  const uint32_t lane = threadIdx.x % kWarp, own_token = lane / lanes, own_unit = lane % lanes;
  const Pair pair = this_pair(p);
  const Plane &src = p.shape.src, &dst = p.shape.dst;
  const int64_t src_step = step_of<V>(src, p.units), dst_step = step_of<V>(dst, p.units);
  const uint32_t items = p.chunks * p.parts.divisor;
  for (uint32_t item = blockIdx.x * kWarps + threadIdx.x / kWarp; item < items;
       item += gridDim.x * kWarps) {
    const uint32_t index = p.parts.quotient(item), part = item - index * p.parts.divisor;
    const bool reports = pair.reports && part == 0;
    const uint32_t first = part * p.units_per_part + own_unit;
    const uint32_t last = min((part + 1) * p.units_per_part, p.units.per_token.divisor);
    for (uint32_t skipped = 0; skipped < p.tokens_per_chunk; skipped += tokens) {
      const Chunk chunk = chunk_of(p, pair.lookup, index, skipped, reports && lane == 0);
      if (chunk.begin >= chunk.end) {
        if (is_past_rows(p, index)) return;
        break;
      }
      Token token{};
      if (own_token < chunk.end - chunk.begin)
        token = token_at(p, pair, chunk, chunk.begin + own_token, reports && own_unit == 0);
      if (!token.dst) continue;
      for (uint32_t unit = first; unit < last; unit += lanes * kUnroll) {
        V units[kUnroll];
        int64_t to[kUnroll];
#pragma unroll
        for (uint32_t i = 0; i < kUnroll; ++i) {
          const uint32_t u = unit + i * lanes;
          const uint32_t head = p.units.per_head.quotient(u);
          const uint32_t in_head = u - head * p.units.per_head.divisor;
          to[i] = unit_offset(dst, p.units.dst_per_pack, dst_step, head, in_head);
          const int64_t from = unit_offset(src, p.units.src_per_pack, src_step, head, in_head);
          units[i] = load<V>(token.src && u < last ? token.src + from : nullptr);
        }
#pragma unroll
        for (uint32_t i = 0; i < kUnroll; ++i)
          if (unit + i * lanes < last) store(token.dst + to[i], units[i]);
      }
    }
  }
}

}  // namespace

template <class P>
void launch_remap(const P &params, const Choice &choice, dim3 grid, cudaStream_t stream) {
  with_vector(choice.unit_bytes, [&](auto vector) {
    KVX_LAUNCH((remap_kernel<decltype(vector), P>), grid, kThreads, 0, stream, params);
  });
}

}  // namespace kvx::cuda

KVX_INSTANTIATE(launch_remap);
