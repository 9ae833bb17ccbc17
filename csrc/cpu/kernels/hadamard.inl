// Groups of numbers times a normalized Hadamard matrix. Included by kernels.inl.
//
// Step b of log2(order) replaces each two numbers whose indices differ in bit b alone by their sum
// and their difference. Every instruction set does the steps in this order, so that all round the
// same; several steps are done while the numbers are in registers.

constexpr int kFloats = KVX_VECTOR_BYTES / 4;
using FloatVector = float __attribute__((vector_size(KVX_VECTOR_BYTES)));
using FloatsAt = float __attribute__((vector_size(KVX_VECTOR_BYTES), aligned(4), may_alias));

// A step between the lanes of a vector.
template <int kBit, int... kLane>
KVX_INLINE FloatVector add_lanes(FloatVector v, std::integer_sequence<int, kLane...>) {
  const FloatVector other = __builtin_shufflevector(v, v, (kLane ^ kBit)...);
  return __builtin_shufflevector(other + v, other - v, (kLane & kBit ? kLane + kFloats : kLane)...);
}

// All steps between the lanes of a vector.
template <int kBit = 1>
KVX_INLINE FloatVector add_all_lanes(FloatVector v) {
  if constexpr (kBit == kFloats)
    return v;
  else
    return add_all_lanes<2 * kBit>(add_lanes<kBit>(v, std::make_integer_sequence<int, kFloats>()));
}

// The steps between kVectors vectors that lie `step` numbers apart, those between their lanes
// before if kFirst; then the product with `scale`.
template <int kVectors, bool kFirst>
KVX_INLINE void add_vectors(float *at, int64_t step, float scale) {
  FloatVector v[kVectors];
#pragma GCC unroll 8
  for (int i = 0; i < kVectors; ++i) {
    v[i] = *reinterpret_cast<const FloatsAt *>(at + i * step);
    if constexpr (kFirst) v[i] = add_all_lanes(v[i]);
  }
#pragma GCC unroll 3
  for (int bit = 1; bit < kVectors; bit *= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) {
      if (i & bit) continue;
      const FloatVector one = v[i], other = v[i + bit];
      v[i] = one + other, v[i + bit] = one - other;
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kVectors; ++i) *reinterpret_cast<FloatsAt *>(at + i * step) = v[i] * scale;
}

// Calls add_vectors for 8, 4, 2 or 1 vectors.
template <bool kFirst>
KVX_INLINE void add_some(int64_t vectors, float *at, int64_t step, float scale) {
  if (vectors == 8) return add_vectors<8, kFirst>(at, step, scale);
  if (vectors == 4) return add_vectors<4, kFirst>(at, step, scale);
  if (vectors == 2) return add_vectors<2, kFirst>(at, step, scale);
  add_vectors<1, kFirst>(at, step, scale);
}

// Groups of less than a vector.
inline void rotate_few(float *group, int64_t order, float scale) {
  for (int64_t bit = 1; bit < order; bit *= 2) {
    for (int64_t i = 0; i < order; ++i) {
      if (i & bit) continue;
      const float one = group[i], other = group[i + bit];
      group[i] = one + other, group[i + bit] = one - other;
    }
  }
  for (int64_t i = 0; i < order; ++i) group[i] *= scale;
}

inline void hadamard(float *numbers, int64_t groups, int64_t order, float scale) {
  constexpr int64_t kMost = 8;  // vectors that fit into registers
  for (float *group = numbers; groups-- > 0; group += order) {
    if (order < kFloats) {
      rotate_few(group, order, scale);
      continue;
    }
    const int64_t first = std::min(order / kFloats, kMost);
    int64_t done = first * kFloats;  // numbers between which all steps have been done
    for (int64_t i = 0; i < order; i += done)
      add_some<true>(first, group + i, kFloats, done == order ? scale : 1.0f);
    for (int64_t step; step = done, done < order;) {
      const int64_t vectors = std::min(order / done, kMost);
      done *= vectors;
      for (int64_t i = 0; i < order; i += done)
        for (int64_t lane = 0; lane < step; lane += kFloats)
          add_some<false>(vectors, group + i + lane, step, done == order ? scale : 1.0f);
    }
  }
}
