// Elements and scales on the device: codec.h, with the processor's own conversions where it has
// them. They give the same bits, but a NaN of 16 bits may be another NaN. Spec: E.6
#pragma once

#include <type_traits>

#include "cuda/lookup.cuh"
#include "cuda/vector.h"
#include "formats/codec.h"
#include "formats/quotient.h"

namespace kvx::cuda {

// ---- one element ----

template <class Format>
__device__ __forceinline__ float load_as(const uint8_t *at) {
  return Format::decode(*reinterpret_cast<const typename Format::Bits *>(at));
}

template <class Format>
__device__ __forceinline__ void store_as(uint8_t *at, float value) {
  *reinterpret_cast<typename Format::Bits *>(at) = Format::encode(value);
}

// Calls visit with the codec of a format of numbers; kScalar: of one whose units are one number.
template <bool kScalar, class Visit>
__device__ __forceinline__ auto with_numbers(kvx_dtype_t dtype, Visit visit) {
  switch (dtype) {
#define KVX_ROW(name, codec, ...)                                                            \
  case KVX_DTYPE_##name:                                                                     \
    if constexpr (kOnDevice<codec> && (!kScalar || kIsScalar<codec>)) return visit(codec{}); \
    break;
    KVX_FORMATS(KVX_ROW)
#undef KVX_ROW
    default:
      break;
  }
  __builtin_unreachable();
}

// A number of a scalar format; the others have kernels of their own (units.cu).
__device__ __forceinline__ float load_element(const uint8_t *at, kvx_dtype_t dtype) {
  return with_numbers<true>(dtype, [&](auto codec) { return load_as<decltype(codec)>(at); });
}

__device__ __forceinline__ void store_element(uint8_t *at, float value, kvx_dtype_t dtype) {
  with_numbers<true>(dtype, [&](auto codec) { store_as<decltype(codec)>(at, value); });
}

// Copies an element unchanged; NULL reads as zero.
__device__ __forceinline__ void copy_element(uint8_t *to, const uint8_t *from, int64_t bytes) {
  if (bytes == 4) {
    *reinterpret_cast<uint32_t *>(to) = from ? *reinterpret_cast<const uint32_t *>(from) : 0;
  } else if (bytes == 2) {
    *reinterpret_cast<uint16_t *>(to) = from ? *reinterpret_cast<const uint16_t *>(from) : 0;
  } else {
    *to = from ? *from : 0;
  }
}

// ---- two elements, the first one in the low bits ----

template <class Format>
__device__ __forceinline__ float2 decode_two(uint32_t bits) {
  using Bits = typename Format::Bits;
  return {Format::decode(static_cast<Bits>(bits)),
          Format::decode(static_cast<Bits>(bits >> (8 * sizeof(Bits))))};
}

template <class Format>
__device__ __forceinline__ float2 decode_upper_two(uint32_t bits) {
  return decode_two<Format>(bits >> 16);
}

template <class Format>
__device__ __forceinline__ uint32_t encode_two(float first, float second) {
  constexpr uint32_t kBits = 8 * sizeof(typename Format::Bits);
  return Format::encode(first) | static_cast<uint32_t>(Format::encode(second)) << kBits;
}

#if defined(__CUDA_ARCH__)

template <>
__device__ __forceinline__ float2 decode_two<F16>(uint32_t bits) {
  float2 values;
  asm("{.reg .b16 first, second;\n"
      "mov.b32 {first, second}, %2;\n"
      "cvt.f32.f16 %0, first;\n"
      "cvt.f32.f16 %1, second;}"
      : "=f"(values.x), "=f"(values.y)
      : "r"(bits));
  return values;
}

template <>
__device__ __forceinline__ uint32_t encode_two<F16>(float first, float second) {
  uint32_t bits;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
  return bits;
}

template <>
__device__ __forceinline__ uint32_t encode_two<Bf16>(float first, float second) {
  uint32_t bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
  return bits;
}

// E5M2 is the upper half of F16.
template <>
__device__ __forceinline__ float2 decode_two<E5m2>(uint32_t bits) {
  return decode_two<F16>(__byte_perm(bits, 0, 0x1404));
}

#if __CUDA_ARCH__ >= 890

template <>
__device__ __forceinline__ float2 decode_two<E4m3>(uint32_t bits) {
  uint32_t halves;
  asm("{.reg .b16 low, high;\n"
      "mov.b32 {low, high}, %1;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;}"
      : "=r"(halves)
      : "r"(bits));
  return decode_two<F16>(halves);
}

// The upper half by an instruction that reads it where it is.
template <>
__device__ __forceinline__ float2 decode_upper_two<E4m3>(uint32_t bits) {
  uint32_t halves;
  asm("{.reg .b16 low, high;\n"
      "mov.b32 {low, high}, %1;\n"
      "cvt.rn.f16x2.e4m3x2 %0, high;}"
      : "=r"(halves)
      : "r"(bits));
  return decode_two<F16>(halves);
}

template <>
__device__ __forceinline__ uint32_t encode_two<E4m3>(float first, float second) {
  uint16_t bits;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(second), "f"(first));
  return bits;
}

template <>
__device__ __forceinline__ uint32_t encode_two<E5m2>(float first, float second) {
  uint16_t bits;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(second), "f"(first));
  return bits;
}

#endif
#endif

// ---- eight elements, as they lie in memory ----

template <class Format>
struct Eight {
  uint32_t words[2 * sizeof(typename Format::Bits)];
};

template <class Format>
using VectorOfEight = Vector<(sizeof(Eight<Format>) < 16 ? sizeof(Eight<Format>) : 16)>;

template <class Format>
__device__ __forceinline__ Eight<Format> load_eight(const uint8_t *at) {
  using V = VectorOfEight<Format>;
  const V *const from = reinterpret_cast<const V *>(global(at));
  Eight<Format> eight;
#pragma unroll
  for (uint32_t i = 0; i < sizeof eight / sizeof(V); ++i) {
    const V vector = from[i];
    memcpy(eight.words + i * sizeof(V) / 4, &vector, sizeof vector);
  }
  return eight;
}

template <class Format>
__device__ __forceinline__ void store_eight(uint8_t *at, const Eight<Format> &eight) {
  using V = VectorOfEight<Format>;
  V *const to = reinterpret_cast<V *>(global(at));
#pragma unroll
  for (uint32_t i = 0; i < sizeof eight / sizeof(V); ++i) {
    V vector;
    memcpy(&vector, eight.words + i * sizeof(V) / 4, sizeof vector);
    to[i] = vector;
  }
}

template <class Format>
__device__ __forceinline__ void decode(const Eight<Format> &eight, float (&values)[8]) {
  if constexpr (sizeof(typename Format::Bits) == 4) {
    memcpy(values, eight.words, sizeof values);
  } else {
    constexpr uint32_t kTwosPerWord = 2 / sizeof(typename Format::Bits);
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      const uint32_t word = eight.words[i / kTwosPerWord];
      const bool is_upper = i % kTwosPerWord == 1;
      const float2 two = is_upper ? decode_upper_two<Format>(word) : decode_two<Format>(word);
      values[2 * i] = two.x;
      values[2 * i + 1] = two.y;
    }
  }
}

template <class Format>
__device__ __forceinline__ Eight<Format> encode(const float (&values)[8]) {
  Eight<Format> eight{};
  if constexpr (sizeof(typename Format::Bits) == 4) {
    memcpy(eight.words, values, sizeof values);
  } else {
    constexpr uint32_t kTwosPerWord = 2 / sizeof(typename Format::Bits);
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      const uint32_t two = encode_two<Format>(values[2 * i], values[2 * i + 1]);
      eight.words[i / kTwosPerWord] |= two << (16 * (i % kTwosPerWord));
    }
  }
  return eight;
}

// The largest magnitude among elements, NaN ignored.
template <class Format>
class Largest {
 public:
  __device__ __forceinline__ void add(const Eight<Format> &eight) {
    float values[8];
    decode(eight, values);
#pragma unroll
    for (const float value : values) found_ = fmaxf(found_, fabsf(value));
  }
  __device__ __forceinline__ float magnitude() const { return found_; }

 private:
  float found_ = 0.0f;
};

#if defined(__CUDA_ARCH__)

// Two elements at a time
template <class Format>
class LargestOfTwos {
 public:
  __device__ __forceinline__ void add(const Eight<Format> &eight) {
#pragma unroll
    for (const uint32_t word : eight.words) found_ = larger(found_, word & 0x7fff7fffu);
  }
  __device__ __forceinline__ float magnitude() const {
    const float2 two = decode_two<Format>(found_);
    return fmaxf(two.x, two.y);
  }

 private:
  static __device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b) {
    uint32_t both;
    if constexpr (std::is_same_v<Format, F16>) {
      asm("max.f16x2 %0, %1, %2;" : "=r"(both) : "r"(a), "r"(b));
    } else {
      asm("max.bf16x2 %0, %1, %2;" : "=r"(both) : "r"(a), "r"(b));
    }
    return both;
  }

  uint32_t found_ = 0;
};

template <>
class Largest<F16> : public LargestOfTwos<F16> {};
template <>
class Largest<Bf16> : public LargestOfTwos<Bf16> {};

#endif

// ---- scales ----

template <class Format>
constexpr bool kIsFp8 = sizeof(typename Format::Bits) == 1;

// The first scale of a token; NULL if there are none. `data` is the pair's own.
__device__ __forceinline__ const uint8_t *scales_at(const Scales &shape, const uint8_t *data,
                                                    const Place &place) {
  return data ? data + place.block * shape.block_stride + place.offset * shape.token_stride
              : nullptr;
}

__device__ __forceinline__ float scale_of(const Scales &shape, const uint8_t *scales,
                                          uint32_t head) {
  if (!scales) return 1.0f;
  const uint8_t *const at = global(scales + head * shape.head_stride);
  if (shape.dtype == KVX_DTYPE_F32) return load_as<F32>(at);
  return shape.dtype == KVX_DTYPE_F16 ? load_as<F16>(at) : load_as<Bf16>(at);
}

__device__ __forceinline__ float scale_at(const Scales &shape, const uint8_t *data,
                                          const Place &place, uint32_t head) {
  return scale_of(shape, scales_at(shape, data, place), head);
}

__device__ __forceinline__ void store_scale_at(uint8_t *at, float scale, kvx_dtype_t dtype) {
  if (dtype == KVX_DTYPE_F32) return store_as<F32>(global(at), scale);
  dtype == KVX_DTYPE_F16 ? store_as<F16>(global(at), scale) : store_as<Bf16>(global(at), scale);
}

__device__ __forceinline__ void store_scale(const Scales &shape, uint8_t *data, const Place &place,
                                            uint32_t head, float scale) {
  store_scale_at(data + place.block * shape.block_stride + place.offset * shape.token_stride +
                     head * shape.head_stride,
                 scale, shape.dtype);
}

__device__ __forceinline__ bool is_usable(float scale) {
  return scale > 0.0f && bits_of(scale) < kInfinity;
}

// Reports whichever of the two scales is not usable.
__device__ __forceinline__ void report_scale(const Common &p, const Pair &pair, const Token &token,
                                             uint32_t head, float scale, float divisor) {
  Violation found{};
  found.fault = Fault::kScale;
  found.is_v = pair.is_v;
  found.at_dst = is_usable(scale);
  found.value = found.at_dst ? token.to.block : token.from.block;
  found.index = head;
  found.scale = found.at_dst ? divisor : scale;
  report(p, pair.lookup, found);
}

// Divides numbers by a scale and encodes them in FP8, with the codes of IEEE division.
class Divisor {
 public:
  __device__ __forceinline__ explicit Divisor(float scale) : scale_(scale), quotient_(scale) {}

  __device__ __forceinline__ bool is_usual() const { return quotient_.is_usual(); }

  // False: some quotients are not finite, or the scale is not usual.
  template <class Format>
  __device__ __forceinline__ bool encode_quickly(const float (&values)[8],
                                                 Eight<Format> *codes) const {
    *codes = encode_finite<Format>(values);
    return !have_nan(codes->words[0], codes->words[1]);
  }

  // Of a usual scale, and of numbers whose quotients are finite, or that are NaN.
  template <class Format>
  __device__ __forceinline__ Eight<Format> encode_finite(const float (&values)[8]) const {
    float quotients[8];
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) quotients[i] = quotient_(values[i]);
    return encode<Format>(quotients);
  }

  template <class Format>
  __device__ __forceinline__ Eight<Format> encode_slowly(const float (&values)[8]) const {
    float quotients[8];
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) quotients[i] = values[i] / scale_;
    return encode<Format>(quotients);
  }

 private:
  // Whether one of eight codes is the NaN that is encoded: 0x7f or 0xff, in E4M3 and E5M2.
  static __device__ __forceinline__ bool have_nan(uint32_t first, uint32_t last) {
    const uint32_t carries =
        ((first & 0x7f7f7f7fu) + 0x01010101u) | ((last & 0x7f7f7f7fu) + 0x01010101u);
    return (carries & 0x80808080u) != 0;
  }

  float scale_;
  FastQuotient quotient_;
};

}  // namespace kvx::cuda
