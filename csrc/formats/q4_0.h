// Q4_0: 32 numbers along dim in 18 bytes, a float16 scale d and 32 numbers q of four bits, the
// first 16 in the low halves of the bytes, the others in the high ones; value = d * (q - 8). Spec:
// E.10 Source: llama.cpp v0.5.0, ggml/src/ggml-quants.c, quantize_row_q4_0_ref; gguf 0.19.0,
// quants.py,
//   Q4_0, whose bytes these are
#pragma once

#include "formats/q8_0.h"

namespace kvx {

struct Q4_0 {
  static constexpr int kNumbers = 32, kBytes = 18;

  static KVX_HD float decode(const uint8_t *unit, int i) {
    const int byte = unit[2 + i % 16];
    return UnitScale::load(unit) * static_cast<float>((i < 16 ? byte & 15 : byte >> 4) - 8);
  }

  template <class ValueAt>
  static KVX_HD void encode(uint8_t *unit, ValueAt value_at) {
    float most = 0.0f;  // the first number of the largest magnitude
    KVX_LOOP
    for (int i = 0; i < kNumbers; ++i) {
      const float value = value_at(i), magnitude = float_of(bits_of(value) & ~kSign);
      const bool is_first = i == 0 && magnitude == 0.0f;  // the scale of zeros takes its sign
      most = is_first || magnitude > float_of(bits_of(most) & ~kSign) ? value : most;
    }
    const float scale = UnitScale::saturate(most / -8.0f), inverse = UnitScale::inverse(scale);
    UnitScale::store(unit, scale);
    KVX_LOOP
    for (int i = 0; i < 16; ++i) {
      const int low = nearest(value_at(i) * inverse), high = nearest(value_at(i + 16) * inverse);
      unit[2 + i] = static_cast<uint8_t>(low | high << 4);
    }
  }

 private:
  // Rounds to 0 .. 15: adds half a step, then truncates. NaN becomes 8, whose value is 0.
  static KVX_HD int nearest(float x) {
    const float shifted = x + 8.5f;
    return shifted >= 16.0f ? 15 : shifted >= 0.0f ? static_cast<int>(shifted) : x < 0.0f ? 0 : 8;
  }
};

}  // namespace kvx
