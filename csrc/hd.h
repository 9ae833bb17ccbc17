// Marks functions that every backend shares: compiled for the host and, by nvcc, for the device.
#pragma once

#if defined(__CUDACC__)
#define KVX_HD __host__ __device__ __forceinline__
#else
#define KVX_HD inline __attribute__((always_inline))
#endif

// Put before a loop that kernels do not unroll because it is long, or rare.
#if defined(__CUDA_ARCH__)
#define KVX_LOOP _Pragma("unroll 1")
#else
#define KVX_LOOP
#endif
