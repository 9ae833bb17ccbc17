#include "backend.h"

#include "cpu/attend.h"
#include "cpu/hadamard.h"
#include "cpu/kernels/kernels.h"
#include "cpu/run.h"
#include "cpu/speed.h"
#include "cpu/threads.h"
#include "cuda/copy_engine.h"
#include "cuda/run.h"
#include "desc/memory.h"
#include "error.h"
#include "hybrid/launch.h"
#include "plan/check.h"

namespace kvx {

bool unified_is_host() { return !cuda::has_device(); }

namespace backend {

kvx_status_t place(const NamedTensor *tensors, size_t count, bool *on_device) {
  *on_device = false;
  for (size_t i = 0; i < count; ++i) {
    const auto &[name, tensor] = tensors[i];
    if (is_absent(*tensor)) continue;
    if (tensor->memory == KVX_MEMORY_DEVICE && !cuda::has_device()) {
      if (!cuda::is_built()) {
        return fail(KVX_STATUS_UNSUPPORTED,
                    "libkvx was built without CUDA; %s.memory is DEVICE. Rebuild with nvcc on PATH "
                    "(spec 4.3)",
                    name);
      }
      return fail(KVX_STATUS_UNSUPPORTED,
                  "%s.memory is DEVICE, but no CUDA device can be used here: %s (spec 4.3)", name,
                  cuda::no_device_because());
    }
    *on_device |= tensor->memory != KVX_MEMORY_HOST && cuda::has_device();
  }
  return KVX_STATUS_OK;
}

kvx_status_t place(kvx_memory_type_t memory, const char *name, bool *on_device) {
  kvx_tensor_desc_t tensor{};
  tensor.memory = memory;
  tensor.ndim = 1;
  tensor.data = &tensor;  // not absent
  const NamedTensor named = {name, &tensor};
  return place(&named, 1, on_device);
}

kvx_status_t check_reachable(const NamedArray *arrays, size_t count) {
  cuda::Reach reach(cuda::Peers::kRefused);
  KVX_TRY(reach.begin());
  for (size_t i = 0; i < count; ++i) KVX_TRY(reach.check(arrays[i].name, "", arrays[i].data));
  return KVX_STATUS_OK;
}

namespace {

kvx_status_t run_on_device(const Plan &plan, const NamedTensor *tensors, size_t count, void *stream,
                           ReachedBy *reached_by) {
  cuda::Reach reach(cuda::Peers::kReached, plan.owner, reached_by);
  KVX_TRY(reach.begin());
  for (size_t i = 0; i < count && !reach.is_kept(); ++i) {
    const auto &[name, tensor] = tensors[i];
    const bool on_host = tensor->memory == KVX_MEMORY_HOST;
    // Copy engines can copy all host memory, but not fill it.
    const bool is_known = on_host ? plan.copy_engine && !plan.zero_fill : reach.is_owned();
    if (is_absent(*tensor) || is_known) continue;
    const Extent extent = extent_of(*tensor);
    KVX_TRY(on_host ? reach.check_whole(name, extent) : reach.check(name, ".data", extent));
  }
  KVX_TRY(reach.check_owners());
  return cuda::run(plan, &reach, stream);
}

}  // namespace

kvx_status_t run(const Plan &plan, const NamedTensor *tensors, size_t count, bool on_device,
                 void *stream, ReachedBy *reached_by) {
  if (on_device) return run_on_device(plan, tensors, count, stream, reached_by);
  uint64_t tokens;
  KVX_TRY(check_data(plan, &tokens));
  cpu::run(plan, tokens);
  return KVX_STATUS_OK;
}

kvx_status_t copy_pairs(const void *const *srcs, void *const *dsts, uint64_t bytes, uint64_t count,
                        kvx_memcpy_mode_t mode, bool *batched, void *stream) {
  *batched = false;
  return cuda::copy_pairs(srcs, dsts, bytes, count, mode, batched, stream);
}

kvx_status_t copy_each_pair(const void *const *srcs, void *const *dsts, uint64_t bytes,
                            uint32_t num_pairs, void *stream) {
  return cuda::copy_each_pair(srcs, dsts, bytes, num_pairs, stream);
}

namespace {

template <class Call, class... Direction>
kvx_status_t run_anywhere(bool on_device, void *stream, const Call &call, Direction... direction) {
  if (on_device) return hybrid::launch(call, direction..., stream);
  hybrid::run(call, direction...);
  return KVX_STATUS_OK;
}

}  // namespace

kvx_status_t run_hybrid(const kvx_hybrid_append_t &call, bool on_device, void *stream) {
  return run_anywhere(on_device, stream, call);
}
kvx_status_t run_hybrid(const kvx_hybrid_tail_t &call, bool on_device, void *stream) {
  return run_anywhere(on_device, stream, call);
}
kvx_status_t run_hybrid(const kvx_hybrid_compress_t &call, bool on_device, void *stream) {
  return run_anywhere(on_device, stream, call);
}
kvx_status_t run_hybrid(const kvx_hybrid_flush_t &call, bool on_device, void *stream) {
  return run_anywhere(on_device, stream, call);
}
kvx_status_t run_hybrid(const kvx_hybrid_state_t &call, bool on_device, void *stream) {
  return run_anywhere(on_device, stream, call);
}
kvx_status_t run_hybrid(const kvx_hybrid_pages_t &call, hybrid::Direction direction, bool on_device,
                        void *stream) {
  return run_anywhere(on_device, stream, call, direction);
}

void attend(const Attention &plan) { cpu::attend(plan); }

bool has_batches() { return cuda::has_batches(); }

bool has_kernels() { return cuda::is_built(); }

void describe(const Plan &plan, uint64_t tokens, const Route &route, kvx_plan_info_t *info,
              kvx_plane_info_t *planes) {
  if (route.on_device) {
    info->on_device = 1;
    // Where UNIFIED memory lies at the moment is not known, nor is how fast it is copied.
    if (route.src != KVX_MEMORY_UNIFIED && route.dst != KVX_MEMORY_UNIFIED) {
      info->copy_bytes_per_second =
          cuda::copy_speed(route.src == KVX_MEMORY_HOST, route.dst == KVX_MEMORY_HOST);
    }
    return cuda::describe(plan, info, planes);
  }
  info->num_threads = cpu::count_threads(plan, tokens);
  info->copy_bytes_per_second = cpu::copy_speed(info->num_threads > 1);
}

const char *find_unreadable(const Plan &plan, bool on_device) {
  return on_device ? cuda::find_in_device_memory(plan) : nullptr;
}

kvx_status_t report_status(void *stream) {
  return cuda::has_device() ? cuda::report_status(stream) : KVX_STATUS_OK;
}

void fill(kvx_backend_info_t *info) {
  const uint32_t size = info->size;
  *info = {};
  info->size = size;
  info->has_cuda = cuda::is_built();
  info->num_threads = cpu::num_threads();
  info->cpu_isa = cpu::kernels().isa;
  info->version = KVX_VERSION;
  info->stream_bytes = cpu::stream_bytes();
}

void hadamard(float *values, uint64_t rows, uint32_t dim, int64_t row_stride, uint32_t order) {
  cpu::hadamard(values, rows, dim, row_stride, order);
}

void set_num_threads(uint32_t count) { cpu::set_num_threads(count); }
void set_host_threads(kvx_parallel_t parallel, uint32_t num_threads) {
  cpu::set_host_threads(parallel, num_threads);
}

}  // namespace backend
}  // namespace kvx
