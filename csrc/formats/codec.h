// Codecs as types: from a dtype to its codec, and units of any format as numbers. Spec: E.6, E.10
#pragma once

#include <type_traits>

#include "formats/format.h"

namespace kvx {

// Stands in the table for the codec of a format that is never converted.
struct Opaque {};

template <class... Codec>
struct Codecs {};

// Formats whose pairs have kernels of their own; all other pairs go through float32.
using FastCodecs = Codecs<F16, Bf16, F32, E4m3, E5m2>;

// Whether a device's kernels ask the codec for single numbers. Of TurboQuant's units they do not:
// cuda/turboquant.cuh.
template <class Codec>
constexpr bool kOnDevice = !std::is_same_v<Codec, Opaque>;
template <int kBits>
constexpr bool kOnDevice<TurboQuant<kBits>> = false;

// Index of a codec in a list; -1: it is not in it.
template <class Codec, class... All>
constexpr int place_of(Codecs<All...>) {
  int place = -1, i = 0;
  ((std::is_same_v<Codec, All> ? place = i : i, ++i), ...);
  return place;
}

inline constexpr int kFastPlaces[kNumFormats] = {-1,
#define KVX_ROW(name, codec, ...) place_of<codec>(FastCodecs{}),
                                                 KVX_FORMATS(KVX_ROW)
#undef KVX_ROW
};
constexpr int fast_place(kvx_dtype_t dtype) { return kFastPlaces[row_of(dtype)]; }
constexpr bool is_fast(kvx_dtype_t dtype) { return fast_place(dtype) >= 0; }

// The dtype of a codec.
template <class Codec>
KVX_HD constexpr kvx_dtype_t dtype_of() {
  kvx_dtype_t dtype = KVX_DTYPE_INVALID;
#define KVX_ROW(name, codec, ...) \
  if (std::is_same_v<codec, Codec>) dtype = KVX_DTYPE_##name;
  KVX_FORMATS(KVX_ROW)
#undef KVX_ROW
  return dtype;
}

// Calls visit with the codec of a number format; for any other, does nothing.
template <class Visit>
void with_codec(kvx_dtype_t dtype, Visit visit) {
  switch (dtype) {
#define KVX_ROW(name, codec, ...)                                 \
  case KVX_DTYPE_##name:                                          \
    if constexpr (!std::is_same_v<codec, Opaque>) visit(codec{}); \
    return;
    KVX_FORMATS(KVX_ROW)
#undef KVX_ROW
    default:
      return;
  }
}

// The same for formats with fast conversions.
template <class Visit>
void with_fast_codec(kvx_dtype_t dtype, Visit visit) {
  with_codec(dtype, [&](auto codec) {
    if constexpr (place_of<decltype(codec)>(FastCodecs{}) >= 0) visit(codec);
  });
}

// Whether a unit of the codec is one number, stored as its Bits.
template <class Codec, class = void>
constexpr bool kIsScalar = false;
template <class Codec>
constexpr bool kIsScalar<Codec, std::void_t<typename Codec::Bits>> = true;

// Gives a codec numbers that are in memory.
struct ValuesAt {
  const float *first;
  KVX_HD float operator()(int i) const { return first[i]; }
};

// Units of any codec, as bytes: scalar ones and those of several numbers, which have kNumbers,
// kBytes and work on whole units.
template <class Codec, bool = kIsScalar<Codec>>
struct Unit {
  static constexpr int kNumbers = Codec::kNumbers, kBytes = Codec::kBytes;
  static KVX_HD float decode(const uint8_t *unit, int i) { return Codec::decode(unit, i); }
  // value_at(i) is number i; it may be asked more than once.
  template <class ValueAt>
  static KVX_HD void encode(uint8_t *unit, ValueAt value_at) {
    Codec::encode(unit, value_at);
  }
};
template <class Codec>
struct Unit<Codec, true> {
  using Bits = typename Codec::Bits;
  static constexpr int kNumbers = 1, kBytes = sizeof(Bits);
  static KVX_HD float decode(const uint8_t *unit, int) {
    return Codec::decode(*reinterpret_cast<const Bits *>(unit));
  }
  template <class ValueAt>
  static KVX_HD void encode(uint8_t *unit, ValueAt value_at) {
    *reinterpret_cast<Bits *>(unit) = Codec::encode(value_at(0));
  }
};

// The sizes in the table and in the codecs agree.
template <class Codec>
constexpr bool has_sizes([[maybe_unused]] int numbers, [[maybe_unused]] int bytes) {
  if constexpr (std::is_same_v<Codec, Opaque>)
    return true;
  else
    return Unit<Codec>::kNumbers == numbers && Unit<Codec>::kBytes == bytes;
}
#define KVX_ROW(name, codec, kind, numbers, bytes, ...) \
  static_assert(has_sizes<codec>(numbers, bytes));
KVX_FORMATS(KVX_ROW)
#undef KVX_ROW

// Constants of a format for kernels, which cannot read tables in host memory.
KVX_HD float largest_of(kvx_dtype_t dtype) {
  switch (dtype) {
#define KVX_ROW(name, codec, kind, numbers, bytes, alignment, largest, ...) \
  case KVX_DTYPE_##name:                                                    \
    return largest;
    KVX_FORMATS(KVX_ROW)
#undef KVX_ROW
    default:
      return 0.0f;
  }
}

}  // namespace kvx
