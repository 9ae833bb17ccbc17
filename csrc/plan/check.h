// What only the data can show, checked before any write.
#pragma once

#include "plan/plan.h"

namespace kvx {

// Reads every index and scale that the plan will use. OUT_OF_RANGE or INVALID_ARGUMENT with the
// index and the value if one of them is not what it may be; nothing has been written then.
// `*tokens`: how many move or are cleared. It does not exceed what the descriptors have room for.
kvx_status_t check_data(const Plan &plan, uint64_t *tokens);

}  // namespace kvx
