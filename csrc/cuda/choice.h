// Chooses the kernel that moves a pair of planes, and cuts its work up.
#pragma once

#include "cuda/params.h"

namespace kvx::cuda {

constexpr uint32_t kVectorBytes = 16;    // of the widest load and store
constexpr uint32_t kMostRotated = 1024;  // numbers that kUnits rotates together

// The least n with 2^n >= number.
inline uint32_t log2_from(uint32_t number) {
  uint32_t log2 = 0;
  while ((uint64_t{1} << log2) < number) ++log2;
  return log2;
}

// kQuantize: units that a lane holds at most, and lanes of a vector at least.
KVX_HD constexpr uint32_t units_held(uint32_t unit_bytes) {
  return unit_bytes > kVectorBytes ? 1 : 4;
}
inline uint32_t least_lanes(uint32_t units, uint32_t unit_bytes) {
  const uint32_t lanes = 1u << log2_from(units), held = units_held(unit_bytes);
  return lanes > held ? lanes / held : 1;
}

// The kernels, in the order in which they are tried. The last one moves everything.
enum class Kernel : uint8_t {
  kSlots,     // same bytes, few tokens to slots: a decode step
  kBlocks,    // same bytes, long runs: whole blocks, or tokens that follow each other at both ends
  kBulk,      // the same in the background
  kVectors,   // same bytes, a warp per token
  kRemap,     // same bytes, tokens innermost at one end, units of 4 bytes or more: packed layouts
  kTile,      // same bytes, a transpose of elements: through shared memory
  kConvert,   // another dtype or scale, eight or sixteen elements at a time
  kQuantize,  // to FP8, with a new scale per token and head
  kUnits,     // formats with several numbers in a unit, a unit at a time
  kAffine,    // formats with zero points, whose units are within a token
  kFp4,       // to F4_E2M1
  kChannels,  // to formats whose units cover the tokens of a block
  kGeneric,   // an element at a time
};

struct Choice {
  Kernel kernel;
  uint32_t unit_bytes;  // of a unit at the source: the vector of a copy
  uint32_t run_tokens;  // kBlocks, kBulk: whose bytes follow each other at both ends, 1 or a
                        // block's; kChannels: of a block
  PlanePair shape;      // with heads merged into one where they follow each other
  Units units;
};

// Chooses for pairs that differ only in their pointers; `alignment` is the largest power of two
// that divides all of these. `block_tokens`: tokens of a block if both ends have the same number,
// else 0.
Choice choose(const PlanePair &shape, uint64_t alignment, uint32_t block_tokens, bool background);

// Chooses for pairs with zero points.
Choice choose_affine(const PlanePair &shape, const AffinePair &affine);

// Whether kSlots can take the place of `choice` for this many pairs, and is faster.
bool is_for_slots(const Choice &choice, const Rows &rows, const LookupPair &lookup,
                  uint64_t num_pairs);

// The name of a kernel: that of its file.
const char *name_of(Kernel kernel);

// Vectors of a run of kBlocks and kBulk.
inline uint64_t run_vectors(const Choice &choice) {
  return uint64_t{choice.run_tokens} * choice.units.per_token.divisor * choice.unit_bytes /
         kVectorBytes;
}

// Cuts the work of `common` into chunks and parts, as `choice` needs it. Rows, pairs and
// `row_bound` are set. Very long bounds make chunks longer by powers of two.
void cut(const Choice &choice, Common *common);

// Blocks that the tokens of a row may lie in, wherever they begin.
inline uint64_t most_blocks(const Common &common, uint32_t block_size) {
  return (common.row_bound - 1) / block_size + 2;
}

// Chunks x parts that a thread block works on at a time.
uint32_t items_per_block(Kernel kernel);

}  // namespace kvx::cuda
