// What a block of threads computes together for a row.
#pragma once

#include "cuda/codec.cuh"
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

// The row's first `nope_dim` numbers as E4M3, the others as BF16; thread 0 stores the inverse
// scale, which is 1 if inv_scale is null.
template <class Format, uint32_t kNumbers>
__device__ __forceinline__ void quantize_row(uint8_t *fp8, uint16_t *rope, float *inv_scale,
                                             const typename Format::Bits *row, uint32_t nope_dim,
                                             uint32_t rope_dim, OfWarps &of_warps) {
  using Numbers = Some<Format, kNumbers>;
  float scale = 1.0f;
  if (inv_scale) {
    int32_t most = 0;
    for (uint32_t d = threadIdx.x * kNumbers; d < nope_dim; d += kThreads * kNumbers) {
      float values[kNumbers];
      Numbers::load(row + d, values);
#pragma unroll
      for (uint32_t i = 0; i < kNumbers; ++i) most = largest_magnitude(most, values[i]);
    }
    scale = inverse_scale(largest_of_block(most, of_warps));
  }
  for (uint32_t d = threadIdx.x * kNumbers; d < nope_dim; d += kThreads * kNumbers) {
    float values[kNumbers];
    Numbers::load(row + d, values);
#pragma unroll
    for (uint32_t i = 0; i < kNumbers; ++i) values[i] = values[i] / scale;
    store_e4m3(fp8 + d, values);
  }
  for (uint32_t d = threadIdx.x; d < rope_dim; d += kThreads) {
    const auto bits = row[nope_dim + d];
    rope[d] = sizeof bits == 2 ? static_cast<uint16_t>(bits) : Bf16::encode(Format::decode(bits));
  }
  if (inv_scale && threadIdx.x == 0) *inv_scale = scale;
}

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
