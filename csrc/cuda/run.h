// A plan on the device. The rest of the library sees no more of CUDA than this.
#pragma once

#include "plan/plan.h"

namespace kvx::cuda {

// Whether there is a driver and a device. Asked once.
bool has_device();

// Whether kernels of the current device can reach `data`, which a refusal calls `name` `field`.
kvx_status_t check_reachable(const char *name, const char *field, const void *data);

// Why there is no device.
const char *no_device_because();

// Launches what the plan says on `stream`. Allocates nothing on the device, waits for nothing and
// reads nothing there, so that a CUDA graph can capture it. What is out of range in the data is
// skipped and remembered; report_status says it.
kvx_status_t run(const Plan &plan, void *stream);

// Waits for `stream`, then says what has been found since it was last asked.
kvx_status_t report_status(void *stream);

}  // namespace kvx::cuda
