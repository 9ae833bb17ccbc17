#include <atomic>
#include <mutex>
#include <string>

#include "cuda/platform.h"
#include "cuda/run.h"
#include "cuda/runtime.h"
#include "cuda/status.h"
#include "error.h"

namespace kvx::cuda {
namespace {

__device__ Status status, taken;

// Moves the status from `from` to `to`, and clears it.
__global__ void take_kernel(Status *from, Status *to) {
  to->count = 0;
  if (atomicAdd(&from->count, 0ull) == 0) return;
  // The thread that claimed the status is running and will set `ready`.
  while (atomicAdd(&from->ready, 0u) == 0) {
  }
  __threadfence();  // what it wrote before is seen
  to->call = from->call;
  to->src = from->src;
  to->dst = from->dst;
  to->first = from->first;
  atomicExch(&from->ready, 0u);
  __threadfence();
  atomicExch(&from->claimed, 0u);
  to->count = atomicExch(&from->count, 0ull);
}

kvx_status_t address_of(const Status &symbol, Status **address) {
  void *found = nullptr;
  KVX_CUDA_TRY(cudaGetSymbolAddress(&found, symbol));
  *address = static_cast<Status *>(found);
  return KVX_STATUS_OK;
}

}  // namespace

kvx_status_t device_status(int device, Status **address) {
  static std::atomic<Status *> addresses[kMostDevices];
  if (device >= kMostDevices) return address_of(status, address);
  *address = addresses[device].load(std::memory_order_relaxed);
  if (*address) return KVX_STATUS_OK;
  KVX_TRY(address_of(status, address));
  addresses[device].store(*address, std::memory_order_relaxed);
  return KVX_STATUS_OK;
}

kvx_status_t report_status(void *stream) {
  static std::mutex taking;
  const std::lock_guard lock(taking);
  const auto on = static_cast<cudaStream_t>(stream);
  cudaStreamCaptureStatus capture;
  KVX_CUDA_TRY(cudaStreamIsCapturing(on, &capture));
  if (capture != cudaStreamCaptureStatusNone) {
    return fail(KVX_STATUS_UNSUPPORTED,
                "stream is being captured, and kvx_device_status waits for it, which would end the "
                "capture: ask when the graph has run (spec 4.3)");
  }
  Status *from = nullptr, *to = nullptr, found;
  KVX_TRY(address_of(status, &from));
  KVX_TRY(address_of(taken, &to));
  KVX_LAUNCH(take_kernel, dim3(1), dim3(1), 0, on, from, to);
  KVX_CUDA_TRY(cudaMemcpyAsync(&found, to, sizeof found, cudaMemcpyDeviceToHost, on));
  KVX_CUDA_TRY(cudaStreamSynchronize(on));
  if (found.count == 0) return KVX_STATUS_OK;
  const kvx_status_t status = fail_with(found.first, field_names(found.call, found.src, found.dst));
  const std::string first = last_error();
  return fail(status, "%s; what is out of range is skipped, %llu times since the last report",
              first.c_str(), found.count);
}

}  // namespace kvx::cuda
