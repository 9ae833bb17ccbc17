// The parameters of a kernel: a part of the plan whose pairs of planes differ only in their
// pointers.
#pragma once

#include "cuda/status.h"
#include "plan/plan.h"

namespace kvx::cuda {

constexpr uint32_t kFewPairs = 2;           // of one layer, as a decode step has them
constexpr uint64_t kMostItems = INT32_MAX;  // chunks x parts: kernels count with 32 bits
constexpr uint32_t kWarp = 32;
// Threads of a block, in every kernel. Four blocks share a multiprocessor, so a thread has 64
// registers; kernels declare it, or compilers for sm_100 and later spill to make room for more
// blocks.
constexpr uint32_t kThreads = 256;
constexpr uint32_t kWarps = kThreads / kWarp;

// Division by a constant: a multiplication and a shift.
// Source: Granlund and Montgomery, Division by Invariant Integers using Multiplication, 1994
struct FastDiv {
  uint32_t divisor = 1, multiplier = 1, shift = 0;

  FastDiv() = default;
  explicit FastDiv(uint32_t by) : divisor(by) {
    if (by == 0) return;  // of a number that the kernel does not need
    while (shift < 32 && (uint64_t{1} << shift) < by) ++shift;
    multiplier =
        static_cast<uint32_t>(((uint64_t{1} << 32) * ((uint64_t{1} << shift) - by)) / by + 1);
  }

  KVX_HD uint32_t quotient(uint32_t n) const {
    const auto high = static_cast<uint32_t>((uint64_t{n} * multiplier) >> 32);
    return static_cast<uint32_t>((uint64_t{high} + n) >> shift);
  }
  // Of numbers of 32 bits.
  KVX_HD Division divide(uint64_t number) const {
    const auto n = static_cast<uint32_t>(number);
    const uint32_t found = quotient(n);
    return {found, n - found * divisor};
  }
};

// How kernels look up tokens at one end: they count with 32 bits and divide often.
struct KernelLookup : Lookup {
  FastDiv block_tokens, ring_tokens, sub_block_count;
  uint32_t slots = 0;

  KernelLookup() = default;
  explicit KernelLookup(const Lookup &lookup)
      : Lookup(lookup),
        block_tokens(lookup.block_size),
        ring_tokens(lookup.block_size * lookup.max_blocks_per_seq),
        sub_block_count(lookup.sub_blocks),
        slots(static_cast<uint32_t>(lookup.num_slots())) {}

  KVX_HD Division by_block(uint64_t tokens) const { return block_tokens.divide(tokens); }
  KVX_HD Division by_sub_block(uint32_t index) const { return sub_block_count.divide(index); }
  KVX_HD uint64_t num_slots() const { return slots; }
  KVX_HD uint64_t in_ring(uint64_t position) const {
    return ring_tokens.divide(position).remainder;
  }
};

struct KernelLookups {
  KernelLookup src, dst;

  KVX_HD bool differs_by_plane() const { return src.planes_per_entry || dst.planes_per_entry; }
};

// A head's vector is `per_head` units, each contiguous at both ends: 1 to 16 bytes of a copy, eight
// or sixteen elements of a conversion, one element if nothing wider fits.
struct Units {
  FastDiv per_head, per_token;         // of one head, of all heads
  uint32_t elements, bytes;            // per unit, at the source
  uint32_t dst_units, dst_bytes;       // units of the format in a unit of kUnits, bytes of each
  FastDiv src_per_pack, dst_per_pack;  // units that follow each other before outer_stride counts
};

// The base addresses of one pair of planes at both ends.
struct Bases {
  uint8_t *src, *src_secondary, *dst, *dst_secondary;
  const uint8_t *src_scales;
  uint8_t *dst_scales;  // written if the kernel finds them
};

struct Common {
  Rows rows;
  KernelLookups lookups[2];
  PlanePair shape;  // of every pair; pointers are in `bases`
  Units units;

  // Work is cut into chunks: `tokens_per_chunk` tokens of a row, and these into parts of a token.
  uint64_t row_bound;  // tokens that a row has at most, not 0; its length is in device memory
  // Chunks are numbered from the rows' first ones on, so that those of short rows end early.
  FastDiv num_rows;
  uint32_t chunks;     // as many of each row
  bool measures_rows;  // kernels that find a chunk empty ask whether any row goes on
  uint32_t tokens_per_chunk;
  uint32_t units_per_part;
  FastDiv parts;  // of a token

  bool zero_fill;
  Call call;
  uint32_t num_pairs;
  uint32_t reporter[2];  // the pair that reports the faults of each lookup
  Status *status;
};

// Few pairs: each has all of its numbers.
template <uint32_t kPairs>
struct Params : Common {
  Bases bases[kPairs];
  uint32_t plane[kPairs];
  uint8_t lookup[kPairs];  // which of the two
  bool is_v[kPairs];

  KVX_HD const uint8_t *src_of(uint32_t pair) const { return bases[pair].src; }
  KVX_HD uint8_t *dst_of(uint32_t pair) const { return bases[pair].dst; }
  KVX_HD const Bases &bases_of(uint32_t pair) const { return bases[pair]; }
  KVX_HD uint32_t plane_of(uint32_t pair) const { return plane[pair]; }
};

// What pairs of a launch may differ in: addresses, and a plane's index where tables have entries of
// each plane. Those of scales and zero points beside the data come last.
enum Column : uint8_t {
  kSrc,
  kDst,
  kSrcSecondary,
  kDstSecondary,
  kSrcScales,
  kDstScales,
  kPlane,
  kSrcUnitScales,
  kSrcUnitZeros,
  kDstUnitScales,
  kDstUnitZeros,
  kColumns
};

// Many pairs, in less than 4 KB: what every driver takes, and a launch copies all of it. A column
// that is 0 in all pairs takes no room. Each pair has a source and a destination, whose columns
// begin where the compiler knows; others lie behind these two, where fewer pairs leave room.
template <uint32_t kPairs>
struct CompactParams : Common {
  uint32_t at[kColumns];  // where a column begins
  uintptr_t numbers[2 * kPairs];
  uint8_t lookup[kPairs];  // which of the two
  bool is_v[kPairs];

  // The most pairs that have this many columns.
  static constexpr uint32_t most_pairs(uint32_t columns) { return kPairs / ((columns + 1) / 2); }

  KVX_HD uint8_t *src_of(uint32_t pair) const { return pointer(numbers[pair]); }
  KVX_HD uint8_t *dst_of(uint32_t pair) const { return pointer(numbers[kPairs + pair]); }
  // Of scales and zero points; NULL: none.
  KVX_HD uint8_t *address_of(uint32_t pair, Column column) const {
    return at[column] ? pointer(numbers[at[column] + pair]) : nullptr;
  }
  // Where no pair has a secondary pool, or tables no entries of each plane, nothing asks for them:
  // the column of the bases stands for theirs.
  KVX_HD Bases bases_of(uint32_t pair) const {
    return {src_of(pair),
            pointer(numbers[at[kSrcSecondary] + pair]),
            dst_of(pair),
            pointer(numbers[at[kDstSecondary] + pair]),
            address_of(pair, kSrcScales),
            address_of(pair, kDstScales)};
  }
  KVX_HD uint32_t plane_of(uint32_t pair) const {
    return static_cast<uint32_t>(numbers[at[kPlane] + pair]);
  }

 private:
  static KVX_HD uint8_t *pointer(uintptr_t number) { return reinterpret_cast<uint8_t *>(number); }
};

#ifdef KVX_ONE_SIZE  // builds that compile for minutes compile each kernel once
using Large = CompactParams<2 * kFewPairs>;
using Small = Large;
#else
using Large = CompactParams<160>;  // K and V of 80 layers or, with scales at one end, of 40
using Small = Params<kFewPairs>;
#endif

// Of pairs with zero points: 72, if these are at one end.
struct AffineParams : CompactParams<144> {
  AffinePair affine;  // of every pair, but for its pointers
};

// Kernels have up to 64 bytes of parameters of their own, those of pairs with zero points none.
constexpr size_t kMostParameterBytes = 4096;
static_assert(sizeof(Small) + 64 <= kMostParameterBytes);
static_assert(sizeof(Large) + 64 <= kMostParameterBytes);
static_assert(sizeof(AffineParams) <= kMostParameterBytes);
static_assert(Large::most_pairs(kSrcUnitScales) > 0 && AffineParams::most_pairs(kColumns) > 0);

}  // namespace kvx::cuda
