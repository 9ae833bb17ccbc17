// The inner loops of the CPU backend, built once per instruction set and chosen at run time.
#pragma once

#include <cstdint>

#include "formats/affine.h"
#include "formats/codec.h"
#include "formats/lossless.h"
#include "formats/turboquant.h"
#include "kvx/kvx_encode.h"
#include "plan/loops.h"

namespace kvx::cpu {

// The scales that the elements of a run are multiplied and divided by.
struct Scaling {
  float scale, divisor;

  bool operator==(const Scaling &other) const {
    return scale == other.scale && divisor == other.divisor;
  }
  float operator()(float x) const { return x * scale / divisor; }
};

struct Conversion {
  Scaling scaling;
  bool streaming;  // stores go past the caches
  bool many;       // thousands of elements have this scaling
  int64_t ahead;   // bytes from here to the next source, which is prefetched
};

// Elements [0, count) of dst = encode(scaling(decode(src))), both contiguous.
using ConvertRun = void (*)(void *dst, const void *src, int64_t count, const Conversion &how);

// Vectors of `numbers` contiguous elements each, at distances in bytes.
struct ScaledRows {
  uint8_t *dst;
  const uint8_t *src;
  int64_t dst_step, src_step;
  int64_t count, numbers;
};
// The same of rows, each with a scaling of its own; that of `how` is not used.
using ConvertRows = void (*)(const ScaledRows &rows, const Scaling *scalings,
                             const Conversion &how);

// Vectors of a format from and to float32; `numbers` is a multiple of a unit's.
using DecodeVector = void (*)(float *to, const uint8_t *from, int64_t numbers);
using EncodeVector = void (*)(uint8_t *to, const float *from, int64_t numbers);

// Numbers with a zero point from and to float32: of one unit or, `each`, of a unit for each number.
struct AffineKernels {
  void (*decode)(float *to, const uint8_t *q, int64_t numbers, const ScaleZero &with);
  void (*decode_each)(float *to, const uint8_t *q, int64_t numbers, const float *scales,
                      const float *zeros);
  void (*encode)(uint8_t *to, const float *from, int64_t numbers, const ScaleZero &with);
  void (*encode_each)(uint8_t *to, const float *from, int64_t numbers, const float *scales,
                      const float *zeros);
};

// Groups of F4_E2M1 that follow each other from and to float32. `group` is 16 or 32 numbers.
struct Fp4Kernels {
  void (*decode)(float *to, const uint8_t *q, int64_t groups, int64_t group, const float *factors);
  // Finds the scales, and stores them as float32.
  void (*encode)(uint8_t *to, float *scales, const float *from, int64_t groups, int64_t group,
                 kvx_dtype_t scale_dtype, float tensor_scale);
};

// The lossless encoding of bfloat16. Buffers of symbols hold whole groups and `kSlack` bytes more;
// `others` are the symbols that a level does not have. Spec: E.19
struct LosslessKernels {
  // Numbers to exponents and to `rest`, sign and mantissa; and back.
  void (*split)(uint8_t *exponents, uint8_t *rest, const uint16_t *numbers, int64_t count);
  void (*join)(uint16_t *numbers, const uint8_t *exponents, const uint8_t *rest, int64_t count);
  // Symbols to the planes of a level; returns how many others there are.
  int64_t (*pack)(uint8_t *planes, uint8_t *others, const uint8_t *symbols, int64_t groups,
                  lossless::Level level);
  void (*unpack)(uint8_t *symbols, const uint8_t *planes, const uint8_t *others, int64_t groups,
                 lossless::Level level);
  // How many others planes have.
  int64_t (*count)(const uint8_t *planes, int64_t groups, int width);
};

// TurboQuant's rows of float32 numbers, whose codes have any alignment. Spec: E.20
struct TurboQuantKernels {
  // Returns the norm. Fills `rest`, unless NULL, with what the codes leave of the rotated vector.
  float (*encode)(uint8_t *codes, float *rest, const float *from, const turboquant::Book &book);
  // Adds `rest`, unless NULL, to the rotated vector.
  void (*decode)(float *to, const uint8_t *codes, const float *rest, float norm,
                 const turboquant::Book &book);
  // What is left: the signs of its second rotation. Returns its norm.
  float (*encode_signs)(uint8_t *to, const float *from, int64_t dim);
  void (*decode_signs)(float *to, const uint8_t *from, float factor, int64_t dim);
  // Even steps from the least number: value = code * scale + zero.
  ScaleZero (*encode_steps)(uint8_t *to, const float *from, int64_t dim, int bits);
  void (*decode_steps)(float *to, const uint8_t *from, int64_t dim, int bits,
                       const ScaleZero &with);
};

// Attention of queries to decoded vectors: rows of a multiple of kAttendLanes numbers. See
// attend.inl
constexpr int kAttendLanes = 16;
struct AttendKernels {
  void (*dot)(float *scores, int64_t stride, const float *query, const float *keys, int64_t step,
              int64_t row, int64_t queries, int64_t tokens);
  void (*softmax)(float *scores, int64_t tokens, float *largest, float *weight);
  void (*add)(float *sums, const float *weights, int64_t stride, const float *values, int64_t step,
              int64_t row, int64_t queries, int64_t tokens);
};

// A stream of tokens of a compressed entry: keys, scores, and what is added to these, or NULL. `z`
// NULL: there is no stream.
struct Stream {
  const void *k, *z;
  const float *ape;
};
// out[d] = sum over the tokens of both streams of softmax(z + ape) * k, for each of `dim` numbers
// alone. Tokens are `stride` numbers apart. Spec: E.22
struct HybridKernels {
  using Weigh = void (*)(float *out, const Stream &a, const Stream &b, int64_t stride,
                         int64_t tokens, int64_t dim);
  Weigh weigh_f32, weigh_bf16;
};

// Where the following copy will write and read; where that is not known, this one's own places.
struct Next {
  uint8_t *dst;
  const uint8_t *src;
};

struct Kernels {
  const char *isa;
  // Copies the loops. `streaming` stores past the caches, for calls that move more than fits them.
  // Prefetches what the same loops need at `next`.
  void (*copy)(const Loops &loops, uint8_t *dst, const uint8_t *src, const Next &next,
               bool streaming);
  ConvertRun convert[5][5];  // [src][dst], by fast_place
  // NULL where a call for each row is as good.
  ConvertRows convert_rows[5][5];  // [src][dst], by fast_place
  // F16, BF16 and F32, by fast_place, to units of several numbers, by row_of, and back. NULL where
  // there is none.
  ConvertRun to_units[3][kNumFormats], units_to[3][kNumFormats];
  DecodeVector decode[kNumFormats];  // by row_of; NULL for formats that are not numbers
  EncodeVector encode[kNumFormats];
  AffineKernels zero, bias;  // of U8_ZERO, of U8_BIAS
  Fp4Kernels fp4;
  void (*bound)(Bounds *of, const float *from, int64_t numbers);
  void (*bound_each)(float *least, float *largest, const float *from, int64_t numbers);
  // Multiplies `groups` groups of `order` numbers, which follow each other, by the Hadamard matrix
  // of that order and by `scale`.
  void (*hadamard)(float *numbers, int64_t groups, int64_t order, float scale);
  LosslessKernels lossless;
  TurboQuantKernels turboquant;
  AttendKernels attend;
  HybridKernels hybrid;

  const AffineKernels &affine(kvx_dtype_t dtype) const {
    return dtype == KVX_DTYPE_U8_ZERO ? zero : bias;
  }

  // The function that converts one format to another without float32 between; NULL: there is none.
  ConvertRun find(kvx_dtype_t src, kvx_dtype_t dst) const {
    const int from = fast_place(src), to = fast_place(dst);
    if (from >= 0 && to >= 0) return convert[from][to];
    if (from >= 0 && from < 3) return to_units[from][row_of(dst)];
    return to >= 0 && to < 3 ? units_to[to][row_of(src)] : nullptr;
  }
  ConvertRows find_rows(kvx_dtype_t src, kvx_dtype_t dst) const {
    return is_fast(src) && is_fast(dst) ? convert_rows[fast_place(src)][fast_place(dst)] : nullptr;
  }
};

// The best kernels for this processor.
const Kernels &kernels();

}  // namespace kvx::cpu
