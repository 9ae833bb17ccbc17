// Rows of BF16 or F32 numbers to E4M3 and BF16 in HOST memory.
#pragma once

#include "kvx/kvx_hybrid.h"

namespace kvx::hybrid {

// The bits of the largest magnitude of these numbers; NaN is left out.
int32_t largest_of(const void *numbers, kvx_dtype_t dtype, uint32_t count);

// E4M3 of x / divisor.
void to_e4m3(uint8_t *to, const void *numbers, kvx_dtype_t dtype, uint32_t count, float divisor);

// The same numbers in another dtype, BF16 or F32; bytes are copied if it is the same.
void to_dtype(void *to, kvx_dtype_t to_dtype, const void *numbers, kvx_dtype_t dtype,
              uint32_t count);

// A row in two parts: `nope` numbers in E4M3 and `rope` in BF16. Stores the inverse scale, which is
// 1 if inv_scale is NULL.
void quantize_row(uint8_t *fp8, void *rope, float *inv_scale, const void *row, kvx_dtype_t dtype,
                  uint32_t nope_dim, uint32_t rope_dim);

inline uint32_t size_of_number(kvx_dtype_t dtype) { return dtype == KVX_DTYPE_F32 ? 4 : 2; }

inline const void *number_at(const void *data, kvx_dtype_t dtype, uint64_t index) {
  return static_cast<const uint8_t *>(data) + index * size_of_number(dtype);
}
inline void *number_at(void *data, kvx_dtype_t dtype, uint64_t index) {
  return static_cast<uint8_t *>(data) + index * size_of_number(dtype);
}

}  // namespace kvx::hybrid
