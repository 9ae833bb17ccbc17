// What a block of threads computes together for a row.
#pragma once

#include "cuda/codec.cuh"
#include "cuda/dependent.cuh"
#include "cuda/platform.h"
#include "cuda/runtime.h"
#include "cuda/vector.h"
#include "error.h"
#include "hybrid/launch.h"
#include "hybrid/numbers.h"

namespace kvx::hybrid {

constexpr uint32_t kThreads = 128, kWarp = 32, kAllLanes = 0xffffffffu;
// A thread has 64 registers; compilers for sm_100 and later spill to make room for more blocks
// where nothing is said.
constexpr uint32_t kBlocksPerSm = 8;

// Shared memory of a kernel: a number of each warp.
using OfWarps = int32_t[kThreads / kWarp];

// The largest of the numbers of all threads.
__device__ __forceinline__ int32_t largest_of_block(int32_t most, OfWarps &of_warps) {
#pragma unroll
  for (uint32_t step = kWarp / 2; step; step /= 2)
    most = max(most, __shfl_xor_sync(kAllLanes, most, step));
  if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = most;
  __syncthreads();
#pragma unroll
  for (uint32_t i = 0; i < kThreads / kWarp; ++i) most = max(most, of_warps[i]);
  return most;
}

// What a kernel begins with that is launched as a dependent one.
__device__ __forceinline__ void begin_dependent() {
  cuda::let_next_kernel_start();
  cuda::wait_for_kernels_before();
}

// Numbers of one row that a thread takes at a time: 4 if all rows are aligned for it.
template <class Format, uint32_t kNumbers>
struct Some {
  using Bits = typename Format::Bits;
  using V = cuda::Vector<kNumbers * sizeof(Bits)>;

  static __device__ __forceinline__ void load(const Bits *from, float (&values)[kNumbers]) {
    const V vector = *reinterpret_cast<const V *>(cuda::global(from));
    Bits bits[kNumbers];
    memcpy(bits, &vector, sizeof vector);
#pragma unroll
    for (uint32_t i = 0; i < kNumbers; ++i) values[i] = Format::decode(bits[i]);
  }
};

__device__ __forceinline__ void store_e4m3(uint8_t *to, const float (&values)[4]) {
  const uint32_t low = cuda::encode_two<E4m3>(values[0], values[1]);
  const uint32_t high = cuda::encode_two<E4m3>(values[2], values[3]);
  *reinterpret_cast<uint32_t *>(cuda::global(to)) = low | high << 16;
}
__device__ __forceinline__ void store_e4m3(uint8_t *to, const float (&values)[1]) {
  *cuda::global(to) = E4m3::encode(values[0]);
}

// A row of `nope_dim` numbers and `rope_dim` others. What a thread takes first of both is in
// registers, so that it is on its way before the row's place is known.
template <class Format, uint32_t kNumbers>
class Row {
 public:
  using Bits = typename Format::Bits;

  __device__ __forceinline__ Row(const Bits *row, uint32_t nope_dim, uint32_t rope_dim)
      : row_(row), nope_dim_(nope_dim), rope_dim_(rope_dim) {
    if (threadIdx.x * kNumbers < nope_dim)
      Some<Format, kNumbers>::load(row + threadIdx.x * kNumbers, first_);
    if (threadIdx.x < rope_dim) rope_ = row[nope_dim + threadIdx.x];
  }

  // For all threads of a block.
  __device__ __forceinline__ float scale(OfWarps &of_warps) const {
    int32_t most = 0;
    each([&](uint32_t, const float (&values)[kNumbers]) {
#pragma unroll
      for (uint32_t i = 0; i < kNumbers; ++i) most = largest_magnitude(most, values[i]);
    });
    return inverse_scale(largest_of_block(most, of_warps));
  }

  // The first numbers as E4M3, the others as BF16.
  __device__ __forceinline__ void store(uint8_t *fp8, uint16_t *rope, float scale) const {
    each([&](uint32_t d, const float (&values)[kNumbers]) {
      float scaled[kNumbers];
#pragma unroll
      for (uint32_t i = 0; i < kNumbers; ++i) scaled[i] = values[i] / scale;
      store_e4m3(fp8 + d, scaled);
    });
    if (threadIdx.x < rope_dim_) rope[threadIdx.x] = bf16_of(rope_);
    for (uint32_t d = threadIdx.x + kThreads; d < rope_dim_; d += kThreads)
      rope[d] = bf16_of(row_[nope_dim_ + d]);
  }

 private:
  static __device__ __forceinline__ uint16_t bf16_of(Bits bits) {
    return sizeof bits == 2 ? static_cast<uint16_t>(bits) : Bf16::encode(Format::decode(bits));
  }
  template <class Visit>
  __device__ __forceinline__ void each(const Visit &visit) const {
    uint32_t d = threadIdx.x * kNumbers;
    if (d < nope_dim_) visit(d, first_);
    for (d += kThreads * kNumbers; d < nope_dim_; d += kThreads * kNumbers) {
      float values[kNumbers];
      Some<Format, kNumbers>::load(row_ + d, values);
      visit(d, values);
    }
  }

  const Bits *row_;
  uint32_t nope_dim_, rope_dim_;
  float first_[kNumbers] = {};
  Bits rope_{};
};

// Whether rows of these dims can be read and written four numbers at a time.
inline bool takes_four(const void *rows, kvx_dtype_t dtype, const void *fp8, uint32_t nope_dim,
                       uint32_t rope_dim) {
  const uintptr_t of_rows = dtype == KVX_DTYPE_F32 ? 16 : 8;
  return nope_dim % 4 == 0 && rope_dim % 4 == 0 && reinterpret_cast<uintptr_t>(fp8) % 4 == 0 &&
         reinterpret_cast<uintptr_t>(rows) % of_rows == 0;
}

// Calls visit with the format of a dtype, F32 or BF16.
template <class Visit>
void with_format(kvx_dtype_t dtype, Visit visit) {
  dtype == KVX_DTYPE_F32 ? visit(F32{}) : visit(Bf16{});
}

inline kvx_status_t launched() {
  return cuda::check(cudaGetLastError(), "a kernel of a hybrid cache");
}

}  // namespace kvx::hybrid
