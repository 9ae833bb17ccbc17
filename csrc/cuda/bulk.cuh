// Bulk copies: an engine of the processor moves pieces between global and shared memory; sizes and
// addresses are multiples of 16 bytes. Before sm_90: a plain loop.
#pragma once

#include "cuda/params.h"
#include "cuda/vector.h"

namespace kvx::cuda {

constexpr uint32_t kStages = 2;  // of a warp

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

constexpr bool kHasBulk = true;

__device__ __forceinline__ uint32_t shared_address(const void *shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// The barriers on which a warp waits for the loads of its lanes, one for each stage. Each lane has
// one of these, for the same `words` of shared memory.
class BulkLoads {
 public:
  __device__ __forceinline__ explicit BulkLoads(uint64_t (&words)[kStages])
      : words_(shared_address(words)) {
    if (threadIdx.x % kWarp < kStages) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(word(threadIdx.x % kWarp)),
                   "r"(kWarp)
                   : "memory");
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncwarp();
  }

  __device__ __forceinline__ void start(uint32_t stage, uint8_t *shared, const uint8_t *global,
                                        uint32_t bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(word(stage)),
                 "r"(bytes)
                 : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(shared_address(shared)),
        "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(word(stage))
        : "memory");
  }

  // Called by all lanes; returns when the loads into a stage that they have started have arrived.
  __device__ __forceinline__ void wait(uint32_t stage) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(word(stage)) : "memory");
    for (uint32_t done = 0; !done;) {
      asm volatile(
          "{ .reg .pred done;\n\t"
          "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n\t"
          "selp.u32 %0, 1, 0, done; }"
          : "=r"(done)
          : "r"(word(stage)), "r"(parities_ >> stage & 1)
          : "memory");
    }
    parities_ ^= 1u << stage;
  }

 private:
  __device__ __forceinline__ uint32_t word(uint32_t stage) const {
    return words_ + stage * uint32_t{sizeof(uint64_t)};
  }

  uint32_t words_, parities_ = 0;  // a bit per stage
};

__device__ __forceinline__ void start_bulk_store(uint8_t *global, const uint8_t *shared,
                                                 uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(
                   __cvta_generic_to_global(global)),
               "r"(shared_address(shared)), "r"(bytes)
               : "memory");
}

// Waits until the shared memory that this lane's stores read may be written again.
__device__ __forceinline__ void wait_for_stores_to_read() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Waits until this lane's stores are done.
__device__ __forceinline__ void wait_for_stores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

#else

#if defined(__CUDA_ARCH__)
constexpr bool kHasBulk = false;
#else
constexpr bool kHasBulk = true;  // so that tests without a device see who copies what
#endif

__device__ __forceinline__ void copy_vectors(uint8_t *to, const uint8_t *from, uint32_t bytes) {
  for (uint32_t at = 0; at < bytes; at += sizeof(Vector<16>))
    *reinterpret_cast<Vector<16> *>(to + at) = *reinterpret_cast<const Vector<16> *>(from + at);
}

class BulkLoads {
 public:
  __device__ __forceinline__ explicit BulkLoads(uint64_t (&)[kStages]) {}
  __device__ __forceinline__ void start(uint32_t, uint8_t *shared, const uint8_t *global,
                                        uint32_t bytes) {
    copy_vectors(shared, global, bytes);
  }
  __device__ __forceinline__ void wait(uint32_t) { __syncwarp(); }
};

__device__ __forceinline__ void start_bulk_store(uint8_t *global, const uint8_t *shared,
                                                 uint32_t bytes) {
  copy_vectors(global, shared, bytes);
}

__device__ __forceinline__ void wait_for_stores_to_read() {}
__device__ __forceinline__ void wait_for_stores() {}

#endif

}  // namespace kvx::cuda
