// The part of the CUDA runtime that KVX calls, for devices whose memory is the host's and whose
// streams have always finished. Names, numbers and words are NVIDIA's.
//
//   HOSTGRID_PAGEABLE=1    memory is not registered, and the device cannot reach such memory
//   HOSTGRID_CAPTURES=1    streams are being captured
//   HOSTGRID_FULL=1        there is no memory left on the device
//   HOSTGRID_MULTIPROCESSORS=132   as many as an H100 has
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>

#include "devices.h"
#include "hostgrid.h"

#if !defined(CUDART_VERSION)
#define CUDART_VERSION 13000
#endif

// ---- errors ----

enum cudaError {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInsufficientDriver = 35,
  cudaErrorNoDevice = 100,
  cudaErrorInvalidDevice = 101,
  cudaErrorPeerAccessUnsupported = 217,
  cudaErrorIllegalAddress = 700,
  cudaErrorPeerAccessAlreadyEnabled = 704,
  cudaErrorNotSupported = 801,
  cudaErrorStreamCaptureUnsupported = 900,
  cudaErrorUnknown = 999,
};
using cudaError_t = cudaError;

namespace hostgrid {

struct ErrorText {
  cudaError_t error;
  const char *name, *words;
};

inline ErrorText text_of(cudaError_t error) {
  static constexpr ErrorText known[] = {
      {cudaSuccess, "cudaSuccess", "no error"},
      {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
      {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
      {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration",
       "invalid configuration argument"},
      {cudaErrorInsufficientDriver, "cudaErrorInsufficientDriver",
       "CUDA driver version is insufficient for CUDA runtime version"},
      {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
      {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
      {cudaErrorPeerAccessUnsupported, "cudaErrorPeerAccessUnsupported",
       "peer access is not supported between these two devices"},
      {cudaErrorPeerAccessAlreadyEnabled, "cudaErrorPeerAccessAlreadyEnabled",
       "peer access is already enabled"},
      {cudaErrorIllegalAddress, "cudaErrorIllegalAddress",
       "an illegal memory access was encountered"},
      {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
      {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
       "operation not permitted when stream is capturing"},
      {cudaErrorUnknown, "cudaErrorUnknown", "unknown error"},
  };
  for (const ErrorText &text : known)
    if (text.error == error) return text;
  return {error, "unrecognized error code", "unrecognized error code"};
}

inline thread_local cudaError_t last_error = cudaSuccess;

// Calls of functions that KVX makes where it prepares a launch, by all threads so far.
struct Calls {
  std::atomic<unsigned> get_device, pointer_attributes, symbol_address, device_attribute;
};
inline Calls calls;

inline cudaError_t returned(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

inline bool is_set(const char *variable) {
  const char *const text = std::getenv(variable);
  return text && std::strcmp(text, "1") == 0;
}
inline bool is_pageable() { return is_set("HOSTGRID_PAGEABLE"); }

// Few, so that grids of a few waves are smaller than the work of small tests.
inline int multiprocessors() {
  const char *const text = std::getenv("HOSTGRID_MULTIPROCESSORS");
  return text ? std::atoi(text) : 3;
}

}  // namespace hostgrid

inline const char *cudaGetErrorName(cudaError_t error) { return hostgrid::text_of(error).name; }
inline const char *cudaGetErrorString(cudaError_t error) { return hostgrid::text_of(error).words; }
inline cudaError_t cudaPeekAtLastError() { return hostgrid::last_error; }
inline cudaError_t cudaGetLastError() { return std::exchange(hostgrid::last_error, cudaSuccess); }

// ---- the device ----

enum cudaDeviceAttr {
  cudaDevAttrMaxThreadsPerBlock = 1,
  cudaDevAttrMaxSharedMemoryPerBlock = 8,
  cudaDevAttrWarpSize = 10,
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrMaxThreadsPerMultiProcessor = 39,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76,
  cudaDevAttrPageableMemoryAccess = 88,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
};

constexpr int cudaInvalidDeviceId = -2;

inline cudaError_t cudaDriverGetVersion(int *version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
inline cudaError_t cudaRuntimeGetVersion(int *version) { return cudaDriverGetVersion(version); }
inline cudaError_t cudaGetDeviceCount(int *count) {
  *count = hostgrid::machine.devices;
  return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int *device) {
  ++hostgrid::calls.get_device;
  *device = hostgrid::machine.current;
  return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int device) {
  if (!hostgrid::is_device(device)) return hostgrid::returned(cudaErrorInvalidDevice);
  hostgrid::machine.current = device;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
  if (!hostgrid::is_device(device) || !hostgrid::is_device(peer))
    return hostgrid::returned(cudaErrorInvalidDevice);
  *can = hostgrid::machine.peers && device != peer;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
  int can = 0;
  const cudaError_t error = cudaDeviceCanAccessPeer(&can, hostgrid::machine.current, peer);
  if (error != cudaSuccess) return error;
  if (!can) return hostgrid::returned(cudaErrorPeerAccessUnsupported);
  bool &enabled = hostgrid::machine.enabled[hostgrid::machine.current][peer];
  if (enabled) return hostgrid::returned(cudaErrorPeerAccessAlreadyEnabled);
  enabled = true;
  return cudaSuccess;
}

inline cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device) {
  ++hostgrid::calls.device_attribute;
  if (!hostgrid::is_device(device)) return hostgrid::returned(cudaErrorInvalidDevice);
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
      *value = 1024;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = hostgrid::kMaxSharedBytesUnasked;
      break;
    case cudaDevAttrWarpSize:
      *value = hostgrid::kWarp;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = hostgrid::multiprocessors();
      break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = 2048;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      break;
    case cudaDevAttrPageableMemoryAccess:
      *value = !hostgrid::is_pageable();
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = hostgrid::kMaxSharedBytes;
      break;
    default:
      return hostgrid::returned(cudaErrorInvalidValue);
  }
  return cudaSuccess;
}

// ---- kernels ----

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };

template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel *kernel, cudaFuncAttribute attribute, int value) {
  const bool known = attribute == cudaFuncAttributeMaxDynamicSharedMemorySize && value >= 0 &&
                     size_t(value) <= hostgrid::kMaxSharedBytes;
  if (!known) return hostgrid::returned(cudaErrorInvalidValue);
  hostgrid::allow_shared(reinterpret_cast<const void *>(kernel), value);
  return cudaSuccess;
}

// Registers are not counted.
template <class Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, Kernel *, int block_size,
                                                          size_t shared_bytes) {
  constexpr size_t all_shared = 228 << 10, reserved_per_block = 1 << 10;
  if (block_size < 1 || block_size > 1024) return hostgrid::returned(cudaErrorInvalidValue);
  const size_t by_shared = all_shared / (shared_bytes + reserved_per_block);
  *blocks = std::min({32, 2048 / block_size, int(by_shared)});
  return cudaSuccess;
}

// ---- streams ----

using cudaStream_t = struct CUstream_st *;

#define cudaStreamLegacy (reinterpret_cast<cudaStream_t>(1))

enum cudaStreamCaptureStatus {
  cudaStreamCaptureStatusNone = 0,
  cudaStreamCaptureStatusActive = 1,
  cudaStreamCaptureStatusInvalidated = 2,
};

inline cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus *status) {
  *status = hostgrid::is_set("HOSTGRID_CAPTURES") ? cudaStreamCaptureStatusActive
                                                  : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
enum cudaStreamCaptureMode {
  cudaStreamCaptureModeGlobal = 0,
  cudaStreamCaptureModeThreadLocal = 1,
  cudaStreamCaptureModeRelaxed = 2,
};
namespace hostgrid {
inline thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
}
inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *mode) {
  std::swap(*mode, hostgrid::capture_mode);
  return cudaSuccess;
}

#define cudaStreamNonBlocking 1
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned) {
  *stream = reinterpret_cast<cudaStream_t>(0x100);
  return cudaSuccess;
}
inline cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }

// ---- events ----

struct CUevent_st {
  std::chrono::steady_clock::time_point recorded;
};
using cudaEvent_t = CUevent_st *;

inline cudaError_t cudaEventCreate(cudaEvent_t *event) {
  *event = new CUevent_st;
  return cudaSuccess;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  event->recorded = std::chrono::steady_clock::now();
  return cudaSuccess;
}
inline cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  using Milliseconds = std::chrono::duration<float, std::milli>;
  *milliseconds = Milliseconds(end->recorded - begin->recorded).count();
  return cudaSuccess;
}

// ---- memory ----

// What may end a capture is refused as if one were under way, unless the thread has said that it
// knows.
inline cudaError_t cudaMallocHost(void **p, size_t count) {
  if (hostgrid::capture_mode != cudaStreamCaptureModeRelaxed)
    return hostgrid::returned(cudaErrorStreamCaptureUnsupported);
  *p = std::malloc(count);
  return cudaSuccess;
}
inline cudaError_t cudaFreeHost(void *p) {
  std::free(p);
  return cudaSuccess;
}
inline cudaError_t cudaMallocAsync(void **p, size_t count, cudaStream_t) {
  if (hostgrid::is_set("HOSTGRID_FULL")) return hostgrid::returned(cudaErrorMemoryAllocation);
  return cudaMallocHost(p, count);
}
inline cudaError_t cudaFreeAsync(void *p, cudaStream_t) { return cudaFreeHost(p); }

enum cudaMemoryType {
  cudaMemoryTypeUnregistered = 0,
  cudaMemoryTypeHost = 1,
  cudaMemoryTypeDevice = 2,
  cudaMemoryTypeManaged = 3,
};

struct cudaPointerAttributes {
  cudaMemoryType type;
  int device;
  void *devicePointer, *hostPointer;
  long reserved[8];
};

inline cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *p) {
  ++hostgrid::calls.pointer_attributes;
  *attributes = {};
  attributes->device = hostgrid::machine.current;
  if (const hostgrid::Owned *const owned = hostgrid::owner_of(p)) {
    attributes->type = cudaMemoryTypeDevice;
    attributes->device = owned->device;
    attributes->devicePointer = hostgrid::can_access(*owned) ? const_cast<void *>(p) : nullptr;
  } else if (hostgrid::is_pageable() || !p) {
    attributes->device = cudaInvalidDeviceId;
  } else {
    attributes->type = cudaMemoryTypeHost;
    attributes->devicePointer = attributes->hostPointer = const_cast<void *>(p);
  }
  return cudaSuccess;
}

enum cudaMemcpyKind {
  cudaMemcpyHostToHost = 0,
  cudaMemcpyHostToDevice = 1,
  cudaMemcpyDeviceToHost = 2,
  cudaMemcpyDeviceToDevice = 3,
  cudaMemcpyDefault = 4,
};

inline cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t count, cudaMemcpyKind,
                                   cudaStream_t = nullptr) {
  std::memcpy(dst, src, count);
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void *p, int value, size_t count, cudaStream_t = nullptr) {
  std::memset(p, value, count);
  return cudaSuccess;
}

inline cudaError_t cudaMemcpy2DAsync(void *dst, size_t dst_pitch, const void *src, size_t src_pitch,
                                     size_t width, size_t height, cudaMemcpyKind,
                                     cudaStream_t = nullptr) {
  constexpr size_t most_pitch = 0x7fffffff;
  if (width > std::min(dst_pitch, src_pitch) || std::max(dst_pitch, src_pitch) > most_pitch)
    return hostgrid::returned(cudaErrorInvalidValue);
  for (size_t row = 0; row < height; ++row)
    std::memcpy(static_cast<char *>(dst) + row * dst_pitch,
                static_cast<const char *>(src) + row * src_pitch, width);
  return cudaSuccess;
}
inline cudaError_t cudaMemset2DAsync(void *p, size_t pitch, int value, size_t width, size_t height,
                                     cudaStream_t = nullptr) {
  if (width > pitch) return hostgrid::returned(cudaErrorInvalidValue);
  for (size_t row = 0; row < height; ++row)
    std::memset(static_cast<char *>(p) + row * pitch, value, width);
  return cudaSuccess;
}

enum cudaMemcpySrcAccessOrder {
  cudaMemcpySrcAccessOrderInvalid = 0,
  cudaMemcpySrcAccessOrderStream = 1,
  cudaMemcpySrcAccessOrderDuringApiCall = 2,
  cudaMemcpySrcAccessOrderAny = 3,
};
enum cudaMemcpyFlags {
  cudaMemcpyFlagDefault = 0,
  cudaMemcpyFlagPreferOverlapWithCompute = 1,
};
struct cudaMemLocation {
  int type, id;
};
struct cudaMemcpyAttributes {
  cudaMemcpySrcAccessOrder srcAccessOrder;
  cudaMemLocation srcLocHint, dstLocHint;
  unsigned int flags;
};

// Copies of a batch run in any order: here from the last to the first.
inline cudaError_t cudaMemcpyBatchAsync(void *const *dsts, const void *const *srcs,
                                        const size_t *sizes, size_t count,
                                        cudaMemcpyAttributes *attributes, size_t *firsts,
                                        size_t num_attributes,
#if CUDART_VERSION < 13000
                                        size_t *,
#endif
                                        cudaStream_t stream) {
  if (!count || !num_attributes || num_attributes > count || firsts[0] != 0 ||
      attributes[0].srcAccessOrder == cudaMemcpySrcAccessOrderInvalid || !stream ||
      stream == cudaStreamLegacy) {
    return hostgrid::returned(cudaErrorInvalidValue);
  }
  while (count--) std::memcpy(dsts[count], srcs[count], sizes[count]);
  return cudaSuccess;
}

template <class T>
cudaError_t cudaGetSymbolAddress(void **p, const T &symbol) {
  ++hostgrid::calls.symbol_address;
  *p = const_cast<void *>(static_cast<const void *>(&symbol));
  return cudaSuccess;
}
template <class T>
cudaError_t cudaMemcpyToSymbolAsync(const T &symbol, const void *src, size_t count,
                                    size_t offset = 0, cudaMemcpyKind kind = cudaMemcpyHostToDevice,
                                    cudaStream_t stream = nullptr) {
  void *p = nullptr;
  cudaGetSymbolAddress(&p, symbol);
  return cudaMemcpyAsync(static_cast<char *>(p) + offset, src, count, kind, stream);
}
template <class T>
cudaError_t cudaMemcpyFromSymbolAsync(void *dst, const T &symbol, size_t count, size_t offset = 0,
                                      cudaMemcpyKind kind = cudaMemcpyDeviceToHost,
                                      cudaStream_t stream = nullptr) {
  void *p = nullptr;
  cudaGetSymbolAddress(&p, symbol);
  return cudaMemcpyAsync(dst, static_cast<const char *>(p) + offset, count, kind, stream);
}
