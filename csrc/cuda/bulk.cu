// Same bytes, long runs, in the background: a few thread blocks whose warps copy runs through
// shared memory with bulk copies. Each warp has its own chunks and stages.
#include <atomic>

#include "cuda/bulk.cuh"
#include "cuda/runs.cuh"

namespace kvx::cuda {
namespace {

// Of a warp. Those of all warps fit into the 99 KB of a thread block on sm_89 and sm_120.
constexpr uint32_t kStages = 3, kStageBytes = 4 << 10;
constexpr uint32_t kAhead = 2;  // stages that are loaded while the one before them is stored

struct Shared {
  alignas(128) uint8_t stages[kWarps][kStages][kStageBytes];
  uint64_t words[kWarps][kStages];
};

// The piece that begins at this lane's token: all runs that follow each other at both ends. Lanes
// whose token begins none have an empty piece.
struct Piece {
  uint64_t begin, end;  // bytes of the chunk
};

// False if a block is not whole, or has no source.
__device__ __forceinline__ bool find_piece(const Common &p, const Runs &runs, const Token &token,
                                           uint32_t tokens, Piece *piece) {
  const uint32_t lane = threadIdx.x % kWarp;
  const uint32_t run = lane / runs.tokens, in_run = lane - run * runs.tokens;
  const uint64_t run_bytes = uint64_t{runs.vectors} * kVectorBytes;
  // Where the lane's run begins, as far as its own token can tell
  uint64_t src = reinterpret_cast<uintptr_t>(token.src),
           dst = reinterpret_cast<uintptr_t>(token.dst);
  if (src) src -= in_run * p.shape.src.token_stride;
  if (dst) dst -= in_run * p.shape.dst.token_stride;
  const uint64_t src_before = __shfl_up_sync(~0u, src, 1), dst_before = __shfl_up_sync(~0u, dst, 1);
  const bool same = src == src_before && dst == dst_before;
  const bool next = src == src_before + run_bytes && dst == dst_before + run_bytes;
  const bool is_member = lane < tokens;
  const bool whole = tokens % runs.tokens == 0 && (in_run == 0 || same) && (src || !dst);
  if (!__all_sync(~0u, !is_member || whole)) return false;
  const bool begins = is_member && in_run == 0 && (lane == 0 || !next);
  const uint32_t later = __ballot_sync(~0u, begins) & ~((2u << lane) - 1);
  const uint32_t end = later ? __ffs(later) - 1 : tokens;
  *piece = {run * run_bytes, begins && dst ? end / runs.tokens * run_bytes : 0};
  return true;
}

// The stages of a warp, used in turn.
class Ring {
 public:
  __device__ __forceinline__ Ring(Shared *shared, uint32_t warp)
      : stages_(shared->stages[warp]), loads_(shared->words[warp], kStages) {}

  // Called by all lanes: each has `count` bytes copied, at `at` of the stage meanwhile. Only their
  // loads have been started when it returns.
  __device__ __forceinline__ void copy(const uint8_t *src, uint8_t *dst, uint32_t at,
                                       uint32_t count) {
    wait_for_stores_to_read<kStages - 1 - kAhead>();
    __syncwarp();
    if (count) loads_.start(next_, &stages_[next_][at], src, count);
    const uint32_t first = (next_ + kStages - kAhead) % kStages;
    loads_.wait(first);
    if (pending_[0].count)
      start_bulk_store(pending_[0].dst, &stages_[first][pending_[0].at], pending_[0].count);
    end_group_of_stores();
#pragma unroll
    for (uint32_t i = 1; i < kAhead; ++i) pending_[i - 1] = pending_[i];
    pending_[kAhead - 1] = {dst, at, count};
    next_ = (next_ + 1) % kStages;
  }

  // Returns when all is done.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (uint32_t i = 0; i < kAhead; ++i) copy(nullptr, nullptr, 0, 0);
    wait_for_stores();
  }

 private:
  struct Load {
    uint8_t *dst;
    uint32_t at, count;
  };

  uint8_t (*stages_)[kStageBytes];
  BulkLoads loads_;
  Load pending_[kAhead]{};  // the first loads are empty
  uint32_t next_ = 0;       // stage
};

// Copies all pieces of a warp.
__device__ __forceinline__ void pass(const Runs &runs, const Token &token, uint32_t tokens,
                                     const Piece &piece, Ring *ring) {
  const uint64_t bytes = tokens / runs.tokens * uint64_t{runs.vectors} * kVectorBytes;
  for (uint64_t begin = 0; begin < bytes; begin += kStageBytes) {
    // What the stage holds of this lane's piece
    const uint64_t first = max(begin, piece.begin);
    const uint64_t last = min(begin + kStageBytes, piece.end);
    const uint64_t in_piece = first - piece.begin;
    ring->copy(token.src + in_piece, token.dst + in_piece, static_cast<uint32_t>(first - begin),
               static_cast<uint32_t>(first < last ? last - first : 0));
  }
}

template <class P>
__global__ void __launch_bounds__(kThreads, 4)
    bulk_kernel(const __grid_constant__ P p, const __grid_constant__ Runs runs) {
  KVX_DYNAMIC_SHARED(Shared, shared);
  const uint32_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  Ring ring(shared, warp);
  const Pair pair = this_pair(p);
  for (uint32_t item = blockIdx.x * kWarps + warp; item < p.chunks; item += gridDim.x * kWarps) {
    for (uint32_t skipped = 0; skipped < p.tokens_per_chunk; skipped += runs.round) {
      // Find all tokens, one per lane
      const Chunk chunk = chunk_of(p, pair.lookup, item, skipped, pair.reports && lane == 0);
      if (chunk.begin >= chunk.end) {
        if (is_past_rows(p, item)) return ring.finish();
        break;
      }
      const uint32_t tokens = min(chunk.end - chunk.begin, runs.round);
      Token token{};
      if (lane < tokens) token = token_at(p, pair, chunk, chunk.begin + lane, pair.reports);
      Piece piece;
      if (kHasBulk && find_piece(p, runs, token, tokens, &piece)) {
        pass(runs, token, tokens, piece, &ring);
        continue;
      }
      for (uint32_t i = 0; i < tokens; ++i) {
        const Token moved = token_of_lane<false>(token, i);
        if (moved.dst) move_token(p, runs, moved.src, moved.dst);
      }
    }
  }
  ring.finish();
}

}  // namespace

template <class P>
void launch_bulk(const P &params, const Choice &choice, dim3 grid, cudaStream_t stream) {
  constexpr int kBytes = sizeof(Shared);
  static std::atomic<uint64_t> allowed{0};  // a bit per device that knows what the kernel needs
  int device = 0;
  cudaGetDevice(&device);
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if (!(allowed & bit) &&
      cudaFuncSetAttribute(bulk_kernel<P>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes) ==
          cudaSuccess) {
    allowed |= bit;
  }
  KVX_LAUNCH((bulk_kernel<P>), grid, kThreads, kBytes, stream, params, Runs(params, choice, kWarp));
}

}  // namespace kvx::cuda

KVX_INSTANTIATE(launch_bulk);
