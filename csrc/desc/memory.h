// Where memory can be read from. What the machine has, the backend says (backend.cc).
#pragma once

#include "kvx/kvx_abi.h"

namespace kvx {

// The host may read it while the call is prepared: a call on UNIFIED memory runs on the host where
// there is no device.
bool is_readable(kvx_memory_type_t memory);

}  // namespace kvx
