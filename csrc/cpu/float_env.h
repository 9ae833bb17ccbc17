// Sets KVX's floating-point mode while it computes, and restores the host application's.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvx::cpu {

// Rounds to nearest, with subnormal floats, without traps; then restores the caller's settings and
// flags.
class StandardFloats {
 public:
#if defined(__x86_64__)
  StandardFloats() : saved_(_mm_getcsr()) { _mm_setcsr(kStandard); }
  ~StandardFloats() { _mm_setcsr(saved_); }
  StandardFloats(const StandardFloats &) = delete;
  StandardFloats &operator=(const StandardFloats &) = delete;

 private:
  static constexpr unsigned kStandard = 0x1f80;  // MXCSR at reset
  const unsigned saved_;
#endif
};

}  // namespace kvx::cpu
