// Which memory the host can read. backend.cc says whether there is a device.
#pragma once

#include "kvx/kvx_abi.h"

namespace kvx {

// Whether calls on UNIFIED memory run on the host, because there is no device.
bool unified_is_host();

// Whether the host may read it while it prepares the call.
inline bool is_readable(kvx_memory_type_t memory) {
  return memory == KVX_MEMORY_HOST || (memory == KVX_MEMORY_UNIFIED && unified_is_host());
}

}  // namespace kvx
