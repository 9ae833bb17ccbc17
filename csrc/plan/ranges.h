// Lists the copies of a plan, for a transport to carry out.
#pragma once

#include "kvx/kvx_plan.h"
#include "plan/plan.h"

namespace kvx {

// UNSUPPORTED, naming the plane, if one is converted.
kvx_status_t check_copies(const Plan &plan);

// Passes all copies of `tokens` tokens, which check_data has counted, to `take` until it stops. The
// plan converts nothing.
void list_ranges(const Plan &plan, uint64_t tokens, kvx_take_ranges_t take, void *context);

}  // namespace kvx
