// Vectors of any format from and to float32: pairs of formats without a kernel of their own convert
// through it. Included by kernels.inl.

// Whether numbers of a unit come in runs that share a scale and lie alike: kRun, scale, level, value.
template <class Codec, class = void>
constexpr bool kHasRuns = false;
template <class Codec>
constexpr bool kHasRuns<Codec, std::void_t<decltype(Codec::kRun)>> = true;

template <class Codec>
void decode_vector(float *__restrict to, const uint8_t *__restrict from, int64_t numbers) {
  constexpr int kNumbers = Unit<Codec>::kNumbers;
  for (int64_t n = 0; n < numbers; n += kNumbers, from += Unit<Codec>::kBytes) {
    if constexpr (kHasRuns<Codec>) {
#pragma GCC unroll 16
      for (int run = 0; run < kNumbers / Codec::kRun; ++run) {
        const auto scale = Codec::scale(from, run);
        float *const first = to + n + run * Codec::kRun;
        for (int i = 0; i < Codec::kRun; ++i)
          first[i] = Codec::value(scale, Codec::level(from, run, i));
      }
    } else {
      for (int i = 0; i < kNumbers; ++i) to[n + i] = Unit<Codec>::decode(from, i);
    }
  }
}

template <class Codec>
void encode_vector(uint8_t *__restrict to, const float *__restrict from, int64_t numbers) {
  constexpr int kNumbers = Unit<Codec>::kNumbers;
  int64_t n = 0;
  if constexpr (kWide<Codec> != 0) {
    for (; n + kWide<Codec> <= numbers; n += kWide<Codec>)
      encode_wide(Codec{}, to + n / kNumbers * Codec::kBytes, from + n);
  }
  for (; kWide<Codec> != kNumbers && n < numbers; n += kNumbers)
    Unit<Codec>::encode(to + n / kNumbers * Unit<Codec>::kBytes, ValuesAt{from + n});
}

template <class Codec>
constexpr DecodeVector decoder_of() {
  if constexpr (std::is_same_v<Codec, Opaque>)
    return nullptr;
  else
    return decode_vector<Codec>;
}

template <class Codec>
constexpr EncodeVector encoder_of() {
  if constexpr (std::is_same_v<Codec, Opaque>)
    return nullptr;
  else
    return encode_vector<Codec>;
}
