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

// The status of `device`, which is current; the runtime is asked once for each device. Allocates
// nothing: it is a variable of the library's kernels, which stays where it is until the device is
// reset.
kvx_status_t device_status(int device, Status **status);

}  // namespace kvx::cuda
