// A plan as the copies that it makes: what a transport carries out.
#pragma once

#include "kvx/kvx_plan.h"
#include "plan/plan.h"

namespace kvx {

// UNSUPPORTED, with its name, if a plane is converted.
kvx_status_t check_copies(const Plan &plan);

// Hands all copies of `tokens` tokens, which check_data has counted, to `take`, until it has
// enough. The plan converts nothing.
void list_ranges(const Plan &plan, uint64_t tokens, kvx_take_ranges_t take, void *context);

}  // namespace kvx
