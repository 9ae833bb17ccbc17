// FP8 by table, 64 at a time in AVX-512 VBMI. The scalar codec fills the tables, so lookups are
// bit-exact, in a few instructions where rounding takes dozens. Included by kernels.inl.

constexpr uint8_t kFp8Sign = 0x80, kFp8Nan = 0x7f;

KVX_INLINE __m512i all(int byte) { return _mm512_set1_epi8(static_cast<char>(byte)); }
KVX_INLINE __m512i words(int word) { return _mm512_set1_epi16(static_cast<short>(word)); }

struct Same {
  KVX_MEMBER Vector operator()(Vector vector) const { return vector; }
};

// A table of 128 bytes, indexed by the lower seven bits.
class ByteTable {
 public:
  ByteTable() = default;
  template <class Entry>
  explicit ByteTable(Entry entry) {
    uint8_t bytes[128];
    for (int i = 0; i < 128; ++i) bytes[i] = static_cast<uint8_t>(entry(i));
    lower_ = load(bytes);
    upper_ = load(bytes + 64);
  }
  KVX_MEMBER ByteTable(Vector lower, Vector upper) : lower_(lower), upper_(upper) {}

  KVX_MEMBER Vector operator[](Vector index) const {
    return Vector(_mm512_permutex2var_epi8(__m512i(lower_), __m512i(index), __m512i(upper_)));
  }

 private:
  Vector lower_, upper_;
};

// Bytes kFirst, kFirst + 2, ... of a, then of b.
template <int kFirst, int... kByte>
KVX_INLINE Vector every_other(Vector a, Vector b, std::integer_sequence<int, kByte...>) {
  return __builtin_shufflevector(a, b, (2 * kByte + kFirst)...);
}
constexpr auto kEach = std::make_integer_sequence<int, 64>{};

// ---- From FP8: a table of the 128 magnitudes ----

template <class Src, class Dst>
struct Decoder {
  using To = typename Dst::Bits;
  static constexpr int kTopBits = 8 * sizeof(To) - 8;

  Scaling scaling;
  ByteTable top, low;  // the bytes of the results; FP8 has only the top one

  explicit Decoder(const Scaling &by)
      : scaling(by),
        top([&](int code) { return result(code) >> kTopBits; }),
        low([&](int code) { return result(code); }) {}
  KVX_MEMBER Decoder(const Scaling &by, const ByteTable &top_bytes, const ByteTable &low_bytes)
      : scaling(by), top(top_bytes), low(low_bytes) {}

  // Stores `map` of the results.
  template <bool kStreaming, class Map = Same>
  KVX_MEMBER void convert(uint8_t *dst, const uint8_t *src, int64_t count, int64_t ahead,
                          const Map &map = {}) const {
    for (int64_t i = 0; i < count; i += 64) {
      prefetch(src + i + ahead);
      convert_one<kStreaming>(dst + i * static_cast<int64_t>(sizeof(To)), src + i, map);
    }
  }

 private:
  template <bool kStreaming, class Map>
  KVX_MEMBER void convert_one(uint8_t *dst, const uint8_t *src, const Map &map) const {
    const auto put = [&](Vector results) KVX_MEMBER {
      results = map(results);
      kStreaming ? store_streaming(dst, results) : store(dst, results);
      dst += sizeof results;
    };
    Vector codes = load(src);
    if constexpr (sizeof(To) == 1) {
      const Vector found = top[codes];
      put(found == kFp8Nan ? found : found | (codes & kFp8Sign));
    } else {
      // Interleaving takes the lower halves of 16 bytes each, then the upper ones.
      typedef uint64_t Halves __attribute__((vector_size(64)));
      const auto order = Halves(codes);
      codes = Vector(__builtin_shufflevector(order, order, 0, 4, 1, 5, 2, 6, 3, 7));
      const auto first = __m512i(low[codes]), second = __m512i(top[codes] | (codes & kFp8Sign));
      put(Vector(_mm512_unpacklo_epi8(first, second)));
      put(Vector(_mm512_unpackhi_epi8(first, second)));
    }
  }

  To result(int code) const {
    return Dst::encode(scaling(Src::decode(static_cast<uint8_t>(code))));
  }
};

// The tables without any scaling.
template <class Coder>
const Coder &unit() {
  static const Coder coder({1.0f, 1.0f});
  return coder;
}

// To BF16 with a scale of few elements: the table holds exact values, which are multiplied.
template <class Src>
struct Multiplier {
  using To = Bf16::Bits;

  Decoder<Src, Bf16> exact;
  __m512 scale;

  explicit Multiplier(const Scaling &by)
      : exact(unit<Decoder<Src, Bf16>>()), scale(_mm512_set1_ps(by.scale)) {}

  static bool takes(const Scaling &by) { return by.divisor == 1.0f; }

  // Every other number is the upper half of a float; the others are, after a shift.
  KVX_MEMBER Vector operator()(Vector numbers) const {
    const Floats two = Floats(numbers);
    const Floats odd = multiply(two & 0xffff0000u), even = multiply(two << 16);
    return Vector((odd & 0xffff0000u) | even >> 16);
  }

  template <bool kStreaming>
  KVX_MEMBER void convert(uint8_t *dst, const uint8_t *src, int64_t count, int64_t ahead) const {
    exact.template convert<kStreaming>(dst, src, count, ahead, *this);
  }

 private:
  // Rounded in the upper halves. NaN stays NaN, since its lower half is zero.
  KVX_MEMBER Floats multiply(Floats x) const {
    const Floats product = Floats(__m512(x) * scale);
    return product + 0x7fff + (product >> 16 & 1);
  }
};

// ---- From BF16 to FP8: tables of the 128 mantissas ----

// If the results are normal numbers, the next exponent adds an octave's steps to all codes. The few
// exponents below, whose results are subnormal, have a table each.
template <class Dst>
struct Encoder {
  using Magnitude = typename Dst::Magnitude;
  static constexpr uint8_t kMost = std::is_same_v<Dst, E4m3> ? 0x7e : 0x7b;
  static constexpr int kOctave = Magnitude::kFirstNormalCode;  // steps
  static constexpr int kSmall = 23 - Magnitude::kDropped + 2;  // exponents; below them: zero

  Scaling scaling;
  int first;                // the least exponent whose results are all normal
  ByteTable small[kSmall];  // of the exponents below it
  ByteTable normal;         // of it
  ByteTable steps;          // added to `normal`, by exponent: 1 is the least with a table

  explicit Encoder(const Scaling &by)
      : scaling(by),
        first(kSmall),
        normal(results_of(first_normal())),
        steps([](int place) { return std::clamp((place - kSmall - 1) * kOctave, 0, 128); }) {
    for (int i = 0; i < kSmall; ++i) small[i] = ByteTable(results_of(first - kSmall + i));
  }

  // Whether no step of the codec makes a float32 that overflows or is subnormal.
  static bool takes(const Scaling &by) {
    const float factor = by.scale / by.divisor;
    return by.scale == 1.0f && factor >= 0x1p-60f && factor <= 0x1p60f;
  }

  // Small results take longer, so pieces are checked for them until one has some: a branch that
  // changes from piece to piece would cost more.
  template <bool kStreaming>
  KVX_MEMBER void convert(uint8_t *dst, const uint8_t *src, int64_t count, int64_t ahead) const {
    for (int64_t i = 0; i < count;) {
      const int64_t piece_end = std::min(count, i + 512);
      for (; i < piece_end && convert_one<kStreaming, false>(dst + i, src + 2 * i, ahead);
           i += 64) {
      }
      for (; i < piece_end; i += 64) convert_one<kStreaming, true>(dst + i, src + 2 * i, ahead);
    }
  }

 private:
  // Returns false, without storing, if there are small results and kSmallToo is false.
  template <bool kStreaming, bool kSmallToo>
  KVX_MEMBER bool convert_one(uint8_t *dst, const uint8_t *src, int64_t ahead) const {
    const Vector a = load(src), b = load(src + sizeof a);
    // The exponent's last bit and the mantissa; the sign and the rest of the exponent.
    const Vector low = every_other<0>(a, b, kEach), high = every_other<1>(a, b, kEach);
    const Vector exponent = (high << 1) | (low >> 7);
    const auto place =
        _mm512_min_epu8(_mm512_subs_epu8(__m512i(exponent), all(first - kSmall - 1)), all(127));
    auto code = _mm512_min_epu8(__m512i(normal[low] + steps[Vector(place)]), all(kMost));
    const __mmask64 is_normal = _mm512_cmpgt_epu8_mask(place, all(kSmall));
    if (!kSmallToo && ~is_normal) return false;
    if (kSmallToo) {
      code = _mm512_maskz_mov_epi8(is_normal, code);
#pragma GCC unroll 8
      for (int i = 0; i < kSmall; ++i) {
        const __mmask64 is_here = _mm512_cmpeq_epi8_mask(place, all(i + 1));
        code = _mm512_mask_mov_epi8(code, is_here, __m512i(small[i][low]));
      }
    }
    // code | (high & sign)
    code = _mm512_ternarylogic_epi32(code, __m512i(high), all(kFp8Sign), 0xf8);
    const __mmask64 is_nan = _mm512_mask_test_epi8_mask(
        _mm512_cmpeq_epi8_mask(__m512i(exponent), all(0xff)), __m512i(low), all(0x7f));
    code = _mm512_mask_mov_epi8(code, is_nan, all(kFp8Nan));
    prefetch(src + ahead), prefetch(src + ahead + sizeof a);
    kStreaming ? store_streaming(dst, Vector(code)) : store(dst, Vector(code));
    return true;
  }

  int first_normal() {
    while (bits_of(scaling(bf16(first, 0))) < Magnitude::kMinNormal) ++first;
    return first;
  }
  auto results_of(int exponent) const {
    return [=, this](int mantissa) { return Dst::encode(scaling(bf16(exponent, mantissa))); };
  }
  static float bf16(int exponent, int mantissa) {
    return Bf16::decode(static_cast<uint16_t>(exponent << 7 | mantissa));
  }
};

// BF16 to E4M3 divided by a power of two: the bits of a code are consecutive bits of the number,
// and its exponent says where they begin. Small results cost no more than others.
struct Shifter {
  static constexpr int kMantissa = 23 - E4m3::Magnitude::kDropped, kSmall = kMantissa + 1;

  Scaling scaling;
  // Exponents are counted from the last one that becomes zero, whose least magnitude is `zero`;
  // `most`, counted from `zero`, is the magnitude of the largest code.
  int zero, most;
  __m512i shift, add;  // by exponent: to a code with eight more bits, and to round these

  explicit Shifter(const Scaling &by) : scaling(by) {
    const int power = static_cast<int>(bits_of(by.divisor) >> 23) - 127;
    const int first = static_cast<int>(E4m3::Magnitude::kMinNormal >> 23) + power;
    zero = (first - kSmall - 1) << 7;
    most = 0x43e0 + power * 128 - zero;  // 448
    uint16_t shifts[32] = {16}, adds[32] = {0x7f};
    for (int i = 1; i < 32; ++i) {
      const int up = std::min(i - 1, kSmall);  // below kSmall: results are subnormal
      shifts[i] = static_cast<uint16_t>(up);
      adds[i] = static_cast<uint16_t>((up < kSmall ? 1 - i : -kSmall) * (128 << up) + 0x7f);
    }
    shift = _mm512_loadu_si512(shifts);
    add = _mm512_loadu_si512(adds);
  }

  static bool takes(const Scaling &by) {
    return by.scale == 1.0f && has_exact_inverse(by.divisor) && by.divisor >= 0x1p-60f &&
           by.divisor <= 0x1p60f;
  }

  template <bool kStreaming>
  KVX_MEMBER void convert(uint8_t *dst, const uint8_t *src, int64_t count, int64_t ahead) const {
    for (int64_t i = 0; i < count; i += 64) {
      prefetch(src + 2 * i + ahead), prefetch(src + 2 * i + ahead + sizeof(Vector));
      const Vector a = encode(src + 2 * i), b = encode(src + 2 * i + sizeof a);
      const Vector codes = every_other<1>(a, b, kEach);
      kStreaming ? store_streaming(dst + i, codes) : store(dst + i, codes);
    }
  }

 private:
  // 32 codes, each with its sign in the upper byte of a word.
  KVX_MEMBER Vector encode(const uint8_t *src) const {
    const auto x = __m512i(load(src)), magnitude = _mm512_and_si512(x, words(0x7fff));
    const __m512i from_zero =
        _mm512_min_epu16(_mm512_subs_epu16(magnitude, words(zero)), words(most));
    const __m512i exponent = _mm512_srli_epi16(from_zero, 7);
    __m512i code = _mm512_sllv_epi16(from_zero, _mm512_permutexvar_epi16(exponent, shift));
    code = _mm512_add_epi16(code, _mm512_permutexvar_epi16(exponent, add));
    // A tie gives 0xff here: one more carries if the code is odd.
    code = _mm512_mask_sub_epi16(code, _mm512_test_epi16_mask(code, words(0x100)), code, words(-1));
    code = _mm512_ternarylogic_epi32(code, x, words(0x8000), 0xf8);  // code | (x & 0x8000)
    const __mmask32 is_nan = _mm512_cmpgt_epu16_mask(magnitude, words(0x7f80));
    return Vector(_mm512_mask_mov_epi16(code, is_nan, words(kFp8Nan << 8)));
  }
};

// Converts the elements that fill registers; returns their number.
template <class Coder>
KVX_INLINE int64_t look_up(uint8_t *dst, const uint8_t *src, int64_t count, const Coder &coder,
                           bool streaming, int64_t ahead) {
  const Coder own =
      coder;  // in registers: the compiler assumes that stored bytes may alias the original
  count &= -64;
  if (streaming && bytes_to_alignment(dst) == 0) {
    own.template convert<true>(dst, src, count, ahead);
  } else {
    own.template convert<false>(dst, src, count, ahead);
  }
  return count;
}

// The tables for a scaling; this thread keeps the last two, such as K's and V's. NULL if they are
// not worth making.
template <class Coder>
const Coder *coder_for(const Conversion &how) {
  if (how.scaling == unit<Coder>().scaling) return &unit<Coder>();
  if (!how.many) return nullptr;
  thread_local Coder last[2] = {unit<Coder>(), unit<Coder>()};
  thread_local int turn = 0;
  for (const Coder &coder : last)
    if (coder.scaling == how.scaling) return &coder;
  turn ^= 1;
  return &(last[turn] = Coder(how.scaling));
}

// ---- Rows of FP8 to BF16, each with a scale of its own ----

// Makes the tables of a scale in some 20 instructions. The first 16 codes are multiplied by it;
// those of a later octave are as those of the first one, but for the exponent.
template <class Src>
class RowDecoder {
 public:
  RowDecoder() {
    constexpr int kMantissa = 23 - Src::Magnitude::kDropped, kOctave = 1 << kMantissa;
    static_assert(2 * kOctave <= 16);
    for (int code = 0; code < 16; ++code) first_[code] = Src::decode(static_cast<uint8_t>(code));
    for (int code = 0; code < 128; ++code) {
      const bool later = code >= 16;
      at_[code] = static_cast<uint16_t>(later ? kOctave | (code & (kOctave - 1)) : code);
      add_[code] = static_cast<uint16_t>(later ? ((code >> kMantissa) - 1) << 7 : 0);
      const float value = Src::decode(static_cast<uint8_t>(code));
      special_[code] = Bf16::encode(value);
      if (!std::isfinite(value)) is_special_ |= code < 96 ? 0 : 1u << (code - 96);
    }
    for (int byte = 0; byte < 64; ++byte) even_[byte] = static_cast<uint8_t>(2 * byte);
  }

  // Whether all products are normal numbers, or zero.
  static bool takes(const Scaling &by) {
    return by.divisor == 1.0f && by.scale >= 0x1p-60f && by.scale <= 0x1p60f;
  }

  KVX_MEMBER Decoder<Src, Bf16> with(const Scaling &by) const {
    const __m512 products = _mm512_mul_ps(_mm512_load_ps(first_), _mm512_set1_ps(by.scale));
    const Floats bits = Floats(products), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const __m512i words = _mm512_zextsi256_si512(_mm512_cvtepi32_epi16(__m512i(rounded)));
    // Codes 32 * i .. 32 * i + 31. From 32 on they are looked up at the same places.
    const __m512i later = _mm512_permutexvar_epi16(part(at_, 1), words);
    const __m512i all[4] = {
        _mm512_add_epi16(_mm512_permutexvar_epi16(part(at_, 0), words), part(add_, 0)),
        _mm512_add_epi16(later, part(add_, 1)), _mm512_add_epi16(later, part(add_, 2)),
        _mm512_mask_mov_epi16(_mm512_add_epi16(later, part(add_, 3)), is_special_,
                              part(special_, 3))};
    const auto even = _mm512_load_si512(even_), odd = _mm512_or_si512(even, _mm512_set1_epi8(1));
    const auto bytes = [&](__m512i which, int half) KVX_MEMBER {
      return Vector(_mm512_permutex2var_epi8(all[2 * half], which, all[2 * half + 1]));
    };
    return {by, ByteTable(bytes(odd, 0), bytes(odd, 1)), ByteTable(bytes(even, 0), bytes(even, 1))};
  }

 private:
  static KVX_MEMBER __m512i part(const uint16_t *words, int i) {
    return _mm512_load_si512(words + 32 * i);
  }

  alignas(64) float first_[16];
  alignas(64) uint16_t at_[128], add_[128], special_[128];
  alignas(64) uint8_t even_[64];
  __mmask32 is_special_ = 0;
};

template <class Src>
void decode_rows(const ScaledRows &rows, const Scaling *scalings, const Conversion &how) {
  static const RowDecoder<Src> decoder;
  uint8_t *to = rows.dst;
  const uint8_t *from = rows.src;
  const Scaling *by = scalings, *const end = scalings + rows.count;
  const auto next = [&]() KVX_MEMBER { ++by, to += rows.dst_step, from += rows.src_step; };
  while (by < end) {
    if (rows.numbers % 64 || !RowDecoder<Src>::takes(*by)) {
      convert_run<Src, Bf16>(to, from, rows.numbers, {*by, how.streaming, how.many, how.ahead});
      next();
      continue;
    }
    const auto tables = decoder.with(*by);  // stay in registers
    do {
      if (how.streaming && bytes_to_alignment(to) == 0)
        tables.template convert<true>(to, from, rows.numbers, how.ahead);
      else
        tables.template convert<false>(to, from, rows.numbers, how.ahead);
      next();
    } while (by < end && *by == tables.scaling);
  }
}
