// What pairs of one kind differ in, as numbers: the host's side of CompactParams.
#pragma once

#include <array>

#include "cuda/params.h"

namespace kvx::cuda {

// NULL: a pair without zero points.
inline const AffinePair *affine_of(const Plan &plan, const PlanePair &pair) {
  return pair.affine ? &plan.affine[pair.affine - 1] : nullptr;
}

// By Column; those that the pair does not have are 0.
using Numbers = std::array<uintptr_t, kColumns>;

inline Numbers numbers_of(const Plan &plan, const PlanePair &pair) {
  const auto number = [](const void *address) { return reinterpret_cast<uintptr_t>(address); };
  Numbers found{number(pair.src.base),        number(pair.dst.base),
                number(pair.src.secondary),   number(pair.dst.secondary),
                number(pair.src_scales.data), number(pair.dst_scales.data)};
  if (plan.lookups[pair.lookup].differs_by_plane()) found[kPlane] = pair.plane;
  if (const AffinePair *const affine = affine_of(plan, pair)) {
    found[kSrcUnitScales] = number(affine->src.scales.data);
    found[kSrcUnitZeros] = number(affine->src.zeros.data);
    found[kDstUnitScales] = number(affine->dst.scales.data);
    found[kDstUnitZeros] = number(affine->dst.zeros.data);
  }
  return found;
}

// The columns of some pairs: a bit each.
class Columns {
 public:
  void add(const Numbers &numbers) {
    for (uint32_t column = 0; column < kColumns; ++column)
      has_ |= uint32_t{numbers[column] != 0} << column;
  }
  // Kernels ask for the column, though all numbers may be 0.
  void require(Column column) { has_ |= 1u << column; }
  // Calls take(column) for each.
  template <class Take>
  void each(Take take) const {
    for (uint32_t left = has_; left; left &= left - 1)
      take(static_cast<uint32_t>(__builtin_ctz(left)));
  }
  bool has(uint32_t column) const { return has_ >> column & 1; }
  uint32_t count() const { return static_cast<uint32_t>(__builtin_popcount(has_)); }

 private:
  uint32_t has_ = 1u << kSrc | 1u << kDst;
};

template <uint32_t kPairs>
void set_columns(const Columns &columns, CompactParams<kPairs> *params) {
  const uint32_t most = params->most_pairs(columns.count());
  uint32_t placed = 2;  // behind the source and the destination by turns
  for (uint32_t column = 0; column < kColumns; ++column) {
    const bool of_dst = column == kDst || (column == kDstSecondary && !columns.has(column));
    uint32_t at = of_dst ? kPairs : 0;
    if (column > kDst && columns.has(column)) {
      at = placed % 2 * kPairs + placed / 2 * most;
      ++placed;
    }
    params->at[column] = at;
  }
}

template <uint32_t kPairs>
void set_numbers(const Columns &columns, const Numbers &numbers, uint32_t pair,
                 CompactParams<kPairs> *params) {
  columns.each(
      [&](uint32_t column) { params->numbers[params->at[column] + pair] = numbers[column]; });
}

inline void set_columns(const Columns &, Params<kFewPairs> *) {}

inline void set_numbers(const Columns &, const Numbers &numbers, uint32_t pair,
                        Params<kFewPairs> *params) {
  const auto address = [&](Column column) { return reinterpret_cast<uint8_t *>(numbers[column]); };
  params->bases[pair] = {address(kSrc),          address(kSrcSecondary), address(kDst),
                         address(kDstSecondary), address(kSrcScales),    address(kDstScales)};
  params->plane[pair] = static_cast<uint32_t>(numbers[kPlane]);
}

}  // namespace kvx::cuda
