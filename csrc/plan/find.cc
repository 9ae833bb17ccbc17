#include "plan/find.h"

#include "plan/check.h"
#include "plan/walk.h"

namespace kvx {
namespace {

// The entries of all rows that move.
uint64_t entries(const Rows &rows) {
  uint64_t found = 0;
  for (uint64_t row = 0; row < rows.count; ++row) found += rows.stored(row);
  return found;
}

// The index of an entry's address to look up, in a table with one for each K and V of the layers.
uint32_t number_of(const kvx_find_desc_t &find) {
  uint32_t number = find.is_v;
  for (uint32_t l = 0; l < find.layer; ++l) number += is_absent(find.span->layers[l]->v) ? 1 : 2;
  return number;
}

}  // namespace

kvx_status_t find_tokens(const kvx_find_desc_t &find) {
  Plan plan;
  plan_find(find, &plan);
  uint64_t count;
  KVX_TRY(check_data(plan, &count));
  const Lookup &lookup = plan.lookups[0].src;
  if (lookup.tokens_per_entry != 1) count = entries(plan.rows_of(plan.lookups[0]));
  if (count != find.place_count) {
    return KVX_INVALID(
        "find.place_count is %llu, expected %llu, %s (spec E.12)",
        static_cast<ull>(find.place_count), static_cast<ull>(count),
        lookup.tokens_per_entry == 1 ? "the sum of seq_lens" : "the entries of seq_lens tokens");
  }
  kvx_place_t *at = find.places;
  return walk(plan, plan.lookups[0], number_of(find), 0, count,
              [&](uint64_t, const Place &place, const Place &, uint64_t count) {
                for (uint32_t i = 0; i < count; ++i) {
                  const bool is_null = place.block < 0;
                  const int64_t block = is_null ? -1 : place.block << lookup.pointer_shift;
                  *at++ = {block, is_null ? 0 : place.offset + i, !is_null && place.secondary};
                }
                return KVX_STATUS_OK;
              });
}

}  // namespace kvx
