// Pairs of addresses in device tables: the widest vectors that both addresses of a pair allow. A
// thread block per part of a pair.
#include <algorithm>

#include "cuda/copy_engine.h"
#include "cuda/reach.h"
#include "cuda/runs.cuh"
#include "cuda/runtime.h"
#include "error.h"

namespace kvx::cuda {
namespace {

constexpr uint64_t kPartBytes = 64 << 10;
constexpr uint64_t kMostBlocksPerSm = 32;
constexpr uint32_t kInFlight = 4;  // loads per thread

// Moves whole vectors; returns how many bytes they are.
template <class V>
__device__ __forceinline__ uint32_t move_whole(const uint8_t *src, uint8_t *dst, uint32_t bytes) {
  const uint32_t count = bytes / sizeof(V);
  move_vectors<V, kThreads, kInFlight>(
      threadIdx.x, count, [&](uint32_t i) { return src + i * sizeof(V); },
      [&](uint32_t i) { return dst + i * sizeof(V); });
  return count * sizeof(V);
}

// As `report` of lookup.cuh, which reads what it says out of the parameters of a plan: one that
// takes it as arguments costs the kernels of FP8 registers, and these spill on sm_100 and sm_120.
__device__ void report_null(Status *status, uint32_t pair, bool at_dst) {
  atomicAdd(&status->count, 1ull);
  if (atomicCAS(&status->claimed, 0u, 1u) != 0) return;
  status->call = Call::kMigrate;
  status->src = status->dst = LookupMode::kPointers;
  Violation found{};
  found.fault = Fault::kHole;
  found.mode = LookupMode::kPointers;
  found.at_dst = at_dst;
  found.row = found.index = pair;
  status->first = found;
  __threadfence();
  atomicExch(&status->ready, 1u);
}

__global__ void __launch_bounds__(kThreads, 4)
    pairs_kernel(const uint8_t *const *srcs, uint8_t *const *dsts, uint64_t bytes,
                 uint32_t num_pairs, uint32_t parts, Status *status) {
  for (uint64_t item = blockIdx.x; item < uint64_t{num_pairs} * parts; item += gridDim.x) {
    const auto pair = static_cast<uint32_t>(item / parts);
    const uint64_t first = (item - uint64_t{pair} * parts) * kPartBytes;
    const uint8_t *src = srcs[pair];
    uint8_t *dst = dsts[pair];
    if (!src || !dst) {
      if (first == 0 && threadIdx.x == 0) report_null(status, pair, !dst);
      continue;
    }
    src += first, dst += first;
    const auto size = static_cast<uint32_t>(min(kPartBytes, bytes - first));
    const auto bits = reinterpret_cast<uintptr_t>(src) | reinterpret_cast<uintptr_t>(dst);
    const uint32_t moved = bits % 16 == 0  ? move_whole<Vector<16>>(src, dst, size)
                           : bits % 8 == 0 ? move_whole<Vector<8>>(src, dst, size)
                           : bits % 4 == 0 ? move_whole<Vector<4>>(src, dst, size)
                                           : 0;
    move_whole<Vector<1>>(src + moved, dst + moved, size - moved);
  }
}

}  // namespace

kvx_status_t copy_each_pair(const void *const *srcs, void *const *dsts, uint64_t bytes,
                            uint32_t num_pairs, void *stream) {
  Reach reach(Peers::kRefused);
  KVX_TRY(reach.begin());
  KVX_TRY(reach.check("srcs", "", srcs));
  KVX_TRY(reach.check("dsts", "", dsts));
  uint32_t sms = 0;
  Status *status = nullptr;
  KVX_TRY(count_sms(reach.device(), &sms));
  KVX_TRY(device_status(reach.device(), &status));
  const auto parts = static_cast<uint32_t>((bytes + kPartBytes - 1) / kPartBytes);
  const auto grid = static_cast<uint32_t>(
      std::min(uint64_t{num_pairs} * parts, uint64_t{sms} * kMostBlocksPerSm));
  KVX_LAUNCH(pairs_kernel, grid, kThreads, 0, static_cast<cudaStream_t>(stream),
             reinterpret_cast<const uint8_t *const *>(srcs),
             reinterpret_cast<uint8_t *const *>(dsts), bytes, num_pairs, parts, status);
  return check(cudaPeekAtLastError(), "kernel launch");
}

}  // namespace kvx::cuda
