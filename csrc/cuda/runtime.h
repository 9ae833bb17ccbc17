// Wraps the CUDA runtime: errors as sentences, numbers of the device.
#pragma once

#include <cuda_runtime.h>

#include "kvx/kvx_abi.h"

namespace kvx::cuda {

// INTERNAL_ERROR with the runtime's message if `error` is an error.
kvx_status_t check(cudaError_t error, const char *what);

// What is asked once of each device is kept for so many. A device that is reset is not asked again.
constexpr int kMostDevices = 64;

// Counts the multiprocessors of a device; asks the runtime once.
kvx_status_t count_sms(int device, uint32_t *count);

}  // namespace kvx::cuda

#define KVX_CUDA_TRY(call) KVX_TRY(::kvx::cuda::check((call), #call))
