// What kernels found out of range: counted, and the first of it remembered, in device memory.
// Kernels of several streams may find and one host thread take at the same time.
#pragma once

#include "plan/violation.h"

namespace kvx::cuda {

struct Status {
  unsigned long long count;
  uint32_t claimed, ready;  // somebody writes what follows; it is written
  Call call;
  LookupMode src, dst;  // how the first call's tokens are found
  Violation first;
};

// The status of the current device. Allocates nothing: it is a variable of the library's kernels.
kvx_status_t device_status(Status **status);

}  // namespace kvx::cuda
