// bf16 to e4m3, 32 elements at a time in AVX-512: bit for bit E4m3::encode(x / divisor), which the
// compiler does 16 at a time and with divisions. Stores past the caches when asked to.
// Included by kernels.inl.

typedef uint16_t Words __attribute__((vector_size(64), aligned(2), may_alias));
typedef uint32_t Floats __attribute__((vector_size(64)));  // their bits, in two words each

KVX_INLINE Words clamp(Words x, Words most) {
  const Words magnitude = x & 0x7fff;
  return magnitude < most ? magnitude : most;
}

// The code of a magnitude gets the sign of x, unless x is no number.
KVX_INLINE Words finish(Words code, Words x) {
  return (x & 0x7fff) > 0x7f80 ? Words{} + 0x7f : code | (x >> 8 & 0x80);
}

struct Unscaled {};

// A word has room for the seven bits of a code and eight that are rounded away.
KVX_INLINE Words encode(Words x, Unscaled) {
  const Words magnitude = clamp(x, Words{} + 0x43e0);  // 448
  const Words normal = (magnitude << 4) - 0xc000;      // 2^-6 becomes 0x0800
  const Words significand = (normal & 0x07f0) | 0x0800, down = (0x3cff - magnitude) >> 7;
  const Words subnormal = Words(_mm512_srlv_epi16(__m512i(significand), __m512i(down)));
  const Words code = magnitude < 0x3c80 ? subnormal : normal;
  const Words half = (code & 0x0100) != 0 ? Words{} + 0x80 : Words{} + 0x7f;
  return finish((code + half) >> 8, x);
}

// Divides into eight times the quotient: the smallest normal number, 2^-6, becomes 2^-3.
struct Divisor {
  __m512 eighth, inverse;
  Words most;  // the magnitudes above have its code, that of 448

  explicit Divisor(float divisor)
      : eighth(_mm512_set1_ps(divisor / 8)),
        inverse(_mm512_set1_ps(8 / divisor)),
        most(Words{} + static_cast<uint16_t>((bits_of(448 * divisor) >> 16) + 1)) {}

  // Far from where a float32 overflows or loses bits.
  static bool takes(float divisor) { return divisor >= 0x1p-60f && divisor <= 0x1p60f; }
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

// Every other word as a float, then the others.
KVX_INLINE Words encode(Words x, const Divisor &divisor) {
  const Floats magnitude = Floats(clamp(x, divisor.most));
  const Floats even = encode_quotient(magnitude << 16, divisor),
               odd = encode_quotient(magnitude & 0xffff0000u, divisor);
  return finish(Words(odd << 16 | even), x);
}

template <bool kStreaming, class Scale>
KVX_INLINE void encode_vectors(uint8_t *dst, const uint16_t *src, int64_t count,
                               const Scale &scale) {
  typedef uint64_t Register __attribute__((vector_size(64)));
  for (int64_t i = 0; i < count; i += 64) {
    const Words a = encode(*reinterpret_cast<const Words *>(src + i), scale),
                b = encode(*reinterpret_cast<const Words *>(src + i + 32), scale);
    const Register mixed = Register(_mm512_packus_epi16(__m512i(a), __m512i(b)));
    const Vector codes = Vector(__builtin_shufflevector(mixed, mixed, 0, 2, 4, 6, 1, 3, 5, 7));
    kStreaming ? store_streaming(dst + i, codes) : store(dst + i, codes);
  }
}

// As many elements as fill vectors. Returns how many.
KVX_INLINE int64_t bf16_to_e4m3(void *dst, const void *src, int64_t count, float divisor,
                                bool streaming) {
  auto *to = static_cast<uint8_t *>(dst);
  const auto *from = static_cast<const uint16_t *>(src);
  const bool streams = streaming && bytes_to_alignment(to) == 0;
  count &= -64;
  const auto encode_all = [&](const auto &scale) __attribute__((always_inline)) {
    streams ? encode_vectors<true>(to, from, count, scale)
            : encode_vectors<false>(to, from, count, scale);
    return count;
  };
  if (divisor == 1.0f) return encode_all(Unscaled{});
  return Divisor::takes(divisor) ? encode_all(Divisor(divisor)) : 0;
}
