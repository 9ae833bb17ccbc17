// Q4_0 and Q5_0: 32 numbers along dim in 18 or 22 bytes, a float16 scale d and 32 levels q of four
// or five bits, half of whose range is below zero; value = d * (q - 8) or d * (q - 16). Spec: E.10
// Source: llama.cpp v0.5.0, ggml/src/ggml-quants.c, quantize_row_q4_0_ref, quantize_row_q5_0_ref;
//   gguf 0.19.0, quants.py, Q4_0, Q5_0, whose bytes these are
#pragma once

#include "formats/levels.h"
#include "formats/units.h"

namespace kvx {

template <int kBits>
struct AroundZero {
  static constexpr int kNumbers = 32, kBytes = 2 + Levels<kBits>::kBytes, kRun = 16;
  static constexpr int kZero = 1 << (kBits - 1);  // the level of 0

  static KVX_HD float scale(const uint8_t *unit, int) { return UnitScale::load(unit); }
  static KVX_HD int level(const uint8_t *unit, int run, int i) {
    return Levels<kBits>::at(unit + 2, run, i);
  }
  static KVX_HD float value(float scale, int level) {
    return scale * static_cast<float>(level - kZero);
  }
  static KVX_HD float decode(const uint8_t *unit, int i) {
    return decode_in_runs<AroundZero>(unit, i);
  }

  template <class ValueAt>
  static KVX_HD void encode(uint8_t *unit, ValueAt value_at) {
    // The first number of the largest magnitude: the scale of zeros takes the first one's sign.
    const float amax = largest_magnitude<kNumbers>(value_at);
    const float most = first_equal<kNumbers, kSign>(value_at, amax);
    const float scale = UnitScale::saturate(most / static_cast<float>(-kZero));
    const float inverse = UnitScale::inverse(scale);
    UnitScale::store(unit, scale);
    Levels<kBits>::put(unit + 2, [&](int i) {
      const float steps = zero_for_nan(value_at(i)) * inverse;
      return level_of(steps + (static_cast<float>(kZero) + 0.5f), Levels<kBits>::kMost);
    });
  }
};

using Q4_0 = AroundZero<4>;
using Q5_0 = AroundZero<5>;

}  // namespace kvx
