// Q8_0: 32 numbers along dim in 34 bytes, a float16 scale d and 32 signed bytes q; value = d * q.
// Spec: E.10
// Source: llama.cpp v0.5.0, ggml/src/ggml-quants.c, quantize_row_q8_0_ref; gguf 0.19.0, quants.py,
//   Q8_0, whose bytes these are
#pragma once

#include "formats/units.h"

namespace kvx {

struct Q8_0 {
  static constexpr int kNumbers = 32, kBytes = 34, kRun = 32;

  static KVX_HD float scale(const uint8_t *unit, int) { return UnitScale::load(unit); }
  static KVX_HD int level(const uint8_t *unit, int, int i) {
    return static_cast<int8_t>(unit[2 + i]);
  }
  static KVX_HD float value(float scale, int level) { return scale * static_cast<float>(level); }
  static KVX_HD float decode(const uint8_t *unit, int i) { return decode_in_runs<Q8_0>(unit, i); }

  template <class ValueAt>
  static KVX_HD void encode(uint8_t *unit, ValueAt value_at) {
    const float amax = largest_magnitude<kNumbers>(value_at);
    const float scale = UnitScale::saturate(amax / 127.0f), inverse = UnitScale::inverse(scale);
    UnitScale::store(unit, scale);
    KVX_LOOP
    for (int i = 0; i < kNumbers; ++i)
      unit[2 + i] = static_cast<uint8_t>(nearest(zero_for_nan(value_at(i)) * inverse));
  }

 private:
  // Rounds to nearest, ties away from zero; numbers past 127 become 127.
  static KVX_HD int nearest(float x) {
    const float magnitude = float_of(bits_of(x) & ~kSign);
    const float within = magnitude < 127.0f ? magnitude : 127.0f;
    // A half, less its last bit: only ties and what is above them reach the next integer.
    const int rounded = static_cast<int>(within + 0x1.fffffep-2f);
    const int sign = static_cast<int32_t>(bits_of(x)) >> 31;
    return (rounded ^ sign) - sign;
  }
};

}  // namespace kvx
