// Units of 32 numbers in registers: the arithmetic of their codecs, which compilers do not turn
// into vectors by themselves. Included by kernels.inl.

// The numbers of a unit; NaN is 0. Lane l of vector i has number i * kLanes + l or, of pairs, those
// at even places in one vector and those at odd ones in the next.
template <bool kPairs>
struct Unit32 {
  static constexpr int kVectors = 32 / kLanes;
  static constexpr bool kHasPairs = kPairs;
  LaneFloats vectors[kVectors];

  explicit KVX_MEMBER Unit32(const float *from) {
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) vectors[i] = load_lanes(from + i * kLanes);
    drop_nan();
  }
  template <class Format>
  explicit KVX_MEMBER Unit32(Halves<Format> from) {
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; i += 2) load_pair(vectors + i, from + i * kLanes);
    drop_nan();
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
    return fold_lanes(all, join);
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
  KVX_MEMBER void drop_nan() {
    each([](LaneFloats x) KVX_MEMBER { return LaneFloats(LaneInts(x) & (x == x)); });
  }
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
Unit32(const float *) -> Unit32<false>;
template <class Format>
Unit32(Halves<Format>) -> Unit32<true>;

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
KVX_INLINE float first_of(const Unit32<false> &numbers, const float *from, float wanted) {
  const int first = numbers.fold(
      [=](LaneFloats x, int at) KVX_MEMBER {
        return LaneFloats(LaneInts(x) & kMask) == wanted ? lane_numbers(at) : LaneInts{} + 31;
      },
      Unit32<false>::Least{});
  return zero_for_nan(from[first]);
}

// Stores the lowest bytes of 4 * kLanes integers, or of the first half of them: in the order of
// vectors or of pairs.
template <int kCount, bool kPairs>
KVX_INLINE void put_bytes(uint8_t *to, LaneInts a, LaneInts b, LaneInts c, LaneInts d) {
  typedef uint8_t Bytes __attribute__((vector_size(4 * kLanes)));
  auto bytes = Bytes((a & 255) | (b & 255) << 8 | (c & 255) << 16 | d << 24);
#if KVX_VECTOR_BYTES >= 32
  // Within 16 bytes first: that is one instruction, and so is the second step.
  if constexpr (kPairs) {
    bytes =
        __builtin_shufflevector(bytes, bytes, 0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15,
                                16, 17, 20, 21, 24, 25, 28, 29, 18, 19, 22, 23, 26, 27, 30, 31);
    typedef int64_t Eights __attribute__((vector_size(32)));
    bytes = Bytes(__builtin_shufflevector(Eights(bytes), Eights(bytes), 0, 2, 1, 3));
  } else {
    bytes =
        __builtin_shufflevector(bytes, bytes, 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15,
                                16, 20, 24, 28, 17, 21, 25, 29, 18, 22, 26, 30, 19, 23, 27, 31);
    bytes =
        Bytes(__builtin_shufflevector(LaneInts(bytes), LaneInts(bytes), 0, 4, 1, 5, 2, 6, 3, 7));
  }
#else
  if constexpr (kPairs)
    bytes =
        __builtin_shufflevector(bytes, bytes, 0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
  else
    bytes =
        __builtin_shufflevector(bytes, bytes, 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
#endif
  memcpy(to, &bytes, kCount);
}

// Cuts the numbers to levels and packs them.
template <int kBits, class Numbers>
KVX_INLINE void put_levels(uint8_t *levels, const Numbers &numbers) {
  constexpr float kMost = Levels<kBits>::kMost;
  constexpr int kVectors = Numbers::kVectors, kHalf = kVectors / 2;
  constexpr bool kPairs = Numbers::kHasPairs;
  LaneInts level[kVectors];
#pragma GCC unroll 8
  for (int i = 0; i < kVectors; ++i) {
    const LaneFloats x = numbers.vectors[i], positive = x > 0.0f ? x : LaneFloats{};
    // Of positive numbers, as integers: that is one instruction.
    const LaneInts most = LaneInts(LaneFloats{} + kMost), bits = LaneInts(positive);
    level[i] = __builtin_convertvector(LaneFloats(bits < most ? bits : most), LaneInts);
  }
  uint8_t *const fours = levels + Levels<kBits>::kFifth;
  const auto both = [&](int i) KVX_MEMBER { return (level[i] & 15) | level[i + kHalf] << 4; };
#if KVX_VECTOR_BYTES >= 32
  put_bytes<16, kPairs>(fours, both(0), both(1), LaneInts{}, LaneInts{});
#else
  put_bytes<16, kPairs>(fours, both(0), both(1), both(2), both(3));
#endif
  if constexpr (kBits == 5) {
    const int32_t fifth = numbers.fold(
        [&](LaneFloats, int at) KVX_MEMBER {
          const int i = at / kLanes, first = kPairs ? i / 2 * 2 * kLanes + i % 2 : at;
          LaneInts bits;
          for (int lane = 0; lane < kLanes; ++lane)
            bits[lane] = static_cast<int32_t>(1u << (first + (kPairs ? 2 * lane : lane)));
          return bits & (level[i] > 15);
        },
        typename Numbers::Either{});
    memcpy(levels, &fifth, sizeof fifth);
  }
}

// ---- encoding: the bounds of some units, then their scales, then their levels, so that divisions
// of one unit do not wait for those of another ----

KVX_INLINE Range bounds_of(Q8_0, const float *from) {
  return {0.0f, Unit32(from).largest_magnitude()};
}
template <int kBits>
KVX_INLINE Range bounds_of(AroundZero<kBits>, const float *from) {
  const Unit32 numbers(from);
  return {0.0f, first_of<0x7fffffff>(numbers, from, numbers.largest_magnitude())};
}
template <int kBits>
KVX_INLINE Range bounds_of(FromLeast<kBits>, const float *from) {
  const Unit32 numbers(from);
  const Range range = numbers.range();
  return {range.least == 0.0f ? first_of<-1>(numbers, from, 0.0f) : range.least, range.largest};
}
template <class Format>
KVX_INLINE Range bounds_of(Q8_0, Halves<Format> from) {
  const int16_t most = Halves32<Format>(from.at).largest_magnitude();
  return {0.0f, Format::decode(static_cast<uint16_t>(most))};
}
template <int kBits, class Format>
KVX_INLINE Range bounds_of(AroundZero<kBits>, Halves<Format> from) {
  const Halves32<Format> numbers(from.at);
  return {0.0f, zero_for_nan(from[numbers.first_of(numbers.largest_magnitude())])};
}
template <int kBits, class Format>
KVX_INLINE Range bounds_of(FromLeast<kBits>, Halves<Format> from) {
  const Halves32<Format> numbers(from.at);
  const Range range = numbers.range();
  return {range.least == 0.0f ? zero_for_nan(from[numbers.first_of(0)]) : range.least,
          range.largest};
}

// What UnitScale and F16::encode do, of a unit in each lane: compilers do not do so by themselves.
struct UnitScales {
  static KVX_MEMBER LaneInts magnitude(LaneFloats x) { return LaneInts(x) & 0x7fffffff; }
  static KVX_MEMBER LaneInts sign(LaneFloats x) {
    return LaneInts(x) & static_cast<int32_t>(kSign);
  }
  static KVX_MEMBER LaneFloats saturate(LaneFloats scale) {
    const LaneInts largest = sign(scale) | 0x477fe000;
    return LaneFloats(magnitude(scale) >= 0x477ff000 ? largest : LaneInts(scale));
  }
  static KVX_MEMBER LaneFloats inverse(LaneFloats scale) {
    const LaneFloats inverse = 1.0f / scale;
    return magnitude(inverse) < static_cast<int32_t>(kInfinity) ? inverse : LaneFloats{};
  }
  // Of saturated scales.
  static KVX_MEMBER LaneInts stored(LaneFloats scale) {
    return round_lanes<SmallFloat<10, -14>>(magnitude(scale)) | (sign(scale) >> 16 & 0x8000);
  }
};

// Of as many units as a vector has lanes: steps and least numbers as they are before they are
// stored.
struct Scale32 {
  LaneFloats step, least;
};

template <class Codec>
KVX_INLINE Scale32 scale_of(Codec, LaneFloats, LaneFloats most) {
  float last = 127.0f;  // what `most` becomes
  if constexpr (!std::is_same_v<Codec, Q8_0>) last = -static_cast<float>(Codec::kZero);
  return {UnitScales::saturate(most / last), LaneFloats{}};
}
template <int kBits>
KVX_INLINE Scale32 scale_of(FromLeast<kBits>, LaneFloats least, LaneFloats most) {
  const LaneFloats from = UnitScales::saturate(least);
  const LaneFloats width = most > from ? most - from : LaneFloats{};
  return {UnitScales::saturate(width / Levels<kBits>::kMost), from};
}

template <class Numbers>
KVX_INLINE void put_unit(Q8_0, uint8_t *unit, const Numbers &numbers, float inverse, float) {
  constexpr int kVectors = Numbers::kVectors;
  LaneInts rounded[kVectors];
#pragma GCC unroll 8
  for (int i = 0; i < kVectors; ++i) {
    const LaneInts bits = LaneInts(numbers.vectors[i] * inverse), size = bits & 0x7fffffff;
    const LaneInts most = LaneInts(LaneFloats{} + 127.0f), within = size < most ? size : most;
    const LaneInts sign = bits & static_cast<int32_t>(kSign);
    const LaneInts shifted = LaneInts(LaneFloats(within) + 0x1.fffffep-2f) | sign;
    rounded[i] = __builtin_convertvector(LaneFloats(shifted), LaneInts);
  }
#pragma GCC unroll 2
  for (int i = 0; i < kVectors; i += 4)
    put_bytes<4 * kLanes, Numbers::kHasPairs>(unit + 2 + i * kLanes, rounded[i], rounded[i + 1],
                                              rounded[i + 2], rounded[i + 3]);
}
template <int kBits, class Numbers>
KVX_INLINE void put_unit(AroundZero<kBits>, uint8_t *unit, Numbers numbers, float inverse, float) {
  constexpr float kMiddle = AroundZero<kBits>::kZero + 0.5f;
  numbers.each([=](LaneFloats x) KVX_MEMBER { return x * inverse + kMiddle; });
  put_levels<kBits>(unit + 2, numbers);
}
template <int kBits, class Numbers>
KVX_INLINE void put_unit(FromLeast<kBits>, uint8_t *unit, Numbers numbers, float inverse,
                         float least) {
  UnitScale::store(unit + 2, least);
  numbers.each([=](LaneFloats x) KVX_MEMBER { return (x - least) * inverse + 0.5f; });
  put_levels<kBits>(unit + 4, numbers);
}

// Encodes at most eight units.
template <class Codec, class From>
KVX_INLINE void encode_units(Codec codec, uint8_t *to, From from, int count) {
  constexpr int kVectors = 8 / kLanes;
  LaneFloats least[kVectors] = {}, most[kVectors] = {}, inverse[kVectors];
  LaneInts stored[kVectors];
  for (int i = 0; i < count; ++i) {
    const Range bounds = bounds_of(codec, from + 32 * i);
    least[i / kLanes][i % kLanes] = bounds.least, most[i / kLanes][i % kLanes] = bounds.largest;
  }
#pragma GCC unroll 2
  for (int i = 0; i < kVectors; ++i) {
    const Scale32 scale = scale_of(codec, least[i], most[i]);
    inverse[i] = UnitScales::inverse(scale.step), least[i] = scale.least;
    stored[i] = UnitScales::stored(scale.step);
  }
  for (int i = 0; i < count; ++i) {
    const int vector = i / kLanes, lane = i % kLanes;
    uint8_t *const unit = to + i * Codec::kBytes;
    const auto step = static_cast<uint16_t>(stored[vector][lane]);
    memcpy(unit, &step, sizeof step);
    put_unit(codec, unit, Unit32(from + 32 * i), inverse[vector][lane], least[vector][lane]);
  }
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

// Whether encode_q8_0 takes them, which x86 has.
template <class Codec>
constexpr bool kWithScalesAhead = KVX_VECTOR_BYTES >= 32 && std::is_same_v<Codec, Q8_0>;
template <class From>
void encode_q8_0(uint8_t *to, From from, int64_t units, int64_t ahead);
