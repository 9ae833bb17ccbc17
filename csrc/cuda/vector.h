// Loads and stores of whole vectors: one instruction each at an aligned address.
#pragma once

#include "cuda/platform.h"

namespace kvx::cuda {

template <uint32_t kBytes>
struct VectorOf;
template <>
struct VectorOf<16> {
  using Type = uint4;
};
template <>
struct VectorOf<8> {
  using Type = uint2;
};
template <>
struct VectorOf<4> {
  using Type = uint32_t;
};
template <>
struct VectorOf<2> {
  using Type = uint16_t;
};
template <>
struct VectorOf<1> {
  using Type = uint8_t;
};
template <uint32_t kBytes>
using Vector = typename VectorOf<kBytes>::Type;

// Calls visit with a vector type of this many bytes: a power of two up to 16.
template <class Visit>
void with_vector(uint32_t bytes, Visit visit) {
  switch (bytes) {
    case 16:
      return visit(Vector<16>{});
    case 8:
      return visit(Vector<8>{});
    case 4:
      return visit(Vector<4>{});
    case 2:
      return visit(Vector<2>{});
    default:
      return visit(Vector<1>{});
  }
}

// Tells the compiler that a pointer is to global memory, pinned host memory included: it cannot see
// that of pointers from the kernel's parameters or shared memory.
template <class T>
__device__ __forceinline__ T *global(T *pointer) {
#if defined(__CUDA_ARCH__)
  __builtin_assume(__isGlobal(pointer));
#endif
  return pointer;
}

// Loads from and stores to global memory. NULL reads as zeros.
template <class V>
__device__ __forceinline__ V load(const uint8_t *at) {
  return at ? *reinterpret_cast<const V *>(global(at)) : V{};
}

template <class V>
__device__ __forceinline__ void store(uint8_t *at, const V &vector) {
  *reinterpret_cast<V *>(global(at)) = vector;
}

}  // namespace kvx::cuda
