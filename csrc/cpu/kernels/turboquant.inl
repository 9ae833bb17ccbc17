// TurboQuant's rows from and to their codes. Included by kernels.inl. Spec: E.20
//
// Loops over 256 numbers at most, each of one operation, which compilers vectorise; sums have eight
// lanes of their own, so that every instruction set rounds the same.

constexpr float kMostMagnitude = 0x1p100f;

// The numbers that are encoded: NaN counts as 0, and no sum of them overflows.
inline void tame(float *to, const float *from, int64_t dim) {
  for (int64_t i = 0; i < dim; ++i) {
    const float x = from[i];
    const float below = x < kMostMagnitude ? x : x >= kMostMagnitude ? kMostMagnitude : 0.0f;
    to[i] = below > -kMostMagnitude ? below : -kMostMagnitude;
  }
}

// The sum of squares; each square is exact.
inline double sum_of_squares(const float *x, int64_t dim) {
  double sums[8] = {};
  for (int64_t i = 0; i < dim; i += 8)
    for (int lane = 0; lane < 8; ++lane)
      sums[lane] += static_cast<double>(x[i + lane]) * static_cast<double>(x[i + lane]);
  for (int step = 4; step; step /= 2)
    for (int lane = 0; lane < step; ++lane) sums[lane] += sums[lane + step];
  return sums[0];
}

// Codes of `kBits` bits, the first in the lowest bits.
template <int kBits>
void pack_codes(uint8_t *to, const int32_t *codes, int64_t dim) {
  for (int64_t i = 0; i < dim; i += 8, to += kBits) {
    uint32_t bits = 0;
    for (int j = 0; j < 8; ++j) bits |= static_cast<uint32_t>(codes[i + j]) << (kBits * j);
    for (int byte = 0; byte < kBits; ++byte) to[byte] = static_cast<uint8_t>(bits >> (8 * byte));
  }
}
template <int kBits>
void look_up_codes(float *to, const uint8_t *from, int64_t dim, const float *table) {
  for (int64_t i = 0; i < dim; i += 8, from += kBits) {
    uint32_t bits = 0;
    for (int byte = 0; byte < kBits; ++byte) bits |= uint32_t{from[byte]} << (8 * byte);
    for (int j = 0; j < 8; ++j) to[i + j] = table[bits >> (kBits * j) & ((1u << kBits) - 1)];
  }
}
inline void pack_codes(uint8_t *to, const int32_t *codes, int64_t dim, int bits) {
  if (bits == 1) return pack_codes<1>(to, codes, dim);
  if (bits == 2) return pack_codes<2>(to, codes, dim);
  if (bits == 3) return pack_codes<3>(to, codes, dim);
  pack_codes<4>(to, codes, dim);
}
inline void look_up_codes(float *to, const uint8_t *from, int64_t dim, int bits,
                          const float *table) {
  if (bits == 1) return look_up_codes<1>(to, from, dim, table);
  if (bits == 2) return look_up_codes<2>(to, from, dim, table);
  if (bits == 3) return look_up_codes<3>(to, from, dim, table);
  look_up_codes<4>(to, from, dim, table);
}

// The code of a coordinate is the number of midpoints that it has reached.
inline void find_codes(int32_t *codes, const float *y, const turboquant::Book &book) {
  const int64_t dim = book.dim;
  for (int64_t i = 0; i < dim; ++i) codes[i] = 0;
  for (int m = 0; m + 1 < 1 << book.bits; ++m) {
    const float midpoint = book.midpoints[m];
    for (int64_t i = 0; i < dim; ++i) codes[i] += y[i] >= midpoint;
  }
}

inline void turn(float *y, const turboquant::Book &book) { hadamard(y, 1, book.dim, book.scale); }

inline void apply_signs(float *y, const float *signs, int64_t dim) {
  for (int64_t i = 0; i < dim; ++i) y[i] *= signs[i];
}

inline float turboquant_encode(uint8_t *codes, float *rest, const float *from,
                               const turboquant::Book &book) {
  const int64_t dim = book.dim;
  alignas(64) float y[turboquant::kMostDim];
  alignas(64) int32_t found[turboquant::kMostDim];
  tame(y, from, dim);
  const auto norm = static_cast<float>(std::sqrt(sum_of_squares(y, dim)));
  const float divisor = norm + book.epsilon > 0.0f ? norm + book.epsilon : 1.0f;
  for (int64_t i = 0; i < dim; ++i) y[i] /= divisor;
  if (book.signs) apply_signs(y, book.signs, dim);
  turn(y, book);
  find_codes(found, y, book);
  pack_codes(codes, found, dim, book.bits);
  if (rest)
    for (int64_t i = 0; i < dim; ++i) rest[i] = y[i] - book.centroids[found[i]];
  return norm;
}

inline void turboquant_decode(float *to, const uint8_t *codes, const float *rest, float norm,
                              const turboquant::Book &book) {
  const int64_t dim = book.dim;
  look_up_codes(to, codes, dim, book.bits, book.centroids);
  if (rest)
    for (int64_t i = 0; i < dim; ++i) to[i] += rest[i];
  float factor = norm;
  if (book.is_corrected) {
    const auto squares = static_cast<float>(sum_of_squares(to, dim));
    factor *= 1.0f / std::sqrt(squares + 1e-16f);
  } else {
    factor *= 1.0f / static_cast<float>(dim);  // of the two rotations, which scale by sqrt(dim)
  }
  turn(to, book);
  for (int64_t i = 0; i < dim; ++i) to[i] *= factor;
  if (book.signs) apply_signs(to, book.signs, dim);
}

// Signs of a vector rotated by other signs and Hadamard's matrix; returns its norm.
inline float turboquant_encode_signs(uint8_t *to, const float *from, int64_t dim) {
  alignas(64) float y[turboquant::kMostDim];
  alignas(64) int32_t found[turboquant::kMostDim];
  for (int64_t i = 0; i < dim; ++i) y[i] = from[i] * turboquant::kSigns.of[1][i];
  hadamard(y, 1, dim, 1.0f);
  for (int64_t i = 0; i < dim; ++i) found[i] = y[i] >= 0.0f;
  pack_codes(to, found, dim, 1);
  return static_cast<float>(std::sqrt(sum_of_squares(from, dim)));
}

inline void turboquant_decode_signs(float *to, const uint8_t *from, float factor, int64_t dim) {
  const float table[] = {-factor, factor};
  look_up_codes(to, from, dim, 1, table);
  hadamard(to, 1, dim, 1.0f);
  apply_signs(to, turboquant::kSigns.of[1], dim);
}

// Numbers in even steps from the least to the largest.
inline ScaleZero turboquant_encode_steps(uint8_t *to, const float *from, int64_t dim, int bits) {
  alignas(64) float x[turboquant::kMostDim];
  alignas(64) int32_t found[turboquant::kMostDim];
  tame(x, from, dim);
  Bounds bounds;
  bound_run(&bounds, x, dim);
  const int most = (1 << bits) - 1;
  const float step = (bounds.largest - bounds.least) / static_cast<float>(most);
  const float scale = step > 1e-8f ? step : 1e-8f, least = bounds.least;
  for (int64_t i = 0; i < dim; ++i) {
    const auto code = static_cast<int32_t>((x[i] - least) / scale + 0.5f);
    found[i] = code < most ? code : most;
  }
  pack_codes(to, found, dim, bits);
  return {scale, least};
}

inline void turboquant_decode_steps(float *to, const uint8_t *from, int64_t dim, int bits,
                                    const ScaleZero &with) {
  float table[turboquant::kMostCodes];
  for (int code = 0; code < turboquant::kMostCodes; ++code)
    table[code] = static_cast<float>(code) * with.scale + with.zero;
  look_up_codes(to, from, dim, bits, table);
}
