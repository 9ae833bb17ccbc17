// A plan on HOST memory.
#pragma once

#include "plan/plan.h"

namespace kvx::cpu {

// Moves what the plan says: `tokens` tokens, which check_data has counted. The caller's indices,
// lengths and scales may have changed since. It reads each again, looks at what it has read, and
// takes for null what is out of range: other tokens may move then, but nothing outside the tensors.
void run(const Plan &plan, uint64_t tokens);

// How many threads that takes, if they are free.
uint32_t count_threads(const Plan &plan, uint64_t tokens);

// Calls that move at least this many bytes store past the caches.
uint64_t stream_bytes();

}  // namespace kvx::cpu
