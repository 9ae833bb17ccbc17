#include "cuda/run.h"
#include "cuda/runtime.h"
#include "error.h"

namespace kvx::cuda {

kvx_status_t check(cudaError_t error, const char *what) {
  if (error == cudaSuccess) return KVX_STATUS_OK;
  cudaGetLastError();  // do not leave it to the caller's next call
  return fail(KVX_STATUS_INTERNAL_ERROR, "%s: %s (%s)", what, cudaGetErrorString(error),
              cudaGetErrorName(error));
}

bool has_device() {
  static const bool found = [] {
    int count = 0;
    const bool ok = cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
    if (!ok) cudaGetLastError();
    return ok;
  }();
  return found;
}

kvx_status_t check_reachable(const char *name, const void *data) {
  cudaPointerAttributes attributes{};
  int current = 0, pageable = 0;
  KVX_CUDA_TRY(cudaPointerGetAttributes(&attributes, data));
  KVX_CUDA_TRY(cudaGetDevice(&current));
  if (attributes.type == cudaMemoryTypeDevice && attributes.device != current) {
    return fail(KVX_STATUS_UNSUPPORTED,
                "%s.data is on device %d, but the current device is %d: make that of the tensors "
                "current (cudaSetDevice, torch.cuda.device) (spec 7)",
                name, attributes.device, current);
  }
  if (attributes.type != cudaMemoryTypeUnregistered) return KVX_STATUS_OK;
  KVX_CUDA_TRY(cudaDeviceGetAttribute(&pageable, cudaDevAttrPageableMemoryAccess, current));
  if (pageable) return KVX_STATUS_OK;
  return fail(KVX_STATUS_UNSUPPORTED,
              "%s.data is %p, which the device cannot reach, in a call that runs there: pin host "
              "memory (cudaHostRegister, torch's pin_memory) (spec 4.3)",
              name, data);
}

kvx_status_t count_sms(uint32_t *count) {
  int device = 0, sms = 0;
  KVX_CUDA_TRY(cudaGetDevice(&device));
  KVX_CUDA_TRY(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
  *count = static_cast<uint32_t>(sms);
  return KVX_STATUS_OK;
}

}  // namespace kvx::cuda
