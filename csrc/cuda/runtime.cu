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

bool has_device() { return find_devices() == cudaSuccess; }

const char *no_device_because() { return cudaGetErrorString(find_devices()); }

kvx_status_t check_reachable(const char *name, const char *field, const void *data) {
  cudaPointerAttributes attributes{};
  int current = 0, pageable = 0;
  KVX_CUDA_TRY(cudaPointerGetAttributes(&attributes, data));
  KVX_CUDA_TRY(cudaGetDevice(&current));
  if (attributes.type == cudaMemoryTypeDevice && attributes.device != current) {
    return fail(KVX_STATUS_UNSUPPORTED,
                "%s%s is on device %d, but the current device is %d: make that of the tensors "
                "current (cudaSetDevice, torch.cuda.device) (spec 7)",
                name, field, attributes.device, current);
  }
  // Registered memory may have another address on the device.
  const bool elsewhere = attributes.type == cudaMemoryTypeHost && attributes.devicePointer != data;
  if (attributes.type != cudaMemoryTypeUnregistered && !elsewhere) return KVX_STATUS_OK;
  KVX_CUDA_TRY(cudaDeviceGetAttribute(&pageable, cudaDevAttrPageableMemoryAccess, current));
  if (pageable) return KVX_STATUS_OK;
  return fail(KVX_STATUS_UNSUPPORTED,
              "%s%s is %p, which the device cannot reach, in a call that runs there: copy it to "
              "the device, or pin host memory (cudaHostRegister, torch's pin_memory) (spec 4.3)",
              name, field, data);
}

kvx_status_t count_sms(uint32_t *count) {
  int device = 0, sms = 0;
  KVX_CUDA_TRY(cudaGetDevice(&device));
  KVX_CUDA_TRY(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
  *count = static_cast<uint32_t>(sms);
  return KVX_STATUS_OK;
}

}  // namespace kvx::cuda
