// The CUDA runtime as the rest of the library sees it: errors as sentences, the device's numbers.
#pragma once

#include <cuda_runtime.h>

#include "kvx/kvx_abi.h"

namespace kvx::cuda {

// INTERNAL_ERROR with the runtime's own words if `error` is one.
kvx_status_t check(cudaError_t error, const char *what);

// Multiprocessors of the current device.
kvx_status_t count_sms(uint32_t *count);

}  // namespace kvx::cuda

#define KVX_CUDA_TRY(call) KVX_TRY(::kvx::cuda::check((call), #call))
