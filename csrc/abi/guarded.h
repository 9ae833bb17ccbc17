// Wraps every exported function.
#pragma once

#include <exception>

#include "backend.h"
#include "error.h"

namespace kvx {

// No exception leaves the library. The only one is out of memory, before the first write.
template <class Call>
kvx_status_t guarded(Call call) {
  const backend::StandardFloats standard;
  try {
    return call();
  } catch (const std::exception &error) {
    return fail(KVX_STATUS_INTERNAL_ERROR, "%s", error.what());
  }
}

}  // namespace kvx
