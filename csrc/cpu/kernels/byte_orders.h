// Orders of eight bytes for each mask of eight bits, for byte shuffles.
#pragma once

#include <cstdint>

namespace kvx::cpu {

struct ByteOrders {
  uint8_t to_front[256][8];    // the bytes that the mask has, one after the other
  uint8_t from_front[256][8];  // byte n to where the mask has its bit n; zero elsewhere

  constexpr ByteOrders() : to_front{}, from_front{} {
    for (int mask = 0; mask < 256; ++mask) {
      int count = 0;
      for (int i = 0; i < 8; ++i) {
        const bool is_set = mask >> i & 1;
        from_front[mask][i] = static_cast<uint8_t>(is_set ? count : 0x80);
        if (is_set) to_front[mask][count++] = static_cast<uint8_t>(i);
      }
      for (; count < 8; ++count) to_front[mask][count] = 0x80;
    }
  }
};

inline constexpr ByteOrders kByteOrders;

}  // namespace kvx::cpu
