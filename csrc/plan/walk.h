// The tokens of a plan in runs that stay in one block at both ends.
#pragma once

#include <algorithm>

#include "error.h"
#include "plan/plan.h"

namespace kvx {

// Where token `token` of row `row` lies; `flat` numbers the tokens of all rows, for slots. Whatever
// the caller's arrays have become since check_data, it lies within the cache or nowhere.
inline Place find(const Lookup &a, uint64_t row, uint64_t token, uint64_t flat) {
  constexpr Place kNowhere{-1, 0, 1, false};
  if (a.mode == LookupMode::kSlots) {
    if (flat >= a.indices_count) return kNowhere;
    const int64_t slot = a.indices[flat];
    if (slot < 0 || slot == a.invalid_slot) return kNowhere;
    const Division at = divide(static_cast<uint64_t>(slot), a.block_size);
    if (at.quotient >= a.num_blocks) return kNowhere;
    return {static_cast<int64_t>(at.quotient), at.remainder, 1, false};
  }
  const uint64_t position = token + (a.starts.data ? static_cast<uint64_t>(a.starts[row]) : 0);
  if (a.mode == LookupMode::kDense) {  // the row is the block
    if (position >= a.block_size) return kNowhere;
    const auto offset = static_cast<uint32_t>(position);
    return {static_cast<int64_t>(row), offset, a.block_size - offset, false};
  }
  const Division at = divide(position, a.block_size);
  const uint64_t entry = a.mode == LookupMode::kRagged
                             ? static_cast<uint64_t>(a.indptr[row]) + position
                             : table_entry(a, row, at.quotient);
  if (entry >= a.indices_count) return kNowhere;
  const int64_t index = a.indices[entry];
  if (a.mode == LookupMode::kKvOffsets) {
    Place place = place_in_pool(a, static_cast<int32_t>(index), at.remainder);
    const uint64_t blocks = place.secondary ? a.secondary_blocks : a.num_blocks;
    if (static_cast<uint64_t>(place.block) >= blocks) place.block = -1;
    return place;
  }
  const bool none = static_cast<uint64_t>(index) >= a.num_blocks || index == a.null_block;
  const uint32_t run = a.mode == LookupMode::kPacked ? a.block_size - at.remainder : 1;
  return {none ? -1 : index, at.remainder, run, false};
}

// Calls visit(row, from, to, count) for tokens [begin, end) of all rows laid end to end, and for no
// others, whatever the caller's arrays become meanwhile. A place whose block is negative holds
// nothing: a null block, a skipped slot or, at the source, a token past the row's stored ones.
// Stops at the first visit that does not return OK.
template <class Visit>
kvx_status_t walk(const Plan &plan, const LookupPair &lookup, uint64_t begin, uint64_t end,
                  Visit visit) {
  uint64_t flat = 0;  // token 0 of the row
  for (uint64_t row = 0; row < plan.rows.count && flat < end; ++row) {
    const uint64_t stored = plan.rows.stored(row);
    const uint64_t last = std::min(end - flat, plan.rows.fill_to_max ? plan.rows.max_len : stored);
    for (uint64_t token = begin > flat ? begin - flat : 0; token < last;) {
      Place from{-1, 0, UINT32_MAX, false};
      uint64_t count = last - token;
      if (token < stored) {
        from = find(lookup.src, row, token, flat + token);
        count = std::min(count, stored - token);
      }
      const Place to = find(lookup.dst, row, token, flat + token);
      count = std::min<uint64_t>(count, std::min(from.run, to.run));
      KVX_TRY(visit(row, from, to, count));
      token += count;
    }
    flat += last;
  }
  return KVX_STATUS_OK;
}

}  // namespace kvx
