// The functions of kvx_turboquant.h.
#include "encodings/turboquant.h"

#include "abi/guarded.h"

extern "C" {

uint32_t kvx_turboquant_bytes(uint32_t dim, uint32_t bits, uint32_t flags) {
  return kvx::turboquant::unit_bytes(dim, bits, flags);
}

kvx_status_t kvx_turboquant_encode(void *units, int64_t unit_stride, const float *values,
                                   int64_t row_stride, uint64_t rows, uint32_t dim, uint32_t bits,
                                   uint32_t flags) {
  return kvx::guarded([=] {
    return kvx::turboquant::encode(units, unit_stride, values, row_stride, rows, dim, bits, flags);
  });
}

kvx_status_t kvx_turboquant_decode(float *values, int64_t row_stride, const void *units,
                                   int64_t unit_stride, uint64_t rows, uint32_t dim, uint32_t bits,
                                   uint32_t flags) {
  return kvx::guarded([=] {
    return kvx::turboquant::decode(values, row_stride, units, unit_stride, rows, dim, bits, flags);
  });
}

uint32_t kvx_turboquant_slot_bytes(uint32_t dim, kvx_turboquant_slot_t kind) {
  return kvx::turboquant::slot_bytes(dim, kind);
}

kvx_status_t kvx_turboquant_encode_slots(void *slots, int64_t slot_stride, const float *keys,
                                         const float *values, int64_t row_stride, uint64_t rows,
                                         uint32_t dim, kvx_turboquant_slot_t kind) {
  return kvx::guarded([=] {
    return kvx::turboquant::encode_slots(slots, slot_stride, keys, values, row_stride, rows, dim,
                                         kind);
  });
}

kvx_status_t kvx_turboquant_decode_slots(float *keys, float *values, int64_t row_stride,
                                         const void *slots, int64_t slot_stride, uint64_t rows,
                                         uint32_t dim, kvx_turboquant_slot_t kind) {
  return kvx::guarded([=] {
    return kvx::turboquant::decode_slots(keys, values, row_stride, slots, slot_stride, rows, dim,
                                         kind);
  });
}

}  // extern "C"
