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
  StandardFloats() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ & ~(kFlush | kRounding)); }
  ~StandardFloats() { _mm_setcsr(saved_); }
  StandardFloats(const StandardFloats &) = delete;
  StandardFloats &operator=(const StandardFloats &) = delete;

 private:
  static constexpr unsigned kFlush = 0x8040, kRounding = 0x6000;  // FTZ and DAZ, RC of MXCSR
  const unsigned saved_;
#endif
};

}  // namespace kvx::cpu
