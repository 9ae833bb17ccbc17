// Floating-point settings of the host application, and ours while we compute.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvx::cpu {

// Round to nearest, subnormal floats, no traps; afterwards the caller's settings and flags again.
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
