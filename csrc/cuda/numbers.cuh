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

// A unit of a head whose first number is d, as value_at gives its numbers, counted from 0.
template <class ValueAt>
__device__ __forceinline__ void store_unit(const Plane &plane, uint8_t *head, uint32_t d,
                                           ValueAt value_at) {
  with_numbers<false>(plane.dtype, [&](auto codec) {
    using U = Unit<decltype(codec)>;
    constexpr uint32_t kNumbers = U::kNumbers;
    U::encode(head + offset_of(plane, d / kNumbers), value_at);
  });
}

// Numbers of a warp on their way from one format to another, so that each is decoded once, and that
// encoders, which read them several times, are small. A gap after 32 of them keeps lanes that read
// a unit each from waiting for each other. The token lies here, too: encoders need the registers.
constexpr uint32_t kStaged = 1024;  // a multiple of every unit's
struct Staged {
  Token token;
  uint32_t usable;  // units of a tile, a bit each
  float numbers[kStaged + kStaged / kWarp];

  __device__ __forceinline__ float &operator[](uint32_t i) { return numbers[i + i / kWarp]; }
};

// Converts units [first, last) of a token; for whole warps. read(token, head, d) gives the numbers
// of heads that are usable(token, head); of others report(token, head) is called once.
template <class P, class Usable, class Read, class ReportHead>
__device__ __forceinline__ void convert_units(const P &p, Staged &staged, const Token &of,
                                              uint32_t first, uint32_t last, Usable usable,
                                              Read read, ReportHead report_head) {
  const uint32_t lane = threadIdx.x % kWarp, elements = p.units.elements;
  const auto first_of = [&](uint32_t unit, uint32_t head) {
    return (unit - head * p.units.per_head.divisor) * elements;
  };
  if (lane == 0) staged.token = of;
  __syncwarp();
  const uint32_t most = min(kStaged / elements, kWarp);
  KVX_LOOP
  for (uint32_t tile = first; tile < last; tile += most) {
    const uint32_t units = min(last - tile, most);
    bool is_usable = false;
    if (lane < units) {
      const uint32_t unit = tile + lane, head = p.units.per_head.quotient(unit);
      is_usable = usable(staged.token, head);
      if (!is_usable && first_of(unit, head) == 0) report_head(staged.token, head);
    }
    const uint32_t all_usable = __ballot_sync(~0u, is_usable);
    if (lane == 0) staged.usable = all_usable;
    KVX_LOOP
    for (uint32_t i = lane; i < units * elements; i += kWarp) {
      const uint32_t unit = tile + i / elements, head = p.units.per_head.quotient(unit);
      if (all_usable >> (unit - tile) & 1)
        staged[i] = read(staged.token, head, first_of(unit, head) + i % elements);
    }
    __syncwarp();
    const uint32_t per_unit = p.units.dst_units, numbers = elements / per_unit;
    KVX_LOOP
    for (uint32_t i = lane; i < units * per_unit; i += kWarp) {
      const uint32_t unit = tile + i / per_unit, head = p.units.per_head.quotient(unit);
      if (!(staged.usable >> (unit - tile) & 1)) continue;
      store_unit(p.shape.dst, staged.token.dst + head * p.shape.dst.head_stride,
                 first_of(unit, head) + i % per_unit * numbers,
                 [&](int n) { return staged[i * numbers + static_cast<uint32_t>(n)]; });
    }
    __syncwarp();
  }
}

}  // namespace kvx::cuda
