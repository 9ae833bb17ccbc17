// AMD's E4M3 of gfx94x ("fnuz"): bias 8, no infinity, no negative zero; NaN is 0x80, the largest
// number 240. Spec: E.6, E.10
// Source: torch 2.13, c10/util/Float8_e4m3fnuz.h
#pragma once

#include "formats/scalar.h"

namespace kvx {

struct E4m3Fnuz {
  using Bits = uint8_t;
  using Magnitude = SmallFloat<3, -7>;
  static KVX_HD float decode(Bits bits) {
    const uint32_t number = Magnitude::widen(bits & 0x7fu) | (bits & 0x80u) << 24;
    return float_of(bits == 0x80u ? 0x7fc00000u : number);
  }
  static KVX_HD Bits encode(float value) {
    const uint32_t bits = bits_of(value), magnitude = bits & ~kSign;
    const uint32_t clamped = magnitude > 0x43700000u ? 0x43700000u : magnitude;  // 240
    const uint32_t number = Magnitude::round(clamped);
    const uint32_t code = number ? number | (bits & kSign) >> 24 : 0u;
    return static_cast<Bits>(magnitude > kInfinity ? 0x80u : code);
  }
};

}  // namespace kvx
