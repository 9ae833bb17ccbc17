// Overlaps that only indices show: what a call reads must differ from what it writes.
#pragma once

#include "plan/plan.h"

namespace kvx {

// INVALID_ARGUMENT if a write reads an element that it writes [7], if a block is read and written
// within one pool [E.3], if a block that a table names by its address overlaps another [E.12], or
// if planes with lookups of their own overlap [E.11]. The indices have been checked.
kvx_status_t check_blocks_apart(const Plan &plan, uint64_t tokens);

}  // namespace kvx
