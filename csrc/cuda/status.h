// What kernels found out of range: counted, and the first of it remembered, in device memory.
#pragma once

#include "finding.h"

namespace kvx::cuda {

struct Status {
  unsigned long long count;
  Call call;
  Addressing src, dst;  // how the first call's tokens are found
  Finding first;
};

// The status of the current device. Allocates nothing: it is a variable of the library's kernels.
kvx_status_t device_status(Status **status);

}  // namespace kvx::cuda
