// Checks what only the data shows, before any write.
#pragma once

#include "plan/plan.h"

namespace kvx {

// Reads every index and scale that the plan will use. OUT_OF_RANGE or INVALID_ARGUMENT, with index
// and value, if one of them is wrong; nothing has been written then. `*tokens`: how many move or
// are cleared, at most as many as the descriptors have room for.
kvx_status_t check_data(const Plan &plan, uint64_t *tokens);

}  // namespace kvx
