/* KVX lossless: bfloat16 in fewer bytes for stores and wires, and not one bit changed.
 *
 * The exponents of numbers are coded, sign and mantissa are stored as they are: keys and values
 * take about 11 of 16 bits. Blocks of KVX_LOSSLESS_BLOCK numbers can be decoded alone.
 *
 * What is decoded may come from anyone: no byte outside the arrays is read or written, whatever it
 * holds. It has no checksum: a bit that flips in it may change numbers unnoticed, as in the numbers
 * themselves.
 *
 * All memory is HOST memory. The functions use the calling thread alone and allocate nothing.
 * Spec: E.19 */
#ifndef KVX_LOSSLESS_H_
#define KVX_LOSSLESS_H_

#include "kvx/kvx_abi.h"

#ifdef __cplusplus
extern "C" {
#endif

#define KVX_LOSSLESS_BLOCK 4096

/* The most bytes that `numbers` numbers are encoded into: all of them are stored as they are.
 * UINT64_MAX if that has no 64 bits. */
KVX_API uint64_t kvx_lossless_bound(uint64_t numbers);

/* Encodes an array.
 *
 * encoded:  `capacity` bytes, at least kvx_lossless_bound(numbers); any alignment
 * bytes:    filled with how many have been written
 * data:     [numbers], contiguous, 2-byte aligned; must not overlap `encoded`
 * dtype:    BF16; otherwise UNSUPPORTED */
KVX_API kvx_status_t kvx_lossless_encode(void *encoded, uint64_t capacity, uint64_t *bytes,
                                         const void *data, uint64_t numbers, kvx_dtype_t dtype);

/* How many numbers an encoded array has, and their dtype. Reads its header alone;
 * kvx_lossless_decode checks the rest. Either result may be NULL. */
KVX_API kvx_status_t kvx_lossless_info(const void *encoded, uint64_t bytes, uint64_t *numbers,
                                       kvx_dtype_t *dtype);

/* Decodes numbers [first, first + count) of an array. Reads the header, and of the blocks that have
 * these numbers the bytes and the index; all of these are checked before the first number is
 * written.
 *
 * data:    [count], contiguous, 2-byte aligned; must not overlap `encoded`
 * encoded: all `bytes` bytes of the array */
KVX_API kvx_status_t kvx_lossless_decode(void *data, uint64_t first, uint64_t count,
                                         const void *encoded, uint64_t bytes);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* KVX_LOSSLESS_H_ */
