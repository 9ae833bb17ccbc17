#include "cpu/kernels/kernels.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "cpu/kernels/byte_orders.h"
#include "formats/codec.h"
#include "formats/softmax.h"

#define KVX_MEMBER __attribute__((always_inline))
#define KVX_INLINE static inline KVX_MEMBER

namespace kvx::cpu {

// Dividing by a power of two equals multiplying by its inverse, which is several times faster.
static inline bool has_exact_inverse(float divisor) {
  const uint32_t bits = bits_of(divisor);
  return (bits & 0x7fffffu) == 0 && bits >= 1u << 23 && bits <= 253u << 23;
}

// A usual block of 32 KiB, prefetched into an L1 cache of 48 KiB, stays there until it is copied.
// With a smaller L1 it is prefetched into L2.
#if defined(_SC_LEVEL1_DCACHE_SIZE)
static const bool kFetchesNear = sysconf(_SC_LEVEL1_DCACHE_SIZE) >= 48 << 10;
#else
static const bool kFetchesNear = false;
#endif

namespace portable {
#define KVX_ISA "portable"
#define KVX_VECTOR_BYTES 16
#include "cpu/kernels/kernels.inl"
#undef KVX_ISA
#undef KVX_VECTOR_BYTES
}  // namespace portable

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(KVX_PORTABLE_KERNELS)
#define KVX_X86_KERNELS 1

#pragma GCC push_options
#pragma GCC target("arch=x86-64-v3,prfchw")
namespace avx2 {
#define KVX_ISA "avx2"
#define KVX_VECTOR_BYTES 32
#include "cpu/kernels/kernels.inl"
#undef KVX_ISA
#undef KVX_VECTOR_BYTES
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4,prfchw,prefer-vector-width=512")
namespace avx512 {
#define KVX_ISA "avx512"
#define KVX_VECTOR_BYTES 64
#include "cpu/kernels/kernels.inl"
#undef KVX_ISA
}  // namespace avx512
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4,avx512vbmi,prfchw,prefer-vector-width=512")
namespace avx512vbmi {  // Ice Lake, Zen 4 and later
#define KVX_ISA "avx512vbmi"
#define KVX_VBMI 1
#include "cpu/kernels/kernels.inl"
#undef KVX_ISA
#undef KVX_VECTOR_BYTES
#undef KVX_VBMI
}  // namespace avx512vbmi
#pragma GCC pop_options
#endif

namespace {

// The best first; the last runs everywhere.
const Kernels *const kBuilt[] = {
#if KVX_X86_KERNELS
    &avx512vbmi::kKernels,
    &avx512::kKernels,
    &avx2::kKernels,
#endif
    &portable::kKernels,
};

bool runs_here(const Kernels &kernels) {
#if KVX_X86_KERNELS
  if (&kernels == &avx512vbmi::kKernels)
    return __builtin_cpu_supports("x86-64-v4") && __builtin_cpu_supports("avx512vbmi");
  if (&kernels == &avx512::kKernels) return __builtin_cpu_supports("x86-64-v4");
  if (&kernels == &avx2::kKernels) return __builtin_cpu_supports("x86-64-v3");
#endif
  return &kernels == &portable::kKernels;
}

// KVX_CPU_ISA selects one, for tests and comparisons; kvx_backend_info reports which is used.
const Kernels &choose() {
  const char *wanted = std::getenv("KVX_CPU_ISA");
  const Kernels *best = nullptr;
  for (const Kernels *kernels : kBuilt) {
    if (!runs_here(*kernels)) continue;
    if (!best) best = kernels;
    if (wanted && std::strcmp(wanted, kernels->isa) == 0) return *kernels;
  }
  return *best;
}

}  // namespace

const Kernels &kernels() {
  static const Kernels &chosen = choose();
  return chosen;
}

}  // namespace kvx::cpu
