// Floating-point settings of the host application, and ours while we compute.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvx::cpu {

// Round to nearest with subnormal floats, whatever the caller's thread is set to.
class StandardFloats {
 public:
#if defined(__x86_64__)
  StandardFloats() : saved_(_mm_getcsr()) {
    if (saved_ & kOurs) _mm_setcsr(saved_ & ~kOurs);
  }
  ~StandardFloats() {
    if (saved_ & kOurs) _mm_setcsr(saved_);
  }
  StandardFloats(const StandardFloats &) = delete;
  StandardFloats &operator=(const StandardFloats &) = delete;

 private:
  static constexpr unsigned kOurs = 0x8040 | 0x6000;  // of MXCSR: FTZ and DAZ, rounding control
  const unsigned saved_;
#endif
};

}  // namespace kvx::cpu
