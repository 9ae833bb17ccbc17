#include <algorithm>

#include "cuda/reach.h"
#include "cuda/runtime.h"
#include "error.h"

namespace kvx::cuda {
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

kvx_status_t Reach::begin() {
  KVX_CUDA_TRY(cudaGetDevice(&device_));
  is_kept_ = reached_by_ && reached_by_->load(std::memory_order_relaxed) == device_;
  return KVX_STATUS_OK;
}

kvx_status_t Reach::check(const char *name, const char *field, const Extent &tensor) {
  if (is_owned() || remembers(tensor.begin, tensor.begin)) return KVX_STATUS_OK;
  KVX_TRY(ask(name, field, tensor.begin));
  remember(tensor);
  return KVX_STATUS_OK;
}

kvx_status_t Reach::check_whole(const char *name, const Extent &tensor) {
  if (remembers(tensor.begin, tensor.end - 1)) return KVX_STATUS_OK;
  KVX_TRY(ask(name, ".data", tensor.begin));
  KVX_TRY(ask(name, "'s last byte", tensor.end - 1));
  remember(tensor);
  return KVX_STATUS_OK;
}

// A tensor that is met again and again, such as a pool of all layers, stays among the latest.
bool Reach::remembers(const uint8_t *first, const uint8_t *last) {
  Extent *const end = remembered_ + num_remembered_;
  Extent *const found = std::find_if(remembered_, end, [&](const Extent &one) {
    return contains(one, first) && contains(one, last);
  });
  if (found == end) return false;
  std::rotate(remembered_, found, found + 1);
  return true;
}

void Reach::remember(const Extent &tensor) {
  if (num_remembered_ < kRemembered) ++num_remembered_;
  Extent *const end = remembered_ + num_remembered_;
  std::move_backward(remembered_, end - 1, end);
  remembered_[0] = tensor;
}

kvx_status_t Reach::ask(const char *name, const char *field, const void *data) {
  cudaPointerAttributes attributes{};
  KVX_CUDA_TRY(cudaPointerGetAttributes(&attributes, data));
  if (attributes.type == cudaMemoryTypeDevice && attributes.device != device_) {
    const int owner = attributes.device;
    if (peers_ == Peers::kRefused) return is_elsewhere(name, field, owner, device_);
    if (!peer_name_) peer_name_ = name, peer_ = owner;
    return attributes.devicePointer == data ? KVX_STATUS_OK
                                            : reach_peer(name, field, data, owner, device_);
  }
  if (attributes.type == cudaMemoryTypeDevice) has_current_ = true;
  // Registered memory may have another address on the device.
  const bool elsewhere = attributes.type == cudaMemoryTypeHost && attributes.devicePointer != data;
  if (attributes.type != cudaMemoryTypeUnregistered && !elsewhere) return KVX_STATUS_OK;
  int pageable = 0;
  KVX_CUDA_TRY(cudaDeviceGetAttribute(&pageable, cudaDevAttrPageableMemoryAccess, device_));
  if (pageable) return KVX_STATUS_OK;
  return fail(KVX_STATUS_UNSUPPORTED,
              "%s%s is %p, which the device cannot reach, in a call that runs there: copy it to "
              "the device, or pin host memory (cudaHostRegister, torch's pin_memory) (spec 4.3)",
              name, field, data);
}

kvx_status_t Reach::check_owners() const {
  if (!peer_name_ || has_current_) return KVX_STATUS_OK;
  return is_elsewhere(peer_name_, ".data", peer_, device_);
}

}  // namespace kvx::cuda
