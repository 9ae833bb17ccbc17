// A few threads that help with large calls; small calls use none.
#pragma once

#include <cstdint>

#include "kvx/kvx_host.h"

namespace kvx::cpu {

// Threads of the pool that a large call uses, the caller included.
uint32_t num_threads();
void set_num_threads(uint32_t count);  // 0: the default

// Sets the host's threads for calls of this thread; NULL: the pool's.
void set_host_threads(kvx_parallel_t parallel, uint32_t num_threads);
uint32_t num_host_threads();  // 0: none have been lent to this thread

// The function that each thread runs; it takes items of `context` until none is left.
using Work = void (*)(void *context, bool is_caller);

// Runs `work` on the calling thread and on up to `helpers` others, and returns when all have
// returned. If they are busy with another caller's work, the calling thread does it alone.
void run_with_helpers(uint32_t helpers, Work work, void *context);

}  // namespace kvx::cpu
