// Runs a plan on the device. The rest of the library uses no more of CUDA than this.
#pragma once

#include "cuda/reach.h"
#include "kvx/kvx_plan.h"
#include "plan/plan.h"

namespace kvx::cuda {

// Whether libkvx was built with kernels. Without them absent.cc is in place of all other files
// here.
bool is_built();

// Whether there is a driver and a device; checked once.
bool has_device();

// Says why there is no device.
const char *no_device_because();

// Launches the plan's kernels on `stream`. Allocates nothing on the device, waits for nothing and
// reads nothing there, so that a CUDA graph can capture it. Kernels skip what is out of range in
// the data and count it for report_status. `reach` has checked the tensors of the call; this checks
// what else kernels read.
kvx_status_t run(const Plan &plan, Reach *reach, void *stream);

// Fills in which kernels move the planes, and in how many launches.
void describe(const Plan &plan, kvx_plan_info_t *info, kvx_plane_info_t *planes);

// Bytes per second that the current device copies from and to its own memory or pinned host memory,
// measured by the first call in a process for each device and direction; 0 if that fails. Allocates
// for it, and waits for the copies.
double copy_speed(bool from_host, bool to_host);

// Names the first of slots, tables, lengths and starts that is in device memory; NULL if none is.
const char *find_in_device_memory(const Plan &plan);

// Waits for `stream`, then reports what kernels have found since the last report.
kvx_status_t report_status(void *stream);

}  // namespace kvx::cuda
