// Numbers of any format, of units of one number or several. Spec: E.10
#pragma once

#include "cuda/codec.cuh"

namespace kvx::cuda {

// Bytes from a head's first unit to unit `unit`.
__device__ __forceinline__ int64_t offset_of(const Plane &plane, uint32_t unit) {
  const uint32_t pack = unit / plane.pack;
  return pack * plane.outer_stride + (unit - pack * plane.pack) * plane.inner_stride;
}

// Number d of the head that begins at `head`.
__device__ __forceinline__ float number_at(const Plane &plane, const uint8_t *head, uint32_t d) {
  switch (plane.dtype) {
#define KVX_ROW(name, codec, kind, numbers, ...)                                       \
  case KVX_DTYPE_##name:                                                               \
    if constexpr (!std::is_same_v<codec, Opaque>) {                                    \
      return Unit<codec>::decode(head + offset_of(plane, d / numbers), d % (numbers)); \
    }                                                                                  \
    break;
    KVX_FORMATS(KVX_ROW)
#undef KVX_ROW
    default:
      break;
  }
  __builtin_unreachable();
}

// Numbers [first, first + count) of a head, whole units, as value_at gives them.
template <class Codec, class ValueAt>
__device__ __forceinline__ void store_with(const Plane &plane, uint8_t *head, uint32_t first,
                                           uint32_t count, ValueAt value_at) {
  constexpr uint32_t kNumbers = Unit<Codec>::kNumbers;
  KVX_LOOP
  for (uint32_t d = first; d < first + count; d += kNumbers)
    Unit<Codec>::encode(head + offset_of(plane, d / kNumbers),
                        [&](int i) { return value_at(d + static_cast<uint32_t>(i)); });
}

template <class ValueAt>
__device__ __forceinline__ void store_numbers(const Plane &plane, uint8_t *head, uint32_t first,
                                              uint32_t count, ValueAt value_at) {
  switch (plane.dtype) {
#define KVX_ROW(name, codec, ...)                                    \
  case KVX_DTYPE_##name:                                             \
    if constexpr (!std::is_same_v<codec, Opaque>)                    \
      return store_with<codec>(plane, head, first, count, value_at); \
    break;
    KVX_FORMATS(KVX_ROW)
#undef KVX_ROW
    default:
      break;
  }
  __builtin_unreachable();
}

}  // namespace kvx::cuda
