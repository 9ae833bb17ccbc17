// Differences between nvcc and g++, which builds the kernels for the tests (tests/hostgrid).
#pragma once

#include <cuda_runtime.h>

#if defined(__CUDACC__)
#define KVX_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  kernel<<<grid, block, shared_bytes, stream>>>(__VA_ARGS__)
#define KVX_DYNAMIC_SHARED(type, name)                \
  extern __shared__ __align__(128) uint8_t name##_[]; \
  type *const name = reinterpret_cast<type *>(name##_)
#else
#include "hostgrid.h"
#define KVX_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  (static_cast<void>(stream), ::hostgrid::launch(grid, block, shared_bytes, kernel, __VA_ARGS__))
#define KVX_DYNAMIC_SHARED(type, name) \
  type *const name = static_cast<type *>(::hostgrid::dynamic_shared())
#endif
