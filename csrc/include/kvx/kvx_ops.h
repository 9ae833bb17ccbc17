/* KVX operations with options: kvx_write_kv and kvx_gather_kv with options that v1 does not have.
 *
 * The conventions of kvx_abi.h hold: `size` first, unused fields zero, pointers borrowed for the
 * call, nothing written before the whole call has been validated. Migrations take the same flags,
 * see kvx_migrate.h. Spec: E.2 */
#ifndef KVX_OPS_H_
#define KVX_OPS_H_

#include "kvx/kvx_abi.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Flags: a call refuses flags that it does not have ---- */

/* Gather and migrate: zero the destination tokens that have no source: those of null blocks and,
 * for gather, those past the sequence's length. Without the flag they keep what they held. */
#define KVX_FLAG_ZERO_FILL (1u << 0)

/* Calls that run on the device: a background transfer, which uses a few multiprocessors and leaves
 * the others to the model. */
#define KVX_FLAG_BACKGROUND (1u << 1)

/* Calls that run on the device: the copy engines move the bytes, without multiprocessors. Both ends
 * must store the same bytes. The host reads slots, tables, lengths and starts, so they must be in
 * HOST memory; they are checked as for HOST memory before anything moves. */
#define KVX_FLAG_COPY_ENGINE (1u << 2)

/* Writes and migrations into FP8 or S8: find the scales, one per token and head, and store them in
 * the PER_TOKEN_HEAD scales of the destination. Spec: E.9 */
#define KVX_FLAG_FIND_SCALES (1u << 3)

/* Migrations into units that cover all tokens of a block (KVX_SCALE_PER_CHANNEL): tokens may begin
 * anywhere in a block, and the tokens before them in it are quantized anew. Without the flag they
 * must begin at a block's first token. Spec: E.14 */
#define KVX_FLAG_REQUANTIZE (1u << 4)

/* Migrations: K, or V, is rotated on its way: each group of 2^log2 numbers of a vector, log2 1 to
 * 12, is multiplied by Hadamard's matrix, normalized. The same rotation undoes it. Spec: E.17 */
#define KVX_FLAG_HADAMARD_K(log2) ((uint32_t)(log2) << 8)
#define KVX_FLAG_HADAMARD_V(log2) ((uint32_t)(log2) << 12)
#define KVX_FLAG_HADAMARD_MASK 0xff00u

/* Writes and gathers: the caller knows that device 0 to 254 has allocated all that the call reads
 * and writes outside HOST memory: tensors, scales, indices and the secondary pool. Where that
 * device is current, libkvx does not ask the CUDA runtime about each of them, which takes a
 * microsecond or two; where another is, it asks and refuses as without the flag. Spec: E.2 */
#define KVX_FLAG_OWNED_BY(device) (((uint32_t)(device) + 1) << 24)
#define KVX_FLAG_OWNER_MASK 0xff000000u

/* ---- Null blocks ---- */

/* The value of null_block_plus_1 for block `id`. The field is 0 if no block is null. Negative table
 * entries are always null. */
#define KVX_NULL_BLOCK(id) ((uint64_t)(id) + 1)

/* ---- Write ---- */

/* Options of kvx_write_kv_ext. 8 bytes. */
typedef struct kvx_write_options_t {
  uint32_t size;
  uint32_t flags; /* KVX_FLAG_BACKGROUND, _COPY_ENGINE, _FIND_SCALES, _OWNED_BY */
} kvx_write_options_t;

/* kvx_write_kv with options; NULL options are those of kvx_write_kv. */
KVX_API kvx_status_t kvx_write_kv_ext(const kvx_cache_desc_t *cache, const kvx_write_desc_t *write,
                                      const kvx_write_options_t *options, void *stream);

/* ---- Gather ---- */

/* Options of kvx_gather_kv_ext. 48 bytes. */
typedef struct kvx_gather_options_t {
  uint32_t size;
  uint32_t flags;                  /* KVX_FLAG_ZERO_FILL, _BACKGROUND, _COPY_ENGINE, _OWNED_BY */
  int64_t reserved_0;              /* 0 */
  uint32_t secondary_num_blocks;   /* blocks in cache.pool.secondary; 0: as many as num_blocks */
  uint32_t reserved_1;             /* 0 */
  const kvx_scale_desc_t *k_scale; /* of the cache's K, if it is FP8 or S8; NULL: 1 */
  const kvx_scale_desc_t *v_scale;
  uint64_t null_block_plus_1; /* KVX_NULL_BLOCK(id) of a block that holds nothing (vLLM: id 0); 0:
                                 every block holds tokens */
} kvx_gather_options_t;

/* kvx_gather_kv with options; NULL options are those of kvx_gather_kv. */
KVX_API kvx_status_t kvx_gather_kv_ext(const kvx_cache_desc_t *cache,
                                       const kvx_gather_desc_t *gather,
                                       const kvx_gather_options_t *options, void *stream);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* KVX_OPS_H_ */
