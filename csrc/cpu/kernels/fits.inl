// Formats whose encoding searches for scales: several groups of numbers at a time, a group in each
// lane, so that sums keep the order of the reference. Included by kernels.inl.

constexpr int kLanes = KVX_VECTOR_BYTES >= 32 ? 8 : 4;
typedef float LaneFloats __attribute__((vector_size(4 * kLanes)));
typedef int32_t LaneInts __attribute__((vector_size(4 * kLanes)));

template <class Real>
struct Lanes;
template <>
struct Lanes<LaneFloats> {
  static KVX_MEMBER LaneInts bits(LaneFloats x) { return LaneInts(x); }
  static KVX_MEMBER LaneFloats number(LaneInts n) { return __builtin_convertvector(n, LaneFloats); }
  static KVX_MEMBER LaneFloats magnitude(LaneFloats x) {
    return LaneFloats(LaneInts(x) & 0x7fffffff);
  }
  static KVX_MEMBER LaneFloats root(LaneFloats x) {
    for (int lane = 0; lane < kLanes; ++lane) x[lane] = __builtin_sqrtf(x[lane]);
    return x;
  }
};

#include "formats/fit.inl"

// Calls fit(x_at) for kLanes groups of kNumbers at a time, where x_at(i) has number i of each, and
// take(first, found) with the first of these groups and what fit has found.
template <int kGroups, int kNumbers, class Fit, class Take>
KVX_INLINE void fit_groups(const float *values, Fit fit, Take take) {
  for (int first = 0; first < kGroups; first += kLanes) {
    LaneFloats lanes[kNumbers];
    for (int i = 0; i < kNumbers; ++i)
      for (int lane = 0; lane < kLanes; ++lane)
        lanes[i][lane] = values[(first + lane) * kNumbers + i];
    take(first, fit([&](int i) KVX_MEMBER { return lanes[i]; }));
  }
}

template <int kNumbers>
KVX_INLINE void make_searchable(float *__restrict to, const float *__restrict from) {
  for (int i = 0; i < kNumbers; ++i) to[i] = searchable(from[i]);
}

template <int kBits>
KVX_INLINE void encode_wide(LinesOf32<kBits>, uint8_t *unit, const float *from) {
  using Codec = LinesOf32<kBits>;
  alignas(64) float values[Codec::kNumbers];
  make_searchable<Codec::kNumbers>(values, from);
  kvx::LineFit<float> fits[Codec::kGroups];
  typename Codec::Most most;
  fit_groups<Codec::kGroups, Codec::kRun>(
      values, [](auto x_at) KVX_MEMBER { return fit_line<LaneFloats, kBits, true>(x_at); },
      [&](int first, const LineFit<LaneFloats> &found) KVX_MEMBER {
        for (int lane = 0; lane < kLanes; ++lane) {
          fits[first + lane] = {found.scale[lane], found.least[lane], found.from[lane],
                                found.inverse[lane]};
          most.add(found.scale[lane], found.least[lane]);
        }
      });
  Codec::put_most(unit, most);
  for (int group = 0; group < Codec::kGroups; ++group) {
    const kvx::LineFit<float> &fit = fits[group];
    Codec::put_scale(unit, group, most, fit.scale, fit.least);
    Codec::put_levels(unit, group, fit, ValuesAt{values + group * Codec::kRun});
  }
}

KVX_INLINE void encode_wide(Q6_K, uint8_t *unit, const float *from) {
  alignas(64) float values[Q6_K::kNumbers];
  make_searchable<Q6_K::kNumbers>(values, from);
  kvx::RatioFit<float> fits[Q6_K::kGroups];
  Q6_K::Most most;
  fit_groups<Q6_K::kGroups, Q6_K::kRun>(
      values, [](auto x_at) KVX_MEMBER { return fit_ratio<LaneFloats>(x_at); },
      [&](int first, const RatioFit<LaneFloats> &found) KVX_MEMBER {
        for (int lane = 0; lane < kLanes; ++lane) {
          fits[first + lane] = {found.scale[lane], found.inverse[lane]};
          most.add(found.scale[lane]);
        }
      });
  Q6_K::put_most(unit, most);
  for (int group = 0; group < Q6_K::kGroups; ++group) {
    Q6_K::put_scale(unit, group, most, fits[group].scale);
    Q6_K::put_levels(unit, group, most, fits[group], ValuesAt{values + group * Q6_K::kRun});
  }
}

KVX_INLINE void encode_wide(Iq4Nl, uint8_t *unit, const float *from) {
  constexpr int kUnits = 8;
  alignas(64) float values[kUnits * Iq4Nl::kNumbers];
  make_searchable<kUnits * Iq4Nl::kNumbers>(values, from);
  fit_groups<kUnits, Iq4Nl::kNumbers>(
      values, [](auto x_at) KVX_MEMBER { return fit_steps<LaneFloats>(x_at); },
      [&](int first, const StepFit<LaneFloats> &found) KVX_MEMBER {
        for (int lane = 0; lane < kLanes; ++lane)
          Iq4Nl::put(unit + (first + lane) * Iq4Nl::kBytes,
                     {found.scale[lane], found.inverse[lane]},
                     ValuesAt{values + (first + lane) * Iq4Nl::kNumbers});
      });
}

// Numbers that encode_wide takes at a time; 0: none.
template <class Codec>
constexpr int kWide = 0;
template <>
constexpr int kWide<Q4_K> = Q4_K::kNumbers;
template <>
constexpr int kWide<Q5_K> = Q5_K::kNumbers;
template <>
constexpr int kWide<Q6_K> = Q6_K::kNumbers;
template <>
constexpr int kWide<Iq4Nl> = 8 * Iq4Nl::kNumbers;
