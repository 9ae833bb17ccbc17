// Runs the calls of kvx_hybrid.h on HOST memory. Numbers have been checked; those that another
// thread has changed since are skipped if they are out of range.
#pragma once

#include "kvx/kvx_hybrid.h"

namespace kvx::hybrid {

enum class Direction { kWrite, kRead };

void run(const kvx_hybrid_append_t &append);
void run(const kvx_hybrid_tail_t &tail);
void run(const kvx_hybrid_compress_t &compress);
void run(const kvx_hybrid_flush_t &flush);
void run(const kvx_hybrid_state_t &state);
void run(const kvx_hybrid_pages_t &pages, Direction direction);

}  // namespace kvx::hybrid
