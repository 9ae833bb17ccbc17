// Where plans run: the host, and the device of builds with CUDA. Nothing else in the library knows
// whether there is one.
#pragma once

#include "cpu/float_env.h"
#include "kvx/kvx_host.h"
#include "kvx/kvx_plan.h"
#include "plan/plan.h"

namespace kvx {

// A tensor of a call, and what a refusal calls it.
struct NamedTensor {
  const char *name;
  const kvx_tensor_desc_t *tensor;
};

namespace backend {

using cpu::StandardFloats;

// Whether a call with these tensors runs on the device: if any of them lies there. UNSUPPORTED if
// one does and there is none.
kvx_status_t place(const NamedTensor *tensors, size_t count, bool *on_device);

// Checks the plan's data as far as the host can see them, and moves what it says.
kvx_status_t run(const Plan &plan, const NamedTensor *tensors, size_t count, bool on_device,
                 void *stream);

// Fills what the backend does with a plan of `tokens` tokens, which may be KVX_UNKNOWN on a device.
void describe(const Plan &plan, uint64_t tokens, bool on_device, kvx_plan_info_t *info,
              kvx_plane_info_t *planes);

// The first of the plan's slots, tables, lengths and starts that the host cannot read; NULL if it
// can read them all.
const char *find_unreadable(const Plan &plan, bool on_device);

// What kernels have found out of range since it was last asked; waits for `stream`.
kvx_status_t report_status(void *stream);

// All of `info` but its size.
void fill(kvx_backend_info_t *info);

void set_num_threads(uint32_t count);
void set_host_threads(kvx_parallel_t parallel, uint32_t num_threads);

}  // namespace backend
}  // namespace kvx
