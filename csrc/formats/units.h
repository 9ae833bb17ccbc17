// What formats with several numbers in a unit share: scales in float16, and searches among the
// numbers of a unit. They work on the bits of numbers, as integers, so that loops over them
// vectorise: comparisons of floats keep their order. Spec: E.10
#pragma once

#include "formats/scalar.h"

namespace kvx {

// A float16 scale somewhere in a unit, at an even address.
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

// A float16 at any address.
KVX_HD void put_half(uint8_t *to, float value) {
  const uint16_t bits = F16::encode(value);
  to[0] = static_cast<uint8_t>(bits), to[1] = static_cast<uint8_t>(bits >> 8);
}
KVX_HD float get_half(const uint8_t *from) {
  return F16::decode(static_cast<uint16_t>(from[0] | from[1] << 8));
}

// NaN is encoded as 0 is.
KVX_HD float zero_for_nan(float x) {
  const uint32_t is_nan = (bits_of(x) & ~kSign) > kInfinity ? 1u : 0u;
  return float_of(bits_of(x) & (is_nan - 1u));
}

// The same; magnitudes past 2^32 count as 2^32, so that no sum of a search overflows.
KVX_HD float searchable(float x) {
  const uint32_t sign = bits_of(x) & kSign, magnitude = bits_of(x) & ~kSign;
  const uint32_t within = magnitude < 0x4f800000u ? magnitude : 0x4f800000u;
  return float_of(magnitude > kInfinity ? 0u : within | sign);
}

// The largest magnitude of kNumbers numbers; NaN counts as 0.
template <int kNumbers, class ValueAt>
KVX_HD float largest_magnitude(ValueAt value_at) {
  int32_t most = 0;
  KVX_LOOP
  for (int i = 0; i < kNumbers; ++i) {
    const auto magnitude = static_cast<int32_t>(bits_of(zero_for_nan(value_at(i))) & ~kSign);
    most = magnitude > most ? magnitude : most;
  }
  return float_of(static_cast<uint32_t>(most));
}

// The first of kNumbers numbers, or of their magnitudes, that equals `wanted`. One does.
template <int kNumbers, uint32_t kSignMask, class ValueAt>
KVX_HD float first_equal(ValueAt value_at, float wanted) {
  int32_t first = kNumbers - 1;
  KVX_LOOP
  for (int i = 0; i < kNumbers; ++i) {
    const float x = float_of(bits_of(zero_for_nan(value_at(i))) & ~kSignMask);
    const int32_t here = x == wanted ? i : kNumbers - 1;
    first = here < first ? here : first;
  }
  return zero_for_nan(value_at(first));
}

// The least and the largest of numbers; NaN counts as 0. Zeros have any sign.
struct Range {
  float least, largest;

  template <int kNumbers, class ValueAt>
  static KVX_HD Range of(ValueAt value_at) {
    int32_t least = ordered(value_at(0)), largest = least;
    KVX_LOOP
    for (int i = 1; i < kNumbers; ++i) {
      const int32_t x = ordered(value_at(i));
      least = x < least ? x : least;
      largest = x > largest ? x : largest;
    }
    return {number(least), number(largest)};
  }

 private:
  // Integers whose order is that of the numbers.
  static KVX_HD int32_t ordered(float x) { return flip(bits_of(zero_for_nan(x))); }
  static KVX_HD float number(int32_t x) { return float_of(static_cast<uint32_t>(flip(x))); }
  static KVX_HD int32_t flip(uint32_t bits) {
    const auto signed_bits = static_cast<int32_t>(bits);
    return signed_bits ^ (signed_bits >> 31 & 0x7fffffff);
  }
};

// Cuts x to 0 .. most, then drops its fraction. NaN becomes 0.
KVX_HD int level_of(float x, int most) {
  const float positive = x > 0.0f ? x : 0.0f, largest = static_cast<float>(most);
  return static_cast<int>(positive < largest ? positive : largest);
}

// Number i of a unit, from its run: kRun numbers that share a scale and lie alike.
template <class Codec>
KVX_HD float decode_in_runs(const uint8_t *unit, int i) {
  const int run = i / Codec::kRun;
  return Codec::value(Codec::scale(unit, run), Codec::level(unit, run, i % Codec::kRun));
}

}  // namespace kvx
