// Units of several numbers to F32, F16 and BF16: those of 32 numbers on x86 in registers, others
// through float32. Such formats have no scales beside their units. Included by kernels.inl.

// Converts kPiece numbers at a time, which `decode` makes float32. One function for all formats:
// they would compile for minutes.
template <class Dst>
__attribute__((noipa)) void convert_decoded(uint8_t *dst, const uint8_t *src, int64_t count,
                                            DecodeVector decode, int64_t unit_numbers,
                                            int64_t unit_bytes, const Conversion &how) {
  alignas(64) float values[kPiece];
  for (int64_t n; count > 0; count -= n) {
    n = std::min(count, kPiece);
    const int64_t bytes = n / unit_numbers * unit_bytes;
    const int64_t to_bytes = n * static_cast<int64_t>(sizeof(typename Dst::Bits));
    if (how.ahead)
      for (int64_t line = 0; line < bytes; line += kLineBytes) prefetch(src + how.ahead + line);
    if constexpr (!std::is_same_v<Dst, F32>) {
      decode(values, src, n);
      compute_piece<F32, Dst>(dst, values, n, how);
    } else if (how.streaming && !bytes_to_alignment(dst) && to_bytes % KVX_VECTOR_BYTES == 0) {
      decode(values, src, n);
      stream_vectors(dst, reinterpret_cast<const uint8_t *>(values), to_bytes, {0, 0});
    } else {
      decode(reinterpret_cast<float *>(dst), src, n);
    }
    dst += to_bytes, src += bytes;
  }
}

template <class Codec, class Dst>
void decode_pieces(void *dst, const void *src, int64_t count, const Conversion &how) {
  static_assert(kPiece % Unit<Codec>::kNumbers == 0);
  convert_decoded<Dst>(static_cast<uint8_t *>(dst), static_cast<const uint8_t *>(src), count,
                       VectorsOf<Codec>::decode, Unit<Codec>::kNumbers, Unit<Codec>::kBytes, how);
}

#if KVX_VECTOR_BYTES >= 32
// ---- Units of 32 numbers in registers ----

// What follows the scale of a unit, and whether that is a least number.
template <class Codec>
constexpr bool kHasLeast = false;
template <int kBits>
constexpr bool kHasLeast<FromLeast<kBits>> = true;
template <class Codec>
constexpr int kScaleBytes = kHasLeast<Codec> ? 4 : 2;

// Bits of a level; 0: not of these formats.
template <class Codec>
constexpr int kLevelBits = 0;
template <>
constexpr int kLevelBits<Q8_0> = 8;
template <>
constexpr int kLevelBits<Iq4Nl> = 4;
template <int kBits>
constexpr int kLevelBits<AroundZero<kBits>> = kBits;
template <int kBits>
constexpr int kLevelBits<FromLeast<kBits>> = kBits;

// Whether the scales of a unit are finite, and so are all its numbers.
template <class Codec>
KVX_INLINE bool is_finite(const uint8_t *unit) {
  uint16_t halves[2];
  memcpy(halves, unit, sizeof halves);
  const auto is_one = [](uint16_t half) KVX_MEMBER { return (half & 0x7c00) != 0x7c00; };
  return is_one(halves[0]) && (!kHasLeast<Codec> || is_one(halves[1]));
}

// NaN and infinity, as the codecs have them.
template <class Codec, class Dst>
__attribute__((noinline)) void decode_rare_unit(uint8_t *dst, const uint8_t *unit) {
  for (int i = 0; i < 32; ++i) {
    const auto bits = Dst::encode(Codec::decode(unit, i));
    memcpy(dst + i * sizeof bits, &bits, sizeof bits);
  }
}

KVX_INLINE __m128i load_half(const uint8_t *from) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i *>(from));
}
KVX_INLINE int16_t half_at(const uint8_t *from) {
  int16_t half;
  memcpy(&half, from, sizeof half);
  return half;
}
template <class Codec>
KVX_INLINE uint32_t fifth_bits(const uint8_t *unit) {
  uint32_t bits;
  memcpy(&bits, unit + kScaleBytes<Codec>, sizeof bits);
  return bits;
}
#endif

#if KVX_VECTOR_BYTES == 64
// What a level stands for, in steps.
template <class Codec>
KVX_INLINE float step_of(int level) {
  if constexpr (kHasLeast<Codec>)
    return static_cast<float>(level);
  else
    return Codec::value(1.0f, level);
}

template <class Codec>
KVX_INLINE __m512 steps_from(int first) {
  typedef float Sixteen __attribute__((vector_size(64)));
  Sixteen steps;
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) steps[i] = step_of<Codec>(first + i);
  return __m512(steps);
}

// 32 numbers in the order of a, then b.
KVX_INLINE __m512i narrow(F16, __m512 a, __m512 b) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtps_ph(a, kToNearest)),
                            _mm512_cvtps_ph(b, kToNearest), 1);
}
KVX_INLINE __m512i narrow(Bf16, __m512 a, __m512 b) {
  const auto rounded = [](__m512 numbers) KVX_MEMBER {
    const Floats bits = Floats(numbers);
    return Vector(bits + 0x7fff + (bits >> 16 & 1));
  };
  typedef uint16_t Words __attribute__((vector_size(64)));
  const Words low = Words(rounded(a)), high = Words(rounded(b));
  return __m512i(__builtin_shufflevector(low, high, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25,
                                         27, 29, 31, 33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55,
                                         57, 59, 61, 63));
}

// Formats of few levels: each unit has a table of the numbers that its levels stand for. Calls
// put(i, 64 bytes).
template <class Codec, class Dst, class Put>
KVX_INLINE void decode_unit_to(const uint8_t *unit, Put put) {
  constexpr bool kFive = kLevelBits<Codec> == 5;
  const __m512 scale = _mm512_cvtph_ps(_mm256_set1_epi16(half_at(unit)));
  if constexpr (kLevelBits<Codec> == 8) {
    const auto numbers = [&](int i) KVX_MEMBER {
      const __m512i levels = _mm512_cvtepi8_epi32(load_half(unit + 2 + 16 * i));
      return _mm512_mul_ps(_mm512_cvtepi32_ps(levels), scale);
    };
    if constexpr (std::is_same_v<Dst, F32>) {
      put(0, _mm512_castps_si512(numbers(0))), put(1, _mm512_castps_si512(numbers(1)));
    } else {
      put(0, narrow(Dst{}, numbers(0), numbers(1)));
    }
  } else {
    const auto numbers = [&](int first) KVX_MEMBER {
      const __m512 product = _mm512_mul_ps(steps_from<Codec>(first), scale);
      if constexpr (!kHasLeast<Codec>) return product;
      return _mm512_add_ps(product, _mm512_cvtph_ps(_mm256_set1_epi16(half_at(unit + 2))));
    };
    const __m128i fours = load_half(unit + kScaleBytes<Codec> + (kFive ? 4 : 0));
    const __m512 low = numbers(0), high = kFive ? numbers(16) : low;
    if constexpr (std::is_same_v<Dst, F32>) {
      const __m512i both = _mm512_cvtepu8_epi32(fours);
      const auto look_up = [&](__m512i level, int half) KVX_MEMBER {
        if constexpr (!kFive) return _mm512_castps_si512(_mm512_permutexvar_ps(level, low));
        const auto fifth = static_cast<__mmask16>(fifth_bits<Codec>(unit) >> (16 * half));
        level = _mm512_and_si512(level, _mm512_set1_epi32(15));
        level = _mm512_mask_add_epi32(level, fifth, level, _mm512_set1_epi32(16));
        return _mm512_castps_si512(_mm512_permutex2var_ps(low, level, high));
      };
      put(0, look_up(both, 0)), put(1, look_up(_mm512_srli_epi32(both, 4), 1));
    } else {
      // Of an index the lowest five bits count: without a fifth bit both halves are the same.
      const __m512i table = narrow(Dst{}, low, high);
      const __m256i both = _mm256_cvtepu8_epi16(fours);
      __m512i level =
          _mm512_inserti64x4(_mm512_castsi256_si512(both), _mm256_srli_epi16(both, 4), 1);
      if constexpr (kFive) {
        level = _mm512_and_si512(level, _mm512_set1_epi16(15));
        level = _mm512_mask_add_epi16(level, fifth_bits<Codec>(unit), level, _mm512_set1_epi16(16));
      }
      put(0, _mm512_permutexvar_epi16(level, table));
    }
  }
}
#elif KVX_VECTOR_BYTES == 32
// The levels of a unit, as signed bytes that are multiplied by its scale.
KVX_INLINE __m256i levels_of(Q8_0, const uint8_t *unit) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(unit + 2));
}
KVX_INLINE __m256i nibbles(const uint8_t *from) {
  const __m128i bytes = load_half(from);
  const __m256i both = _mm256_set_m128i(_mm_srli_epi16(bytes, 4), bytes);
  return _mm256_and_si256(both, _mm256_set1_epi8(15));
}
// 16 in each byte whose bit is set.
KVX_INLINE __m256i sixteens(uint32_t bits) {
  const __m256i bytes = _mm256_shuffle_epi8(
      _mm256_set1_epi32(static_cast<int>(bits)),
      _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303));
  const __m256i own = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201u));
  const __m256i is_set = _mm256_cmpeq_epi8(_mm256_and_si256(bytes, own), own);
  return _mm256_and_si256(is_set, _mm256_set1_epi8(16));
}
KVX_INLINE __m256i levels_of(Iq4Nl, const uint8_t *unit) {
  Sixteen steps;
#pragma GCC unroll 16
  for (int level = 0; level < 16; ++level)
    steps[level] = static_cast<uint8_t>(Iq4Nl::step_of(level));
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(__m128i(steps)), nibbles(unit + 2));
}
template <class Codec>
KVX_INLINE __m256i levels_of(Codec, const uint8_t *unit) {
  constexpr bool kFive = kLevelBits<Codec> == 5;
  const __m256i low = nibbles(unit + kScaleBytes<Codec> + (kFive ? 4 : 0));
  const __m256i level = kFive ? _mm256_or_si256(low, sixteens(fifth_bits<Codec>(unit))) : low;
  if constexpr (kHasLeast<Codec>)
    return level;
  else
    return _mm256_sub_epi8(level, _mm256_set1_epi8(Codec::kZero));
}

KVX_INLINE __m256i narrow(F16, __m256 a, __m256 b) {
  return _mm256_set_m128i(_mm256_cvtps_ph(b, kToNearest), _mm256_cvtps_ph(a, kToNearest));
}
KVX_INLINE __m256i narrow(Bf16, __m256 a, __m256 b) {
  const auto rounded = [](__m256 numbers) KVX_MEMBER {
    typedef uint32_t Bits __attribute__((vector_size(32)));
    const Bits bits = Bits(numbers);
    return __m256i((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  };
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded(a), rounded(b)), 0xd8);
}

// Calls put(i, 32 bytes).
template <class Codec, class Dst, class Put>
KVX_INLINE void decode_unit_to(const uint8_t *unit, Put put) {
  const __m256 scale = _mm256_cvtph_ps(_mm_set1_epi16(half_at(unit)));
  const __m256i levels = levels_of(Codec{}, unit);
  const __m128i halves[2] = {_mm256_castsi256_si128(levels), _mm256_extracti128_si256(levels, 1)};
  const auto numbers = [&](int i) KVX_MEMBER {
    const __m128i eight = i % 2 ? _mm_srli_si128(halves[i / 2], 8) : halves[i / 2];
    const __m256 product = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight)), scale);
    if constexpr (!kHasLeast<Codec>) return product;
    return _mm256_add_ps(product, _mm256_cvtph_ps(_mm_set1_epi16(half_at(unit + 2))));
  };
  if constexpr (std::is_same_v<Dst, F32>) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) put(i, _mm256_castps_si256(numbers(i)));
  } else {
    put(0, narrow(Dst{}, numbers(0), numbers(1))), put(1, narrow(Dst{}, numbers(2), numbers(3)));
  }
}
#endif

#if KVX_VECTOR_BYTES >= 32
template <bool kStreaming, class Codec, class Dst>
KVX_INLINE void decode_each_unit(uint8_t *dst, const uint8_t *src, int64_t units, int64_t ahead) {
  constexpr int64_t kBytes = 32 * sizeof(typename Dst::Bits);
  for (; units > 0; --units, dst += kBytes, src += Codec::kBytes) {
    prefetch(src + ahead);
    if (__builtin_expect(!is_finite<Codec>(src), 0)) {
      decode_rare_unit<Codec, Dst>(dst, src);
      continue;
    }
    decode_unit_to<Codec, Dst>(src, [=](int i, auto numbers) KVX_MEMBER {
      uint8_t *const at = dst + i * KVX_VECTOR_BYTES;
      kStreaming ? store_streaming(at, Vector(numbers)) : store(at, Vector(numbers));
    });
  }
}

template <class Codec, class Dst>
void decode_units(void *dst, const void *src, int64_t count, const Conversion &how) {
  auto *const to = static_cast<uint8_t *>(dst);
  const auto *const from = static_cast<const uint8_t *>(src);
  if (how.streaming && bytes_to_alignment(to) == 0) {
    decode_each_unit<true, Codec, Dst>(to, from, count / 32, how.ahead);
  } else {
    decode_each_unit<false, Codec, Dst>(to, from, count / 32, how.ahead);
  }
}
#endif

// The function of a format and one of these three, for the table of kernels.
template <class Codec, class Dst>
constexpr ConvertRun units_to() {
  if constexpr (std::is_same_v<Codec, Opaque> || kIsScalar<Codec>) {
    return nullptr;
  } else {
#if KVX_VECTOR_BYTES >= 32
    if constexpr (kLevelBits<Codec> != 0) return decode_units<Codec, Dst>;
#endif
    return decode_pieces<Codec, Dst>;
  }
}
