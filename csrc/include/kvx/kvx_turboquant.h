/* KVX TurboQuant: head vectors in 2, 3 or 4 bits per number and a float16 norm.
 *
 * A vector is rotated, so that its coordinates are alike whatever it was; each of them becomes the
 * nearest of 2^bits centroids. The rotation is the same for every vector: signs that are fixed, and
 * a Hadamard matrix. Tables are constants, so that a unit, the bytes of a vector, means the same
 * everywhere. Slots are vLLM's: a key and a value in the bytes of its `turboquant_*` caches.
 *
 * All memory is HOST memory. Functions take rows of float32 numbers, use the calling thread alone
 * and allocate nothing. Row r begins at `values + r * row_stride`, a stride in numbers; unit r at
 * `units + r * unit_stride`, a stride in bytes. Strides are at least a row and a unit; what lies
 * between is not touched. dim is 64, 128 or 256. A wrong argument is INVALID_ARGUMENT, before
 * anything is written.
 *
 * NaN counts as 0, and magnitudes above 2^100 as 2^100; but keys of K8V4 keep NaN, and what is past
 * 448 becomes 448. Spec: E.20 */
#ifndef KVX_TURBOQUANT_H_
#define KVX_TURBOQUANT_H_

#include "kvx/kvx_abi.h"

#ifdef __cplusplus
extern "C" {
#endif

/* One of the bits is the sign of what remains, rotated again: inner products are unbiased, and vary
 * more. */
#define KVX_TURBOQUANT_RESIDUAL (1u << 0)

/* Bytes of a unit: dim * bits / 8, and 2 for the norm; with RESIDUAL 2 more. 0 if there is no such
 * unit: bits is 2, 3 or 4. */
KVX_API uint32_t kvx_turboquant_bytes(uint32_t dim, uint32_t bits, uint32_t flags);

/* Encodes rows. Mutates the units. */
KVX_API kvx_status_t kvx_turboquant_encode(void *units, int64_t unit_stride, const float *values,
                                           int64_t row_stride, uint64_t rows, uint32_t dim,
                                           uint32_t bits, uint32_t flags);

/* Decodes units: any bytes are a unit. Mutates the rows. */
KVX_API kvx_status_t kvx_turboquant_decode(float *values, int64_t row_stride, const void *units,
                                           int64_t unit_stride, uint64_t rows, uint32_t dim,
                                           uint32_t bits, uint32_t flags);

/* vLLM's --kv-cache-dtype turboquant_*. */
typedef enum kvx_turboquant_slot_t {
  KVX_TURBOQUANT_K8V4 = 0,    /* keys in E4M3, values in 4 bits */
  KVX_TURBOQUANT_4BIT_NC = 1, /* both in 4 bits */
  KVX_TURBOQUANT_K3V4_NC = 2, /* keys in 3 bits, values in 4 */
  KVX_TURBOQUANT_3BIT_NC = 3  /* both in 3 bits */
} kvx_turboquant_slot_t;

/* Bytes of a slot: those of the key, then those of the value. 0 if there is no such slot. */
KVX_API uint32_t kvx_turboquant_slot_bytes(uint32_t dim, kvx_turboquant_slot_t kind);

/* Encodes a row of `keys` and the same row of `values` into each slot. Mutates the slots. */
KVX_API kvx_status_t kvx_turboquant_encode_slots(void *slots, int64_t slot_stride,
                                                 const float *keys, const float *values,
                                                 int64_t row_stride, uint64_t rows, uint32_t dim,
                                                 kvx_turboquant_slot_t kind);

/* Decodes slots. Keys are rotated back: they are those that were encoded, not those that vLLM's
 * kernels multiply with rotated queries. Mutates the rows of both. */
KVX_API kvx_status_t kvx_turboquant_decode_slots(float *keys, float *values, int64_t row_stride,
                                                 const void *slots, int64_t slot_stride,
                                                 uint64_t rows, uint32_t dim,
                                                 kvx_turboquant_slot_t kind);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* KVX_TURBOQUANT_H_ */
