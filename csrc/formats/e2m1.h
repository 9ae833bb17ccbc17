// E2M1, a float of four bits, two in a byte: in units with their scale (MXFP4), and with scales
// beside the data (F4_E2M1). Spec: E.18
#pragma once

#include "formats/affine.h"

namespace kvx {

// 0, 0.5, 1, 1.5, 2, 3, 4 and 6, and a sign in bit 3. Chooses by masks: compilers turn choices into
// branches, and loops with branches are not vectorized.
struct E2m1 {
  using Magnitude = SmallFloat<1, 0>;
  static constexpr uint32_t kLargest = 0x40c00000u;  // 6
  static KVX_HD float decode(uint32_t code) {
    const uint32_t number = code & 7u;
    const uint32_t normal = 0x3f000000u + (number << 22), half = 0x3f000000u & -(number & 1u);
    const uint32_t is_small = -((number - 2u) >> 31);  // below 1: 0 or a half
    return float_of((normal & ~is_small) | (half & is_small) | (code & 8u) << 28);
  }
  // To nearest, ties to even; past 6 becomes 6, NaN becomes 0.
  static KVX_HD uint32_t encode(float value) {
    const uint32_t bits = bits_of(value), magnitude = bits & ~kSign;
    const uint32_t number = Magnitude::round(magnitude > kLargest ? kLargest : magnitude);
    const uint32_t is_number = ((magnitude - kInfinity - 1) >> 31) * 15u;
    return (number | (bits & kSign) >> 28) & is_number;
  }
};

// The bits of the largest magnitude, as more numbers are seen. NaN is left out.
KVX_HD int32_t largest_magnitude(int32_t most, float x) {
  const auto magnitude = static_cast<int32_t>(bits_of(x) & ~kSign);
  const int32_t is_number = ~((static_cast<int32_t>(kInfinity) - magnitude) >> 31);
  const int32_t number = magnitude & is_number;
  return number > most ? number : most;
}

// Infinity counts as the largest finite number.
KVX_HD uint32_t finite(int32_t magnitude) {
  const auto bits = static_cast<uint32_t>(magnitude);
  return bits < kInfinity ? bits : kInfinity - 1;
}

// A power of two, as an exponent of eight bits: 2^(bits - 127). 255 is NaN.
struct E8m0 {
  static KVX_HD float decode(uint8_t bits) {
    const uint32_t normal = static_cast<uint32_t>(bits) << 23;
    return float_of(bits == 255 ? 0x7fc00000u : bits ? normal : 0x00400000u);
  }
  // Of a power of two from 2^-127 to 2^127, or of 0, which becomes 0.
  static KVX_HD uint8_t encode_exact(float value) {
    return static_cast<uint8_t>(bits_of(value) >> 23);
  }
};

// MXFP4: 32 numbers along dim in 17 bytes, an exponent e and 16 bytes, the first 16 numbers in
// their low halves and the others in the high ones; value = 2^(e - 127) * E2M1. The scale and the
// rounding of ties are ggml's. Spec: E.10
// Source: gguf 0.19.0, quants.py, MXFP4, whose bytes these are
struct MxFp4 {
  static constexpr int kNumbers = 32, kBytes = 17;

  static KVX_HD float decode(const uint8_t *unit, int i) {
    const uint32_t byte = unit[1 + i % 16];
    return decode(half_scale(unit[0]), i < 16 ? byte & 15u : byte >> 4);
  }
  // Half the scale, which is finite for every e, times twice the number; 0 has one sign.
  static KVX_HD float half_scale(uint8_t e) {
    return float_of(e < 2 ? 0x00200000u << e : (e - 1u) << 23);
  }
  static KVX_HD float decode(float half_scale, uint32_t code) {
    return half_scale * (E2m1::decode(code) * 2.0f + 0.0f);
  }

  // Of a unit with this largest magnitude: its e, and what its numbers are multiplied by.
  static KVX_HD uint32_t exponent_of(int32_t most) {
    const uint32_t exponent = finite(most) >> 23;
    return exponent > 2 ? exponent - 2 : 0;
  }
  static KVX_HD float inverse(uint32_t e) { return float_of((254u - e) << 23); }

  template <class ValueAt>
  static KVX_HD void encode(uint8_t *unit, ValueAt value_at) {
    int32_t most = 0;
    KVX_LOOP
    for (int i = 0; i < kNumbers; ++i) most = largest_magnitude(most, value_at(i));
    const uint32_t e = exponent_of(most);
    const float inverse = MxFp4::inverse(e);
    unit[0] = static_cast<uint8_t>(e);
    KVX_LOOP
    for (int i = 0; i < 16; ++i) {
      const uint32_t low = nearest(value_at(i) * inverse),
                     high = nearest(value_at(i + 16) * inverse);
      unit[1 + i] = static_cast<uint8_t>(low | high << 4);
    }
  }

 private:
  // Rounds to nearest, ties towards 0, which has one sign; NaN becomes 0.
  static KVX_HD uint32_t nearest(float x) {
    const auto size = static_cast<int32_t>(bits_of(x) & ~kSign);
    const auto above = [size](uint32_t tie) {  // 1 or 0
      return static_cast<uint32_t>(static_cast<int32_t>(tie) - size) >> 31;
    };
    const uint32_t is_number = above(kInfinity) - 1u;
    const uint32_t code = above(0x3e800000u) + above(0x3f400000u) + above(0x3fa00000u) +
                          above(0x3fe00000u) + above(0x40200000u) + above(0x40600000u) +
                          above(0x40a00000u);  // 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5
    const uint32_t sign = (bits_of(x) & kSign) >> 28 & -above(0x3e800000u);
    return (code | sign) & is_number;
  }
};

// F4_E2M1: numbers with a scale for each group beside the data, E4M3 (NVFP4) or E8M0 (MX), and
// perhaps one for the tensor; value = E2M1 * (scale * tensor_scale).
// Source: vLLM 0.32, model_executor/layers/quantization/utils/nvfp4_emulation_utils.py,
//   ref_nvfp4_quant and dequantize_to_dtype; models/deepseek_v4/common/ops/fused_indexer_q.py,
//   _quantize_mxfp4_pair
class Fp4 {
 public:
  KVX_HD explicit Fp4(float tensor_scale) : times_(1.0f / tensor_scale), over_(1.0f / times_) {}

  // What magnitudes are multiplied by before their scale is stored, and the inverse of that.
  KVX_HD float times() const { return times_; }
  KVX_HD float over() const { return over_; }

  // The scale of a group, as it is stored.
  KVX_HD float find(int32_t most, kvx_dtype_t scales) const {
    const float sixth = float_of(finite(most)) * (1.0f / 6.0f);
    if (scales == KVX_DTYPE_F8_E4M3) return E4m3::decode(E4m3::encode(sixth * times_));
    // The least power of two that is not below it; at least 2^-126.
    const uint32_t bits = bits_of(sixth > 0x1p-126f ? sixth : 0x1p-126f);
    return float_of((bits + 0x7fffffu) & kInfinity);
  }

  // What numbers are multiplied by before they are rounded; 0 if that is not finite.
  KVX_HD float inverse(float scale) const {
    const float inverse = 1.0f / (scale * over_);
    return bits_of(inverse) < kInfinity ? inverse : 0.0f;
  }

 private:
  float times_, over_;
};

// The scale of a group, stored as E4M3 or E8M0.
KVX_HD float load_group_scale(const uint8_t *at, kvx_dtype_t dtype) {
  return dtype == KVX_DTYPE_F8_E4M3 ? E4m3::decode(*at) : E8m0::decode(*at);
}
KVX_HD void store_group_scale(uint8_t *at, kvx_dtype_t dtype, float scale) {
  *at = dtype == KVX_DTYPE_F8_E4M3 ? E4m3::encode(scale) : E8m0::encode_exact(scale);
}

}  // namespace kvx
