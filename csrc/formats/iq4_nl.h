// IQ4_NL: 32 numbers along dim in 18 bytes, a float16 scale d and 32 levels of four bits, each of
// which stands for one of 16 uneven steps; value = d * step. Spec: E.10
// Source: llama.cpp v0.5.0, ggml/src/ggml-quants.c, quantize_row_iq4_nl_ref, whose bytes these
//   are; gguf 0.19.0, quants.py, IQ4_NL
#pragma once

#include "formats/fit.h"
#include "formats/levels.h"

namespace kvx {

struct Iq4Nl {
  static constexpr int kNumbers = 32, kBytes = 18, kRun = 16;

  static KVX_HD float scale(const uint8_t *unit, int) { return UnitScale::load(unit); }
  static KVX_HD int level(const uint8_t *unit, int run, int i) {
    return Levels<4>::at(unit + 2, run, i);
  }
  static KVX_HD float value(float scale, int level) {
    return scale * static_cast<float>(step_of(level));
  }
  static KVX_HD float decode(const uint8_t *unit, int i) { return decode_in_runs<Iq4Nl>(unit, i); }

  template <class ValueAt>
  static KVX_HD void encode(uint8_t *unit, ValueAt value_at) {
    const auto x_at = [&](int i) { return searchable(value_at(i)); };
    const StepFit<float> fit = fit_steps<float>(x_at);
    put(unit, fit, x_at);
  }

  template <class XAt>
  static KVX_HD void put(uint8_t *unit, const StepFit<float> &fit, XAt x_at) {
    UnitScale::store(unit, UnitScale::saturate(fit.scale));
    const int something = fit.inverse == 0.0f ? 0 : 15;
    Levels<4>::put(unit + 2, [&](int i) {
      return static_cast<int>(nearest_step<float>(x_at(i) * fit.inverse).level) & something;
    });
  }

  // The steps, a byte each: -127, -104, -83, -65, -49, -35, -22, -10; 1, 13, 25, 38, 53, 69, 89,
  // 113.
  static KVX_HD int8_t step_of(int level) {
    constexpr uint64_t kBelow = 0xf6eaddcfbfad9881u, kAbove = 0x7159453526190d01u;
    return static_cast<int8_t>((level < 8 ? kBelow : kAbove) >> (8 * (level & 7)));
  }
};

}  // namespace kvx
