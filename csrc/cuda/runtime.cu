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

namespace {

kvx_status_t is_elsewhere(const char *name, const char *field, int owner, int current) {
  return fail(KVX_STATUS_UNSUPPORTED,
              "%s%s is on device %d, but the current device is %d: make that of the tensors "
              "current (cudaSetDevice, torch.cuda.device) (spec 7)",
              name, field, owner, current);
}

// Lets the current device access memory of device `owner`, which holds for the whole process.
kvx_status_t reach_peer(const char *name, const char *field, const void *data, int owner,
                        int current) {
  int can = 0;
  KVX_CUDA_TRY(cudaDeviceCanAccessPeer(&can, current, owner));
  if (!can) {
    return fail(KVX_STATUS_UNSUPPORTED,
                "%s%s is on device %d, which the current device %d has no peer access to: copy it "
                "to pinned HOST memory with device %d current, and from there with device %d "
                "current (spec 7)",
                name, field, owner, current, owner, current);
  }
  const cudaError_t enabled = cudaDeviceEnablePeerAccess(owner, 0);
  if (enabled == cudaErrorPeerAccessAlreadyEnabled) {
    cudaGetLastError();  // clear the error, or the caller's next call returns it
  } else {
    KVX_TRY(check(enabled, "cudaDeviceEnablePeerAccess"));
  }
  cudaPointerAttributes attributes{};
  KVX_CUDA_TRY(cudaPointerGetAttributes(&attributes, data));
  if (attributes.devicePointer == data) return KVX_STATUS_OK;
  return fail(KVX_STATUS_UNSUPPORTED,
              "%s%s is in a memory pool of device %d that device %d may not access: allow it "
              "(cudaMemPoolSetAccess, cuMemSetAccess), or copy by way of pinned HOST memory "
              "(spec 7)",
              name, field, owner, current);
}

}  // namespace

kvx_status_t check_reachable(const char *name, const char *field, const void *data,
                             Owners *owners) {
  cudaPointerAttributes attributes{};
  int current = 0, pageable = 0;
  KVX_CUDA_TRY(cudaPointerGetAttributes(&attributes, data));
  KVX_CUDA_TRY(cudaGetDevice(&current));
  if (attributes.type == cudaMemoryTypeDevice && attributes.device != current) {
    const int owner = attributes.device;
    if (!owners) return is_elsewhere(name, field, owner, current);
    if (!owners->peer_name) owners->peer_name = name, owners->peer = owner;
    return attributes.devicePointer == data ? KVX_STATUS_OK
                                            : reach_peer(name, field, data, owner, current);
  }
  if (owners && attributes.type == cudaMemoryTypeDevice) owners->has_current = true;
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

kvx_status_t check_owners(const Owners &owners) {
  int current = 0;
  if (!owners.peer_name || owners.has_current) return KVX_STATUS_OK;
  KVX_CUDA_TRY(cudaGetDevice(&current));
  return is_elsewhere(owners.peer_name, ".data", owners.peer, current);
}

kvx_status_t count_sms(uint32_t *count) {
  int device = 0, sms = 0;
  KVX_CUDA_TRY(cudaGetDevice(&device));
  KVX_CUDA_TRY(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
  *count = static_cast<uint32_t>(sms);
  return KVX_STATUS_OK;
}

}  // namespace kvx::cuda
