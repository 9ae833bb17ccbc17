// Encoding of Q8_0 on x86, eight units at a time. Included by kernels.inl, after units32.inl.

constexpr int kToNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

KVX_INLINE const void *address_of(const float *from) { return from; }
template <class Format>
KVX_INLINE const void *address_of(Halves<Format> from) {
  return from.at;
}
template <class From>
constexpr int kBytesOf = sizeof(uint16_t);
template <>
constexpr int kBytesOf<const float *> = sizeof(float);

KVX_INLINE __m256 load_eight(const float *from) { return _mm256_loadu_ps(from); }
KVX_INLINE __m256 load_eight(Halves<F16> from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from.at)));
}
KVX_INLINE __m256 load_eight(Halves<Bf16> from) {
  const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i *>(from.at));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
}

// In lane i the largest of all lanes of rows[i], as integers.
KVX_INLINE __m256i largest_of_rows(const __m256i *rows) {
  __m256i fours[4], twos[2];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m256i a = rows[i], b = rows[i + 4];  // b's lanes become the upper half
    fours[i] = _mm256_max_epi32(_mm256_permute2x128_si256(a, b, 0x20),
                                _mm256_permute2x128_si256(a, b, 0x31));
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i)
    twos[i] = _mm256_max_epi32(_mm256_unpacklo_epi32(fours[i], fours[i + 2]),
                               _mm256_unpackhi_epi32(fours[i], fours[i + 2]));
  return _mm256_max_epi32(_mm256_unpacklo_epi32(twos[0], twos[1]),
                          _mm256_unpackhi_epi32(twos[0], twos[1]));
}

// The scales of eight units, and what numbers are multiplied by.
struct Scales8 {
  alignas(32) float inverses[8];
  alignas(16) uint16_t scales[8];
  // No unit has a NaN or numbers whose scale would not be a normal float32 and a finite float16:
  // no number has to be cut to the range of levels.
  bool are_usual;

  template <class From>
  KVX_MEMBER void find(From from) {
    constexpr int32_t kLeast = (127 - 118) << 23;  // 2^-118: its 127th part is normal
    __m256i rows[8];
#pragma GCC unroll 8
    for (int unit = 0; unit < 8; ++unit) {
      rows[unit] = _mm256_setzero_si256();
#pragma GCC unroll 4
      for (int i = 0; i < 32; i += 8) {
        const __m256 x = load_eight(from + (32 * unit + i));
        const __m256 size = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x);
        rows[unit] = _mm256_max_epi32(rows[unit], _mm256_castps_si256(size));
      }
    }
    const __m256i most = largest_of_rows(rows);
    const __m256i largest = _mm256_castps_si256(_mm256_set1_ps(65504.0f * 127.0f));
    const __m256i is_zero = _mm256_cmpeq_epi32(most, _mm256_setzero_si256());
    const __m256i is_small = _mm256_cmpgt_epi32(_mm256_set1_epi32(kLeast), most);
    const __m256i is_odd =
        _mm256_or_si256(_mm256_andnot_si256(is_zero, is_small), _mm256_cmpgt_epi32(most, largest));
    are_usual = _mm256_testz_si256(is_odd, is_odd);
    const __m256 scale = _mm256_div_ps(_mm256_castsi256_ps(most), _mm256_set1_ps(127.0f));
    const __m256 inverse = _mm256_div_ps(_mm256_set1_ps(1.0f), scale);
    _mm256_store_ps(inverses, _mm256_andnot_ps(_mm256_castsi256_ps(is_zero), inverse));
    _mm_store_si128(reinterpret_cast<__m128i *>(scales), _mm256_cvtps_ph(scale, kToNearest));
  }

  template <class From>
  KVX_MEMBER void put(uint8_t *to, From from) const {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
#pragma GCC unroll 8
    for (int unit = 0; unit < 8; ++unit, to += Q8_0::kBytes) {
      const __m256 by = _mm256_broadcast_ss(inverses + unit);
      // A half, less its last bit, away from zero: only ties and what is past them reach the next
      // integer.
      const auto level = [&](int i) KVX_MEMBER {
        const __m256 x = _mm256_mul_ps(load_eight(from + (32 * unit + i)), by);
        const __m256 half = _mm256_or_ps(_mm256_and_ps(x, sign), _mm256_set1_ps(0x1.fffffep-2f));
        return _mm256_cvttps_epi32(_mm256_add_ps(x, half));
      };
      const __m256i first = _mm256_packs_epi32(level(0), level(8));
      const __m256i second = _mm256_packs_epi32(level(16), level(24));
      const __m256i bytes = _mm256_packs_epi16(first, second);
      memcpy(to, scales + unit, sizeof scales[0]);
      _mm256_storeu_si256(reinterpret_cast<__m256i *>(to + 2),
                          _mm256_permutevar8x32_epi32(bytes, order));
    }
  }
};

// Finds scales eight units ahead of those that are stored, so that no unit waits for a division.
template <class From>
void encode_q8_0(uint8_t *to, From from, int64_t units, int64_t ahead) {
  Scales8 scales[2];
  if (units >= 8) scales[0].find(from);
  for (int turn = 0; units >= 8; units -= 8, turn ^= 1) {
    if (ahead)
      for (int line = 0; line < 8 * 32 * kBytesOf<From>; line += kLineBytes)
        prefetch(reinterpret_cast<const uint8_t *>(address_of(from)) + ahead + line);
    if (units >= 16) scales[turn ^ 1].find(from + 256);
    if (__builtin_expect(scales[turn].are_usual, 1))
      scales[turn].put(to, from);
    else
      encode_units(Q8_0{}, to, from, 8);
    to += 8 * Q8_0::kBytes, from = from + 256;
  }
  if (units) encode_units(Q8_0{}, to, from, static_cast<int>(units));
}
