// Q6_K: 256 numbers along dim in 210 bytes: levels q of six bits, for each of 16 groups of 16
// numbers a signed byte s, and a float16 scale d; value = d * s * (q - 32). Spec: E.10
// Source: llama.cpp v0.5.0, ggml/src/ggml-quants.c, quantize_row_q6_K_ref, whose bytes these are;
//   gguf 0.19.0, quants.py, Q6_K
#pragma once

#include "formats/fit.h"

namespace kvx {

struct Q6_K {
  static constexpr int kNumbers = 256, kBytes = 210, kRun = 16, kGroups = kNumbers / kRun;
  static constexpr int kHigh = 128, kScales = 192, kScale = 208;  // where they begin

  static KVX_HD float scale(const uint8_t *unit, int group) {
    return UnitScale::load(unit + kScale) *
           static_cast<float>(static_cast<int8_t>(unit[kScales + group]));
  }
  static KVX_HD int level(const uint8_t *unit, int group, int i) {
    const Place at(group);
    const int low = unit[at.low + i] >> at.low_shift & 15;
    return low | (unit[at.high + i] >> at.high_shift & 3) << 4;
  }
  static KVX_HD float value(float scale, int level) {
    return scale * static_cast<float>(level - 32);
  }
  static KVX_HD float decode(const uint8_t *unit, int i) { return decode_in_runs<Q6_K>(unit, i); }

  // The first of the scales with the largest magnitude.
  struct Most {
    float scale = 0.0f;

    KVX_HD void add(float of) {
      scale = float_of(bits_of(of) & ~kSign) > float_of(bits_of(scale) & ~kSign) ? of : scale;
    }
    KVX_HD bool is_nothing() const { return float_of(bits_of(scale) & ~kSign) < kLeastMagnitude; }
    KVX_HD float inverse() const { return -128.0f / scale; }
  };

  static KVX_HD void put_most(uint8_t *unit, const Most &most) {
    const float scale = most.is_nothing() ? 0.0f : UnitScale::saturate(1.0f / most.inverse());
    UnitScale::store(unit + kScale, scale);
  }

  static KVX_HD void put_scale(uint8_t *unit, int group, const Most &most, float of) {
    const int whole = cut_whole<float>(most.inverse() * of, -128, 127);
    unit[kScales + group] = static_cast<uint8_t>(most.is_nothing() ? 0 : whole);
  }

  // Its scale has been put, and so have those groups before it that share its bytes. Levels are
  // found again for the stored scale, unless that is 0.
  template <class ValueAt>
  static KVX_HD void put_levels(uint8_t *unit, int group, const Most &most,
                                const RatioFit<float> &fit, ValueAt value_at) {
    const Place at(group);
    const float of = scale(unit, group);
    const int kept = at.low_shift ? 15 : 0, kept_high = (1 << at.high_shift) - 1;
    const int something = most.is_nothing() || (of == 0.0f && fit.inverse == 0.0f) ? 0 : 63;
    KVX_LOOP
    for (int i = 0; i < kRun; ++i) {
      const float x = value_at(i);
      const int whole = cut_whole<float>(of != 0.0f ? x / of : x * fit.inverse, -32, 31);
      const int level = (whole + 32) & something;
      uint8_t &low = unit[at.low + i], &high = unit[at.high + i];
      low = static_cast<uint8_t>((low & kept) | (level & 15) << at.low_shift);
      high = static_cast<uint8_t>((high & kept_high) | level >> 4 << at.high_shift);
    }
  }

  // Searches each group twice: the bytes of all depend on the largest scale.
  template <class ValueAt>
  static KVX_HD void encode(uint8_t *unit, ValueAt value_at) {
    Most most;
    KVX_LOOP
    for (int n = 0; n < 2 * kGroups; ++n) {
      const int group = n % kGroups;
      const auto x_at = [&](int i) { return searchable(value_at(kRun * group + i)); };
      const RatioFit<float> fit = fit_ratio<float>(x_at);
      if (n < kGroups) {
        most.add(fit.scale);
        continue;
      }
      if (group == 0) put_most(unit, most);
      put_scale(unit, group, most, fit.scale);
      put_levels(unit, group, most, fit, x_at);
    }
  }

 private:
  // Where the levels of a group lie: those of 128 numbers in 64 bytes of low and 32 of high bits.
  struct Place {
    int low, high, low_shift, high_shift;

    KVX_HD explicit Place(int group)
        : low(64 * (group / 8) + 16 * (group & 3)),
          high(kHigh + 32 * (group / 8) + 16 * (group & 1)),
          low_shift(group & 4),
          high_shift(2 * (group / 2 & 3)) {}
  };
};

}  // namespace kvx
