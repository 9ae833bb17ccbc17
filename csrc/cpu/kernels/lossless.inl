// The lossless encoding of bfloat16: exponents apart from sign and mantissa, and exponents as bit
// planes. Included by kernels.inl. Spec: E.19

inline void lossless_split(uint8_t *__restrict exponents, uint8_t *__restrict rest,
                           const uint16_t *__restrict numbers, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const uint16_t x = numbers[i];
    exponents[i] = static_cast<uint8_t>(x >> 7);
    rest[i] = static_cast<uint8_t>((x >> 8 & 0x80) | (x & 0x7f));
  }
}

inline void lossless_join(uint16_t *__restrict numbers, const uint8_t *__restrict exponents,
                          const uint8_t *__restrict rest, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const unsigned r = rest[i];
    numbers[i] = static_cast<uint16_t>((r & 0x80) << 8 | exponents[i] << 7 | (r & 0x7f));
  }
}

KVX_INLINE uint32_t load_word(const uint8_t *from) {
  uint32_t word;
  memcpy(&word, from, sizeof word);
  return word;
}
KVX_INLINE void store_word(uint8_t *to, uint32_t word) { memcpy(to, &word, sizeof word); }

// The symbols of a group that are not of the level: all ones in its planes.
KVX_INLINE uint32_t others_of(const uint8_t *planes, int width) {
  uint32_t others = ~0u;
  for (int plane = 0; plane < width; ++plane) others &= load_word(planes + 4 * plane);
  return others;
}

inline int64_t lossless_count(const uint8_t *planes, int64_t groups, int width) {
  int64_t count = 0;
  for (int64_t group = 0; group < groups; ++group)
    count += __builtin_popcount(others_of(planes + group * 4 * width, width));
  return count;
}

#if KVX_VECTOR_BYTES >= 32

// Eight symbols at a time: a byte of the mask picks how they move to the front, or from there.
inline int64_t lossless_pack(uint8_t *planes, uint8_t *others, const uint8_t *symbols,
                             int64_t groups, lossless::Level level) {
  const __m256i first = _mm256_set1_epi8(static_cast<char>(level.first)),
                most = _mm256_set1_epi8(static_cast<char>(level.symbols()));
  int64_t count = 0;
  for (int64_t group = 0; group < groups; ++group) {
    const uint8_t *const from = symbols + group * lossless::kGroup;
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from));
    const __m256i code = _mm256_min_epu8(_mm256_sub_epi8(x, first), most);
    for (int plane = 0; plane < level.width; ++plane, planes += 4) {
      const __m256i at_sign = _mm256_sll_epi16(code, _mm_cvtsi32_si128(7 - plane));
      store_word(planes, static_cast<uint32_t>(_mm256_movemask_epi8(at_sign)));
    }
    const auto mask = static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(code, most)));
    for (int part = 0; part < 4; ++part) {
      const __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(from + 8 * part));
      const __m128i order = _mm_loadl_epi64(
          reinterpret_cast<const __m128i *>(kByteOrders.to_front[mask >> (8 * part) & 0xff]));
      const int before = __builtin_popcount(mask & ((1u << (8 * part)) - 1));
      _mm_storel_epi64(reinterpret_cast<__m128i *>(others + count + before),
                       _mm_shuffle_epi8(eight, order));
    }
    count += __builtin_popcount(mask);
  }
  return count;
}

// A byte for each bit: all ones where it is set.
KVX_INLINE __m256i bytes_of(uint32_t bits) {
  const __m256i places = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201u));
  const __m256i spread = _mm256_shuffle_epi8(
      _mm256_set1_epi32(static_cast<int>(bits)),
      _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303));
  return _mm256_cmpeq_epi8(_mm256_and_si256(spread, places), places);
}

// Eight of the symbols that lie at `others` one after the other, to where `mask` has ones.
KVX_INLINE __m128i spread_eight(const uint8_t *others, uint32_t mask) {
  return _mm_shuffle_epi8(
      _mm_loadl_epi64(reinterpret_cast<const __m128i *>(others)),
      _mm_loadl_epi64(reinterpret_cast<const __m128i *>(kByteOrders.from_front[mask & 0xff])));
}

inline void lossless_unpack(uint8_t *symbols, const uint8_t *planes, const uint8_t *others,
                            int64_t groups, lossless::Level level) {
  const __m256i first = _mm256_set1_epi8(static_cast<char>(level.first));
  for (int64_t group = 0; group < groups; ++group, symbols += lossless::kGroup) {
    __m256i x = first;
    uint32_t mask = ~0u;
    for (int plane = 0; plane < level.width; ++plane, planes += 4) {
      const uint32_t bits = load_word(planes);
      const __m256i worth = _mm256_set1_epi8(static_cast<char>(1 << plane));
      x = _mm256_add_epi8(x, _mm256_and_si256(bytes_of(bits), worth));
      mask &= bits;
    }
    const uint8_t *const second = others + __builtin_popcount(mask & 0xff),
                         *const third = others + __builtin_popcount(mask & 0xffff),
                         *const fourth = others + __builtin_popcount(mask & 0xffffff);
    const __m128i low = _mm_unpacklo_epi64(spread_eight(others, mask),
                                           spread_eight(second, mask >> 8)),
                  high = _mm_unpacklo_epi64(spread_eight(third, mask >> 16),
                                            spread_eight(fourth, mask >> 24));
    others += __builtin_popcount(mask);
    const __m256i other = _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(symbols),
                        _mm256_blendv_epi8(x, other, bytes_of(mask)));
  }
}

#else

inline int64_t lossless_pack(uint8_t *planes, uint8_t *others, const uint8_t *symbols,
                             int64_t groups, lossless::Level level) {
  int64_t count = 0;
  for (int64_t group = 0; group < groups; ++group, planes += 4 * level.width) {
    uint32_t bits[lossless::kMaxWidth] = {};
    for (int i = 0; i < lossless::kGroup; ++i) {
      const uint8_t symbol = *symbols++;
      const int place = static_cast<uint8_t>(symbol - level.first), most = level.symbols();
      const auto code = static_cast<uint32_t>(place < most ? place : most);
      for (int plane = 0; plane < level.width; ++plane) bits[plane] |= (code >> plane & 1) << i;
      others[count] = symbol;  // overwritten by the next, unless it counts
      count += place >= most;
    }
    for (int plane = 0; plane < level.width; ++plane) store_word(planes + 4 * plane, bits[plane]);
  }
  return count;
}

inline void lossless_unpack(uint8_t *symbols, const uint8_t *planes, const uint8_t *others,
                            int64_t groups, lossless::Level level) {
  for (int64_t group = 0; group < groups; ++group, planes += 4 * level.width) {
    uint32_t bits[lossless::kMaxWidth] = {};
    for (int plane = 0; plane < level.width; ++plane) bits[plane] = load_word(planes + 4 * plane);
    for (int i = 0; i < lossless::kGroup; ++i) {
      uint32_t code = 0;
      for (int plane = 0; plane < level.width; ++plane) code |= (bits[plane] >> i & 1) << plane;
      const bool is_other = code == static_cast<uint32_t>(level.symbols());
      *symbols++ = is_other ? *others : static_cast<uint8_t>(level.first + code);
      others += is_other;
    }
  }
}

#endif
