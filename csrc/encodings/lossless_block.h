// A block of the lossless encoding: up to 4096 bfloat16 numbers. Spec: E.19
#pragma once

#include <cstdint>

#include "formats/lossless.h"

namespace kvx::lossless {

constexpr int64_t kBlockHeader = 8;

constexpr int64_t most_bytes(int64_t numbers) { return kBlockHeader + 2 * numbers; }

// A block whose sizes have been checked: where its parts lie.
struct Block {
  int64_t numbers, others[2];  // others[l]: symbols that level l does not have
  Level levels[2];
  bool is_stored;
  const uint8_t *rest;  // or the numbers, if they are stored
  const uint8_t *planes[2], *raw;
};

// Encodes `count` numbers; returns how many bytes it took, at most most_bytes(count).
int64_t encode_block(uint8_t *to, const uint16_t *numbers, int64_t count);

// Finds the parts of a block of `count` numbers in exactly `bytes` bytes. `counts`: whether to
// compare the planes with the numbers of symbols too. Returns what is wrong, or NULL.
const char *read_block(const uint8_t *from, uint64_t bytes, int64_t count, bool counts,
                       Block *block);

// Decodes a block; reads and writes nothing outside it, even if its bytes change meanwhile.
void decode_block(uint16_t *numbers, const Block &block);

}  // namespace kvx::lossless
