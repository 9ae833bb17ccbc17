// The inner loops of the CPU backend, built once per instruction set and chosen at run time.
#pragma once

#include <cstdint>

#include "formats/affine.h"
#include "formats/codec.h"
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

// Attention of queries to decoded vectors: rows of a multiple of kLanes numbers. See attend.inl
constexpr int kLanes = 16;
struct AttendKernels {
  void (*dot)(float *scores, int64_t stride, const float *query, const float *keys, int64_t row,
              int64_t queries, int64_t tokens);
  void (*softmax)(float *scores, int64_t tokens, float *largest, float *weight);
  void (*add)(float *sums, const float *weights, int64_t stride, const float *values, int64_t row,
              int64_t queries, int64_t tokens);
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
  ConvertRun convert[5][5];          // [src][dst], by fast_place
  DecodeVector decode[kNumFormats];  // by row_of; NULL for formats that are not numbers
  EncodeVector encode[kNumFormats];
  AffineKernels zero, bias;  // of U8_ZERO, of U8_BIAS
  void (*bound)(Bounds *of, const float *from, int64_t numbers);
  void (*bound_each)(float *least, float *largest, const float *from, int64_t numbers);
  AttendKernels attend;

  const AffineKernels &affine(kvx_dtype_t dtype) const {
    return dtype == KVX_DTYPE_U8_ZERO ? zero : bias;
  }

  // The function that converts one format to another without float32 between; NULL: there is none.
  ConvertRun find(kvx_dtype_t src, kvx_dtype_t dst) const {
    return is_fast(src) && is_fast(dst) ? convert[fast_place(src)][fast_place(dst)] : nullptr;
  }
};

// The best kernels for this processor.
const Kernels &kernels();

}  // namespace kvx::cpu
