#include "numbers.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace sass {

float half_to_float(uint16_t half) {
  _Float16 x;
  std::memcpy(&x, &half, sizeof x);
  return static_cast<float>(x);
}

uint16_t to_half(float x) {
  if (std::isnan(x)) return 0x7fff;
  const auto narrow = static_cast<_Float16>(x);
  uint16_t half;
  std::memcpy(&half, &narrow, sizeof half);
  return half;
}

uint16_t to_bfloat(float x) {
  if (std::isnan(x)) return 0x7fff;
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

float fp8_to_float(uint8_t code, bool e4m3) {
  const int mantissa_bits = e4m3 ? 3 : 2, bias = e4m3 ? 7 : 15;
  const int exponent = (code & 127) >> mantissa_bits;
  const float mantissa = static_cast<float>(code & ((1 << mantissa_bits) - 1)) /
                         static_cast<float>(1 << mantissa_bits);
  if (e4m3 ? (code & 127) == 127 : exponent == 31 && mantissa != 0) return NAN;
  if (!e4m3 && exponent == 31) return code & 128 ? -INFINITY : INFINITY;
  const float x =
      exponent ? std::ldexp(1 + mantissa, exponent - bias) : std::ldexp(mantissa, 1 - bias);
  return code & 128 ? -x : x;
}

uint8_t to_fp8(float x, bool e4m3) {
  if (std::isnan(x)) return 0x7f;
  const auto positive = [](bool of_e4m3) {  // by code, the finite ones
    std::vector<float> all;
    for (int code = 0; code <= (of_e4m3 ? 0x7e : 0x7b); ++code)
      all.push_back(fp8_to_float(static_cast<uint8_t>(code), of_e4m3));
    return all;
  };
  static const std::vector<float> kE4m3 = positive(true), kE5m2 = positive(false);
  const std::vector<float> &all = e4m3 ? kE4m3 : kE5m2;
  const double size = std::min(std::fabs(x), all.back());
  const auto above = std::lower_bound(all.begin(), all.end(), size);
  auto code = static_cast<int>(above - all.begin());
  if (code > 0) {
    const double up = all[code] - size, down = size - all[code - 1];
    if (down < up || (down == up && code % 2 == 1)) --code;
  }
  return static_cast<uint8_t>(code | (std::signbit(x) ? 128 : 0));
}

}  // namespace sass
