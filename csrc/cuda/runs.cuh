// Runs: pieces of a chunk that are the same bytes at both ends: a token each or, if the tokens of a
// block interleave, a whole block.
#pragma once

#include "cuda/kernels.h"
#include "cuda/lookup.cuh"
#include "cuda/vector.h"

namespace kvx::cuda {

struct Runs {
  uint32_t tokens;              // of a run
  uint32_t vectors;             // of a run
  uint32_t round;               // tokens of the whole runs of one round
  FastDiv per_part;             // vectors of a part of a run
  uint32_t unit_bytes;          // of a single token, of a block that does not move whole
  uint32_t src_step, dst_step;  // bytes from one such unit to the next

  Runs(const Common &p, const Choice &choice, uint32_t most_tokens)
      : tokens(choice.run_tokens),
        vectors(static_cast<uint32_t>(run_vectors(choice))),
        round(most_tokens / tokens * tokens),
        per_part(p.units_per_part),
        unit_bytes(choice.unit_bytes),
        src_step(step_of(choice, choice.shape.src)),
        dst_step(step_of(choice, choice.shape.dst)) {}

 private:
  static uint32_t step_of(const Choice &choice, const Plane &plane) {
    return choice.units.elements == 1 ? static_cast<uint32_t>(plane.inner_stride)
                                      : choice.unit_bytes;
  }
};

// Moves vectors first, first + kStep, ... below `count` from from(v) to to(v), `kUnroll` of them in
// flight. If from(v) is NULL it stores zeros, if to(v) is NULL nothing.
template <class V, uint32_t kStep, uint32_t kUnroll, class From, class To>
__device__ __forceinline__ void move_vectors(uint32_t first, uint32_t count, From from, To to) {
  for (uint32_t begin = first; begin < count; begin += kStep * kUnroll) {
    V vectors[kUnroll];
#pragma unroll
    for (uint32_t i = 0; i < kUnroll; ++i)
      if (begin + i * kStep < count) vectors[i] = load<V>(from(begin + i * kStep));
#pragma unroll
    for (uint32_t i = 0; i < kUnroll; ++i) {
      uint8_t *const at = begin + i * kStep < count ? to(begin + i * kStep) : nullptr;
      if (at) store(at, vectors[i]);
    }
  }
}

// Moves one token by one warp, unit by unit.
template <class V>
__device__ __forceinline__ void move_units(const Common &p, const Runs &runs, const uint8_t *src,
                                           uint8_t *dst) {
  const auto offset = [&](const Plane &plane, const FastDiv &per_pack, uint32_t step,
                          uint32_t unit) {
    const uint32_t head = p.units.per_head.quotient(unit);
    return unit_offset(plane, per_pack, step, head, unit - head * p.units.per_head.divisor);
  };
  move_vectors<V, kWarp, 1>(
      threadIdx.x % kWarp, p.units.per_token.divisor,
      [&](uint32_t unit) {
        return src ? src + offset(p.shape.src, p.units.src_per_pack, runs.src_step, unit) : nullptr;
      },
      [&](uint32_t unit) {
        return dst + offset(p.shape.dst, p.units.dst_per_pack, runs.dst_step, unit);
      });
}

__device__ __forceinline__ void move_token(const Common &p, const Runs &runs, const uint8_t *src,
                                           uint8_t *dst) {
  switch (runs.unit_bytes) {
    case 16:
      return move_units<Vector<16>>(p, runs, src, dst);
    case 8:
      return move_units<Vector<8>>(p, runs, src, dst);
    case 4:
      return move_units<Vector<4>>(p, runs, src, dst);
    case 2:
      return move_units<Vector<2>>(p, runs, src, dst);
    default:
      return move_units<Vector<1>>(p, runs, src, dst);
  }
}

}  // namespace kvx::cuda
