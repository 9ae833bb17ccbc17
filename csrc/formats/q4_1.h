// Q4_1 and Q5_1: 32 numbers along dim in 20 or 24 bytes, a float16 scale d, the least number m in
// float16, and 32 levels q of four or five bits; value = d * q + m. Spec: E.10
// Source: llama.cpp v0.5.0, ggml/src/ggml-quants.c, quantize_row_q4_1_ref, quantize_row_q5_1_ref;
//   gguf 0.19.0, quants.py, Q4_1, Q5_1, whose bytes these are
#pragma once

#include "formats/levels.h"
#include "formats/units.h"

namespace kvx {

template <int kBits>
struct FromLeast {
  static constexpr int kNumbers = 32, kBytes = 4 + Levels<kBits>::kBytes, kRun = 16;

  struct Scale {
    float step, least;
  };
  static KVX_HD Scale scale(const uint8_t *unit, int) {
    return {UnitScale::load(unit), UnitScale::load(unit + 2)};
  }
  static KVX_HD int level(const uint8_t *unit, int run, int i) {
    return Levels<kBits>::at(unit + 4, run, i);
  }
  static KVX_HD float value(const Scale &scale, int level) {
    return scale.step * static_cast<float>(level) + scale.least;
  }
  static KVX_HD float decode(const uint8_t *unit, int i) {
    return decode_in_runs<FromLeast>(unit, i);
  }

  // As it is before it is stored in float16.
  static KVX_HD Scale scale_of(const Range &range) {
    const float least = UnitScale::saturate(range.least);
    const float width = range.largest > least ? range.largest - least : 0.0f;
    return {UnitScale::saturate(width / static_cast<float>(Levels<kBits>::kMost)), least};
  }

  template <class ValueAt>
  static KVX_HD void encode(uint8_t *unit, ValueAt value_at) {
    const Range range = Range::of<kNumbers>(value_at);
    // Of zeros of both signs the first one is stored.
    const float first =
        range.least == 0.0f ? first_equal<kNumbers, 0>(value_at, 0.0f) : range.least;
    const Scale scale = scale_of({first, range.largest});
    const float least = scale.least, inverse = UnitScale::inverse(scale.step);
    UnitScale::store(unit, scale.step);
    UnitScale::store(unit + 2, least);
    Levels<kBits>::put(unit + 4, [&](int i) {
      const float steps = (zero_for_nan(value_at(i)) - least) * inverse;
      return level_of(steps + 0.5f, Levels<kBits>::kMost);
    });
  }
};

using Q4_1 = FromLeast<4>;
using Q5_1 = FromLeast<5>;

}  // namespace kvx
