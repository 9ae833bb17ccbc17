#include "plan/find.h"

#include "plan/check.h"
#include "plan/walk.h"

namespace kvx {

kvx_status_t find_tokens(const kvx_find_desc_t &find) {
  Plan plan;
  plan_find(find, &plan);
  uint64_t tokens;
  KVX_TRY(check_data(plan, &tokens));
  if (tokens != find.place_count) {
    return KVX_INVALID("find.place_count is %llu, expected %llu, the sum of seq_lens (spec E.12)",
                       static_cast<ull>(find.place_count), static_cast<ull>(tokens));
  }
  kvx_place_t *at = find.places;
  const Lookup &lookup = plan.lookups[0].src;
  return walk(plan, plan.lookups[0], find.is_v, 0, tokens,
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
