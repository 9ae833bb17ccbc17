// The searches of fit.inl among floats. Spec: E.10
#pragma once

#include <cmath>

#include "formats/units.h"

namespace kvx {

template <class Real>
struct Lanes;
template <>
struct Lanes<float> {
  // Of NaN those that CPUs give it; GPUs have others.
  static KVX_HD int32_t bits(float x) {
#if defined(__CUDA_ARCH__)
    if (x != x) return 0x7fc00000;
#endif
    return static_cast<int32_t>(bits_of(x));
  }
  static KVX_HD float number(int32_t n) { return static_cast<float>(n); }
  static KVX_HD float magnitude(float x) { return float_of(bits_of(x) & ~kSign); }
  static KVX_HD float root(float x) { return sqrtf(x); }
};

#include "formats/fit.inl"

}  // namespace kvx
