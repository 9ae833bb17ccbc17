// From a row and a position in it to a block and an offset: slots, block tables, KVCacheIndex.
// Shared by every backend. The arrays are the caller's and may change at any time: a number that is
// used is read once, and found in range as it was read.
#pragma once

#include <cstdint>

#include "hd.h"

namespace kvx {

// The caller's integers, S32 or S64.
struct Ints {
  const void *data;
  bool wide;

  // One load: on the host the compiler may not repeat it.
  KVX_HD int64_t operator[](uint64_t i) const {
#if defined(__CUDA_ARCH__)
    return wide ? static_cast<const int64_t *>(data)[i] : static_cast<const int32_t *>(data)[i];
#else
    return wide ? static_cast<const volatile int64_t *>(data)[i]
                : static_cast<const volatile int32_t *>(data)[i];
#endif
  }
};

enum class LookupMode : uint8_t { kDense, kSlots, kPacked, kRagged, kKvOffsets };

// How the tokens of each row (a sequence, or one beam of it) are found at one end, for K or for V.
struct Lookup {
  LookupMode mode;
  bool is_v;                    // which row of a KV_OFFSETS table
  bool is_own;                  // a plane's own, not the view's: for sentences
  bool exact;                   // RAGGED: a row has one entry per token, and no more
  uint32_t block_size;          // tokens
  uint32_t max_blocks_per_seq;  // columns of PACKED and KV_OFFSETS
  uint32_t sub_blocks;          // KV_OFFSETS: sub-blocks per block, all layers and K and V
  uint32_t sub_block;           // KV_OFFSETS: which of them this tensor is
  uint32_t indices_count;       // entries of `indices`
  uint64_t num_blocks;          // bound of a block id
  uint64_t secondary_blocks;    // bound of a block id in the secondary pool
  int64_t null_block;           // block id that holds nothing
  int64_t invalid_slot;
  Ints indices;  // slots or table entries
  Ints indptr;   // RAGGED
  Ints starts;   // first token of each row; NULL: 0
};

// A token's place. `run` tokens from here on stay in the block and follow each other.
struct Place {
  int64_t block;    // -1: nothing is stored there
  uint32_t offset;  // tokens into the block
  uint32_t run;
  bool secondary;
};

constexpr uint32_t kSecondaryPool = 1u << 31;  // KVCacheIndex: bit 31 selects the secondary pool

KVX_HD Place place_in_block(const Lookup &a, int64_t block, uint32_t offset) {
  const bool null = block < 0 || block == a.null_block;
  return {null ? -1 : block, offset, a.block_size - offset, false};
}

// Quotient and remainder; narrow numbers, which are the usual ones, divide several times faster.
// Kernels are given no others (cuda/run.cu refuses them).
struct Division {
  uint64_t quotient;
  uint32_t remainder;
};
KVX_HD Division divide(uint64_t number, uint32_t divisor) {
#if !defined(__CUDA_ARCH__)
  if (number > UINT32_MAX) return {number / divisor, static_cast<uint32_t>(number % divisor)};
#endif
  const auto narrow = static_cast<uint32_t>(number);
  return {narrow / divisor, narrow % divisor};
}

// A KVCacheIndex counts sub-blocks; null (-1) has bit 31 set and is tested first.
// Source: TensorRT-LLM main (2026), cpp/include/tensorrt_llm/kernels/kvCacheIndex.h, KVCacheIndex
KVX_HD Place place_in_pool(const Lookup &a, int32_t index, uint32_t offset) {
  if (index == -1) return place_in_block(a, -1, offset);
  const uint32_t sub_block_id = static_cast<uint32_t>(index) & ~kSecondaryPool;
  Place place = place_in_block(a, sub_block_id / a.sub_blocks, offset);
  place.secondary = (static_cast<uint32_t>(index) & kSecondaryPool) != 0;
  return place;
}

// The entry of a PACKED or KV_OFFSETS table for a row's column.
KVX_HD uint64_t table_entry(const Lookup &a, uint64_t row, uint64_t column) {
  const uint64_t table_row = a.mode == LookupMode::kKvOffsets ? row * 2 + (a.is_v ? 1 : 0) : row;
  return table_row * a.max_blocks_per_seq + column;
}

// The place that a slot or a table's entry names, `offset` tokens into the block of an entry.
KVX_HD Place place_of(const Lookup &a, int64_t entry, uint32_t offset) {
  if (a.mode == LookupMode::kPacked) return place_in_block(a, entry, offset);
  if (a.mode == LookupMode::kKvOffsets)
    return place_in_pool(a, static_cast<int32_t>(entry), offset);
  if (a.mode == LookupMode::kSlots) {
    if (entry < 0 || entry == a.invalid_slot) return {-1, 0, 1, false};
    const Division at = divide(static_cast<uint64_t>(entry), a.block_size);
    entry = static_cast<int64_t>(at.quotient);
    offset = at.remainder;
  }
  Place place = place_in_block(a, entry, offset);
  place.run = 1;
  return place;
}

// What an index can be that only the data shows.
enum class Fault : uint8_t {
  kNone,
  kSlot,         // past the cache
  kBlock,        // past the cache
  kNoSecondary,  // in a secondary pool that is not there
  kPoolBlock,    // past its pool
  kSubBlock,     // another tensor's
  kLength,       // negative
  kStart,        // negative
  kCapacity,     // a row needs more than its table, or its block, holds
  kIndptr,       // out of order
  kExact,        // a RAGGED row has more or fewer entries than tokens
  kSlotCount,    // fewer slots than tokens
  kScale,        // not finite or not positive
};

// Whether a slot or an entry of a table is in range; null is.
KVX_HD Fault fault_of(const Lookup &a, int64_t entry) {
  if (a.mode == LookupMode::kSlots) {
    const auto limit = static_cast<int64_t>(a.num_blocks * a.block_size);
    return entry < limit || entry == a.invalid_slot ? Fault::kNone : Fault::kSlot;
  }
  if (a.mode != LookupMode::kKvOffsets) {
    const bool null = entry < 0 || entry == a.null_block;
    return null || static_cast<uint64_t>(entry) < a.num_blocks ? Fault::kNone : Fault::kBlock;
  }
  if (entry == -1) return Fault::kNone;
  const auto index = static_cast<uint32_t>(static_cast<int32_t>(entry));
  const uint32_t id = index & ~kSecondaryPool;
  const bool secondary = (index & kSecondaryPool) != 0;
  if (id / a.sub_blocks == a.null_block) return Fault::kNone;
  const uint64_t blocks = secondary ? a.secondary_blocks : a.num_blocks;
  if (secondary && blocks == 0) return Fault::kNoSecondary;
  if (id / a.sub_blocks >= blocks) return Fault::kPoolBlock;
  return id % a.sub_blocks == a.sub_block ? Fault::kNone : Fault::kSubBlock;
}

// What an entry that fault_of refuses had to stay below: tokens, or blocks of its pool.
KVX_HD uint64_t limit_of(const Lookup &a, int64_t entry) {
  if (a.mode == LookupMode::kSlots) return a.num_blocks * a.block_size;
  return a.mode == LookupMode::kKvOffsets && static_cast<int32_t>(entry) < 0 ? a.secondary_blocks
                                                                             : a.num_blocks;
}

// Whether a row that has its last token before `end` breaks a table's promise to be exact.
KVX_HD bool is_inexact(const Lookup &a, uint64_t row, uint64_t end) {
  return a.exact && static_cast<uint64_t>(a.indptr[row + 1] - a.indptr[row]) != end;
}

// How many tokens a row can have here.
KVX_HD uint64_t capacity_of(const Lookup &a, uint64_t row) {
  if (a.mode == LookupMode::kSlots) return UINT64_MAX;
  if (a.mode == LookupMode::kDense) return a.block_size;
  if (a.mode == LookupMode::kRagged)
    return static_cast<uint64_t>(a.indptr[row + 1] - a.indptr[row]);
  return uint64_t{a.max_blocks_per_seq} * a.block_size;
}

}  // namespace kvx
