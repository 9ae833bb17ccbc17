// Q4_K and Q5_K: 256 numbers along dim in 144 or 176 bytes: float16 d and dmin; for each of eight
// groups of 32 numbers a scale s and a least number m of six bits; levels q of four or five bits.
// value = d * s * q - dmin * m. Spec: E.10
// Source: llama.cpp v0.5.0, ggml/src/ggml-quants.c, quantize_row_q4_K_ref, quantize_row_q5_K_ref,
//   whose bytes these are; gguf 0.19.0, quants.py, Q4_K, Q5_K
#pragma once

#include "formats/fit.h"

namespace kvx {

template <int kBits>
struct LinesOf32 {
  static_assert(kBits == 4 || kBits == 5);
  static constexpr int kNumbers = 256, kRun = 32, kGroups = kNumbers / kRun;
  static constexpr int kFifth = 16, kLow = kBits == 5 ? 48 : 16;  // where levels begin
  static constexpr int kBytes = kLow + kNumbers / 2, kMost = (1 << kBits) - 1;

  struct Scale {
    float step, least;
  };
  static KVX_HD Scale scale(const uint8_t *unit, int group) {
    const uint8_t *const six = unit + 4;
    const int j = group & 3, high = six[8 + j];
    const bool is_first = group < 4;
    const int step = is_first ? six[j] & 63 : (high & 15) | six[j] >> 6 << 4;
    const int least = is_first ? six[4 + j] & 63 : high >> 4 | six[4 + j] >> 6 << 4;
    return {UnitScale::load(unit) * static_cast<float>(step),
            UnitScale::load(unit + 2) * static_cast<float>(least)};
  }
  static KVX_HD int level(const uint8_t *unit, int group, int i) {
    const int low = unit[kLow + 32 * (group / 2) + i] >> (4 * (group & 1)) & 15;
    return kBits == 4 ? low : low | (unit[kFifth + i] >> group & 1) << 4;
  }
  static KVX_HD float value(const Scale &scale, int level) {
    return scale.step * static_cast<float>(level) - scale.least;
  }
  static KVX_HD float decode(const uint8_t *unit, int i) {
    return decode_in_runs<LinesOf32>(unit, i);
  }

  // The largest scale and least number of the groups.
  struct Most {
    float scale = 0.0f, least = 0.0f;

    KVX_HD void add(float of_scale, float of_least) {
      scale = of_scale > scale ? of_scale : scale;
      least = of_least > least ? of_least : least;
    }
  };

  static KVX_HD void put_most(uint8_t *unit, const Most &most) {
    UnitScale::store(unit, UnitScale::saturate(most.scale / 63.0f));
    UnitScale::store(unit + 2, UnitScale::saturate(most.least / 63.0f));
  }

  // Groups come in order: a later one adds bits to the bytes of an earlier one.
  static KVX_HD void put_scale(uint8_t *unit, int group, const Most &most, float of_scale,
                               float of_least) {
    const int step = six_bits(most.scale, of_scale), least = six_bits(most.least, of_least);
    uint8_t *const six = unit + 4;
    const int j = group & 3;
    if (group < 4) {
      six[j] = static_cast<uint8_t>(step);
      six[4 + j] = static_cast<uint8_t>(least);
    } else {
      six[8 + j] = static_cast<uint8_t>((step & 15) | (least & 15) << 4);
      six[j] = static_cast<uint8_t>(six[j] | step >> 4 << 6);
      six[4 + j] = static_cast<uint8_t>(six[4 + j] | least >> 4 << 6);
    }
  }

  // Its scale has been put. Levels are found again for the stored scale, unless that is 0.
  // value_at(i) is number i of the group.
  template <class ValueAt>
  static KVX_HD void put_levels(uint8_t *unit, int group, const LineFit<float> &fit,
                                ValueAt value_at) {
    const Scale of = scale(unit, group);
    uint8_t *const low = unit + kLow + 32 * (group / 2), *const fifth = unit + kFifth;
    const int shift = 4 * (group & 1), kept = group & 1 ? 15 : 0, kept_fifth = (1 << group) - 1;
    KVX_LOOP
    for (int i = 0; i < kRun; ++i) {
      const float x = value_at(i);
      const int level = of.step != 0.0f ? cut_whole<float>((x + of.least) / of.step, 0, kMost)
                                        : fit.level(x, kMost);
      low[i] = static_cast<uint8_t>((low[i] & kept) | (level & 15) << shift);
      if (kBits == 5)
        fifth[i] = static_cast<uint8_t>((fifth[i] & kept_fifth) | level >> 4 << group);
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
      const LineFit<float> fit = fit_line<float, kBits, false>(x_at);
      if (n < kGroups) {
        most.add(fit.scale, fit.least);
        continue;
      }
      if (group == 0) put_most(unit, most);
      put_scale(unit, group, most, fit.scale, fit.least);
      put_levels(unit, group, fit, x_at);
    }
  }

 private:
  // As an unsigned byte, so that what is below 0 becomes 63.
  static KVX_HD int six_bits(float most, float part) {
    const float inverse = most > 0.0f ? 63.0f / most : 0.0f;
    const int byte = whole_of<float>(inverse * part) & 255;
    return byte < 63 ? byte : 63;
  }
};

using Q4_K = LinesOf32<4>;
using Q5_K = LinesOf32<5>;

}  // namespace kvx
