// A plan moved by the device's copy engines: no kernel runs, the host finds all places.
#pragma once

#include "plan/plan.h"

namespace kvx::cuda {

// Queues on `stream` what the plan says. Slots, tables, lengths and starts are read before it
// returns; if one of them is out of range, or if a pair converts, nothing is queued.
kvx_status_t run_copies(const Plan &plan, void *stream);

}  // namespace kvx::cuda
