#include <cstring>
#include <string>

#include "cuda/platform.h"
#include "cuda/run.h"
#include "cuda/runtime.h"
#include "cuda/status.h"
#include "error.h"

namespace kvx::cuda {
namespace {

__device__ Status status;

}  // namespace

kvx_status_t device_status(Status **address) {
  void *found = nullptr;
  KVX_CUDA_TRY(cudaGetSymbolAddress(&found, status));
  *address = static_cast<Status *>(found);
  return KVX_STATUS_OK;
}

kvx_status_t report_status(void *stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  Status *address = nullptr;
  KVX_TRY(device_status(&address));
  Status found;
  KVX_CUDA_TRY(cudaMemcpyAsync(&found, address, sizeof found, cudaMemcpyDeviceToHost, on));
  KVX_CUDA_TRY(cudaStreamSynchronize(on));
  if (found.count == 0) return KVX_STATUS_OK;
  KVX_CUDA_TRY(cudaMemsetAsync(address, 0, sizeof found, on));
  KVX_CUDA_TRY(cudaStreamSynchronize(on));
  const kvx_status_t status = fail_with(found.first, names_of(found.call, found.src, found.dst));
  const std::string first = last_error();
  return fail(status, "%s; such tokens are skipped, %llu of them since the last report",
              first.c_str(), found.count);
}

}  // namespace kvx::cuda
