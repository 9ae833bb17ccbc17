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
  return with_numbers<false>(plane.dtype, [&](auto codec) {
    using U = Unit<decltype(codec)>;
    constexpr uint32_t kNumbers = U::kNumbers;
    return U::decode(head + offset_of(plane, d / kNumbers), static_cast<int>(d % kNumbers));
  });
}

// Stores numbers [first, first + count) of a head, whole units, as value_at gives them.
template <class ValueAt>
__device__ __forceinline__ void store_numbers(const Plane &plane, uint8_t *head, uint32_t first,
                                              uint32_t count, ValueAt value_at) {
  with_numbers<false>(plane.dtype, [&](auto codec) {
    using U = Unit<decltype(codec)>;
    constexpr uint32_t kNumbers = U::kNumbers;
    KVX_LOOP
    for (uint32_t d = first; d < first + count; d += kNumbers)
      U::encode(head + offset_of(plane, d / kNumbers),
                [&](int i) { return value_at(d + static_cast<uint32_t>(i)); });
  });
}

}  // namespace kvx::cuda
