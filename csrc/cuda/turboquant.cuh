// The parts of TurboQuant's units that numbers.cuh puts together. Operations and their order are
// those of cpu/kernels/turboquant.inl, so that bytes and numbers are the same. Spec: E.20
#pragma once

#include <utility>

#include "cuda/codec.cuh"
#include "formats/turboquant.h"

namespace kvx::cuda {

constexpr uint32_t kTurboQuantNumbers = 128;

template <int kBits>
using Codes = std::make_integer_sequence<int, (1 << kBits)>;
template <int kBits>
using Midpoints = std::make_integer_sequence<int, (1 << kBits) - 1>;
template <int kBits, int kCode>
constexpr float kCentroid = turboquant::book(kTurboQuantNumbers, kBits).centroids[kCode];
template <int kBits, int kCode>
constexpr float kMidpoint = turboquant::book(kTurboQuantNumbers, kBits).midpoints[kCode];

template <int kBits, int... kCode>
__device__ __forceinline__ uint32_t code_of(float y, std::integer_sequence<int, kCode...>) {
  return (0u + ... + (y >= kMidpoint<kBits, kCode> ? 1u : 0u));
}
template <int kBits, int... kCode>
__device__ __forceinline__ float centroid_of(uint32_t code, std::integer_sequence<int, kCode...>) {
  float centroid = 0.0f;
  ((centroid = code == kCode ? kCentroid<kBits, kCode> : centroid), ...);
  return centroid;
}

// The sign of number i of a unit: applied to y, before and after the rotation.
__device__ __forceinline__ float with_sign(float y, uint32_t i) {
  constexpr uint32_t k0 = turboquant::kSignBits[0][0], k1 = turboquant::kSignBits[0][1],
                     k2 = turboquant::kSignBits[0][2], k3 = turboquant::kSignBits[0][3];
  const uint32_t bits = i < 64 ? (i < 32 ? k0 : k1) : (i < 96 ? k2 : k3);
  return float_of(bits_of(y) ^ (bits << i % 32 & kSign));
}

// The bits of a code; 0: the format is not one of TurboQuant's.
KVX_HD uint32_t bits_of_turboquant(kvx_dtype_t dtype) {
  if (dtype == KVX_DTYPE_TQ2) return 2;
  if (dtype == KVX_DTYPE_TQ3) return 3;
  return dtype == KVX_DTYPE_TQ4 ? 4 : 0;
}

// The float16 norm of a unit lies behind its codes.
__device__ __forceinline__ uint32_t norm_at(kvx_dtype_t dtype) {
  return kTurboQuantNumbers / 8 * bits_of_turboquant(dtype);
}

// The centroid of number i.
template <int kBits>
__device__ __forceinline__ float load_centroid(const uint8_t *unit, uint32_t i) {
  const uint32_t bit = i * kBits % 8;
  uint32_t bits = unit[i * kBits / 8];
  if (bit + kBits > 8) bits |= uint32_t{unit[i * kBits / 8 + 1]} << 8;
  return centroid_of<kBits>(bits >> bit & ((1u << kBits) - 1), Codes<kBits>{});
}
__device__ __forceinline__ float load_centroid(const uint8_t *unit, uint32_t i, kvx_dtype_t dtype) {
  if (dtype == KVX_DTYPE_TQ2) return load_centroid<2>(unit, i);
  if (dtype == KVX_DTYPE_TQ3) return load_centroid<3>(unit, i);
  return load_centroid<4>(unit, i);
}

// Stores the codes of eight numbers, the first in the lowest bits.
template <int kBits, class NumberAt>
__device__ __forceinline__ void store_codes(uint8_t *to, NumberAt number_at) {
  uint32_t bits = 0;
  KVX_LOOP
  for (uint32_t i = 0; i < 8; ++i)
    bits |= code_of<kBits>(number_at(i), Midpoints<kBits>{}) << (kBits * i);
#pragma unroll
  for (uint32_t byte = 0; byte < kBits; ++byte) to[byte] = static_cast<uint8_t>(bits >> (8 * byte));
}
// Those of eight numbers from number i on.
template <class NumberAt>
__device__ __forceinline__ void store_codes(uint8_t *unit, uint32_t i, kvx_dtype_t dtype,
                                            NumberAt number_at) {
  if (dtype == KVX_DTYPE_TQ2) return store_codes<2>(unit + i / 8 * 2, number_at);
  if (dtype == KVX_DTYPE_TQ3) return store_codes<3>(unit + i / 8 * 3, number_at);
  store_codes<4>(unit + i / 8 * 4, number_at);
}

// NaN counts as 0, and no sum of them overflows.
__device__ __forceinline__ float tame(float x) {
  constexpr float kMost = 0x1p100f;
  const float below = x < kMost ? x : x >= kMost ? kMost : 0.0f;
  return below > -kMost ? below : -kMost;
}

// The root of a sum of squares, 0 or 2^-298 to 2^207, as the host rounds it. `sqrt` of doubles is a
// function that is called, for which there are no registers left.
__device__ __forceinline__ double root_of(double squares) {
  if (!(squares > 0.0)) return 0.0;
  uint64_t bits;
  memcpy(&bits, &squares, sizeof bits);
  const int half = (static_cast<int>(bits >> 52) - 1023) >> 1;  // of the exponent
  const auto power_of_two = [](int exponent) {
    const uint64_t power = static_cast<uint64_t>(exponent + 1023) << 52;
    double two;
    memcpy(&two, &power, sizeof two);
    return two;
  };
  const double within = squares * power_of_two(-2 * half);  // from 1 to 4
  const float inverse = 1.0f / sqrtf(static_cast<float>(within));
  double root = within * static_cast<double>(inverse);
#pragma unroll
  for (uint32_t step = 0; step < 2; ++step)
    root = fma(fma(-root, root, within), 0.5 * static_cast<double>(inverse), root);
  return root * power_of_two(half);
}

// The norm of 128 numbers; for whole warps. Eight sums, each by the lanes that are the same modulo
// eight; squares are exact.
template <class NumberAt>
__device__ __forceinline__ float norm_of(NumberAt number_at) {
  double squares = 0.0;
  KVX_LOOP
  for (uint32_t i = threadIdx.x % 8; i < kTurboQuantNumbers; i += 8) {
    const double x = tame(number_at(i));
    squares += x * x;
  }
#pragma unroll
  for (uint32_t step = 4; step > 0; step /= 2) squares += __shfl_xor_sync(~0u, squares, step);
  return static_cast<float>(root_of(squares));
}

}  // namespace kvx::cuda
