// A plan on the device. The rest of the library sees no more of CUDA than this.
#pragma once

#include "kvx/kvx_plan.h"
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

// Fills which kernels move the planes, and in how many launches.
void describe(const Plan &plan, kvx_plan_info_t *info, kvx_plane_info_t *planes);

// The first of slots, tables, lengths and starts that lies in device memory; NULL if none does.
const char *find_in_device_memory(const Plan &plan);

// Waits for `stream`, then says what has been found since it was last asked.
kvx_status_t report_status(void *stream);

}  // namespace kvx::cuda
