// Finds the block and offset of a token of a row: dense ends, slots, block tables, KVCacheIndex.
// This is the only decoder: the data checks (check.cc), the CPU (walk.h), the kernels
// (cuda/lookup.cuh) and Python (kvx_find_tokens) use it. What a mode means is in
// the functions from mode_of to share_entries.
//
// The arrays are the caller's and may change at any time, so each number is read once, and checked
// as it was read.
#pragma once

#include <cstdint>

#include "hd.h"
#include "kvx/kvx_abi.h"

namespace kvx {

// An array of the caller's integers, S32 or S64.
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
  bool operator==(const Ints &) const = default;
};

enum class LookupMode : uint8_t { kDense, kSlots, kPacked, kRagged, kKvOffsets, kPointers, kRing };

// Quotient and remainder. Numbers of 32 bits, the usual case, divide several times faster; kernels
// take no others (cuda/run.cu refuses them).
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

// The same of any numbers, also in kernels. Slow there.
KVX_HD Division divide_wide(uint64_t number, uint32_t divisor) {
  if (number > UINT32_MAX) return {number / divisor, static_cast<uint32_t>(number % divisor)};
  return divide(number, divisor);
}

// Finds the tokens of each row (a sequence, or one beam of it) at one end, for K or for V.
struct Lookup {
  LookupMode mode;
  bool is_v;                    // K's or V's part of a KV_OFFSETS table
  bool is_own;                  // a plane's own, not the span's: for errors
  bool exact : 1;               // RAGGED: a row has one entry per token, and no more
  bool holes : 1;               // tokens may have null entries: they are left out
  uint32_t tokens_per_entry;    // tokens of an entry; 0: an entry has all tokens of its row
  uint32_t block_size;          // tokens, or entries
  uint32_t max_blocks_per_seq;  // columns of PACKED and KV_OFFSETS
  uint32_t num_rows;            // RAGGED: of indptr, which has one entry more
  uint32_t sub_blocks;          // KV_OFFSETS: sub-blocks per block, all layers and K and V
  uint32_t sub_block;           // KV_OFFSETS: the one of this tensor
  uint32_t planes_per_entry;    // an entry has an index for each plane of the span; 0: one for all
  uint32_t pointer_shift;       // POINTERS: bits of an address that are 0; the rest is the block id
  uint32_t indices_count;       // entries of `indices`, times planes_per_entry
  uint64_t num_blocks;          // bound of a block id
  uint64_t secondary_blocks;    // bound of a block id in the secondary pool
  int64_t null_block;           // block id that holds nothing
  int64_t invalid_slot;
  Ints indices;  // slots or table entries
  Ints indptr;   // RAGGED
  Ints starts;   // first token of each row; NULL: 0

  bool operator==(const Lookup &) const = default;

  // Kernels have a Lookup whose divisions are multiplications (cuda/params.h), so the functions
  // that find a token take any type with these.
  KVX_HD Division by_block(uint64_t tokens) const { return divide(tokens, block_size); }
  KVX_HD Division by_sub_block(uint32_t index) const { return divide(index, sub_blocks); }
  KVX_HD uint64_t num_slots() const { return num_blocks * block_size; }
  // RING: the position in the first round of a position in any.
  KVX_HD uint64_t in_ring(uint64_t position) const {
    return position % (uint64_t{max_blocks_per_seq} * block_size);
  }
};

// A token's place. `run` tokens from here on stay in the block and follow each other.
struct Place {
  int64_t block;    // -1: nothing is stored there
  uint32_t offset;  // tokens into the block
  uint32_t run;
  bool secondary;
};

// The errors of an index that only the data shows.
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
  kPointer,      // not aligned, or no address
  kExact,        // a RAGGED row has more or fewer entries than tokens
  kSlotCount,    // fewer slots than tokens
  kScale,        // not finite or not positive
  kUnit,         // a row begins within a unit that covers the tokens of a block
  kHole,         // a null entry that a token needs, in a table without holes
};

// The entries of a row of this many tokens from its start on: complete ones, or the one of the
// whole row.
KVX_HD uint64_t entries_of(uint64_t tokens, uint32_t tokens_per_entry) {
  if (tokens_per_entry == 1) return tokens;
  if (tokens_per_entry == 0) return tokens ? 1 : 0;
#if defined(__CUDA_ARCH__)
  if (tokens > UINT32_MAX) tokens = UINT32_MAX;  // `divide` takes narrow numbers there
#endif
  return divide(tokens, tokens_per_entry).quotient;
}

// ---- a table

inline LookupMode mode_of(kvx_block_table_format_t format) {
  switch (format) {
    case KVX_BLOCK_TABLE_RAGGED:
      return LookupMode::kRagged;
    case KVX_BLOCK_TABLE_KV_OFFSETS:
      return LookupMode::kKvOffsets;
    case KVX_BLOCK_TABLE_POINTERS:
      return LookupMode::kPointers;
    case KVX_BLOCK_TABLE_RING:
      return LookupMode::kRing;
    default:
      return LookupMode::kPacked;
  }
}

// ---- a row

// One row of a lookup. Count is uint64_t on the host and uint32_t in kernels.
template <class Count>
struct RowLookup {
  Count start;     // position of token 0: the tokens that the row has before it
  Count capacity;  // positions that the row has
  Count entry;     // of position 0; of a dense end, the block
};

// The index of the wrong one of the two entries of indptr that bound a row; UINT64_MAX: neither is
// wrong.
KVX_HD uint64_t wrong_indptr(const Lookup &a, uint64_t row, int64_t begin, int64_t end) {
  if (row == 0 && begin != 0) return 0;
  const bool is_last = row + 1 == a.num_rows;
  if (end < begin || (is_last ? end != a.indices_count : end > a.indices_count)) return row + 1;
  return begin < 0 ? row : UINT64_MAX;
}

// Reads the numbers of a row. At a fault the row has no tokens.
template <class L, class Count>
KVX_HD Fault read_row(const L &a, uint64_t row, RowLookup<Count> *found) {
  *found = {};
  if (a.mode == LookupMode::kSlots) return Fault::kNone;  // slots are numbered through all rows
  uint64_t entry = row, capacity = a.block_size;
  if (a.mode == LookupMode::kRagged) {
    const int64_t begin = a.indptr[row], end = a.indptr[row + 1];
    if (wrong_indptr(a, row, begin, end) != UINT64_MAX) return Fault::kIndptr;
    entry = static_cast<uint64_t>(begin);
    capacity = static_cast<uint64_t>(end - begin);
  } else if (a.mode != LookupMode::kDense) {
    if (a.mode == LookupMode::kKvOffsets) entry = row * 2 + (a.is_v ? 1 : 0);
    entry *= a.max_blocks_per_seq;
    capacity *= a.max_blocks_per_seq;
  }
  int64_t start = a.starts.data ? a.starts[row] : 0;
  // Whole rounds of a ring change nothing: without them its starts fit kernels' numbers. Rare.
  if (a.mode == LookupMode::kRing && capacity && start > 0 &&
      static_cast<uint64_t>(start) > static_cast<Count>(-1)) {
    const uint64_t round = capacity * (a.tokens_per_entry ? a.tokens_per_entry : 1);
    start = static_cast<int64_t>(static_cast<uint64_t>(start) % round);
  }
  if (start < 0 || static_cast<uint64_t>(start) > static_cast<Count>(-1)) return Fault::kStart;
  found->start = static_cast<Count>(start);
  if (a.tokens_per_entry > 1) {
    const Division at = divide_wide(static_cast<uint64_t>(start), a.tokens_per_entry);
    if (at.remainder) return *found = {}, Fault::kStart;
    found->start = static_cast<Count>(at.quotient);
  }
  if (a.mode == LookupMode::kRing && capacity) {  // positions count from the round of token 0
    found->start = static_cast<Count>(a.in_ring(found->start));
    capacity += found->start;
    if (capacity > static_cast<Count>(-1)) capacity = static_cast<Count>(-1);
  }
  found->capacity = static_cast<Count>(capacity);
  found->entry = static_cast<Count>(entry);
  return Fault::kNone;
}

// ---- a token

// Finds the entry or slot of a token, and the token's offset in the entry's block. `flat` numbers
// the tokens of all rows. False: the row does not have the token.
template <class L, class Count>
KVX_HD bool entry_of(const L &a, const RowLookup<Count> &row, uint64_t token, uint64_t flat,
                     uint64_t *entry, uint32_t *offset) {
  *entry = flat;
  *offset = 0;
  if (a.mode == LookupMode::kSlots) return true;
  const uint64_t position = token + row.start;
  if (position >= row.capacity) return false;
  *entry = row.entry;
  *offset = static_cast<uint32_t>(position);
  if (a.mode == LookupMode::kDense) return true;
  const Division in = a.by_block(position);
  if (a.mode == LookupMode::kRagged) {
    *entry += position;
  } else {
    *entry += in.quotient;
    if (in.quotient >= a.max_blocks_per_seq) *entry -= a.max_blocks_per_seq;  // RING's second round
  }
  *offset = in.remainder;
  return true;
}

// Finds the entries of the first and the last of `count` tokens of a row, at least one. Of a RING
// that goes on in its second round, the last may be before the first.
template <class Count>
KVX_HD void entries_of_row(const Lookup &a, const RowLookup<Count> &row, uint64_t count,
                           uint64_t *first, uint64_t *last) {
  uint32_t offset;
  entry_of(a, row, 0, 0, first, &offset);
  entry_of(a, row, count - 1, 0, last, &offset);
}

// Whether the tokens of a row of a RING go on in its second round.
template <class Count>
KVX_HD bool goes_round(const Lookup &a, const RowLookup<Count> &row, uint64_t count) {
  return a.mode == LookupMode::kRing &&
         row.start + count > uint64_t{a.max_blocks_per_seq} * a.block_size;
}

// The number of positions of a row, for errors.
template <class Count>
KVX_HD uint64_t held_by(const Lookup &a, const RowLookup<Count> &row) {
  return a.mode == LookupMode::kRing ? row.capacity - row.start : row.capacity;
}

constexpr uint32_t kSecondaryPool = 1u << 31;  // KVCacheIndex: bit 31 selects the secondary pool

// Decodes a slot.
template <class L>
KVX_HD Fault place_of_slot(const L &a, int64_t slot, Place *place) {
  *place = {-1, 0, 1, false};
  if (slot < 0 || slot == a.invalid_slot) return Fault::kNone;
  if (static_cast<uint64_t>(slot) >= a.num_slots()) return Fault::kSlot;
  const Division at = a.by_block(static_cast<uint64_t>(slot));
  place->block = static_cast<int64_t>(at.quotient);
  place->offset = at.remainder;
  return Fault::kNone;
}

// The fault of a null entry.
template <class L>
KVX_HD Fault hole_of(const L &a) {
  return a.holes ? Fault::kNone : Fault::kHole;
}

// Decodes a slot, or an entry and `offset` tokens into its block.
template <class L>
KVX_HD Fault place_of(const L &a, int64_t entry, uint32_t offset, Place *place) {
  switch (a.mode) {
    case LookupMode::kDense:
      *place = {entry, offset, a.block_size - offset, false};
      return Fault::kNone;
    case LookupMode::kSlots:
      return place_of_slot(a, entry, place);
    case LookupMode::kPacked:
    case LookupMode::kRing:
    case LookupMode::kRagged: {
      const uint32_t run = a.mode == LookupMode::kRagged ? 1 : a.block_size - offset;
      *place = {-1, offset, run, false};
      if (entry < 0 || entry == a.null_block) return hole_of(a);
      if (static_cast<uint64_t>(entry) >= a.num_blocks) return Fault::kBlock;
      place->block = entry;
      return Fault::kNone;
    }
    case LookupMode::kPointers: {
      *place = {-1, offset, a.block_size - offset, false};
      const int64_t block = entry >> a.pointer_shift;
      if (entry == 0) return hole_of(a);
      if (entry < 0 || block << a.pointer_shift != entry) return Fault::kPointer;
      place->block = block;
      return Fault::kNone;
    }
    case LookupMode::kKvOffsets:
      break;
  }
  // A KVCacheIndex counts sub-blocks; null (-1) has bit 31 set and is tested first.
  // Source: TensorRT-LLM main (2026), cpp/include/tensorrt_llm/kernels/kvCacheIndex.h, KVCacheIndex
  *place = {-1, offset, a.block_size - offset, false};
  if (entry == -1) return hole_of(a);
  const auto index = static_cast<uint32_t>(static_cast<int32_t>(entry));
  const bool secondary = (index & kSecondaryPool) != 0;
  const Division at = a.by_sub_block(index & ~kSecondaryPool);
  const auto block = static_cast<int64_t>(at.quotient);
  if (block == a.null_block) return hole_of(a);
  const uint64_t blocks = secondary ? a.secondary_blocks : a.num_blocks;
  if (secondary && blocks == 0) return Fault::kNoSecondary;
  if (at.quotient >= blocks) return Fault::kPoolBlock;
  if (at.remainder != a.sub_block) return Fault::kSubBlock;
  place->block = block;
  place->secondary = secondary;
  return Fault::kNone;
}

// The bound that an entry refused by place_of exceeds: tokens, or blocks of its pool.
KVX_HD uint64_t limit_of(const Lookup &a, int64_t entry) {
  if (a.mode == LookupMode::kSlots) return a.num_blocks * a.block_size;
  if (a.mode == LookupMode::kPointers) return uint64_t{1} << a.pointer_shift;
  return a.mode == LookupMode::kKvOffsets && static_cast<int32_t>(entry) < 0 ? a.secondary_blocks
                                                                             : a.num_blocks;
}

// The position of an entry's index for plane `plane` of the span.
KVX_HD uint64_t index_of(const Lookup &a, uint64_t entry, uint32_t plane) {
  return a.planes_per_entry ? entry * a.planes_per_entry + plane : entry;
}

// Finds a token of a row in plane `plane` of the span. Even if the caller's arrays have changed
// since they were checked, the place is within the cache or, at a fault, null.
template <class L, class Count>
KVX_HD Fault find(const L &a, const RowLookup<Count> &row, uint64_t token, uint64_t flat,
                  uint32_t plane, Place *place) {
  uint64_t entry;
  uint32_t offset;
  *place = {-1, 0, 1, false};
  if (!entry_of(a, row, token, flat, &entry, &offset)) return Fault::kCapacity;
  if (a.mode == LookupMode::kDense)  // the row is the block
    return place_of(a, static_cast<int64_t>(entry), offset, place);
  entry = index_of(a, entry, plane);
  if (entry >= a.indices_count) return Fault::kSlotCount;
  return place_of(a, a.indices[entry], offset, place);
}

// ---- all rows

// The most tokens of a row, by the descriptors.
KVX_HD uint64_t most_tokens_of_row(const Lookup &a) {
  if (a.mode == LookupMode::kSlots || a.mode == LookupMode::kRagged) return a.indices_count;
  return a.mode == LookupMode::kDense ? a.block_size
                                      : uint64_t{a.max_blocks_per_seq} * a.block_size;
}

// Whether all rows share the entries that most_tokens_of_row counts.
KVX_HD bool share_entries(const Lookup &a) {
  return a.mode == LookupMode::kSlots || a.mode == LookupMode::kRagged;
}

}  // namespace kvx
