// Kernels that start while the one before them on the stream ends: a launch costs more than a small
// kernel takes. Such a kernel reads its parameters and computes addresses, then waits until all
// before it has ended and what that wrote can be read. In captures too. On sm_90, where it has run;
// on sm_120 others have seen captures of such launches fail.
// Source: SGLang, pull request 18596
// Source: CUDA C++ Programming Guide 13.0, Programmatic Dependent Launch and Synchronization
#pragma once

#include <atomic>
#include <cstdint>

#include "cuda/platform.h"

#if !defined(KVX_DEPENDENT_LAUNCHES)
#define KVX_DEPENDENT_LAUNCHES 1
#endif

namespace kvx::cuda {

constexpr bool kDependentLaunches = KVX_DEPENDENT_LAUNCHES;

// Every thread calls it before it reads or writes global memory, and one thread of a kernel at
// least does: who waits for this kernel waits for those before it, too.
__device__ __forceinline__ void wait_for_kernels_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if constexpr (kDependentLaunches) asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The same with the addresses of the first loads, which are not NULL: a test for it has the
// compiler find them before the thread waits.
__device__ __forceinline__ void wait_for_kernels_before([[maybe_unused]] const uint8_t *&one,
                                                        [[maybe_unused]] const uint8_t *&other) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if constexpr (kDependentLaunches) {
    asm volatile(
        "{ .reg .pred none; setp.eq.u64 none, %0, 0; setp.eq.or.u64 none, %1, 0, none; "
        "@none exit; griddepcontrol.wait; }"
        : "+l"(one), "+l"(other)::"memory");
  }
#endif
}

// Lets the next kernel start, which waits as this one has or, launched as usual, for its end.
__device__ __forceinline__ void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if constexpr (kDependentLaunches) asm volatile("griddepcontrol.launch_dependents;");
#endif
}

#if defined(__CUDACC__)

// Whether kernels start early on the current device: it is an sm_90, and their code waits, as code
// for older devices that the driver has translated does not. All kernels are compiled for the same
// devices, so one is asked, once.
inline bool can_start_early(const void *kernel) {
  constexpr int kDevices = 64, kLeastDriver = 12030;  // whose graphs have such launches
  enum : uint8_t { kUnknown, kNo, kYes };
  static std::atomic<uint8_t> known[kDevices];
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kDevices) return false;
  uint8_t found = known[device].load(std::memory_order_relaxed);
  if (found == kUnknown) {
    cudaFuncAttributes attributes{};
    int driver = 0;
    const bool asked = cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess &&
                       cudaDriverGetVersion(&driver) == cudaSuccess;
    if (!asked) cudaGetLastError();  // clear the error, or the launch seems to have failed
    const bool waits = asked && attributes.ptxVersion >= 90 && attributes.binaryVersion / 10 == 9;
    found = waits && driver >= kLeastDriver ? kYes : kNo;
    known[device].store(found, std::memory_order_relaxed);
  }
  return found == kYes;
}

inline void launch_dependent(const void *kernel, dim3 grid, dim3 block, cudaStream_t stream,
                             void **params) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = kDependentLaunches && can_start_early(kernel);
  cudaLaunchKernelExC(&config, kernel, params);
}

template <class... P>
void launch_dependent(void (*kernel)(P...), dim3 grid, dim3 block, cudaStream_t stream,
                      P... params) {
  void *addresses[] = {&params...};
  launch_dependent(reinterpret_cast<const void *>(kernel), grid, block, stream, addresses);
}
#endif

}  // namespace kvx::cuda

// KVX_LAUNCH of a kernel that waits.
#if defined(__CUDACC__)
#define KVX_LAUNCH_DEPENDENT(kernel, grid, block, stream, ...) \
  ::kvx::cuda::launch_dependent(kernel, grid, block, stream, __VA_ARGS__)
#else
#define KVX_LAUNCH_DEPENDENT(kernel, grid, block, stream, ...) \
  KVX_LAUNCH(kernel, grid, block, 0, stream, __VA_ARGS__)
#endif
