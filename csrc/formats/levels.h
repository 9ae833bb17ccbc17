// Levels of four or five bits of 32 numbers, as llama.cpp packs them: byte i of 16 holds four bits
// of number i in its low half and of number i + 16 in its high half; before them lie, if there are
// five, the fifth bits of all numbers as a 32-bit integer, number 0's in its lowest bit. Spec: E.10
#pragma once

#include <cstdint>

#include "hd.h"

namespace kvx {

template <int kBits>
struct Levels {
  static_assert(kBits == 4 || kBits == 5);
  static constexpr int kFifth = kBits == 5 ? 4 : 0;  // bytes
  static constexpr int kBytes = kFifth + 16, kMost = (1 << kBits) - 1;

  // The level of number 16 * half + i.
  static KVX_HD int at(const uint8_t *levels, int half, int i) {
    const int low = levels[kFifth + i] >> (4 * half) & 15;
    if (kBits == 4) return low;
    return low | static_cast<int>(fifth_bits(levels) >> (16 * half + i) & 1u) << 4;
  }

  // level_at(i) is that of number i.
  template <class LevelAt>
  static KVX_HD void put(uint8_t *levels, LevelAt level_at) {
    uint32_t fifth = 0;
    KVX_LOOP
    for (int i = 0; i < 16; ++i) {
      const auto low = static_cast<uint32_t>(level_at(i));
      const auto high = static_cast<uint32_t>(level_at(i + 16));
      levels[kFifth + i] = static_cast<uint8_t>((low & 15u) | high << 4);
      fifth |= (low >> 4 | high >> 4 << 16) << i;
    }
    for (int byte = 0; byte < kFifth; ++byte)
      levels[byte] = static_cast<uint8_t>(fifth >> (8 * byte));
  }

 private:
  static KVX_HD uint32_t fifth_bits(const uint8_t *levels) {
    return levels[0] | static_cast<uint32_t>(levels[1]) << 8 |
           static_cast<uint32_t>(levels[2]) << 16 | static_cast<uint32_t>(levels[3]) << 24;
  }
};

}  // namespace kvx
