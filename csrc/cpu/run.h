// A plan on HOST memory.
#pragma once

#include "plan.h"

namespace kvx::cpu {

// Reads every index and scale that the plan will use. OUT_OF_RANGE or INVALID_ARGUMENT with the
// index and the value if one of them is not what it may be; nothing has been written then.
// `*tokens`: how many move or are cleared. It does not exceed what the descriptors have room for.
kvx_status_t check_data(const Plan &plan, uint64_t *tokens);

// Moves what the plan says: `tokens` tokens, which check_data has counted. The caller's indices,
// lengths and scales may have changed since. It reads each again, looks at what it has read, and
// takes for null what is out of range: other tokens may move then, but nothing outside the tensors.
void run(const Plan &plan, uint64_t tokens);

// Calls that move at least this many bytes store past the caches.
uint64_t stream_bytes();

}  // namespace kvx::cpu
