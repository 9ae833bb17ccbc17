// bf16 to e4m3 in AVX-512 if there is no table, or a run is too short for one: the same bits as
// E4m3::encode(x / divisor), for which the compiler would divide. Included by kernels.inl.

typedef uint32_t Floats __attribute__((vector_size(64)));  // their bits
typedef uint16_t Words __attribute__((vector_size(64), aligned(2), may_alias));

// Computes eight times the quotient: the smallest normal number, 2^-6, becomes 2^-3.
struct Divisor {
  __m512 eighth, inverse;
  Words most;  // larger magnitudes get the code of this one, 448

  explicit Divisor(float divisor)
      : eighth(_mm512_set1_ps(divisor / 8)),
        inverse(_mm512_set1_ps(8 / divisor)),
        most(Words{} + static_cast<uint16_t>((bits_of(448 * divisor) >> 16) + 1)) {}

  // Whether no float32 overflows or loses bits.
  static bool takes(const Scaling &by) {
    return by.scale == 1.0f && by.divisor >= 0x1p-60f && by.divisor <= 0x1p60f;
  }
};

// The code of the quotient, as SmallFloat::round finds it.
KVX_INLINE Floats encode_quotient(Floats x, const Divisor &divisor) {
  // A product, corrected once, is the rounded quotient of any bf16 by any float32: trying all
  // significands has shown it.
  const __m512 product = _mm512_mul_ps(__m512(x), divisor.inverse);
  const __m512 rest = _mm512_fnmadd_ps(product, divisor.eighth, __m512(x));
  const __m512 quotient = _mm512_fmadd_ps(rest, divisor.inverse, product);
  const Floats own_exponent = Floats(quotient) & kInfinity, least = Floats{} + (124u << 23);
  const Floats exponent = own_exponent > least ? own_exponent : least;
  const Floats steps = Floats(_mm512_fmadd_ps(__m512(exponent), _mm512_set1_ps(0x1p20f), quotient));
  // Its exponent field begins at 124 + 20, whose lowest four bits, those of a code, are zero.
  return (steps + (steps >> 20)) & 0x7f;
}

// Encodes every other word as a float, then the others. A code gets the sign of x, unless x is NaN.
KVX_INLINE Words encode(Words x, const Divisor &divisor) {
  const Words magnitude = x & 0x7fff, clamped = magnitude < divisor.most ? magnitude : divisor.most;
  const Floats even = encode_quotient(Floats(clamped) << 16, divisor),
               odd = encode_quotient(Floats(clamped) & 0xffff0000u, divisor);
  const auto code = Words(odd << 16 | even);
  return magnitude > 0x7f80 ? Words{} + 0x7f : code | (x >> 8 & 0x80);
}

template <class Src, class Dst>
void convert_run(void *dst, const void *src, int64_t count, const Conversion &how);

// Converts the elements that fill whole vectors; returns their number.
KVX_INLINE int64_t divide_to_e4m3(uint8_t *dst, const uint8_t *src, int64_t count,
                                  const Conversion &how) {
  typedef uint64_t Register __attribute__((vector_size(64)));
  const Divisor by(how.scaling.divisor);
  const bool streams = how.streaming && bytes_to_alignment(dst) == 0;
  count &= -64;
  for (int64_t i = 0; i < count; i += 64) {
    const uint8_t *const from = src + 2 * i;
    prefetch(from + how.ahead), prefetch(from + how.ahead + kLineBytes);
    const Words a = encode(*reinterpret_cast<const Words *>(from), by),
                b = encode(*reinterpret_cast<const Words *>(from + sizeof a), by);
    const Register mixed = Register(_mm512_packus_epi16(__m512i(a), __m512i(b)));
    const Vector codes = Vector(__builtin_shufflevector(mixed, mixed, 0, 2, 4, 6, 1, 3, 5, 7));
    streams ? store_streaming(dst + i, codes) : store(dst + i, codes);
  }
  return count;
}

// Rows, each with a divisor of its own.
void divide_rows(const ScaledRows &rows, const Scaling *scalings, const Conversion &how) {
  for (int64_t row = 0; row < rows.count; ++row) {
    uint8_t *const to = rows.dst + row * rows.dst_step;
    const uint8_t *const from = rows.src + row * rows.src_step;
    const Conversion own = {scalings[row], how.streaming, how.many, how.ahead};
    if (rows.numbers % 64 || !Divisor::takes(own.scaling))
      convert_run<Bf16, E4m3>(to, from, rows.numbers, own);
    else
      divide_to_e4m3(to, from, rows.numbers, own);
  }
}
