#include "backend.h"

#include "cpu/attend.h"
#include "cpu/hadamard.h"
#include "cpu/kernels/kernels.h"
#include "cpu/run.h"
#include "cpu/speed.h"
#include "cpu/threads.h"
#include "desc/memory.h"
#include "error.h"
#include "plan/check.h"
#if KVX_WITH_CUDA
#include "cuda/copy_engine.h"
#include "cuda/run.h"
#include "hybrid/launch.h"
#endif

namespace kvx {

bool unified_is_host() {
#if KVX_WITH_CUDA
  return !cuda::has_device();
#else
  return true;
#endif
}

namespace backend {

kvx_status_t place(const NamedTensor *tensors, size_t count, bool *on_device) {
  *on_device = false;
  for (size_t i = 0; i < count; ++i) {
    const auto &[name, tensor] = tensors[i];
    if (is_absent(*tensor)) continue;
#if KVX_WITH_CUDA
    if (tensor->memory == KVX_MEMORY_DEVICE && !cuda::has_device()) {
      return fail(KVX_STATUS_UNSUPPORTED,
                  "%s.memory is DEVICE, but no CUDA device can be used here: %s (spec 4.3)", name,
                  cuda::no_device_because());
    }
    *on_device |= tensor->memory != KVX_MEMORY_HOST && cuda::has_device();
#else
    if (tensor->memory == KVX_MEMORY_DEVICE) {
      return fail(KVX_STATUS_UNSUPPORTED,
                  "libkvx was built without CUDA; %s.memory is DEVICE. Rebuild with nvcc on PATH "
                  "(spec 4.3)",
                  name);
    }
#endif
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

kvx_status_t check_reachable([[maybe_unused]] const NamedArray *arrays,
                             [[maybe_unused]] size_t count) {
#if KVX_WITH_CUDA
  cuda::Reach reach(cuda::Peers::kRefused);
  KVX_TRY(reach.begin());
  for (size_t i = 0; i < count; ++i) KVX_TRY(reach.check(arrays[i].name, "", arrays[i].data));
#endif
  return KVX_STATUS_OK;  // place() has refused DEVICE memory
}

#if KVX_WITH_CUDA
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
#endif

kvx_status_t run(const Plan &plan, [[maybe_unused]] const NamedTensor *tensors,
                 [[maybe_unused]] size_t count, [[maybe_unused]] bool on_device,
                 [[maybe_unused]] void *stream, [[maybe_unused]] ReachedBy *reached_by) {
#if KVX_WITH_CUDA
  if (on_device) return run_on_device(plan, tensors, count, stream, reached_by);
#endif
  uint64_t tokens;
  KVX_TRY(check_data(plan, &tokens));
  cpu::run(plan, tokens);
  return KVX_STATUS_OK;
}

kvx_status_t copy_pairs([[maybe_unused]] const void *const *srcs,
                        [[maybe_unused]] void *const *dsts, [[maybe_unused]] uint64_t bytes,
                        [[maybe_unused]] uint64_t count, [[maybe_unused]] kvx_memcpy_mode_t mode,
                        bool *batched, [[maybe_unused]] void *stream) {
  *batched = false;
#if KVX_WITH_CUDA
  return cuda::copy_pairs(srcs, dsts, bytes, count, mode, batched, stream);
#else
  return KVX_STATUS_OK;  // place() has refused DEVICE memory
#endif
}

kvx_status_t copy_each_pair([[maybe_unused]] const void *const *srcs,
                            [[maybe_unused]] void *const *dsts, [[maybe_unused]] uint64_t bytes,
                            [[maybe_unused]] uint32_t num_pairs, [[maybe_unused]] void *stream) {
#if KVX_WITH_CUDA
  return cuda::copy_each_pair(srcs, dsts, bytes, num_pairs, stream);
#else
  return KVX_STATUS_OK;  // place() has refused DEVICE memory
#endif
}

namespace {

template <class Call, class... Direction>
kvx_status_t run_anywhere([[maybe_unused]] bool on_device, [[maybe_unused]] void *stream,
                          const Call &call, Direction... direction) {
#if KVX_WITH_CUDA
  if (on_device) return hybrid::launch(call, direction..., stream);
#endif
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

bool has_batches() {
#if KVX_WITH_CUDA
  return cuda::has_batches();
#else
  return false;
#endif
}

bool has_kernels() {
#if KVX_WITH_CUDA
  return true;
#else
  return false;
#endif
}

void describe(const Plan &plan, uint64_t tokens, [[maybe_unused]] const Route &route,
              kvx_plan_info_t *info, [[maybe_unused]] kvx_plane_info_t *planes) {
#if KVX_WITH_CUDA
  if (route.on_device) {
    info->on_device = 1;
    // Where UNIFIED memory lies at the moment is not known, nor is how fast it is copied.
    if (route.src != KVX_MEMORY_UNIFIED && route.dst != KVX_MEMORY_UNIFIED) {
      info->copy_bytes_per_second =
          cuda::copy_speed(route.src == KVX_MEMORY_HOST, route.dst == KVX_MEMORY_HOST);
    }
    return cuda::describe(plan, info, planes);
  }
#endif
  info->num_threads = cpu::count_threads(plan, tokens);
  info->copy_bytes_per_second = cpu::copy_speed(info->num_threads > 1);
}

const char *find_unreadable([[maybe_unused]] const Plan &plan, [[maybe_unused]] bool on_device) {
#if KVX_WITH_CUDA
  if (on_device) return cuda::find_in_device_memory(plan);
#endif
  return nullptr;
}

kvx_status_t report_status([[maybe_unused]] void *stream) {
#if KVX_WITH_CUDA
  if (cuda::has_device()) return cuda::report_status(stream);
#endif
  return KVX_STATUS_OK;
}

void fill(kvx_backend_info_t *info) {
  const uint32_t size = info->size;
  *info = {};
  info->size = size;
#if KVX_WITH_CUDA
  info->has_cuda = 1;
#endif
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
