// The exponential function of softmax, the same bits on every backend.
#pragma once

#include "formats/scalar.h"

namespace kvx {

// exp of numbers up to 0, to 2e-7 of the result; 0 below -87. NaN stays NaN.
KVX_HD float exp_of(float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const float bounded = x < -88.0f ? -88.0f : x;
  const float shifted = bounded * 1.44269504f + kRound, whole = shifted - kRound;
  // ln 2 in two parts: the first has few bits, so that its product is exact.
  const float rest = bounded - whole * 0.693359375f + whole * 2.12194440e-4f;
  float series = rest * (1.0f / 5040) + 1.0f / 720;
  series = series * rest + 1.0f / 120;
  series = series * rest + 1.0f / 24;
  series = series * rest + 1.0f / 6;
  series = series * rest + 0.5f;
  series = series * rest + 1.0f;
  series = series * rest + 1.0f;
  const uint32_t power = (bits_of(shifted) - bits_of(kRound) + 127u) << 23;
  const uint32_t keeps = x < -87.0f ? 0u : 0xffffffffu;
  return float_of(bits_of(series * float_of(power)) & keeps);
}

}  // namespace kvx
