// Runs plans on the host or on the device. Where libkvx has no kernels, the files absent.cc of
// cuda/ and hybrid/ say that there is no device.
#pragma once

#include <atomic>

#include "cpu/float_env.h"
#include "hybrid/run.h"
#include "kvx/kvx_blocks.h"
#include "kvx/kvx_host.h"
#include "kvx/kvx_plan.h"
#include "plan/attend.h"
#include "plan/plan.h"

namespace kvx {

// A tensor of a call, and its name in errors.
struct NamedTensor {
  const char *name;
  const kvx_tensor_desc_t *tensor;
};

// An array of a call, and its name in errors.
struct NamedArray {
  const char *name;
  const void *data;
};

// The device whose kernels reach what a plan keeps, as the last run there has found; kNobody: there
// was none. Threads may run a plan at the same time.
using ReachedBy = std::atomic<int>;
constexpr int kNobody = -1;

namespace backend {

using cpu::StandardFloats;

// Whether a call with these tensors runs on the device: if any of them is there. UNSUPPORTED if
// this machine or build has no device.
kvx_status_t place(const NamedTensor *tensors, size_t count, bool *on_device);

// The same for a call whose memory is one field of the argument `name`.
kvx_status_t place(kvx_memory_type_t memory, const char *name, bool *on_device);

// Checks that kernels of the current device can reach arrays.
kvx_status_t check_reachable(const NamedArray *arrays, size_t count);

// Checks the plan's data as far as the host can read them, then runs the plan. `reached_by`: of a
// plan that keeps these tensors, scales and secondary pools; a device is asked for them once.
kvx_status_t run(const Plan &plan, const NamedTensor *tensors, size_t count, bool on_device,
                 void *stream, ReachedBy *reached_by = nullptr);

// Copies `bytes` bytes from srcs[i] to dsts[i] with the device's copy engines; both tables are read
// before it returns. `*batched`: as one batch.
kvx_status_t copy_pairs(const void *const *srcs, void *const *dsts, uint64_t bytes, uint64_t count,
                        kvx_memcpy_mode_t mode, bool *batched, void *stream);

// The same for tables that kernels read, whose addresses may be aligned in any way.
kvx_status_t copy_each_pair(const void *const *srcs, void *const *dsts, uint64_t bytes,
                            uint32_t num_pairs, void *stream);

// Fills the output of an attention to HOST memory.
void attend(const Attention &plan);

// Runs a call of kvx_hybrid.h.
kvx_status_t run_hybrid(const kvx_hybrid_append_t &call, bool on_device, void *stream);
kvx_status_t run_hybrid(const kvx_hybrid_tail_t &call, bool on_device, void *stream);
kvx_status_t run_hybrid(const kvx_hybrid_compress_t &call, bool on_device, void *stream);
kvx_status_t run_hybrid(const kvx_hybrid_flush_t &call, bool on_device, void *stream);
kvx_status_t run_hybrid(const kvx_hybrid_state_t &call, bool on_device, void *stream);
kvx_status_t run_hybrid(const kvx_hybrid_pages_t &call, hybrid::Direction direction, bool on_device,
                        void *stream);

// Whether copies can be given as a batch, and whether there are kernels.
bool has_batches();
bool has_kernels();

// Where a plan runs, and the memory of its ends.
struct Route {
  bool on_device;
  kvx_memory_type_t src, dst;
};

// Fills in how the backend runs a plan of `tokens` tokens, which may be KVX_UNKNOWN on a device.
void describe(const Plan &plan, uint64_t tokens, const Route &route, kvx_plan_info_t *info,
              kvx_plane_info_t *planes);

// Names the first of the plan's slots, tables, lengths and starts that the host cannot read; NULL
// if it can read all.
const char *find_unreadable(const Plan &plan, bool on_device);

// Reports what kernels have found out of range since the last report; waits for `stream`.
kvx_status_t report_status(void *stream);

// Rotates rows in host memory by Hadamard matrices of this order.
void hadamard(float *values, uint64_t rows, uint32_t dim, int64_t row_stride, uint32_t order);

// Fills all of `info` but its size.
void fill(kvx_backend_info_t *info);

void set_num_threads(uint32_t count);
void set_host_threads(kvx_parallel_t parallel, uint32_t num_threads);

}  // namespace backend
}  // namespace kvx
