// Element formats: stored bits <-> float32. Round to nearest even; FP8 saturates; NaN stays NaN.
// Branch-free, so that loops over them vectorise; shared by every backend. Spec: E.6 No step makes
// a subnormal float32 of a normal number: subnormals are slow on some processors, and zero if a
// host application has switched them off.
#pragma once

#include <cstdint>
#include <cstring>

#include "hd.h"
#include "kvx/kvx_abi.h"

namespace kvx {

KVX_HD float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

KVX_HD uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

constexpr uint32_t kSign = 0x80000000u;
constexpr uint32_t kInfinity = 0x7f800000u;

// A format with kMantissa mantissa bits whose numbers are subnormal below 2^kMinExponent. Its
// exponent and mantissa are one unsigned number, `code`, that grows with the magnitude.
template <int kMantissa, int kMinExponent>
struct SmallFloat {
  static constexpr int kDropped = 23 - kMantissa;  // mantissa bits that float32 has more
  static constexpr uint32_t kMinNormal = static_cast<uint32_t>(127 + kMinExponent) << 23;
  static constexpr uint32_t kFirstNormalCode = 1u << kMantissa;

  // The caller has clamped the magnitude, a float32 without sign, to what the format can hold.
  static KVX_HD uint32_t round(uint32_t magnitude) {
    const uint32_t own_exponent = magnitude & kInfinity;
    const uint32_t exponent = own_exponent < kMinNormal ? kMinNormal : own_exponent;
    // Adding a float whose last mantissa bit is worth one step rounds the magnitude to whole steps.
    const uint32_t steps_base = exponent + (static_cast<uint32_t>(kDropped) << 23);
    const uint32_t steps = bits_of(float_of(magnitude) + float_of(steps_base)) - steps_base;
    return steps + ((exponent - kMinNormal) >> kDropped);
  }

  // Exact; for codes of finite numbers.
  static KVX_HD uint32_t widen(uint32_t code) {
    const uint32_t normal = (code << kDropped) + kMinNormal - (1u << 23);
    const uint32_t subnormal =
        bits_of(float_of((code << kDropped) + kMinNormal) - float_of(kMinNormal));
    return code < kFirstNormalCode ? subnormal : normal;
  }
};

struct F32 {
  using Bits = uint32_t;
  static KVX_HD float decode(Bits bits) { return float_of(bits); }
  static KVX_HD Bits encode(float value) { return bits_of(value); }
};

struct Bf16 {
  using Bits = uint16_t;
  static KVX_HD float decode(Bits bits) { return float_of(static_cast<uint32_t>(bits) << 16); }
  static KVX_HD Bits encode_exact(float value) { return static_cast<Bits>(bits_of(value) >> 16); }
  static KVX_HD Bits encode(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const bool nan = (bits & ~kSign) > kInfinity;
    return static_cast<Bits>(nan ? (bits >> 16) | 0x40u : rounded);
  }
};

struct F16 {
  using Bits = uint16_t;
  static KVX_HD float decode(Bits bits) {
    const uint32_t magnitude = bits & 0x7fffu;
    const uint32_t special = kInfinity | (magnitude << 13) | (magnitude > 0x7c00u ? 0x400000u : 0u);
    const uint32_t finite = SmallFloat<10, -14>::widen(magnitude);
    return float_of((magnitude >= 0x7c00u ? special : finite) | (bits & 0x8000u) << 16);
  }
  static KVX_HD Bits encode(float value) {
    const uint32_t bits = bits_of(value), magnitude = bits & ~kSign;
    // Clamped to 65536, which encodes as infinity.
    const uint32_t clamped = magnitude > 0x47800000u ? 0x47800000u : magnitude;
    const uint32_t number = SmallFloat<10, -14>::round(clamped);
    return static_cast<Bits>((magnitude > kInfinity ? 0x7e00u : number) | (bits & kSign) >> 16);
  }
};

struct E4m3 {
  using Bits = uint8_t;
  using Magnitude = SmallFloat<3, -6>;
  static KVX_HD float decode(Bits bits) {
    const uint32_t magnitude = bits & 0x7fu;
    const uint32_t finite = Magnitude::widen(magnitude);
    return float_of((magnitude == 0x7fu ? 0x7fc00000u : finite) | (bits & 0x80u) << 24);
  }
  static KVX_HD Bits encode(float value) {
    const uint32_t bits = bits_of(value), magnitude = bits & ~kSign;
    const uint32_t clamped = magnitude > 0x43e00000u ? 0x43e00000u : magnitude;  // 448
    const uint32_t number = Magnitude::round(clamped);
    return static_cast<Bits>(magnitude > kInfinity ? 0x7fu : number | (bits & kSign) >> 24);
  }
};

struct E5m2 {
  using Bits = uint8_t;
  using Magnitude = SmallFloat<2, -14>;
  static KVX_HD float decode(Bits bits) {
    const uint32_t magnitude = bits & 0x7fu;
    const uint32_t special = kInfinity | (magnitude > 0x7cu ? 0x400000u | magnitude << 21 : 0u);
    const uint32_t finite = Magnitude::widen(magnitude);
    return float_of((magnitude >= 0x7cu ? special : finite) | (bits & 0x80u) << 24);
  }
  static KVX_HD Bits encode(float value) {
    const uint32_t bits = bits_of(value), magnitude = bits & ~kSign;
    const uint32_t clamped = magnitude > 0x47600000u ? 0x47600000u : magnitude;  // 57344
    const uint32_t number = Magnitude::round(clamped);
    return static_cast<Bits>(magnitude > kInfinity ? 0x7fu : number | (bits & kSign) >> 24);
  }
};

}  // namespace kvx
