// Runs a plan on HOST memory.
#pragma once

#include "plan/plan.h"

namespace kvx::cpu {

// Runs the plan: `tokens` tokens, which check_data has counted. The caller's indices, lengths and
// scales may have changed since: each is read again, checked again, and treated as null if it is
// out of range. Then other tokens may move, but no memory outside the tensors is touched.
void run(const Plan &plan, uint64_t tokens);

// The number of threads that run uses if they are free.
uint32_t count_threads(const Plan &plan, uint64_t tokens);

// Calls that move at least this many bytes store past the caches.
uint64_t stream_bytes();

}  // namespace kvx::cpu
