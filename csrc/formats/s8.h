// Signed bytes, -127 to 127 as encoded: TensorRT-LLM's INT8 and vLLM's int8 caches. Spec: E.6, E.10
#pragma once

#include "formats/scalar.h"

namespace kvx {

struct S8 {
  using Bits = uint8_t;
  static KVX_HD float decode(Bits bits) { return static_cast<float>(static_cast<int8_t>(bits)); }
  // NaN becomes 0.
  static KVX_HD Bits encode(float value) {
    const float below = value > 127.0f ? 127.0f : value;
    const float within = below < -127.0f ? -127.0f : below;
    // At 1.5 * 2^23 a step of float32 is 1, and its last bits are an integer's.
    const uint32_t bits = bits_of(within + 12582912.0f);
    return static_cast<Bits>(value == value ? bits : 0u);
  }
};

}  // namespace kvx
