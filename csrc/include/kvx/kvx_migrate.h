/* KVX migration: copies sequences from one cache into another in one call, whatever their layouts.
 *
 * Each end is a span: layers, described as for kvx_write_kv, and the lookup of sequences in them.
 *
 *   kvx_span_t src = {sizeof src}, dst = {sizeof dst};
 *   src.num_layers = dst.num_layers = 32;
 *   src.layers = vllm_layers, src.block_table = &vllm_blocks;
 *   dst.layers = dense_layers;
 *   kvx_migrate_desc_t migrate = {sizeof migrate};
 *   migrate.seq_lens = &lens, migrate.src = &src, migrate.dst = &dst;
 *   kvx_migrate_kv(&migrate, NULL);
 *
 * The conventions of kvx_abi.h hold: `size` first, unused fields zero, pointers borrowed for the
 * call, nothing written before the whole call has been validated. Spec: E.3 */
#ifndef KVX_MIGRATE_H_
#define KVX_MIGRATE_H_

#include "kvx/kvx_abi.h"
#include "kvx/kvx_ops.h"
#include "kvx/kvx_plane.h"

#ifdef __cplusplus
extern "C" {
#endif

/* One end of a migration: the layers of one engine's cache and the lookup of sequences in them.
 *
 * At most one of `block_table` and `slots` is given:
 *   block_table  PACKED, RAGGED or KV_OFFSETS, shared by all layers
 *   slots        one slot per token that moves, the sequences one after the other
 *   neither      dense: sequence s is block s (HF's [batch, head, token, dim], a StaticCache, ...)
 *
 * 112 bytes. Spec: E.3 */
typedef struct kvx_span_t {
  uint32_t size;
  uint32_t num_layers;
  const kvx_cache_desc_t *const *layers; /* [num_layers] */
  const kvx_block_table_t *block_table;
  const kvx_slot_mapping_t *slots;
  const kvx_seq_lens_t *starts;            /* first token of each sequence here; NULL: 0 */
  uint32_t head_start;                     /* first KV head here */
  uint32_t secondary_num_blocks;           /* as in kvx_gather_options_t */
  int64_t reserved_0;                      /* 0 */
  const kvx_scale_desc_t *const *k_scales; /* [num_layers], entries may be NULL; NULL: none */
  const kvx_scale_desc_t *const *v_scales;
  uint64_t null_block_plus_1;             /* as in kvx_gather_options_t */
  const kvx_scale_desc_t *const *k_zeros; /* zero points of U8_ZERO and U8_BIAS, as k_scales and of
                                             the same granularity; one scale of all of F4_E2M1, or
                                             none. Spec: E.14, E.18 */
  const kvx_scale_desc_t *const *v_zeros;
  const kvx_plane_t *const *planes; /* [num_planes] beside the layers */
  uint32_t num_planes;
  uint32_t reserved_1; /* 0 */
} kvx_span_t;

/* kvx_migrate_kv's arguments.
 *
 * Token `src.starts[s] + i` of sequence s goes to token `dst.starts[s] + i`, for i < seq_lens[s]
 * and, if it is given, i < max_seq_len, heads src.head_start + h to dst.head_start + h, for h <
 * num_heads, in layers l of both ends. */
typedef struct kvx_migrate_desc_t {
  uint32_t size;
  uint32_t flags;       /* KVX_FLAG_ZERO_FILL, _BACKGROUND, _COPY_ENGINE, _FIND_SCALES, _REQUANTIZE,
                           _HADAMARD_K, _HADAMARD_V */
  uint32_t num_heads;   /* 0: all heads; both ends then hold the same number */
  uint32_t max_seq_len; /* the most tokens of a sequence that move; 0: all. Where the host cannot
                           read lengths, a device launches work for this many */
  const kvx_seq_lens_t *seq_lens; /* tokens to move of each sequence */
  const kvx_span_t *src;
  const kvx_span_t *dst;
} kvx_migrate_desc_t;

/* Moves sequences from one cache into another in one pass: other layout, block size, dtype, scales,
 * table and head range, all layers in one call, no staging.
 *
 * Mutates these tokens of the destination, nothing else. Both ends may be the same pool if their
 * blocks are disjoint. Null blocks of either end are skipped where its table has HOLES. On HOST
 * memory a slot, block or length out of range gives OUT_OF_RANGE, and two tokens with one place
 * INVALID_ARGUMENT, and nothing is written. Tokens whose keys are rotated have to keep their
 * positions: `starts` of two ends that count alike are the same. Spec: E.3 */
KVX_API kvx_status_t kvx_migrate_kv(const kvx_migrate_desc_t *migrate, void *stream);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* KVX_MIGRATE_H_ */
