// E2M1 from and to float32: units of MXFP4, and groups of F4_E2M1. Included by kernels.inl, after
// vectors.inl.

template <>
inline void decode_vector<MxFp4>(float *__restrict to, const uint8_t *__restrict from,
                                 int64_t numbers) {
  constexpr int kHalf = MxFp4::kNumbers / 2;
  for (int64_t n = 0; n < numbers; n += MxFp4::kNumbers, from += MxFp4::kBytes) {
    const float half_scale = MxFp4::half_scale(from[0]);
    for (int i = 0; i < kHalf; ++i) to[n + i] = MxFp4::decode(half_scale, from[1 + i] & 15u);
    for (int i = 0; i < kHalf; ++i) to[n + kHalf + i] = MxFp4::decode(half_scale, from[1 + i] >> 4);
  }
}

template <int kGroup>
KVX_INLINE void decode_groups(float *__restrict to, const uint8_t *__restrict q, int64_t groups,
                              const float *__restrict factors) {
  for (int64_t g = 0; g < groups; ++g, to += kGroup, q += kGroup / 2) {
    const float factor = factors[g];
    uint8_t codes[kGroup];
    for (int i = 0; i < kGroup / 2; ++i) codes[2 * i] = q[i] & 15, codes[2 * i + 1] = q[i] >> 4;
    for (int i = 0; i < kGroup; ++i) to[i] = E2m1::decode(codes[i]) * factor;
  }
}

template <int kGroup>
KVX_INLINE void encode_groups(uint8_t *__restrict to, float *__restrict scales,
                              const float *__restrict from, int64_t groups, kvx_dtype_t dtype,
                              const Fp4 &with) {
  for (int64_t g = 0; g < groups; ++g, from += kGroup, to += kGroup / 2) {
    int32_t most = 0;
    uint32_t codes[kGroup];
    for (int i = 0; i < kGroup; ++i) most = largest_magnitude(most, from[i]);
    scales[g] = with.find(most, dtype);
    const float inverse = with.inverse(scales[g]);
    for (int i = 0; i < kGroup; ++i) codes[i] = E2m1::encode(from[i] * inverse);
    for (int i = 0; i < kGroup / 2; ++i)
      to[i] = static_cast<uint8_t>(codes[2 * i] | codes[2 * i + 1] << 4);
  }
}

inline void fp4_decode(float *to, const uint8_t *q, int64_t groups, int64_t group,
                       const float *factors) {
  group == 16 ? decode_groups<16>(to, q, groups, factors)
              : decode_groups<32>(to, q, groups, factors);
}

inline void fp4_encode(uint8_t *to, float *scales, const float *from, int64_t groups, int64_t group,
                       kvx_dtype_t dtype, float tensor_scale) {
  const Fp4 with(tensor_scale);
  group == 16 ? encode_groups<16>(to, scales, from, groups, dtype, with)
              : encode_groups<32>(to, scales, from, groups, dtype, with);
}
