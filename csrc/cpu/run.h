// A plan on HOST memory.
#pragma once

#include "plan.h"

namespace kvx::cpu {

// Reads every index and scale that the plan will use. OUT_OF_RANGE or INVALID_ARGUMENT with the
// index and the value if one of them is not what it may be; nothing has been written then.
kvx_status_t check_data(const Plan &plan);

// Moves what the plan says. `check_data` has passed.
void run(const Plan &plan);

// Calls that move at least this many bytes store past the caches.
uint64_t stream_bytes();

}  // namespace kvx::cpu
