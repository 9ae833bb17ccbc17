// Where memory can be read from. What the machine has, the backend says (backend.cc).
#pragma once

#include "kvx/kvx_abi.h"

namespace kvx {

// Whether calls on UNIFIED memory run on the host: there is no device.
bool unified_is_host();

// The host may read it while the call is prepared.
inline bool is_readable(kvx_memory_type_t memory) {
  return memory == KVX_MEMORY_HOST || (memory == KVX_MEMORY_UNIFIED && unified_is_host());
}

}  // namespace kvx
