// Converting a contiguous run of elements; plain loops that the compiler vectorises.
// Included by kernels.inl.

template <class Src, class Dst, class Map>
KVX_INLINE void convert_each(void *dst, const void *src, int64_t count, Map map) {
  auto *__restrict to = static_cast<typename Dst::Bits *>(dst);
  const auto *__restrict from = static_cast<const typename Src::Bits *>(src);
  for (int64_t i = 0; i < count; ++i) to[i] = map(Src::decode(from[i]));
}

template <class Src, class Dst>
KVX_INLINE void compute_run(void *dst, const void *src, int64_t count, const Scaling &scaling) {
  const auto [scale, divisor] = scaling;
  const auto convert = [=](auto map) __attribute__((always_inline)) {
    convert_each<Src, Dst>(dst, src, count, map);
  };
  if (scale == 1.0f && divisor == 1.0f) {
    constexpr bool exact = std::is_same_v<Dst, Bf16> && sizeof(typename Src::Bits) == 1;
    if constexpr (exact) return convert([](float x) { return Bf16::encode_exact(x); });
    convert([](float x) { return Dst::encode(x); });
  } else if (has_exact_inverse(divisor)) {
    const float inverse = 1.0f / divisor;
    convert([=](float x) { return Dst::encode(x * scale * inverse); });
  } else {
    convert([=](float x) { return Dst::encode(x * scale / divisor); });
  }
}

constexpr int64_t kPiece = 512;  // elements

// Converts at most kPiece elements. Streaming stores need whole vectors, which are computed in a
// buffer first: that pays off if the conversion is cheap.
template <class Src, class Dst>
KVX_INLINE void compute_piece(uint8_t *dst, const void *src, int64_t count, const Conversion &how) {
  constexpr bool is_light = !std::is_same_v<Src, F16> && sizeof(typename Src::Bits) > 1;
  const int64_t num_bytes = count * static_cast<int64_t>(sizeof(typename Dst::Bits));
  if (!is_light || !how.streaming || bytes_to_alignment(dst) || num_bytes % KVX_VECTOR_BYTES)
    return compute_run<Src, Dst>(dst, src, count, how.scaling);
  alignas(64) typename Dst::Bits stage[kPiece];
  compute_run<Src, Dst>(stage, src, count, how.scaling);
  stream_vectors(dst, reinterpret_cast<const uint8_t *>(stage), num_bytes, {0, 0});
}

#if KVX_VECTOR_BYTES == 64
// Converts the elements of a run for which there is a faster way than computing each; returns their
// number.
template <class Src, class Dst>
KVX_INLINE int64_t convert_vectors(uint8_t *dst, const uint8_t *src, int64_t count,
                                   const Conversion &how) {
  constexpr bool bf16_to_e4m3 = std::is_same_v<Src, Bf16> && std::is_same_v<Dst, E4m3>;
  if (count < 64) return 0;
#if KVX_VBMI
  constexpr bool from_fp8 = sizeof(typename Src::Bits) == 1;
  constexpr bool to_fp8 = sizeof(typename Dst::Bits) == 1;
  if constexpr (from_fp8 && !std::is_same_v<Dst, F32>) {
    if (const auto *decoder = coder_for<Decoder<Src, Dst>>(how))
      return look_up(dst, src, count, *decoder, how.streaming, how.ahead);
  }
  if constexpr (from_fp8 && std::is_same_v<Dst, Bf16>) {
    if (Multiplier<Src>::takes(how.scaling))
      return look_up(dst, src, count, Multiplier<Src>(how.scaling), how.streaming, how.ahead);
  }
  if constexpr (from_fp8) {  // every FP8 number is a BF16 number
    alignas(64) Bf16::Bits exact[kPiece];
    auto *const stage = reinterpret_cast<uint8_t *>(exact);
    count &= -64;
    for (int64_t i = 0, n; i < count; i += n) {
      n = look_up(stage, src + i, std::min(count - i, kPiece), unit<Decoder<Src, Bf16>>(), false,
                  how.ahead);
      compute_run<Bf16, Dst>(dst + i * static_cast<int64_t>(sizeof(typename Dst::Bits)), exact, n,
                             how.scaling);
    }
    return count;
  }
  if constexpr (std::is_same_v<Src, Bf16> && to_fp8) {
    if constexpr (bf16_to_e4m3) {
      const auto *shifter = Shifter::takes(how.scaling) ? coder_for<Shifter>(how) : nullptr;
      if (shifter) return look_up(dst, src, count, *shifter, how.streaming, how.ahead);
    }
    // Short runs keep tables in registers for too short a time.
    const bool repays = Encoder<Dst>::takes(how.scaling) && (count >= 256 || !bf16_to_e4m3);
    const auto *encoder = repays ? coder_for<Encoder<Dst>>(how) : nullptr;
    if (encoder) return look_up(dst, src, count, *encoder, how.streaming, how.ahead);
  }
#endif
  if constexpr (bf16_to_e4m3)
    if (Divisor::takes(how.scaling)) return divide_to_e4m3(dst, src, count, how);
  return 0;
}
#endif

template <class Src, class Dst>
void convert_run(void *dst, const void *src, int64_t count, const Conversion &how) {
  auto *to = static_cast<typename Dst::Bits *>(dst);
  const auto *from = static_cast<const typename Src::Bits *>(src);
#if KVX_VECTOR_BYTES == 64
  const int64_t done = convert_vectors<Src, Dst>(
      reinterpret_cast<uint8_t *>(to), reinterpret_cast<const uint8_t *>(from), count, how);
  to += done, from += done, count -= done;
#endif
  // Works in pieces and fetches the next source between them.
  for (int64_t i = 0; i < count; i += kPiece) {
    const int64_t n = std::min(count - i, kPiece);
    const auto *piece = reinterpret_cast<const uint8_t *>(from + i);
    if (how.ahead)
      for (int64_t line = 0; line < n * static_cast<int64_t>(sizeof *from); line += kLineBytes)
        prefetch(piece + how.ahead + line);
    compute_piece<Src, Dst>(reinterpret_cast<uint8_t *>(to + i), from + i, n, how);
  }
}

// The function that converts rows with scales of their own, for the table of kernels; NULL: there
// is no better way than a call for each.
template <class Src, class Dst>
constexpr ConvertRows rows_of() {
#if KVX_VECTOR_BYTES == 64
  if constexpr (std::is_same_v<Src, Bf16> && std::is_same_v<Dst, E4m3>) return divide_rows;
#endif
#if KVX_VBMI
  if constexpr (sizeof(typename Src::Bits) == 1 && std::is_same_v<Dst, Bf16>)
    return decode_rows<Src>;
#endif
  return nullptr;
}
