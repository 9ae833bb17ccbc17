// TurboQuant's units from and to float32. Included by kernels.inl, after vectors.inl. Spec: E.20

template <int kBits>
constexpr turboquant::Book kUnitBook = turboquant::book(TurboQuant<kBits>::kNumbers, kBits);

template <int kBits>
void decode_turboquant(float *to, const uint8_t *from, int64_t numbers) {
  using Codec = TurboQuant<kBits>;
  for (int64_t n = 0; n < numbers; n += Codec::kNumbers, from += Codec::kBytes)
    turboquant_decode(to + n, from, nullptr, get_half(from + Codec::kNorm), kUnitBook<kBits>);
}

template <int kBits>
void encode_turboquant(uint8_t *to, const float *from, int64_t numbers) {
  using Codec = TurboQuant<kBits>;
  for (int64_t n = 0; n < numbers; n += Codec::kNumbers, to += Codec::kBytes) {
    const float norm = turboquant_encode(to, nullptr, from + n, kUnitBook<kBits>);
    put_half(to + Codec::kNorm, UnitScale::saturate(norm));
  }
}

template <int kBits>
struct VectorsOf<TurboQuant<kBits>> {
  static constexpr DecodeVector decode = decode_turboquant<kBits>;
  static constexpr EncodeVector encode = encode_turboquant<kBits>;
};
