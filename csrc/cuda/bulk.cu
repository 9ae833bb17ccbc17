// Same bytes, long runs, in the background: a few thread blocks whose warps copy runs through
// shared memory with bulk copies. Each warp has its own chunks, and two stages of shared memory:
// one is loaded while the other is stored.
#include <algorithm>
#include <atomic>

#include "cuda/bulk.cuh"
#include "cuda/runs.cuh"
#include "cuda/runtime.h"

namespace kvx::cuda {
namespace {

// As many bytes in flight as a thread block can have, within what a multiprocessor makes use of.
constexpr uint32_t kMostStageBytes = 12 << 10, kStageAlignment = 1 << 10;

struct Barriers {
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
  __device__ __forceinline__ Ring(uint8_t *shared, uint32_t stage_bytes, uint32_t warp)
      : stages_(shared + uint64_t{warp} * kStages * stage_bytes),
        loads_(reinterpret_cast<Barriers *>(shared + uint64_t{kWarps} * kStages * stage_bytes)
                   ->words[warp]),
        stage_bytes_(stage_bytes) {}

  // Called by all lanes: each has `count` bytes copied, through `at` of a stage. It returns when
  // those of the call before are on their way out, and these on their way in.
  __device__ __forceinline__ void copy(const uint8_t *src, uint8_t *dst, uint32_t at,
                                       uint32_t count) {
    wait_for_stores_to_read();
    __syncwarp();
    if (count) loads_.start(stage_, stages_ + stage_ * stage_bytes_ + at, src, count);
    stage_ ^= 1;
    loads_.wait(stage_);
    if (before_.count)
      start_bulk_store(before_.dst, stages_ + stage_ * stage_bytes_ + before_.at, before_.count);
    before_ = {dst, at, count};
  }

  // Returns when all is done.
  __device__ __forceinline__ void finish() {
    copy(nullptr, nullptr, 0, 0);
    wait_for_stores();
  }

 private:
  struct Load {
    uint8_t *dst;
    uint32_t at, count;
  };

  uint8_t *stages_;
  BulkLoads loads_;
  uint32_t stage_bytes_, stage_ = 0;
  Load before_{};  // the first one is empty
};

// Copies all pieces of a warp.
__device__ __forceinline__ void pass(const Runs &runs, const Token &token, uint32_t tokens,
                                     const Piece &piece, uint32_t stage_bytes, Ring *ring) {
  const uint64_t bytes = tokens / runs.tokens * uint64_t{runs.vectors} * kVectorBytes;
  for (uint64_t begin = 0; begin < bytes; begin += stage_bytes) {
    // What the stage holds of this lane's piece
    const uint64_t first = max(begin, piece.begin);
    const uint64_t last = min(begin + stage_bytes, piece.end);
    const uint64_t in_piece = first - piece.begin;
    ring->copy(token.src + in_piece, token.dst + in_piece, static_cast<uint32_t>(first - begin),
               static_cast<uint32_t>(first < last ? last - first : 0));
  }
}

template <class P>
__global__ void __launch_bounds__(kThreads, 4)
    bulk_kernel(const __grid_constant__ P p, const __grid_constant__ Runs runs,
                uint32_t stage_bytes) {
  KVX_DYNAMIC_SHARED(uint8_t, shared);
  const uint32_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  Ring ring(shared, stage_bytes, warp);
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
        pass(runs, token, tokens, piece, stage_bytes, &ring);
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

uint32_t shared_bytes(uint32_t stage_bytes) {
  return kWarps * kStages * stage_bytes + uint32_t{sizeof(Barriers)};
}

// Bytes of a stage on the current device, which lets the kernel have them; 0: an error.
template <class P>
uint32_t stage_bytes() {
  static std::atomic<uint32_t> known[kMostDevices];
  int device = 0, most = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  if (device < kMostDevices && known[device]) return known[device];
  if (cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) != cudaSuccess)
    return 0;
  const uint32_t room = (static_cast<uint32_t>(most) - shared_bytes(0)) / (kWarps * kStages);
  const uint32_t found = std::min(room / kStageAlignment * kStageAlignment, kMostStageBytes);
  if (cudaFuncSetAttribute(bulk_kernel<P>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(shared_bytes(found))) != cudaSuccess) {
    return 0;
  }
  if (device < kMostDevices) known[device] = found;
  return found;
}

}  // namespace

template <class P>
void launch_bulk(const P &params, const Choice &choice, dim3 grid, cudaStream_t stream) {
  const uint32_t bytes = stage_bytes<P>();
  if (!bytes) return;  // the caller asks for the error
  KVX_LAUNCH((bulk_kernel<P>), grid, kThreads, shared_bytes(bytes), stream, params,
             Runs(params, choice, kWarp), bytes);
}

}  // namespace kvx::cuda

KVX_INSTANTIATE(launch_bulk);
