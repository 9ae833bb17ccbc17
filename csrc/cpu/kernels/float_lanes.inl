// Small floats from and to float32, a number in each lane: what SmallFloat does, which compilers
// turn into vectors only in long loops. Included by kernels.inl.

// Magnitudes, as the bits of float32, to codes; they have been clamped to what the format can hold.
template <class Number>
KVX_INLINE LaneInts round_lanes(LaneInts magnitude) {
  constexpr auto kLeast = static_cast<int32_t>(Number::kMinNormal);
  const LaneInts own = magnitude & static_cast<int32_t>(kInfinity);
  const LaneInts exponent = own < kLeast ? LaneInts{} + kLeast : own;
  const LaneInts base = exponent + (Number::kDropped << 23);
  const LaneInts steps = LaneInts(LaneFloats(magnitude) + LaneFloats(base)) - base;
  return steps + ((exponent - kLeast) >> Number::kDropped);
}

// And back.
template <class Number>
KVX_INLINE LaneInts widen_lanes(LaneInts code) {
  constexpr auto kLeast = static_cast<int32_t>(Number::kMinNormal);
  const LaneInts wide = (code << Number::kDropped) + kLeast, normal = wide - (1 << 23);
  const LaneInts subnormal = LaneInts(LaneFloats(wide) - float_of(Number::kMinNormal));
  return code < static_cast<int32_t>(Number::kFirstNormalCode) ? subnormal : normal;
}

KVX_INLINE LaneFloats load_lanes(const float *from) {
  typedef LaneFloats Unaligned __attribute__((aligned(4), may_alias));
  return *reinterpret_cast<const Unaligned *>(from);
}

// Joins all lanes.
template <class Join>
KVX_INLINE int32_t fold_lanes(LaneInts all, Join join) {
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
