// The inner loops of the CPU backend, built once per instruction set and chosen at run time.
#pragma once

#include <cstdint>

#include "cpu/nest.h"

namespace kvx::cpu {

// Elements [0, count) of dst = encode(decode(src) * scale / divisor), both contiguous. `streaming`:
// the destination need not be left in the caches.
using ConvertRun = void (*)(void *dst, const void *src, int64_t count, float scale, float divisor,
                            bool streaming);

struct Kernels {
  const char *isa;
  // Copies a nest. `streaming` stores past the caches: right when the bytes moved exceed them; it
  // fetches meanwhile what the same nest will read from `next`.
  void (*copy)(const Nest &nest, uint8_t *dst, const uint8_t *src, const uint8_t *next,
               bool streaming);
  ConvertRun convert[5][5];  // [src][dst], by convert_index
};

// F16, BF16, F32, F8_E4M3, F8_E5M2: their own numbers, from 0.
constexpr int convert_index(kvx_dtype_t dtype) { return static_cast<int>(dtype) - 1; }

// The best for this processor.
const Kernels &kernels();

}  // namespace kvx::cpu
