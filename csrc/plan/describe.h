// Describes what a plan will move.
#pragma once

#include "kvx/kvx_plan.h"
#include "plan/plan.h"

namespace kvx {

// Fills in all that the plan shows. The counts stay KVX_UNKNOWN; the backend adds its part.
// `planes` may be NULL. `span`: an end of its migration.
void describe_planes(const Plan &plan, const kvx_span_t &span, kvx_plan_info_t *info,
                     kvx_plane_info_t *planes);

// Fills in the counts, for `tokens` tokens that check_data has counted.
void count_moves(const Plan &plan, uint64_t tokens, kvx_plan_info_t *info,
                 kvx_plane_info_t *planes);

}  // namespace kvx
