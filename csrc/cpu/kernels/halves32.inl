// Units of 32 numbers that are F16 or BF16: they are widened in registers, and compared as integers
// of 16 bits before that. Included by kernels.inl.

// Where such numbers are.
template <class Format>
struct Halves {
  const uint16_t *at;

  KVX_MEMBER Halves operator+(int64_t numbers) const { return {at + numbers}; }
  KVX_MEMBER float operator[](int i) const { return Format::decode(at[i]); }
};

KVX_INLINE LaneFloats widen(Bf16, LaneInts bits) { return LaneFloats(bits << 16); }
// As F16::decode, but that a NaN keeps its quiet bit.
KVX_INLINE LaneFloats widen(F16, LaneInts bits) {
  const LaneInts magnitude = bits & 0x7fff, finite = widen_lanes<SmallFloat<10, -14>>(magnitude);
  const LaneInts special = magnitude << 13 | static_cast<int32_t>(kInfinity);
  return LaneFloats((magnitude < 0x7c00 ? finite : special) | (bits & 0x8000) << 16);
}

// The numbers at even places of the next 2 * kLanes, and those at odd ones: that needs no shuffle.
template <class Format>
KVX_INLINE void load_pair(LaneFloats *to, Halves<Format> from) {
  typedef LaneInts Unaligned __attribute__((aligned(2), may_alias));
  const LaneInts both = *reinterpret_cast<const Unaligned *>(from.at);
  const LaneInts high = both & static_cast<int32_t>(0xffff0000u);
  to[0] = widen(Format{}, both & 0xffff);
  to[1] = std::is_same_v<Format, Bf16> ? LaneFloats(high) : widen(Format{}, high >> 16 & 0xffff);
}

// The numbers of a unit, as they are stored. NaN counts as 0.
template <class Format>
struct Halves32 {
  typedef int16_t Shorts __attribute__((vector_size(KVX_VECTOR_BYTES)));
  static constexpr int kCount = KVX_VECTOR_BYTES / 2, kVectors = 32 / kCount;
  static constexpr int16_t kInfinite = std::is_same_v<Format, Bf16> ? 0x7f80 : 0x7c00;
  Shorts vectors[kVectors];

  explicit KVX_MEMBER Halves32(const uint16_t *from) {
    typedef Shorts Unaligned __attribute__((aligned(2), may_alias));
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i)
      vectors[i] = *reinterpret_cast<const Unaligned *>(from + i * kCount);
  }

  KVX_MEMBER int16_t largest_magnitude() const {
    return fold([](Shorts x, int) KVX_MEMBER { return magnitude(x); }, Most{});
  }
  // The index of the first number of that magnitude, which one has.
  KVX_MEMBER int first_of(int16_t wanted) const {
    return fold(
        [=](Shorts x, int first) KVX_MEMBER {
          Shorts index;
          for (int lane = 0; lane < kCount; ++lane)
            index[lane] = static_cast<int16_t>(first + lane);
          return magnitude(x) == wanted ? index : Shorts{} + 31;
        },
        Least{});
  }
  KVX_MEMBER Range range() const {
    const auto ordered = [](Shorts x, int) KVX_MEMBER {
      const Shorts number = x & ((x & 0x7fff) <= kInfinite);
      return Shorts(number ^ (number >> 15 & 0x7fff));
    };
    const int16_t least = fold(ordered, Least{}), largest = fold(ordered, Most{});
    return {number(least), number(largest)};
  }

 private:
  static KVX_MEMBER Shorts magnitude(Shorts x) {
    const Shorts size = x & 0x7fff;
    return size & (size <= kInfinite);
  }
  struct Most {
    template <class V>
    KVX_MEMBER V operator()(V a, V b) const {
      return a > b ? a : b;
    }
  };
  struct Least {
    template <class V>
    KVX_MEMBER V operator()(V a, V b) const {
      return a < b ? a : b;
    }
  };
  static KVX_MEMBER float number(int16_t ordered) {
    return Format::decode(static_cast<uint16_t>(ordered ^ (ordered >> 15 & 0x7fff)));
  }

  template <class Map, class Join>
  KVX_MEMBER int16_t fold(Map map, Join join) const {
    Shorts all = map(vectors[0], 0);
#pragma GCC unroll 4
    for (int i = 1; i < kVectors; ++i) all = join(all, map(vectors[i], i * kCount));
#if KVX_VECTOR_BYTES == 64
    const auto half = join(
        __builtin_shufflevector(all, all, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
        __builtin_shufflevector(all, all, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29,
                                30, 31));
#else
    const auto half = all;
#endif
#if KVX_VECTOR_BYTES >= 32
    auto eight = join(__builtin_shufflevector(half, half, 0, 1, 2, 3, 4, 5, 6, 7),
                      __builtin_shufflevector(half, half, 8, 9, 10, 11, 12, 13, 14, 15));
#else
    auto eight = half;
#endif
    eight = join(eight, __builtin_shufflevector(eight, eight, 4, 5, 6, 7, 0, 1, 2, 3));
    eight = join(eight, __builtin_shufflevector(eight, eight, 2, 3, 0, 1, 6, 7, 4, 5));
    eight = join(eight, __builtin_shufflevector(eight, eight, 1, 0, 3, 2, 5, 4, 7, 6));
    return eight[0];
  }
};
