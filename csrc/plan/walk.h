// Walks the tokens of a plan in runs that stay in one block at both ends.
#pragma once

#include <algorithm>

#include "error.h"
#include "plan/plan.h"

namespace kvx {

// Calls visit(row, from, to, count) for tokens [begin, end) of plane `plane` of the spans, numbered
// through all rows, and for no others, even if the caller's arrays change meanwhile. A negative
// block holds nothing: a null block, a skipped slot or, at the source, a token past the row's
// stored ones. Stops at the first visit that does not return OK.
template <class Visit>
kvx_status_t walk(const Plan &plan, const LookupPair &lookup, uint32_t plane, uint64_t begin,
                  uint64_t end, Visit visit) {
  const Rows rows = plan.rows_of(lookup);
  uint64_t flat = 0;  // number of the row's token 0
  for (uint64_t row = 0; row < rows.count && flat < end; ++row) {
    const uint64_t stored = rows.stored(row);
    const uint64_t last = std::min(end - flat, rows.fill_to_max ? rows.max_len : stored);
    uint64_t token = begin > flat ? begin - flat : 0;
    RowLookup<uint64_t> src{}, dst{};
    if (token < last) {
      read_row(lookup.src, row, &src);
      read_row(lookup.dst, row, &dst);
    }
    while (token < last) {
      Place from{-1, 0, UINT32_MAX, false}, to;
      uint64_t count = last - token;
      if (token < stored) {
        find(lookup.src, src, token, flat + token, plane, &from);
        count = std::min(count, stored - token);
      }
      find(lookup.dst, dst, token, flat + token, plane, &to);
      count = std::min<uint64_t>(count, std::min(from.run, to.run));
      KVX_TRY(visit(row, from, to, count));
      token += count;
    }
    flat += last;
  }
  return KVX_STATUS_OK;
}

// The same for the tokens of a pair of planes.
template <class Visit>
kvx_status_t walk(const Plan &plan, const PlanePair &pair, uint64_t begin, uint64_t end,
                  Visit visit) {
  return walk(plan, plan.lookups[pair.lookup], pair.plane, begin, end, visit);
}

}  // namespace kvx
