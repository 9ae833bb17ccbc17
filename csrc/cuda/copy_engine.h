// Runs a plan on the device's copy engines: no kernel runs, the host finds all tokens. Copies pairs
// of addresses.
#pragma once

#include "kvx/kvx_blocks.h"
#include "plan/plan.h"

namespace kvx::cuda {

// Queues the plan's copies on `stream`. Reads slots, tables, lengths and starts before it returns;
// if one of them is out of range, or if a pair converts, it queues nothing.
kvx_status_t run_copies(const Plan &plan, void *stream);

// Queues `count` copies of `bytes` bytes.
kvx_status_t copy_pairs(const void *const *srcs, void *const *dsts, uint64_t bytes, uint64_t count,
                        kvx_memcpy_mode_t mode, bool *batched, void *stream);

// Copies `bytes` bytes of each pair of tables that a kernel reads, as wide as both addresses of the
// pair allow. NULL is skipped and counted for report_status.
kvx_status_t copy_each_pair(const void *const *srcs, void *const *dsts, uint64_t bytes,
                            uint32_t num_pairs, void *stream);

// Whether this build's runtime has batches of copies.
bool has_batches();

}  // namespace kvx::cuda
