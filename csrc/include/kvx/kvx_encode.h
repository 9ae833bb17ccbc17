/* KVX encode: what is done to numbers before they are encoded and after they are decoded, beside
 * the formats of kvx_abi.h. */
#ifndef KVX_ENCODE_H_
#define KVX_ENCODE_H_

#include "kvx/kvx_abi.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The largest order of kvx_hadamard. */
#define KVX_HADAMARD_MAX_ORDER 4096

/* Multiplies groups of `order` numbers by the normalized Hadamard matrix of that order, in place.
 * The matrix is symmetric and orthogonal: a second call gives the first numbers back, up to
 * rounding. A few large numbers become many that are alike, which loses less when they are
 * quantized to few bits: llama.cpp rotates vectors of a quantized cache so.
 *
 * values:     [rows, dim] float32 in HOST memory, row r at values + r * row_stride
 * dim:        numbers of a row
 * row_stride: float32 numbers from one row to the next, at least dim
 * order:      a power of two from 2 to KVX_HADAMARD_MAX_ORDER that divides dim: a row is
 *             dim / order groups. 0: the largest power of two that divides dim
 *
 * Mutates the rows and nothing between them. Allocates nothing. INVALID_ARGUMENT, before anything
 * is written, if an argument is none of these. Spec: E.17 */
KVX_API kvx_status_t kvx_hadamard(float *values, uint64_t rows, uint32_t dim, int64_t row_stride,
                                  uint32_t order);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* KVX_ENCODE_H_ */
