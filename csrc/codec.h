// Element formats: stored bits <-> float32. Round to nearest even; FP8 saturates; NaN stays NaN.
// Branch-free, so that loops over them vectorise; shared by every backend. Spec: E.6
//
// The encoders round by adding and subtracting a power of two, so they need subnormal floats and
// no contraction into fused multiply-add.
#pragma once

#include <cstdint>
#include <cstring>

#include "address.h"
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

// Rounds `magnitude` to `kMantissa` bits, subnormal below 2^kMinExponent, and returns the bits of the
// small format's exponent and mantissa. The caller has clamped it to what the format can hold.
template <int kMantissa, int kMinExponent>
KVX_HD uint32_t round_to_small_float(uint32_t magnitude) {
  constexpr uint32_t min_normal = static_cast<uint32_t>(127 + kMinExponent) << 23;
  constexpr uint32_t to_small_bias = static_cast<uint32_t>(127 - (126 + kMinExponent)) << 23;
  const uint32_t exponent = magnitude & kInfinity;
  // Its last mantissa bit is worth one step of the small format.
  const float step = float_of((exponent < min_normal ? min_normal : exponent) +
                              (static_cast<uint32_t>(23 - kMantissa) << 23));
  const float rounded = (float_of(magnitude) + step) - step;
  return bits_of(rounded * float_of(to_small_bias)) >> (23 - kMantissa);
}

// The inverse for finite values: exact.
template <int kMantissa, int kMinExponent>
KVX_HD float widen_small_float(uint32_t exponent_and_mantissa) {
  constexpr uint32_t from_small_bias = static_cast<uint32_t>(127 + (126 + kMinExponent)) << 23;
  return float_of(exponent_and_mantissa << (23 - kMantissa)) * float_of(from_small_bias);
}

struct F32 {
  using Bits = uint32_t;
  static KVX_HD float decode(Bits bits) { return float_of(bits); }
  static KVX_HD Bits encode(float value) { return bits_of(value); }
};

struct Bf16 {
  using Bits = uint16_t;
  static KVX_HD float decode(Bits bits) { return float_of(static_cast<uint32_t>(bits) << 16); }
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
    const uint32_t finite = bits_of(widen_small_float<10, -14>(magnitude));
    return float_of((magnitude >= 0x7c00u ? special : finite) | (bits & 0x8000u) << 16);
  }
  static KVX_HD Bits encode(float value) {
    const uint32_t bits = bits_of(value), magnitude = bits & ~kSign;
    // 65536 and above round to it, and it encodes as infinity.
    const uint32_t clamped = magnitude > 0x47800000u ? 0x47800000u : magnitude;
    const uint32_t number = round_to_small_float<10, -14>(clamped);
    return static_cast<Bits>((magnitude > kInfinity ? 0x7e00u : number) | (bits & kSign) >> 16);
  }
};

struct E4m3 {
  using Bits = uint8_t;
  static KVX_HD float decode(Bits bits) {
    const uint32_t magnitude = bits & 0x7fu;
    const uint32_t finite = bits_of(widen_small_float<3, -6>(magnitude));
    return float_of((magnitude == 0x7fu ? 0x7fc00000u : finite) | (bits & 0x80u) << 24);
  }
  static KVX_HD Bits encode(float value) {
    const uint32_t bits = bits_of(value), magnitude = bits & ~kSign;
    const uint32_t clamped = magnitude > 0x43e00000u ? 0x43e00000u : magnitude;  // 448
    const uint32_t number = round_to_small_float<3, -6>(clamped);
    return static_cast<Bits>(magnitude > kInfinity ? 0x7fu : number | (bits & kSign) >> 24);
  }
};

struct E5m2 {
  using Bits = uint8_t;
  static KVX_HD float decode(Bits bits) {
    const uint32_t magnitude = bits & 0x7fu;
    const uint32_t special = kInfinity | (magnitude > 0x7cu ? 0x400000u | magnitude << 21 : 0u);
    const uint32_t finite = bits_of(widen_small_float<2, -14>(magnitude));
    return float_of((magnitude >= 0x7cu ? special : finite) | (bits & 0x80u) << 24);
  }
  static KVX_HD Bits encode(float value) {
    const uint32_t bits = bits_of(value), magnitude = bits & ~kSign;
    const uint32_t clamped = magnitude > 0x47600000u ? 0x47600000u : magnitude;  // 57344
    const uint32_t number = round_to_small_float<2, -14>(clamped);
    return static_cast<Bits>(magnitude > kInfinity ? 0x7fu : number | (bits & kSign) >> 24);
  }
};

}  // namespace kvx
