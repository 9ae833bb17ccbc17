// Faults that kernels find: their number and the first of them, in device memory. Kernels of
// several streams may add faults while one host thread takes them.
#pragma once

#include "plan/violation.h"

namespace kvx::cuda {

struct Status {
  unsigned long long count;
  uint32_t claimed, ready;  // a thread writes the fields below; they are written
  Call call;
  LookupMode src, dst;  // how the first call's tokens are found
  Violation first;
};

// The status of the current device. Allocates nothing: it is a variable of the library's kernels.
kvx_status_t device_status(Status **status);

}  // namespace kvx::cuda
