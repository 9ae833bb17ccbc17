// Same bytes, long runs: a thread block per chunk. Its threads find the tokens in parallel, then
// share the vectors of all runs: the number of a vector gives its addresses.
#include "cuda/runs.cuh"

namespace kvx::cuda {
namespace {

constexpr uint32_t kUnroll = 4;  // loads in flight per thread

struct Places {
  const uint8_t *src[kThreads];
  uint8_t *dst[kThreads];
  uint32_t tokens;  // as thread 0 has found them: other threads may have read another length
};

// Whether token `i` follows the first token of its run.
__device__ __forceinline__ bool follows(const Common &p, const Runs &runs, const Places &places,
                                        uint32_t i) {
  const uint32_t in_run = i % runs.tokens;
  const uint8_t *const src = places.src[i - in_run];
  uint8_t *const dst = places.dst[i - in_run];
  return places.src[i] == (src ? src + in_run * p.shape.src.token_stride : nullptr) &&
         places.dst[i] == (dst ? dst + in_run * p.shape.dst.token_stride : nullptr);
}

// One part of all runs.
__device__ __forceinline__ void move_runs(const Runs &runs, const Places &places, uint32_t tokens,
                                          uint32_t part) {
  const uint32_t first = part * runs.per_part.divisor;
  const auto at = [&](auto *const *begins, uint32_t vector) {
    const uint32_t run = runs.per_part.quotient(vector);
    const uint32_t in_run = first + vector - run * runs.per_part.divisor;
    auto *const begin = begins[run * runs.tokens];
    return begin && in_run < runs.vectors ? begin + uint64_t{in_run} * kVectorBytes : nullptr;
  };
  move_vectors<Vector<kVectorBytes>, kThreads, kUnroll>(
      threadIdx.x, tokens / runs.tokens * runs.per_part.divisor,
      [&](uint32_t vector) { return at(places.src, vector); },
      [&](uint32_t vector) { return at(places.dst, vector); });
}

// Finds a round of tokens of a chunk from `first` on, one per thread.
template <class P>
__device__ __forceinline__ void find_tokens(const P &p, const Runs &runs, uint32_t index,
                                            uint32_t first, bool may_report, Places *places) {
  if (threadIdx.x / kWarp * kWarp >= p.tokens_per_chunk) return;  // whole warps without a token
  const Pair pair = this_pair(p);
  const bool reports = pair.reports && may_report;
  const Chunk chunk = chunk_of(p, pair.lookup, index, first, reports && threadIdx.x == 0);
  const uint32_t tokens = min(chunk.end - chunk.begin, runs.round);
  Token token{};
  if (threadIdx.x < tokens) token = token_at(p, pair, chunk, chunk.begin + threadIdx.x, reports);
  places->src[threadIdx.x] = token.src;
  places->dst[threadIdx.x] = token.dst;
  if (threadIdx.x == 0) places->tokens = tokens;
}

template <class P>
__global__ void __launch_bounds__(kThreads, 4)
    blocks_kernel(const __grid_constant__ P p, const __grid_constant__ Runs runs) {
  KVX_DYNAMIC_SHARED(Places, shared);
  Places &places = *shared;
  const uint32_t items = p.chunks * p.parts.divisor;
  for (uint32_t item = blockIdx.x; item < items; item += gridDim.x) {
    const uint32_t index = p.parts.quotient(item), part = item - index * p.parts.divisor;
    for (uint32_t first = 0; first < p.tokens_per_chunk; first += runs.round) {
      find_tokens(p, runs, index, first, part == 0, &places);
      __syncthreads();
      const uint32_t tokens = places.tokens;
      if (tokens == 0 && p.measures_rows && __syncthreads_and(is_past_rows(p, index))) return;
      bool whole = true;
      if (runs.tokens > 1) {
        whole = tokens % runs.tokens == 0;
        if (threadIdx.x < tokens) whole = whole && follows(p, runs, places, threadIdx.x);
        whole = __syncthreads_and(whole);
      }
      if (whole) {
        move_runs(runs, places, tokens, part);
      } else {
        // A warp per token
        const uint32_t step = p.parts.divisor * kWarps;
        for (uint32_t i = part * kWarps + threadIdx.x / kWarp; i < tokens; i += step)
          if (places.dst[i]) move_token(p, runs, places.src[i], places.dst[i]);
      }
      __syncthreads();
    }
  }
}

}  // namespace

template <class P>
void launch_blocks(const P &params, const Choice &choice, dim3 grid, cudaStream_t stream) {
  KVX_LAUNCH((blocks_kernel<P>), grid, kThreads, sizeof(Places), stream, params,
             Runs(params, choice, kThreads));
}

}  // namespace kvx::cuda

KVX_INSTANTIATE(launch_blocks);
