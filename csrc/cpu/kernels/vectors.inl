// Vectors of any format from and to float32: pairs of formats without a kernel of their own convert
// through it. Included by kernels.inl.

// Whether numbers of a unit come in runs that share a scale and lie alike: kRun, scale, level,
// value.
template <class Codec, class = void>
constexpr bool kHasRuns = false;
template <class Codec>
constexpr bool kHasRuns<Codec, std::void_t<decltype(Codec::kRun)>> = true;

template <class Codec>
void decode_vector(float *__restrict to, const uint8_t *__restrict from, int64_t numbers) {
  constexpr int kNumbers = Unit<Codec>::kNumbers;
  for (int64_t n = 0; n < numbers; n += kNumbers, from += Unit<Codec>::kBytes, to += kNumbers) {
    if constexpr (std::is_same_v<Codec, Iq4Nl>) {
      decode_unit(Codec{}, to, from);
    } else if constexpr (kGetsLevels<Codec>) {
      uint8_t levels[kNumbers];
      get_levels(Codec{}, levels, from);
      // Units of 32 numbers have one scale: loops over 16 numbers are not always vectorised.
      constexpr int kRun = kNumbers == 32 ? 32 : Codec::kRun;
      for (int first = 0; first < kNumbers; first += kRun) {
        const auto scale = Codec::scale(from, first / kRun);
        for (int i = first; i < first + kRun; ++i) to[i] = Codec::value(scale, levels[i]);
      }
    } else if constexpr (kHasRuns<Codec>) {
#pragma GCC unroll 8
      for (int run = 0; run < kNumbers / Codec::kRun; ++run) {
        const auto scale = Codec::scale(from, run);
        for (int i = 0; i < Codec::kRun; ++i)
          to[run * Codec::kRun + i] = Codec::value(scale, Codec::level(from, run, i));
      }
    } else {
      for (int i = 0; i < kNumbers; ++i) to[i] = Unit<Codec>::decode(from, i);
    }
  }
}

template <class Codec>
void encode_vector(uint8_t *__restrict to, const float *__restrict from, int64_t numbers) {
  constexpr int kNumbers = Unit<Codec>::kNumbers, kBytes = Unit<Codec>::kBytes;
  if constexpr (kIsScalar<Codec>) return convert_each<F32, Codec>(to, from, numbers, Codec::encode);
  if constexpr (kWithScalesAhead<Codec>) return encode_q8_0(to, from, numbers / 32, 0);
  int64_t n = 0;
  if constexpr (kWide<Codec> != 0)
    for (; n + kWide<Codec> <= numbers; n += kWide<Codec>)
      encode_wide(Codec{}, to + n / kNumbers * kBytes, from + n);
  if constexpr (kInRegisters<Codec>) {
    for (; n < numbers; n += 8 * kNumbers) {
      const int64_t left = (numbers - n) / kNumbers;
      encode_units(Codec{}, to + n / kNumbers * kBytes, from + n,
                   static_cast<int>(std::min<int64_t>(left, 8)));
    }
  } else if constexpr (kWide<Codec> != kNumbers) {
    for (; n < numbers; n += kNumbers)
      Unit<Codec>::encode(to + n / kNumbers * kBytes, ValuesAt{from + n});
  }
}

// The functions of a format, for the table of kernels.
template <class Codec>
struct VectorsOf {
  static constexpr DecodeVector decode = decode_vector<Codec>;
  static constexpr EncodeVector encode = encode_vector<Codec>;
};
template <>
struct VectorsOf<Opaque> {
  static constexpr DecodeVector decode = nullptr;
  static constexpr EncodeVector encode = nullptr;
};
