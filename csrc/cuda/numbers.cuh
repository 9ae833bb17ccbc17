// Numbers of any format, of units of one number or several. Spec: E.10
#pragma once

#include "cuda/codec.cuh"
#include "cuda/turboquant.cuh"

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
// a unit each from waiting for each other. The token and where its units are lie here, too:
// formats need the registers.
constexpr uint32_t kStaged = 1024;  // a multiple of every unit's
struct Staged {
  Token token;
  uint32_t tile, last;  // the first unit of a tile, and the end of all
  uint32_t usable;      // units of the tile, a bit each
  float numbers[kStaged + kStaged / kWarp];

  __device__ __forceinline__ float &operator[](uint32_t i) { return numbers[i + i / kWarp]; }
};

// 1 / sqrt(order), rounded to float32; `order` is a power of two up to 2^12.
__device__ __forceinline__ float rotation_scale(uint32_t order) {
  const uint32_t exponent = 31u - static_cast<uint32_t>(__clz(static_cast<int>(order)));
  return float_of((127u - (exponent + 1) / 2) << 23) * (exponent % 2 ? 0x1.6a09e6p0f : 1.0f);
}

// Multiplies groups of numbers by Hadamard's matrix, as cpu/kernels/hadamard.inl does.
__device__ __forceinline__ void rotate_staged(Staged &staged, uint32_t numbers, uint32_t order) {
  const uint32_t lane = threadIdx.x % kWarp;
  __syncwarp();
  KVX_LOOP
  for (uint32_t bit = 1; bit < order; bit *= 2) {
    KVX_LOOP
    for (uint32_t i = lane; i < numbers / 2; i += kWarp) {
      const uint32_t at = (i & ~(bit - 1)) * 2 + (i & (bit - 1));
      const float one = staged[at], other = staged[at + bit];
      staged[at] = one + other, staged[at + bit] = one - other;
    }
    __syncwarp();
  }
}

// The units of the tile. Asked for again in each loop, rather than kept in registers.
template <class P>
__device__ __forceinline__ uint32_t units_of_tile(const P &p, const Staged &staged) {
  return min(staged.last - staged.tile, min(kStaged / p.units.elements, kWarp));
}

// A unit of the tile: its head, and which of the head's units it is.
struct TileUnit {
  uint32_t head, in_head;
  bool is_usable;

  template <class P>
  __device__ __forceinline__ TileUnit(const P &p, const Staged &staged, uint32_t i)
      : head(p.units.per_head.quotient(staged.tile + i)),
        in_head(staged.tile + i - head * p.units.per_head.divisor),
        is_usable(staged.usable >> i & 1) {}
};

// Finds the units of the tile whose scales are usable, and reports others, once for a head.
template <class P, class Usable, class ReportHead>
__device__ __forceinline__ void find_usable(const P &p, Staged &staged, Usable usable,
                                            ReportHead report_head) {
  const uint32_t lane = threadIdx.x % kWarp;
  bool is_usable = false;
  if (lane < units_of_tile(p, staged)) {
    const uint32_t head = p.units.per_head.quotient(staged.tile + lane);
    is_usable = usable(staged.token, head);
    if (!is_usable && head * p.units.per_head.divisor == staged.tile + lane)
      report_head(staged.token, head);
  }
  const uint32_t all_usable = __ballot_sync(~0u, is_usable);
  if (lane == 0) staged.usable = all_usable;
  __syncwarp();
}

// Where TurboQuant's unit lies that number i of the tile belongs to.
template <class P>
__device__ __forceinline__ const uint8_t *src_unit(const P &p, const Staged &staged, uint32_t i) {
  const TileUnit unit(p, staged, i / p.units.elements);
  const uint32_t d = unit.in_head * p.units.elements + i % p.units.elements;
  return staged.token.src + unit.head * p.shape.src.head_stride +
         offset_of(p.shape.src, d / kTurboQuantNumbers);
}

// Puts numbers of TurboQuant's units at the source into their places, but for their norms and
// signs.
template <class P>
__device__ __forceinline__ void stage_turboquant(const P &p, Staged &staged) {
  KVX_LOOP
  for (uint32_t i = threadIdx.x % kWarp; i < units_of_tile(p, staged) * p.units.elements;
       i += kWarp)
    staged[i] = load_centroid(src_unit(p, staged, i), i % kTurboQuantNumbers, p.shape.src.dtype);
  rotate_staged(staged, units_of_tile(p, staged) * p.units.elements, kTurboQuantNumbers);
}
template <class P>
__device__ __forceinline__ float staged_turboquant(const P &p, Staged &staged, uint32_t i) {
  const float norm = get_half(src_unit(p, staged, i) + norm_at(p.shape.src.dtype));
  return with_sign(staged[i] * (norm * (1.0f / kTurboQuantNumbers)), i % kTurboQuantNumbers);
}

// Where unit i of the destination lies, of those of the tile.
template <class P>
__device__ __forceinline__ uint8_t *dst_unit(const P &p, const Staged &staged, uint32_t i) {
  const TileUnit unit(p, staged, i / p.units.dst_units);
  return staged.token.dst + unit.head * p.shape.dst.head_stride +
         offset_of(p.shape.dst, unit.in_head * p.units.dst_units + i % p.units.dst_units);
}

// Stores units of TurboQuant of the numbers of the tile.
template <class P>
__device__ __forceinline__ void store_turboquant(const P &p, Staged &staged) {
  const uint32_t lane = threadIdx.x % kWarp;
  KVX_LOOP
  for (uint32_t i = 0; i < units_of_tile(p, staged) * p.units.dst_units; ++i) {
    const uint32_t first = i * kTurboQuantNumbers;
    const float norm = norm_of([&](uint32_t n) { return staged[first + n]; });
    if (lane == 0 && (staged.usable >> i / p.units.dst_units & 1))
      put_half(dst_unit(p, staged, i) + norm_at(p.shape.dst.dtype), UnitScale::saturate(norm));
    __syncwarp();
    KVX_LOOP
    for (uint32_t n = lane; n < kTurboQuantNumbers; n += kWarp)
      staged[first + n] = with_sign(tame(staged[first + n]) / (norm > 0.0f ? norm : 1.0f), n);
  }
  rotate_staged(staged, units_of_tile(p, staged) * p.units.elements, kTurboQuantNumbers);
  KVX_LOOP
  for (uint32_t n = 8 * lane; n < units_of_tile(p, staged) * p.units.elements; n += 8 * kWarp) {
    const uint32_t i = n / kTurboQuantNumbers;
    if (!(staged.usable >> i / p.units.dst_units & 1)) continue;
    store_codes(dst_unit(p, staged, i), n % kTurboQuantNumbers, p.shape.dst.dtype,
                [&](uint32_t k) { return staged[n + k]; });
  }
}

// Converts units [first, last) of a token; for whole warps. read(token, head, d) gives the numbers
// of heads that are usable(token, head), as they are stored; scale(token, head, number) and then
// divide(token, head, number) apply scales. Of other heads report(token, head) is called once.
// kToTurboQuant: whether the destination is of TurboQuant; registers do not suffice for both.
template <bool kToTurboQuant, class P, class Usable, class Read, class Scale, class Divide,
          class ReportHead>
__device__ __forceinline__ void convert_units(const P &p, Staged &staged, const Token &of,
                                              uint32_t first, uint32_t last, Usable usable,
                                              Read read, Scale scale, Divide divide,
                                              ReportHead report_head) {
  const uint32_t lane = threadIdx.x % kWarp;
  __syncwarp();  // all lanes have seen that the token before is done
  if (lane == 0) staged.token = of, staged.tile = first, staged.last = last;
  __syncwarp();
  KVX_LOOP
  while (staged.tile < staged.last) {
    find_usable(p, staged, usable, report_head);
    if (bits_of_turboquant(p.shape.src.dtype)) stage_turboquant(p, staged);
    KVX_LOOP
    for (uint32_t i = lane; i < units_of_tile(p, staged) * p.units.elements; i += kWarp) {
      const TileUnit unit(p, staged, i / p.units.elements);
      if (!unit.is_usable) continue;
      const float number = bits_of_turboquant(p.shape.src.dtype)
                               ? staged_turboquant(p, staged, i)
                               : read(staged.token, unit.head,
                                      unit.in_head * p.units.elements + i % p.units.elements);
      staged[i] = scale(staged.token, unit.head, number);
    }
    if (p.shape.hadamard)
      rotate_staged(staged, units_of_tile(p, staged) * p.units.elements, p.shape.hadamard);
    KVX_LOOP
    for (uint32_t i = lane; i < units_of_tile(p, staged) * p.units.elements; i += kWarp) {
      const TileUnit unit(p, staged, i / p.units.elements);
      const float by = p.shape.hadamard ? rotation_scale(p.shape.hadamard) : 1.0f;
      if (unit.is_usable) staged[i] = divide(staged.token, unit.head, staged[i] * by);
    }
    __syncwarp();
    if constexpr (kToTurboQuant) {
      store_turboquant(p, staged);
    } else {
      const uint32_t numbers = p.units.elements / p.units.dst_units;
      KVX_LOOP
      for (uint32_t i = lane; i < units_of_tile(p, staged) * p.units.dst_units; i += kWarp) {
        const TileUnit unit(p, staged, i / p.units.dst_units);
        if (!unit.is_usable) continue;
        store_unit(p.shape.dst, staged.token.dst + unit.head * p.shape.dst.head_stride,
                   unit.in_head * p.units.elements + i % p.units.dst_units * numbers,
                   [&](int n) { return staged[i * numbers + static_cast<uint32_t>(n)]; });
      }
    }
    __syncwarp();
    if (lane == 0) staged.tile += units_of_tile(p, staged);
    __syncwarp();
  }
}

}  // namespace kvx::cuda
