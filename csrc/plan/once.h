// Places that a call names more than once: tokens that go there would overwrite each other.
#pragma once

#include "plan/plan.h"

namespace kvx {

// INVALID_ARGUMENT if two of the tokens that a plan writes have one place, by slots or by tables.
// The indices have been checked. Allocates memory only for more than some 500 blocks or slots that
// are not in order. Spec: 5.1, 5.2
kvx_status_t check_written_once(const Plan &plan, uint64_t tokens);

}  // namespace kvx
