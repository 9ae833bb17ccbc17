/* KVX lookup: finds the tokens of a span without moving them, with the decoder of kvx_migrate_kv.
 *
 * It tells which blocks a sequence occupies, which of its tokens are in null blocks, and in which
 * pool they are. The arrays of the span (table, slots, starts) and the lengths are in HOST memory;
 * K and V are not touched and may be in any memory.
 * The conventions of kvx_abi.h hold. Spec: E.12 */
#ifndef KVX_LOOKUP_H_
#define KVX_LOOKUP_H_

#include "kvx/kvx_abi.h"
#include "kvx/kvx_migrate.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The place of a token in a cache. 16 bytes. */
typedef struct kvx_place_t {
  int64_t block;   /* physical block, or its address with POINTERS; -1: none, for a null
                      block or a skipped slot */
  uint32_t offset; /* tokens, or entries of a plane, into the block; 0 if there is none */
  uint32_t pool;   /* 0: the primary pool; 1: the secondary one of a KV_OFFSETS table */
} kvx_place_t;

/* kvx_find_tokens's arguments. 48 bytes. */
typedef struct kvx_find_desc_t {
  uint32_t size;
  uint32_t is_v;                  /* 0: K; 1: V. They differ with KV_OFFSETS and POINTERS */
  const kvx_span_t *span;         /* of at least one layer, or of the plane to find */
  const kvx_seq_lens_t *seq_lens; /* tokens to find of each sequence, from its start on */
  uint64_t place_count;           /* the sum of seq_lens over all rows, or entries of the plane */
  kvx_place_t *places;            /* [place_count], filled: the rows one after the other */
  uint32_t plane_plus_1;          /* 0: K or V; p + 1: entries of span->planes[p] */
  uint32_t layer;                 /* with a POINTERS table, the layer of K or V; otherwise 0 */
} kvx_find_desc_t;

/* Finds the tokens that a migration from `span` would read.
 *
 * Mutates `places`, nothing else. Errors are those of kvx_migrate_kv about its source: a slot,
 * block or length out of range gives OUT_OF_RANGE, and nothing is filled. Spec: E.12 */
KVX_API kvx_status_t kvx_find_tokens(const kvx_find_desc_t *find);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* KVX_LOOKUP_H_ */
