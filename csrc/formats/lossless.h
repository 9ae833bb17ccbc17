// The lossless encoding of bfloat16: sizes that all of it shares. Spec: E.19
#pragma once

#include <cstdint>

namespace kvx::lossless {

constexpr int64_t kBlock = 4096;  // numbers of a block; the last block of an array may have fewer
constexpr int64_t kGroup = 32;    // symbols of which one word of a plane has a bit each
constexpr int kMaxWidth = 4;      // planes of a level
constexpr int64_t kSlack = 32;    // bytes behind a buffer that kernels may read and write

// A level writes 2^width - 1 consecutive symbols, from `first` on, as `width` bits: a bit plane
// each. All ones mean that the symbol is another, which the next level has.
struct Level {
  uint8_t width, first;
  constexpr int symbols() const { return (1 << width) - 1; }
};

constexpr int64_t groups_of(int64_t symbols) { return (symbols + kGroup - 1) / kGroup; }
constexpr int64_t plane_bytes(Level level, int64_t symbols) {
  return groups_of(symbols) * 4 * level.width;
}

}  // namespace kvx::lossless
