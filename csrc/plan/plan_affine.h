// Planning of pairs with zero points or scales of groups. Spec: E.14, E.18
#pragma once

#include "plan/plan.h"

namespace kvx {

// Makes room for the pairs of a migration.
void reserve_pairs(Plan *plan, const kvx_span_t &src, const kvx_span_t &dst);

// What says the scales and zero points, or the scale of the tensor, of one end of a pair: NULL
// where its format has none.
struct AffineDescs {
  const kvx_scale_desc_t *scales, *zeros;
  uint32_t head_start;
};

// Completes pair `index` of the plan, one end of which is affine: either it copies bytes, and pairs
// that copy scales and zero points follow it, or it has an AffinePair. The plan has room.
// `readable`: the host can read the memory of both ends.
void add_affine(Plan *plan, size_t index, const AffineDescs &src, const AffineDescs &dst,
                uint32_t flags, bool readable);

// Where tokens begin in a destination whose units cover those of a block.
kvx_status_t check_unit_starts(const Plan &plan);
// That no block of it is filled twice.
kvx_status_t check_unit_blocks(const Plan &plan, uint64_t tokens);

}  // namespace kvx
