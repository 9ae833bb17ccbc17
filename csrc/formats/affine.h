// U8_ZERO and U8_BIAS: a byte q per number, and beside the data a scale and a zero point for each
// unit, a group of numbers. Spec: E.14
// Source: OpenVINO 2026.4.1, the CPU plugin's u8 KV cache; MLX 0.32.4, mx.quantize, mode affine
#pragma once

#include <cmath>

#include "formats/units.h"

namespace kvx {

// The scale and zero point of a unit.
struct ScaleZero {
  float scale, zero;
};

// The least and the largest number of a unit. NaN is ignored.
struct Bounds {
  float least = float_of(kInfinity), largest = float_of(kInfinity | kSign);

  KVX_HD void add(float x) {
    least = x < least ? x : least;
    largest = x > largest ? x : largest;
  }
  // Merges the bounds of other numbers, or of none.
  KVX_HD void merge(const Bounds &other) {
    least = other.least < least ? other.least : least;
    largest = other.largest > largest ? other.largest : largest;
  }
  // Infinities count as the largest finite numbers. Without any number: zeros.
  KVX_HD Bounds finite() const {
    if (!(least <= largest)) return {0.0f, 0.0f};
    return {within(least), within(largest)};
  }

 private:
  static KVX_HD float within(float x) {
    constexpr float kMost = 0x1.fffffep127f;
    return (x > kMost ? kMost : x < -kMost ? -kMost : x) + 0.0f;  // 0 has one sign
  }
};

// The step of 255 equal ones from the least number to the largest.
KVX_HD float step_of(const Bounds &of) {
  const float step = (of.largest - of.least) / 255.0f;
  return bits_of(step) < kInfinity ? step : of.largest / 255.0f - of.least / 255.0f;
}

// The step as OpenVINO computes it if a unit covers tokens: rounded in another way.
KVX_HD float step_over_tokens(const Bounds &of) {
  const float step = (of.largest - of.least) * (1.0f / 255.0f);
  return bits_of(step) < kInfinity ? step : step_of(of);
}

// Rounds to nearest, ties to even, between 0 and 255. Cuts as an integer, whose order is that of
// positive numbers, by masks: compilers turn choices into branches, and loops with branches are not
// vectorized.
KVX_HD uint8_t nearest_byte(float x) {
  constexpr int32_t kMost = 0x437f0000;  // 255
  const auto bits = static_cast<int32_t>(bits_of(x));
  const int32_t positive = bits & ~(bits >> 31);
  const int32_t past = positive - kMost, within = kMost + (past & (past >> 31));
  // The last bit of 2^23 is worth 1.
  return static_cast<uint8_t>(bits_of(float_of(static_cast<uint32_t>(within)) + 0x1p23f));
}

// value = (q - zero) * scale
struct U8Zero {
  static KVX_HD float decode(uint8_t q, const ScaleZero &with) {
    return (static_cast<float>(q) - with.zero) * with.scale;
  }
  static KVX_HD ScaleZero find(const Bounds &found, bool covers_tokens) {
    const Bounds of = found.finite();
    const float step = covers_tokens ? step_over_tokens(of) : step_of(of);
    const bool has_inverse = bits_of(1.0f / step) < kInfinity;  // it is not 0, nor almost
    const float scale = has_inverse ? step : 0.0001f;
    const float zero = -of.least / scale;
    if ((bits_of(zero) & ~kSign) < kInfinity) return {scale, zero};
    // One number alone, too large for that scale.
    return {of.least < 0.0f ? -of.least : of.least, of.least < 0.0f ? 1.0f : -1.0f};
  }
  static KVX_HD uint8_t encode(float x, const ScaleZero &with) {
    return nearest_byte(fmaf(zero_for_nan(x), 1.0f / with.scale, with.zero));
  }
};

// value = q * scale + zero
struct U8Bias {
  static KVX_HD float decode(uint8_t q, const ScaleZero &with) {
    return static_cast<float>(q) * with.scale + with.zero;
  }
  // Keeps the bound that is further from 0 exactly; 0 is a whole number of steps from it.
  static KVX_HD ScaleZero find(const Bounds &found, bool) {
    const Bounds of = found.finite();
    const float step = step_of(of), width = step > 1e-7f ? step : 1e-7f;
    const bool is_least = magnitude(of.least) > magnitude(of.largest);
    const float scale = is_least ? width : -width, edge = is_least ? of.least : of.largest;
    const float steps = whole(edge / scale);
    if (steps == 0.0f) return {scale, 0.0f};
    return {magnitude(steps) < float_of(kInfinity) ? edge / steps : scale, edge};
  }
  static KVX_HD uint8_t encode(float x, const ScaleZero &with) {
    return nearest_byte((zero_for_nan(x) - with.zero) / with.scale);
  }

 private:
  static KVX_HD float magnitude(float x) { return float_of(bits_of(x) & ~kSign); }
  // Rounds to nearest, ties to even.
  static KVX_HD float whole(float x) {
    const float size = magnitude(x);
    const float rounded = size < 0x1p23f ? (size + 0x1p23f) - 0x1p23f : size;
    return float_of(bits_of(rounded) | (bits_of(x) & kSign));
  }
};

// Calls visit with the arithmetic of one of the two.
template <class Visit>
KVX_HD auto with_affine(kvx_dtype_t dtype, Visit visit) {
  return dtype == KVX_DTYPE_U8_ZERO ? visit(U8Zero{}) : visit(U8Bias{});
}

// A scale or zero point for `dtype`: the largest finite number in place of infinity.
KVX_HD float saturate_for(kvx_dtype_t dtype, float number) {
  if (dtype == KVX_DTYPE_F16) return UnitScale::saturate(number);
  const bool is_past = dtype == KVX_DTYPE_BF16 && (bits_of(number) & ~kSign) >= 0x7f7f8000u;
  return is_past ? float_of(0x7f7f0000u | (bits_of(number) & kSign)) : number;
}

}  // namespace kvx
