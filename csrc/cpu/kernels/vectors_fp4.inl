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

// E2m1::decode, a number in each lane.
KVX_INLINE LaneFloats from_e2m1(const uint8_t *codes) {
  typedef uint8_t Bytes __attribute__((vector_size(kLanes), aligned(1), may_alias));
  const LaneInts code = __builtin_convertvector(*reinterpret_cast<const Bytes *>(codes), LaneInts);
  return LaneFloats(widen_lanes<E2m1::Magnitude>(code & 7) | (code & 8) << 28);
}

// Decodes at most eight groups.
template <int kGroup>
KVX_INLINE void decode_groups(float *__restrict to, const uint8_t *__restrict q, int groups,
                              const float *__restrict factors) {
  typedef LaneFloats Unaligned __attribute__((aligned(4), may_alias));
  uint8_t codes[8 * kGroup];
  for (int i = 0; i < groups * kGroup / 2; ++i) {
    const auto pair = static_cast<uint16_t>((q[i] | q[i] << 4) & 0x0f0f);
    memcpy(codes + 2 * i, &pair, sizeof pair);
  }
  for (int g = 0; g < groups; ++g) {
#pragma GCC unroll 8
    for (int i = g * kGroup; i < (g + 1) * kGroup; i += kLanes)
      *reinterpret_cast<Unaligned *>(to + i) = from_e2m1(codes + i) * factors[g];
  }
}

// E2m1::encode, a number in each lane.
KVX_INLINE LaneInts to_e2m1(LaneFloats x) {
  constexpr auto kLargest = static_cast<int32_t>(E2m1::kLargest);
  const LaneInts bits = LaneInts(x), magnitude = bits & 0x7fffffff;
  const LaneInts within = magnitude < kLargest ? magnitude : LaneInts{} + kLargest;
  const LaneInts code = round_lanes<E2m1::Magnitude>(within) | (bits >> 28 & 8);
  return code & (magnitude <= static_cast<int32_t>(kInfinity));
}

// Fp4::find and Fp4::inverse, of a group in each lane.
KVX_INLINE LaneFloats find_scales(LaneInts most, kvx_dtype_t dtype, const Fp4 &with) {
  constexpr auto kInfinite = static_cast<int32_t>(kInfinity);
  const LaneInts finite = most < kInfinite ? most : LaneInts{} + (kInfinite - 1);
  const LaneFloats sixth = LaneFloats(finite) * (1.0f / 6.0f);
  if (dtype == KVX_DTYPE_F8_E4M3) {
    const LaneInts bits = LaneInts(sixth * with.times()), magnitude = bits & 0x7fffffff;
    const LaneInts within = magnitude < 0x43e00000 ? magnitude : LaneInts{} + 0x43e00000;  // 448
    const LaneInts code = round_lanes<E4m3::Magnitude>(within);
    const LaneInts number = widen_lanes<E4m3::Magnitude>(code);
    const LaneInts or_nan = magnitude > kInfinite ? LaneInts{} + 0x7fc00000 : number;
    return LaneFloats(or_nan | (bits & static_cast<int32_t>(kSign)));
  }
  const LaneInts least = LaneInts(LaneFloats{} + 0x1p-126f), bits = LaneInts(sixth);
  return LaneFloats(((bits > least ? bits : least) + 0x7fffff) & kInfinite);
}
KVX_INLINE LaneFloats inverse_of(LaneFloats scale, const Fp4 &with) {
  const LaneFloats inverse = 1.0f / (scale * with.over());
  const LaneInts bits = LaneInts(inverse);
  return LaneFloats(bits & (bits >= 0) & (bits < static_cast<int32_t>(kInfinity)));
}

template <int kGroup>
KVX_INLINE int32_t most_of(const float *from) {
  const auto magnitude = [&](int i) KVX_MEMBER {
    const LaneInts size = LaneInts(load_lanes(from + i)) & 0x7fffffff;
    return size & (size <= static_cast<int32_t>(kInfinity));
  };
  LaneInts most = magnitude(0);
#pragma GCC unroll 8
  for (int i = kLanes; i < kGroup; i += kLanes) {
    const LaneInts next = magnitude(i);
    most = most > next ? most : next;
  }
  return fold_lanes(most, Unit32<false>::Most{});
}

// As MxFp4 rounds: ties go towards 0, which has one sign.
KVX_INLINE LaneInts to_mxfp4(LaneFloats x) {
  const LaneInts bits = LaneInts(x), size = bits & 0x7fffffff;
  const LaneInts above = (size > 0x3e800000) + (size > 0x3f400000) + (size > 0x3fa00000) +
                         (size > 0x3fe00000) + (size > 0x40200000) + (size > 0x40600000) +
                         (size > 0x40a00000);  // 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5
  const LaneInts sign = bits >> 28 & 8 & (size > 0x3e800000);
  return (sign - above) & (size <= static_cast<int32_t>(kInfinity));
}

template <>
inline void encode_vector<MxFp4>(uint8_t *__restrict to, const float *__restrict from,
                                 int64_t numbers) {
  for (int64_t n = 0; n < numbers; n += 32, from += 32, to += MxFp4::kBytes) {
    const uint32_t e = MxFp4::exponent_of(most_of<32>(from));
    const float inverse = MxFp4::inverse(e);
    const auto both = [&](int vector) KVX_MEMBER {
      const float *const at = from + vector * kLanes;
      return to_mxfp4(load_lanes(at) * inverse) | to_mxfp4(load_lanes(at + 16) * inverse) << 4;
    };
    to[0] = static_cast<uint8_t>(e);
#if KVX_VECTOR_BYTES >= 32
    put_bytes<16, false>(to + 1, both(0), both(1), LaneInts{}, LaneInts{});
#else
    put_bytes<16, false>(to + 1, both(0), both(1), both(2), both(3));
#endif
  }
}

// Encodes at most eight groups, so that divisions of one do not wait for those of another.
template <int kGroup>
KVX_INLINE void encode_groups(uint8_t *__restrict to, float *__restrict scales,
                              const float *__restrict from, int groups, kvx_dtype_t dtype,
                              const Fp4 &with) {
  constexpr int kVectors = 8 / kLanes;
  LaneInts most[kVectors] = {};
  LaneFloats scale[kVectors], inverse[kVectors];
  for (int g = 0; g < groups; ++g)
    most[g / kLanes][g % kLanes] = most_of<kGroup>(from + g * kGroup);
#pragma GCC unroll 2
  for (int i = 0; i < kVectors; ++i) {
    scale[i] = find_scales(most[i], dtype, with);
    inverse[i] = inverse_of(scale[i], with);
  }
  memcpy(scales, scale, static_cast<size_t>(groups) * sizeof *scales);
  uint8_t codes[8 * kGroup];
  for (int g = 0; g < groups; ++g) {
    const float by = inverse[g / kLanes][g % kLanes];
#pragma GCC unroll 2
    for (int i = g * kGroup; i < (g + 1) * kGroup; i += 16) {
      const auto code = [&](int vector) KVX_MEMBER {
        return to_e2m1(load_lanes(from + i + vector * kLanes) * by);
      };
#if KVX_VECTOR_BYTES >= 32
      put_bytes<16, false>(codes + i, code(0), code(1), LaneInts{}, LaneInts{});
#else
      put_bytes<16, false>(codes + i, code(0), code(1), code(2), code(3));
#endif
    }
  }
  for (int i = 0; i < groups * kGroup / 2; ++i) {
    uint16_t pair;
    memcpy(&pair, codes + 2 * i, sizeof pair);
    to[i] = static_cast<uint8_t>(pair | pair >> 4);
  }
}

// Calls of(first, count) for at most eight groups at a time.
template <class Of>
KVX_INLINE void by_eight(int64_t groups, Of of) {
  for (int64_t g = 0; g < groups; g += 8) of(g, static_cast<int>(groups - g < 8 ? groups - g : 8));
}

template <int kGroup>
KVX_INLINE void decode_all(float *to, const uint8_t *q, int64_t groups, const float *factors) {
  by_eight(groups, [=](int64_t g, int some) KVX_MEMBER {
    decode_groups<kGroup>(to + g * kGroup, q + g * kGroup / 2, some, factors + g);
  });
}
template <int kGroup>
KVX_INLINE void encode_all(uint8_t *to, float *scales, const float *from, int64_t groups,
                           kvx_dtype_t dtype, const Fp4 &with) {
  by_eight(groups, [=, &with](int64_t g, int some) KVX_MEMBER {
    encode_groups<kGroup>(to + g * kGroup / 2, scales + g, from + g * kGroup, some, dtype, with);
  });
}

inline void fp4_decode(float *to, const uint8_t *q, int64_t groups, int64_t group,
                       const float *factors) {
  group == 16 ? decode_all<16>(to, q, groups, factors) : decode_all<32>(to, q, groups, factors);
}

inline void fp4_encode(uint8_t *to, float *scales, const float *from, int64_t groups, int64_t group,
                       kvx_dtype_t dtype, float tensor_scale) {
  const Fp4 with(tensor_scale);
  group == 16 ? encode_all<16>(to, scales, from, groups, dtype, with)
              : encode_all<32>(to, scales, from, groups, dtype, with);
}
