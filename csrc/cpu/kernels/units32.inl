// Units of 32 numbers in registers: the arithmetic of their codecs, which compilers do not turn
// into vectors by themselves. Included by kernels.inl.

// The numbers of a unit; NaN is 0.
struct Unit32 {
  static constexpr int kVectors = 32 / kLanes;
  LaneFloats vectors[kVectors];

  explicit KVX_MEMBER Unit32(const float *from) {
    typedef LaneFloats Unaligned __attribute__((aligned(4), may_alias));
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) {
      const LaneFloats x = *reinterpret_cast<const Unaligned *>(from + i * kLanes);
      vectors[i] = LaneFloats(LaneInts(x) & (x == x));
    }
  }

  template <class Map>
  KVX_MEMBER void each(Map map) {
#pragma GCC unroll 8
    for (LaneFloats &x : vectors) x = map(x);
  }

  // Joins map(x, first) of each vector, whose first number has that index, and all its lanes.
  template <class Map, class Join>
  KVX_MEMBER int32_t fold(Map map, Join join) const {
    LaneInts all = map(vectors[0], 0);
#pragma GCC unroll 8
    for (int i = 1; i < kVectors; ++i) all = join(all, map(vectors[i], i * kLanes));
#if KVX_VECTOR_BYTES >= 32
    all = join(all, __builtin_shufflevector(all, all, 4, 5, 6, 7, 0, 1, 2, 3));
    all = join(all, __builtin_shufflevector(all, all, 2, 3, 0, 1, 6, 7, 4, 5));
    all = join(all, __builtin_shufflevector(all, all, 1, 0, 3, 2, 5, 4, 7, 6));
#else
    all = join(all, __builtin_shufflevector(all, all, 2, 3, 0, 1));
    all = join(all, __builtin_shufflevector(all, all, 1, 0, 3, 2));
#endif
    return all[0];
  }

  KVX_MEMBER float largest_magnitude() const {
    return float_of(static_cast<uint32_t>(fold(Magnitude{}, Most{})));
  }
  KVX_MEMBER Range range() const {
    const int32_t least = fold(Ordered{}, Least{}), largest = fold(Ordered{}, Most{});
    return {number(least), number(largest)};
  }

  struct Most {
    KVX_MEMBER LaneInts operator()(LaneInts a, LaneInts b) const { return a > b ? a : b; }
  };
  struct Least {
    KVX_MEMBER LaneInts operator()(LaneInts a, LaneInts b) const { return a < b ? a : b; }
  };
  struct Either {
    KVX_MEMBER LaneInts operator()(LaneInts a, LaneInts b) const { return a | b; }
  };

 private:
  struct Magnitude {
    KVX_MEMBER LaneInts operator()(LaneFloats x, int) const { return LaneInts(x) & 0x7fffffff; }
  };
  // Integers whose order is that of the numbers.
  struct Ordered {
    KVX_MEMBER LaneInts operator()(LaneFloats x, int) const {
      return LaneInts(x) ^ (LaneInts(x) >> 31 & 0x7fffffff);
    }
  };
  static KVX_MEMBER float number(int32_t ordered) {
    return float_of(static_cast<uint32_t>(ordered ^ (ordered >> 31 & 0x7fffffff)));
  }
};

// The index of each lane, plus `first`.
KVX_INLINE LaneInts lane_numbers(int first) {
#if KVX_VECTOR_BYTES >= 32
  return LaneInts{0, 1, 2, 3, 4, 5, 6, 7} + first;
#else
  return LaneInts{0, 1, 2, 3} + first;
#endif
}

// The first number, or magnitude, that equals `wanted`, which one does. kMask leaves the sign or
// not.
template <int32_t kMask>
KVX_INLINE float first_of(const Unit32 &numbers, const float *from, float wanted) {
  const int first = numbers.fold(
      [=](LaneFloats x, int at) KVX_MEMBER {
        return LaneFloats(LaneInts(x) & kMask) == wanted ? lane_numbers(at) : LaneInts{} + 31;
      },
      Unit32::Least{});
  return zero_for_nan(from[first]);
}

// Stores the lowest bytes of 4 * kLanes integers, or of the first half of them.
template <int kCount>
KVX_INLINE void put_bytes(uint8_t *to, LaneInts a, LaneInts b, LaneInts c, LaneInts d) {
  typedef uint8_t Bytes __attribute__((vector_size(4 * kLanes)));
  const auto mixed = Bytes((a & 255) | (b & 255) << 8 | (c & 255) << 16 | d << 24);
#if KVX_VECTOR_BYTES >= 32
  const Bytes bytes =
      __builtin_shufflevector(mixed, mixed, 0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25,
                              29, 2, 6, 10, 14, 18, 22, 26, 30, 3, 7, 11, 15, 19, 23, 27, 31);
#else
  const Bytes bytes =
      __builtin_shufflevector(mixed, mixed, 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
#endif
  memcpy(to, &bytes, kCount);
}

// Cuts the numbers to levels and packs them.
template <int kBits>
KVX_INLINE void put_levels(uint8_t *levels, const Unit32 &numbers) {
  constexpr float kMost = Levels<kBits>::kMost;
  constexpr int kHalf = Unit32::kVectors / 2;
  LaneInts level[Unit32::kVectors];
#pragma GCC unroll 8
  for (int i = 0; i < Unit32::kVectors; ++i) {
    const LaneFloats x = numbers.vectors[i], positive = x > 0.0f ? x : LaneFloats{};
    const LaneFloats within = positive < kMost ? positive : LaneFloats{} + kMost;
    level[i] = __builtin_convertvector(within, LaneInts);
  }
  uint8_t *const fours = levels + Levels<kBits>::kFifth;
  const auto both = [&](int i) KVX_MEMBER { return (level[i] & 15) | level[i + kHalf] << 4; };
#if KVX_VECTOR_BYTES >= 32
  put_bytes<16>(fours, both(0), both(1), LaneInts{}, LaneInts{});
#else
  put_bytes<16>(fours, both(0), both(1), both(2), both(3));
#endif
  if constexpr (kBits == 5) {
    const int32_t fifth = numbers.fold(
        [&](LaneFloats, int at) KVX_MEMBER {
          LaneInts bits;
          for (int lane = 0; lane < kLanes; ++lane)
            bits[lane] = static_cast<int32_t>(1u << (at + lane));
          return bits & (level[at / kLanes] > 15);
        },
        Unit32::Either{});
    memcpy(levels, &fifth, sizeof fifth);
  }
}

// ---- encoding: the bounds of some units, then their scales, then their levels, so that divisions
// of one unit do not wait for those of another ----

KVX_INLINE Range bounds_of(Q8_0, const Unit32 &numbers, const float *) {
  return {0.0f, numbers.largest_magnitude()};
}
template <int kBits>
KVX_INLINE Range bounds_of(AroundZero<kBits>, const Unit32 &numbers, const float *from) {
  return {0.0f, first_of<0x7fffffff>(numbers, from, numbers.largest_magnitude())};
}
template <int kBits>
KVX_INLINE Range bounds_of(FromLeast<kBits>, const Unit32 &numbers, const float *from) {
  const Range range = numbers.range();
  return {range.least == 0.0f ? first_of<-1>(numbers, from, 0.0f) : range.least, range.largest};
}

// Steps as they are before they are stored, their inverses, and the least numbers.
struct Scale32 {
  float step, inverse, least;
};

KVX_INLINE float step_of(Q8_0, const Range &of) { return UnitScale::saturate(of.largest / 127.0f); }
template <int kBits>
KVX_INLINE float step_of(AroundZero<kBits>, const Range &of) {
  return UnitScale::saturate(of.largest / -static_cast<float>(AroundZero<kBits>::kZero));
}
template <class Codec>
KVX_INLINE Scale32 scale_of(Codec codec, const Range &of) {
  const float step = step_of(codec, of);
  return {step, UnitScale::inverse(step), 0.0f};
}
template <int kBits>
KVX_INLINE Scale32 scale_of(FromLeast<kBits>, const Range &of) {
  const auto [step, least] = FromLeast<kBits>::scale_of(of);
  return {step, UnitScale::inverse(step), least};
}

KVX_INLINE void put_unit(Q8_0, uint8_t *unit, const Unit32 &numbers, const Scale32 &scale) {
  UnitScale::store(unit, scale.step);
  LaneInts rounded[Unit32::kVectors];
#pragma GCC unroll 8
  for (int i = 0; i < Unit32::kVectors; ++i) {
    const LaneFloats x = numbers.vectors[i] * scale.inverse;
    const LaneInts sign = LaneInts(x) & static_cast<int32_t>(kSign);
    const LaneFloats magnitude = LaneFloats(LaneInts(x) & 0x7fffffff);
    const LaneFloats within = magnitude < 127.0f ? magnitude : LaneFloats{} + 127.0f;
    const LaneInts shifted = LaneInts(within + 0x1.fffffep-2f) | sign;
    rounded[i] = __builtin_convertvector(LaneFloats(shifted), LaneInts);
  }
#pragma GCC unroll 2
  for (int i = 0; i < Unit32::kVectors; i += 4)
    put_bytes<4 * kLanes>(unit + 2 + i * kLanes, rounded[i], rounded[i + 1], rounded[i + 2],
                          rounded[i + 3]);
}
template <int kBits>
KVX_INLINE void put_unit(AroundZero<kBits>, uint8_t *unit, Unit32 numbers, const Scale32 &scale) {
  constexpr float kMiddle = AroundZero<kBits>::kZero + 0.5f;
  const float inverse = scale.inverse;
  UnitScale::store(unit, scale.step);
  numbers.each([=](LaneFloats x) KVX_MEMBER { return x * inverse + kMiddle; });
  put_levels<kBits>(unit + 2, numbers);
}
template <int kBits>
KVX_INLINE void put_unit(FromLeast<kBits>, uint8_t *unit, Unit32 numbers, const Scale32 &scale) {
  const float least = scale.least, inverse = scale.inverse;
  UnitScale::store(unit, scale.step);
  UnitScale::store(unit + 2, least);
  numbers.each([=](LaneFloats x) KVX_MEMBER { return (x - least) * inverse + 0.5f; });
  put_levels<kBits>(unit + 4, numbers);
}

// Encodes at most eight units.
template <class Codec>
KVX_INLINE void encode_units(Codec codec, uint8_t *to, const float *from, int count) {
  Range bounds[8];
  Scale32 scales[8];
  for (int i = 0; i < count; ++i)
    bounds[i] = bounds_of(codec, Unit32(from + 32 * i), from + 32 * i);
  for (int i = 0; i < count; ++i) scales[i] = scale_of(codec, bounds[i]);
  for (int i = 0; i < count; ++i)
    put_unit(codec, to + i * Codec::kBytes, Unit32(from + 32 * i), scales[i]);
}

// ---- levels of a unit as bytes, where that is faster than taking them from it one by one ----

typedef uint8_t Sixteen __attribute__((vector_size(16)));

// Stored at once where a register holds them: loads then need not wait for two stores.
KVX_INLINE void put_halves(uint8_t *to, Sixteen low, Sixteen high) {
#if KVX_VECTOR_BYTES >= 32
  const auto both =
      __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16,
                              17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31);
  memcpy(to, &both, sizeof both);
#else
  memcpy(to, &low, sizeof low);
  memcpy(to + sizeof low, &high, sizeof high);
#endif
}
KVX_INLINE Sixteen load_sixteen(const uint8_t *from) {
  Sixteen bytes;
  memcpy(&bytes, from, sizeof bytes);
  return bytes;
}
KVX_INLINE void halves_of(uint8_t *to, const uint8_t *from) {
  const Sixteen bytes = load_sixteen(from);
  put_halves(to, bytes & 15, bytes >> 4);
}
KVX_INLINE void get_levels(Q4_0, uint8_t *to, const uint8_t *unit) { halves_of(to, unit + 2); }
KVX_INLINE void get_levels(Q4_1, uint8_t *to, const uint8_t *unit) { halves_of(to, unit + 4); }
KVX_INLINE void get_levels(Q6_K, uint8_t *__restrict to, const uint8_t *__restrict unit) {
  for (int half = 0; half < 2; ++half, to += 128) {
    const uint8_t *const low = unit + 64 * half, *const high = unit + Q6_K::kHigh + 32 * half;
    for (int i = 0; i < 32; ++i) {
      to[i] = static_cast<uint8_t>((low[i] & 15) | (high[i] << 4 & 48));
      to[32 + i] = static_cast<uint8_t>((low[32 + i] & 15) | (high[i] << 2 & 48));
      to[64 + i] = static_cast<uint8_t>(low[i] >> 4 | (high[i] & 48));
      to[96 + i] = static_cast<uint8_t>(low[32 + i] >> 4 | (high[i] >> 2 & 48));
    }
  }
}
template <class Codec>
constexpr bool kGetsLevels = false;
template <>
constexpr bool kGetsLevels<Q4_0> = true;
template <>
constexpr bool kGetsLevels<Q4_1> = true;
template <>
constexpr bool kGetsLevels<Q6_K> = true;

// Looks steps up, 16 at a time.
KVX_INLINE void decode_unit(Iq4Nl, float *__restrict to, const uint8_t *__restrict unit) {
  Sixteen steps;
  for (int level = 0; level < 16; ++level)
    steps[level] = static_cast<uint8_t>(Iq4Nl::step_of(level));
  const Sixteen bytes = load_sixteen(unit + 2);
  int8_t found[32];
  put_halves(reinterpret_cast<uint8_t *>(found), __builtin_shuffle(steps, bytes & 15),
             __builtin_shuffle(steps, bytes >> 4));
  const float scale = UnitScale::load(unit);
  for (int i = 0; i < 32; ++i) to[i] = scale * static_cast<float>(found[i]);
}

// Whether encode_units takes units of the codec.
template <class Codec>
constexpr bool kInRegisters = false;
template <>
constexpr bool kInRegisters<Q8_0> = true;
template <int kBits>
constexpr bool kInRegisters<AroundZero<kBits>> = true;
template <int kBits>
constexpr bool kInRegisters<FromLeast<kBits>> = true;
