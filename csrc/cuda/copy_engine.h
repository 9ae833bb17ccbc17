// Runs a plan on the device's copy engines: no kernel runs, the host finds all tokens.
#pragma once

#include "plan/plan.h"

namespace kvx::cuda {

// Queues the plan's copies on `stream`. Reads slots, tables, lengths and starts before it returns;
// if one of them is out of range, or if a pair converts, it queues nothing.
kvx_status_t run_copies(const Plan &plan, void *stream);

}  // namespace kvx::cuda
