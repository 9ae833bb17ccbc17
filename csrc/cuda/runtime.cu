#include <atomic>

#include "cuda/run.h"
#include "cuda/runtime.h"
#include "error.h"

namespace kvx::cuda {

kvx_status_t check(cudaError_t error, const char *what) {
  if (error == cudaSuccess) return KVX_STATUS_OK;
  cudaGetLastError();  // clear the error, or the caller's next call returns it
  return fail(KVX_STATUS_INTERNAL_ERROR, "%s: %s (%s)", what, cudaGetErrorString(error),
              cudaGetErrorName(error));
}

namespace {

cudaError_t find_devices() {
  static const cudaError_t found = [] {
    int count = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess) cudaGetLastError();
    return error == cudaSuccess && count == 0 ? cudaErrorNoDevice : error;
  }();
  return found;
}

}  // namespace

bool is_built() { return true; }

bool has_device() { return find_devices() == cudaSuccess; }

const char *no_device_because() { return cudaGetErrorString(find_devices()); }

kvx_status_t count_sms(int device, uint32_t *count) {
  static std::atomic<int> counts[kMostDevices];  // 0: not asked
  int sms = device < kMostDevices ? counts[device].load(std::memory_order_relaxed) : 0;
  if (!sms) {
    KVX_CUDA_TRY(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
    if (device < kMostDevices) counts[device].store(sms, std::memory_order_relaxed);
  }
  *count = static_cast<uint32_t>(sms);
  return KVX_STATUS_OK;
}

}  // namespace kvx::cuda
