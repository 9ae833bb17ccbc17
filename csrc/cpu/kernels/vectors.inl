// Vectors of any format from and to float32: pairs of formats without a kernel of their own convert
// through it. Included by kernels.inl.

template <class Codec>
void decode_vector(float *__restrict to, const uint8_t *__restrict from, int64_t numbers) {
  constexpr int kNumbers = Unit<Codec>::kNumbers;
  for (int64_t n = 0; n < numbers; n += kNumbers, from += Unit<Codec>::kBytes)
    for (int i = 0; i < kNumbers; ++i) to[n + i] = Unit<Codec>::decode(from, i);
}

template <class Codec>
void encode_vector(uint8_t *__restrict to, const float *__restrict from, int64_t numbers) {
  constexpr int kNumbers = Unit<Codec>::kNumbers;
  for (int64_t n = 0; n < numbers; n += kNumbers, to += Unit<Codec>::kBytes)
    Unit<Codec>::encode(to, ValuesAt{from + n});
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
