// FastQuotient against IEEE division, by their FP8 codes. Prints the first differences, and how
// many there are.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "formats/quotient.h"
#include "formats/scalar.h"

namespace {

uint64_t compared = 0, different = 0, state = 1;

uint64_t random_bits() {  // splitmix64
  uint64_t z = (state += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

template <class Format>
void compare(float value, float scale, float quotient) {
  ++compared;
  const uint8_t ours = Format::encode(quotient), theirs = Format::encode(value / scale);
  if (ours == theirs || (ours & 0x7f) == 0x7f) return;  // NaN: the caller divides
  if (++different > 10) return;
  std::printf("%a / %a: %#04x, expected %#04x\n", value, scale, ours, theirs);
}

void compare(float value, float scale, const kvx::FastQuotient &by) {
  const float quotient = by(value);
  compare<kvx::E4m3>(value, scale, quotient);
  compare<kvx::E5m2>(value, scale, quotient);
  // NaN is for what is not finite, and for nothing else.
  if (std::isnan(quotient) && std::isfinite(value) && std::isfinite(value / scale) &&
      std::isfinite(value * (1.0f / scale)) && ++different <= 10) {
    std::printf("%a / %a is NaN\n", value, scale);
  }
}

// The numbers halfway between two codes, where rounding decides.
template <class Format>
void add_ties(std::vector<float> *ties) {
  for (uint32_t code = 0; code < 0x7f; ++code) {
    const float low = Format::decode(static_cast<uint8_t>(code));
    const float high = Format::decode(static_cast<uint8_t>(code + 1));
    if (std::isfinite(high)) ties->push_back((low + high) / 2);
  }
}

}  // namespace

int main() {
  std::vector<float> ties,
      scales = {1.0f,    2.0f,      0.37f,   0.1f,     1.0f / 3,       3.0f,
                0.0237f, 1 / 448.f, 0x1p59f, 0x1p-59f, 0x1.fffffep59f, 0x1.000002p-60f};
  add_ties<kvx::E4m3>(&ties);
  add_ties<kvx::E5m2>(&ties);
  for (int i = 0; i < 150; ++i)
    scales.push_back(std::exp2(static_cast<float>(random_bits() % 1000000) / 1e6f * 118 - 59));
  for (int i = 0; i < 150; ++i)
    scales.push_back(std::exp2(static_cast<float>(random_bits() % 1000000) / 1e6f * 16 - 12));
  for (const float scale : scales) {
    const kvx::FastQuotient by(scale);
    if (!by.is_usual()) return std::printf("%a is not usual\n", scale), 1;
    for (uint32_t bits = 0; bits < 1u << 16; ++bits) {
      compare(kvx::float_of(bits << 16), scale, by);  // every BF16
      if (bits % 4 == 0) compare(kvx::F16::decode(static_cast<uint16_t>(bits)), scale, by);
    }
    for (const float tie : ties) {
      const uint32_t near = kvx::bits_of(tie * scale);
      for (uint32_t step = 0; step < 9; ++step) {
        compare(kvx::float_of(near + step - 4), scale, by);
        compare(-kvx::float_of(near + step - 4), scale, by);
      }
    }
  }
  for (int i = 0; i < 20000000; ++i) {
    const uint64_t bits = random_bits();
    const float scale = kvx::float_of(static_cast<uint32_t>(bits >> 33));
    const kvx::FastQuotient by(scale);
    if (by.is_usual()) compare(kvx::float_of(static_cast<uint32_t>(bits)), scale, by);
  }
  std::printf("%llu of %llu differ\n", static_cast<unsigned long long>(different),
              static_cast<unsigned long long>(compared));
  return different != 0;
}
