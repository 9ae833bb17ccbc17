// The inner loops of the CPU backend, built once per instruction set and chosen at run time.
#pragma once

#include <cstdint>

#include "plan/loops.h"

namespace kvx::cpu {

// What the elements of a run are multiplied with and divided by.
struct Scaling {
  float scale, divisor;

  bool operator==(const Scaling &other) const {
    return scale == other.scale && divisor == other.divisor;
  }
  float operator()(float x) const { return x * scale / divisor; }
};

struct Conversion {
  Scaling scaling;
  bool streaming;  // the destination need not be left in the caches
  bool many;       // thousands of elements have this scaling
  int64_t ahead;   // bytes from the source to what will be converted next, which is fetched
};

// Elements [0, count) of dst = encode(scaling(decode(src))), both contiguous.
using ConvertRun = void (*)(void *dst, const void *src, int64_t count, const Conversion &how);

// Where the following copy will write and read; where that is not known, this one's own places.
struct Next {
  uint8_t *dst;
  const uint8_t *src;
};

struct Kernels {
  const char *isa;
  // Copies a loops. `streaming` stores past the caches: right when the bytes moved exceed them.
  // What the same loops will need at `next` is fetched meanwhile.
  void (*copy)(const Loops &loops, uint8_t *dst, const uint8_t *src, const Next &next,
               bool streaming);
  ConvertRun convert[5][5];  // [src][dst], by convert_index
};

// F16, BF16, F32, F8_E4M3, F8_E5M2: their own numbers, from 0.
constexpr int convert_index(kvx_dtype_t dtype) { return static_cast<int>(dtype) - 1; }

// The best for this processor.
const Kernels &kernels();

}  // namespace kvx::cpu
