// Q8_0: 32 numbers along dim in 34 bytes, a float16 scale d and 32 signed bytes q; value = d * q.
// Spec: E.10
// Source: llama.cpp v0.5.0, ggml/src/ggml-quants.c, quantize_row_q8_0_ref; gguf 0.19.0, quants.py,
//   Q8_0, whose bytes these are
#pragma once

#include "formats/scalar.h"

namespace kvx {

// The part that units share: a float16 scale at their start.
struct UnitScale {
  static KVX_HD float load(const uint8_t *unit) {
    return F16::decode(*reinterpret_cast<const uint16_t *>(unit));
  }
  static KVX_HD void store(uint8_t *unit, float scale) {
    *reinterpret_cast<uint16_t *>(unit) = F16::encode(scale);
  }
  // Replaces a scale that would become infinity in float16 by the largest float16.
  static KVX_HD float saturate(float scale) {
    const bool past = (bits_of(scale) & ~kSign) >= 0x477ff000u;  // 65520; false for NaN
    return past ? float_of(0x477fe000u | (bits_of(scale) & kSign)) : scale;
  }
  // 1 / scale; 0 if that is not finite, so that all numbers become zero.
  static KVX_HD float inverse(float scale) {
    const float inverse = 1.0f / scale;
    return (bits_of(inverse) & ~kSign) < kInfinity ? inverse : 0.0f;
  }
};

struct Q8_0 {
  static constexpr int kNumbers = 32, kBytes = 34;

  static KVX_HD float decode(const uint8_t *unit, int i) {
    return UnitScale::load(unit) * static_cast<float>(static_cast<int8_t>(unit[2 + i]));
  }

  template <class ValueAt>
  static KVX_HD void encode(uint8_t *unit, ValueAt value_at) {
    float amax = 0.0f;
    KVX_LOOP
    for (int i = 0; i < kNumbers; ++i) {
      const float magnitude = float_of(bits_of(value_at(i)) & ~kSign);
      amax = magnitude > amax ? magnitude : amax;  // not for NaN
    }
    const float scale = UnitScale::saturate(amax / 127.0f), inverse = UnitScale::inverse(scale);
    UnitScale::store(unit, scale);
    KVX_LOOP
    for (int i = 0; i < kNumbers; ++i)
      unit[2 + i] = static_cast<uint8_t>(nearest(value_at(i) * inverse));
  }

 private:
  // Rounds to nearest, ties away from zero; NaN becomes 0, numbers past 127 become 127.
  static KVX_HD int nearest(float x) {
    const float magnitude = float_of(bits_of(x) & ~kSign);
    const float within = magnitude <= 127.0f ? magnitude : magnitude > 127.0f ? 127.0f : 0.0f;
    const int whole = static_cast<int>(within);
    const int rounded = whole + (within - static_cast<float>(whole) >= 0.5f ? 1 : 0);
    return bits_of(x) & kSign ? -rounded : rounded;
  }
};

}  // namespace kvx
