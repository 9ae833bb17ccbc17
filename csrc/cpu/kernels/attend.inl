// Attention of a query to decoded vectors. Sums have 16 lanes, which are added in one order, on
// every instruction set, so that all have the same bits. Rows are multiples of 16 numbers, padded
// with 0. Included by kernels.inl.

// Lanes are parts, each a register: vectors wider than those are slow.
constexpr int kPartLanes = KVX_VECTOR_BYTES / static_cast<int>(sizeof(float));
constexpr int kParts = kAttendLanes / kPartLanes;
typedef float Part __attribute__((vector_size(KVX_VECTOR_BYTES), aligned(4), may_alias));
typedef uint32_t BitPart __attribute__((vector_size(KVX_VECTOR_BYTES), aligned(4), may_alias));

KVX_INLINE const Part &part_at(const float *from, int p) {
  return reinterpret_cast<const Part *>(from)[p];
}
KVX_INLINE Part &part_at(float *to, int p) { return reinterpret_cast<Part *>(to)[p]; }

typedef float Four __attribute__((vector_size(16)));

// Adds lane i + 8 to lane i, then i + 4.
KVX_INLINE Four four_of(const Part (&lanes)[kParts]) {
#if KVX_VECTOR_BYTES == 64
  const auto eight = __builtin_shufflevector(lanes[0], lanes[0], 0, 1, 2, 3, 4, 5, 6, 7) +
                     __builtin_shufflevector(lanes[0], lanes[0], 8, 9, 10, 11, 12, 13, 14, 15);
#elif KVX_VECTOR_BYTES == 32
  const Part eight = lanes[0] + lanes[1];
#else
  return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
#endif
#if KVX_VECTOR_BYTES > 16
  return __builtin_shufflevector(eight, eight, 0, 1, 2, 3) +
         __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
#endif
}

KVX_INLINE float sum_of(const Part (&lanes)[kParts]) {
  const Four four = four_of(lanes);
  return (four[0] + four[2]) + (four[1] + four[3]);
}

// scores[r * stride + t] = query r . key t, four tokens at a time: there are rows and room for
// them. Keys are `step` numbers apart.
static void dot_keys(float *scores, int64_t stride, const float *query, const float *keys,
                     int64_t step, int64_t row, int64_t queries, int64_t tokens) {
  for (int64_t t = 0; t < tokens; t += 4) {
    const float *const key = keys + t * step;
    for (int64_t r = 0; r < queries; ++r) {
      const float *const one = query + r * row;
      Part sums[4][kParts] = {};
      for (int64_t d = 0; d < row; d += kAttendLanes)
        for (int i = 0; i < 4; ++i)
          for (int p = 0; p < kParts; ++p)
            sums[i][p] += part_at(one + d, p) * part_at(key + i * step + d, p);
      const Four a = four_of(sums[0]), b = four_of(sums[1]), c = four_of(sums[2]),
                 e = four_of(sums[3]);
      // As sum_of, for four tokens at once.
      const Four ab =
          __builtin_shufflevector(a, b, 0, 1, 4, 5) + __builtin_shufflevector(a, b, 2, 3, 6, 7);
      const Four ce =
          __builtin_shufflevector(c, e, 0, 1, 4, 5) + __builtin_shufflevector(c, e, 2, 3, 6, 7);
      const Four all =
          __builtin_shufflevector(ab, ce, 0, 2, 4, 6) + __builtin_shufflevector(ab, ce, 1, 3, 5, 7);
      memcpy(scores + r * stride + t, &all, sizeof all);
    }
  }
}

// What add_values does for kQueries queries, which share the loads of values.
template <int kQueries>
KVX_INLINE void add_to(float *sums, const float *weights, int64_t stride, const float *values,
                       int64_t step, int64_t row, int64_t tokens) {
  for (int64_t d = 0; d < row; d += kAttendLanes) {
    Part sum[kQueries][kParts];
    for (int r = 0; r < kQueries; ++r)
      for (int p = 0; p < kParts; ++p) sum[r][p] = part_at(sums + r * row + d, p);
    const float *value = values + d;
    for (int64_t t = 0; t < tokens; ++t, value += step)
      for (int r = 0; r < kQueries; ++r)
        for (int p = 0; p < kParts; ++p) sum[r][p] += part_at(value, p) * weights[r * stride + t];
    for (int r = 0; r < kQueries; ++r)
      for (int p = 0; p < kParts; ++p) part_at(sums + r * row + d, p) = sum[r][p];
  }
}

// sums[r] += weights[r * stride + t] * value t. Values are `step` numbers apart.
static void add_values(float *sums, const float *weights, int64_t stride, const float *values,
                       int64_t step, int64_t row, int64_t queries, int64_t tokens) {
  constexpr int kTogether = KVX_VECTOR_BYTES >= 32 ? 4 : 2;  // their sums fit into registers
  int64_t r = 0;
  for (; r + kTogether <= queries; r += kTogether)
    add_to<kTogether>(sums + r * row, weights + r * stride, stride, values, step, row, tokens);
  for (; r < queries; ++r)
    add_to<1>(sums + r * row, weights + r * stride, stride, values, step, row, tokens);
}

// exp of numbers up to 0, to 2e-7 of the result; 0 below -87, where results leave the normal range
// of float32. NaN stays NaN.
KVX_INLINE void exp_each(Part &x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const Part shifted = x * 1.44269504f + kRound, whole = shifted - kRound;
  // ln 2 in two parts: the first has few bits, so that its product is exact.
  const Part rest = x - whole * 0.693359375f + whole * 2.12194440e-4f;
  Part series = rest * (1.0f / 5040) + 1.0f / 720;
  series = series * rest + 1.0f / 120;
  series = series * rest + 1.0f / 24;
  series = series * rest + 1.0f / 6;
  series = series * rest + 0.5f;
  series = series * rest + 1.0f;
  series = series * rest + 1.0f;
  // Casts of vectors keep the bits.
  const BitPart power = ((BitPart)shifted - bits_of(kRound) + 127u) << 23;
  const BitPart vanishes = (BitPart)(x < -87.0f);  // all ones where it holds; not for NaN
  x = (Part)((BitPart)(series * (Part)power) & ~vanishes);
}

// scores[t] = exp(scores[t] - *largest); *weight is their sum. There is room for whole lanes, and
// what lies behind the last token becomes 0.
static void softmax_run(float *scores, int64_t tokens, float *largest, float *weight) {
  constexpr float kNothing = -__builtin_huge_valf();
  const int64_t padded = (tokens + kAttendLanes - 1) / kAttendLanes * kAttendLanes;
  for (int64_t t = tokens; t < padded; ++t) scores[t] = kNothing;
  Part most = part_at(scores, 0);
  for (int64_t t = kPartLanes; t < padded; t += kPartLanes) {
    const Part at = part_at(scores + t, 0);
    most = at > most ? at : most;
  }
  float each[kPartLanes];
  part_at(each, 0) = most;
  for (int i = 1; i < kPartLanes; ++i) each[0] = each[i] > each[0] ? each[i] : each[0];
  *largest = each[0];
  const float from = each[0] == kNothing ? 0.0f : each[0];  // these all become 0, not NaN
  Part sum[kParts] = {};
  for (int64_t t = 0; t < padded; t += kAttendLanes) {
    for (int p = 0; p < kParts; ++p) {
      Part at = part_at(scores + t, p) - from;
      exp_each(at);
      part_at(scores + t, p) = at;
      sum[p] += at;
    }
  }
  *weight = sum_of(sum);
}
