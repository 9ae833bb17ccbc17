#include "cpu/kernels.h"

#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "codec.h"

#define KVX_INLINE static inline __attribute__((always_inline))

namespace kvx::cpu {

namespace portable {
#define KVX_ISA "portable"
#define KVX_VECTOR_BYTES 16
#include "cpu/copy.inl"
#include "cpu/convert.inl"
#undef KVX_ISA
#undef KVX_VECTOR_BYTES
}  // namespace portable

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define KVX_X86_KERNELS 1

#pragma GCC push_options
#pragma GCC target("arch=x86-64-v3")
namespace avx2 {
#define KVX_ISA "avx2"
#define KVX_VECTOR_BYTES 32
#include "cpu/copy.inl"
#include "cpu/convert.inl"
#undef KVX_ISA
#undef KVX_VECTOR_BYTES
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4,prefer-vector-width=512")
namespace avx512 {
#define KVX_ISA "avx512"
#define KVX_VECTOR_BYTES 64
#include "cpu/copy.inl"
#include "cpu/convert.inl"
#undef KVX_ISA
#undef KVX_VECTOR_BYTES
}  // namespace avx512
#pragma GCC pop_options
#endif

const Kernels &kernels() {
#if KVX_X86_KERNELS
  static const Kernels &best = __builtin_cpu_supports("x86-64-v4")   ? avx512::kKernels
                               : __builtin_cpu_supports("x86-64-v3") ? avx2::kKernels
                                                                     : portable::kKernels;
  return best;
#else
  return portable::kKernels;
#endif
}

}  // namespace kvx::cpu
