// Sets KVX's floating-point mode while it computes, and restores the host application's.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <cstdint>

namespace kvx::cpu {

// Rounds to nearest, with subnormal floats, without traps; then restores the caller's settings and
// flags.
class StandardFloats {
 public:
#if defined(__x86_64__)
  StandardFloats() : saved_(_mm_getcsr()) { _mm_setcsr(kStandard); }
  ~StandardFloats() { _mm_setcsr(saved_); }
#elif defined(__aarch64__)
  StandardFloats() {
    asm volatile("mrs %0, fpcr\n\tmrs %1, fpsr" : "=r"(mode_), "=r"(flags_));
    asm volatile("msr fpcr, %0" ::"r"(kStandard) : "memory");
  }
  ~StandardFloats() {
    asm volatile("msr fpcr, %0\n\tmsr fpsr, %1" ::"r"(mode_), "r"(flags_) : "memory");
  }
#else
  StandardFloats() {}
#endif
  StandardFloats(const StandardFloats &) = delete;
  StandardFloats &operator=(const StandardFloats &) = delete;

 private:
#if defined(__x86_64__)
  static constexpr unsigned kStandard = 0x1f80;  // MXCSR at reset
  const unsigned saved_;
#elif defined(__aarch64__)
  static constexpr uint64_t kStandard = 0;  // FPCR at reset
  uint64_t mode_, flags_;
#endif
};

}  // namespace kvx::cpu
