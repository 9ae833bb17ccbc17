// TurboQuant: rows of float32 numbers to units and slots, and back. Spec: E.20
#pragma once

#include "kvx/kvx_turboquant.h"

namespace kvx::turboquant {

// Rows in memory. `stride` is in bytes.
struct Rows {
  const char *name;
  const void *data;
  int64_t stride;
  uint64_t row_bytes;
};

uint32_t unit_bytes(uint32_t dim, uint32_t bits, uint32_t flags);  // 0: there is none
kvx_status_t encode(void *units, int64_t unit_stride, const float *values, int64_t row_stride,
                    uint64_t rows, uint32_t dim, uint32_t bits, uint32_t flags);
kvx_status_t decode(float *values, int64_t row_stride, const void *units, int64_t unit_stride,
                    uint64_t rows, uint32_t dim, uint32_t bits, uint32_t flags);

uint32_t slot_bytes(uint32_t dim, kvx_turboquant_slot_t kind);  // 0: there is none
kvx_status_t encode_slots(void *slots, int64_t slot_stride, const float *keys, const float *values,
                          int64_t row_stride, uint64_t rows, uint32_t dim,
                          kvx_turboquant_slot_t kind);
kvx_status_t decode_slots(float *keys, float *values, int64_t row_stride, const void *slots,
                          int64_t slot_stride, uint64_t rows, uint32_t dim,
                          kvx_turboquant_slot_t kind);

}  // namespace kvx::turboquant
