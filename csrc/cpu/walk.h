// The tokens of a plan in stretches that stay in one block at both ends.
#pragma once

#include <algorithm>

#include "error.h"
#include "plan.h"

namespace kvx::cpu {

// Calls visit(row, from, to, count) for tokens [begin, end) of all rows laid end to end. A place
// whose block is negative holds nothing: a null block, a skipped slot or, at the source, a token
// past the row's stored ones. Stops at the first visit that does not return OK.
template <class Visit>
kvx_status_t walk(const Plan &plan, const Address &src, const Address &dst, uint64_t begin,
                  uint64_t end, Visit visit) {
  uint64_t flat = 0;  // token 0 of the row
  for (uint64_t row = 0; row < plan.rows.count && flat < end; ++row) {
    const uint64_t length = plan.rows.length(row), stored = plan.rows.stored(row);
    const uint64_t last = std::min(end - flat, length);
    for (uint64_t token = begin > flat ? begin - flat : 0; token < last;) {
      Place from{-1, 0, UINT32_MAX, false};
      uint64_t count = last - token;
      if (token < stored) {
        from = find(src, row, token, flat + token);
        count = std::min(count, stored - token);
      }
      const Place to = find(dst, row, token, flat + token);
      count = std::min<uint64_t>(count, std::min(from.run, to.run));
      KVX_TRY(visit(row, from, to, count));
      token += count;
    }
    flat += length;
  }
  return KVX_STATUS_OK;
}

// All tokens of the plan.
inline uint64_t count_tokens(const Plan &plan) {
  uint64_t tokens = 0;
  for (uint64_t row = 0; row < plan.rows.count; ++row) tokens += plan.rows.length(row);
  return tokens;
}

}  // namespace kvx::cpu
