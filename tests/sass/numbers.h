// Numbers of 8 and 16 bits, as the hardware converts them: to nearest, ties to even; to FP8,
// saturating. Slow and obvious.
#pragma once

#include <cstdint>

namespace sass {

float half_to_float(uint16_t half);
uint16_t to_half(float x);
uint16_t to_bfloat(float x);
float fp8_to_float(uint8_t code, bool e4m3);
uint8_t to_fp8(float x, bool e4m3);

}  // namespace sass
