// F32, F16 and BF16 to units of several numbers, without a pass that widens or copies them first.
// Included by kernels.inl.

template <class Codec>
void floats_to_units(void *dst, const void *src, int64_t count, const Conversion &how) {
  constexpr int64_t kNumbers = Unit<Codec>::kNumbers, kBytes = Unit<Codec>::kBytes;
  static_assert(kPiece % kNumbers == 0);
  auto *to = static_cast<uint8_t *>(dst);
  const auto *from = static_cast<const float *>(src);
  if constexpr (kWithScalesAhead<Codec>) return encode_q8_0(to, from, count / 32, how.ahead);
  for (int64_t n; count > 0; count -= n, from += n, to += n / kNumbers * kBytes) {
    n = std::min(count, kPiece);
    if (how.ahead)
      for (int64_t line = 0; line < n * 4; line += kLineBytes)
        prefetch(reinterpret_cast<const uint8_t *>(from) + how.ahead + line);
    VectorsOf<Codec>::encode(to, from, n);
  }
}

template <class Format, class Codec>
void halves_to_units(void *dst, const void *src, int64_t count, const Conversion &how) {
  constexpr int64_t kGroup = 8 * 32;
  Halves<Format> from = {static_cast<const uint16_t *>(src)};
  auto *to = static_cast<uint8_t *>(dst);
  if constexpr (kWithScalesAhead<Codec>) return encode_q8_0(to, from, count / 32, how.ahead);
  for (; count > 0; count -= kGroup, from = from + kGroup, to += 8 * Codec::kBytes) {
    const auto units = static_cast<int>((count < kGroup ? count : kGroup) / 32);
    if (how.ahead)
      for (int unit = 0; unit < units; ++unit)
        prefetch(reinterpret_cast<const uint8_t *>(from.at + 32 * unit) + how.ahead);
    encode_units(Codec{}, to, from, units);
  }
}

// The function of one of these three and a format, for the table of kernels; NULL: there is none.
template <class Src, class Codec>
constexpr ConvertRun to_units() {
  if constexpr (std::is_same_v<Codec, Opaque> || kIsScalar<Codec>)
    return nullptr;
  else if constexpr (std::is_same_v<Src, F32>)
    return floats_to_units<Codec>;
  else if constexpr (kInRegisters<Codec>)
    return halves_to_units<Src, Codec>;
  else
    return nullptr;
}
