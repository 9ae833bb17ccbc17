// scalar.h's encoders against NVIDIA's own conversions, as cuda_fp8.h defines them for the host:
// they stand for the instructions that the kernels use. Prints the first differences, and how many
// there are.
#include <cuda_fp8.h>

#include <cstdio>

#include "formats/scalar.h"

namespace {

uint64_t compared = 0, different = 0;

void compare(const char *format, uint32_t bits, uint8_t ours, uint8_t theirs) {
  ++compared;
  if (ours == theirs || ++different > 10) return;
  std::printf("%s of %#010x: %#04x, expected %#04x\n", format, bits, ours, theirs);
}

void compare(uint32_t bits) {
  const float value = kvx::float_of(bits);
  compare("E4M3", bits, kvx::E4m3::encode(value),
          __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3));
  compare("E5M2", bits, kvx::E5m2::encode(value),
          __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E5M2));
}

// The instruction gives F16, which holds every FP8 number.
void compare_decoders(__nv_fp8_interpretation_t format, uint8_t code, float ours) {
  const float theirs = kvx::F16::decode(__nv_cvt_fp8_to_halfraw(code, format).x);
  ++compared;
  if (kvx::bits_of(ours) == kvx::bits_of(theirs) || (ours != ours && theirs != theirs)) return;
  ++different;
  std::printf("code %#04x is %g, expected %g\n", code, ours, theirs);
}

}  // namespace

int main() {
  for (uint32_t code = 0; code < 256; ++code) {
    const auto bits = static_cast<uint8_t>(code);
    compare_decoders(__NV_E4M3, bits, kvx::E4m3::decode(bits));
    compare_decoders(__NV_E5M2, bits, kvx::E5m2::decode(bits));
  }
  for (uint32_t upper = 0; upper < 1u << 16; ++upper) compare(upper << 16);  // every BF16
  for (uint64_t bits = 0; bits < uint64_t{1} << 32; bits += 37)
    compare(static_cast<uint32_t>(bits));
  std::printf("%llu of %llu differ\n", static_cast<unsigned long long>(different),
              static_cast<unsigned long long>(compared));
  return different != 0;
}
