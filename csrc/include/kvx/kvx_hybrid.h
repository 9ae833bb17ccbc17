/* KVX hybrid caches: DeepSeek-V4's windows, tails, compressed entries and indexer keys.
 *
 * A layer keeps the last tokens of a request in a ring, what it has not compressed yet in a tail,
 * and one entry for each `ratio` tokens in blocks. Numbers without rotation are E4M3 with one
 * inverse scale for a row, those with rotation BF16, indexer keys E2M1 with a scale for a group or
 * E4M3 with one for the key.
 *
 * Arrays are contiguous and row-major, and all of a call's are in `memory`, HOST or DEVICE. Arrays
 * that a call writes overlap no other array of it. A call on HOST memory checks slots, positions
 * and block ids first and writes nothing if one is out of range; on DEVICE memory kernels skip the
 * rows whose numbers are out of range. Calls allocate nothing on a device, wait for nothing and may
 * be captured. A call on no rows does nothing. Spec: E.22 */
#ifndef KVX_HYBRID_H_
#define KVX_HYBRID_H_

#include "kvx/kvx_abi.h"

#ifdef __cplusplus
extern "C" {
#endif

/* append: no two tokens of the call are of one slot, as in a decode step: one launch on a device,
 * which takes places by an atomic addition to the head. */
#define KVX_HYBRID_ONE_EACH (1u << 0)
/* compress: rows of the state are head_dim wide, and the stream of the previous tokens has the
 * projection of the current ones. Not what DeepSeek-V4 computes. */
#define KVX_HYBRID_SINGLE_ROW (1u << 1)
/* compress: ka and za are the tokens of one request, [num_rows * ratio, row]; the previous tokens
 * of row i are those of row i - 1, those of row 0 are kb and zb, or none if these are NULL. */
#define KVX_HYBRID_BULK (1u << 2)
/* compress, BULK: entries have no stream of previous tokens. */
#define KVX_HYBRID_NO_OVERLAP (1u << 3)
/* flush: keys in E2M1 are rounded by thresholds, as SGLang rounds them: a tie goes to the smaller
 * magnitude, 0 has no sign, and E8M0 scales are 2^-13 at least. Else a tie goes to the even code.
 */
#define KVX_HYBRID_THRESHOLDS (1u << 4)

/* Spans of append and tail: where the tokens of one slot stand. With num_spans the tokens of a call
 * lie in spans, one after the other, each of one slot, no two of the same slot but -1; a span may
 * be empty. Each token is then placed in a time that does not depend on the others. Without spans
 * tokens of a slot may stand anywhere, and a device looks for them among all tokens of the call. */

/* Tokens into rings. 120 bytes. */
typedef struct kvx_hybrid_append_t {
  uint32_t size;
  kvx_memory_type_t memory;
  uint32_t num_tokens, num_slots; /* rows of x; rings */
  uint32_t window;                /* rows of a ring */
  uint32_t nope_dim, rope_dim;    /* numbers of a row in E4M3 and in BF16 */
  uint32_t position_bytes;        /* 4: int32_t; 8: int64_t */
  uint32_t flags;                 /* ONE_EACH */
  uint32_t num_spans;             /* 0: without spans */
  const void *x;                  /* [num_tokens, nope_dim + rope_dim] BF16 */
  const void *positions;          /* [num_tokens] */
  const int32_t *slots;           /* [num_tokens] ring of each token; -1: skipped */
  uint8_t *fp8;                   /* [num_slots, window, nope_dim] E4M3 */
  void *rope;                     /* [num_slots, window, rope_dim] BF16 */
  float *inv_scale;               /* [num_slots, window]; NULL: no scales, all are 1 */
  int32_t *pos;                   /* [num_slots, window] */
  int32_t *head;                  /* [num_slots] tokens that a ring has been given */
  const int32_t *span_of;         /* [num_tokens] the span of each token; read with num_spans */
  const int32_t *span_starts;     /* [num_spans + 1] first token of each span; num_tokens */
} kvx_hybrid_append_t;

/* Rows into tails. 104 bytes. */
typedef struct kvx_hybrid_tail_t {
  uint32_t size;
  kvx_memory_type_t memory;
  uint32_t num_tokens, num_slots;
  uint32_t ratio;    /* rows of a tail */
  uint32_t row;      /* numbers of a row */
  kvx_dtype_t dtype; /* of k and z: F32 or BF16 */
  kvx_dtype_t state; /* of ka and za: F32 or BF16 */
  const void *k, *z; /* [num_tokens, row] */
  const int32_t *slots;
  void *ka, *za;              /* [num_slots, ratio, row] */
  int32_t *tail_len;          /* [num_slots] rows that a tail has */
  uint32_t num_spans;         /* 0: without spans */
  uint32_t reserved;          /* 0 */
  const int32_t *span_of;     /* [num_tokens]; see append */
  const int32_t *span_starts; /* [num_spans + 1] */
} kvx_hybrid_tail_t;

/* Tails to entries. 152 bytes. */
typedef struct kvx_hybrid_compress_t {
  uint32_t size;
  kvx_memory_type_t memory;
  uint32_t num_rows, num_slots; /* rows of out; tails */
  uint32_t ratio, head_dim, rope_dim;
  uint32_t position_bytes; /* 4 or 8 */
  uint32_t num_positions;  /* rows of cos_sin */
  uint32_t flags;          /* SINGLE_ROW, BULK, NO_OVERLAP */
  kvx_dtype_t state;       /* of ka, za, kb and zb: F32 or BF16 */
  kvx_dtype_t out_dtype;   /* F32 or BF16 */
  float eps;
  uint32_t reserved;          /* 0 */
  const void *ka, *za;        /* [num_slots, ratio, row] current tokens */
  const void *kb, *zb;        /* the same of the previous tokens; NULL: no overlap (HCA) */
  const float *ape_a, *ape_b; /* [ratio, head_dim], added to za and zb; NULL: 0 */
  const float *norm_weight;   /* [head_dim]; NULL: no norm */
  const float *cos_sin;       /* [num_positions, rope_dim]: cosines, sines; NULL: no rotation */
  const void *positions;      /* [num_rows]; read with cos_sin */
  const int32_t *slots;       /* [num_rows] tail of each row, -1: skipped; NULL: row i is tail i */
  const uint8_t *mask;        /* [num_rows], 0: the row is not written; NULL: all are */
  void *out;                  /* [num_rows, head_dim] */
} kvx_hybrid_compress_t;

/* The scales of indexer keys. */
typedef enum kvx_hybrid_keys_t {
  KVX_HYBRID_NO_KEYS = 0,
  KVX_HYBRID_NVFP4 = 1, /* E4M3, one for 16 numbers */
  KVX_HYBRID_MXFP4 = 2, /* E8M0, one for 32 numbers */
  KVX_HYBRID_FP8 = 3    /* float32, a power of two for all numbers of a key, which are E4M3 */
} kvx_hybrid_keys_t;

/* Entries into blocks. 136 bytes. */
typedef struct kvx_hybrid_flush_t {
  uint32_t size;
  kvx_memory_type_t memory;
  uint32_t num_rows, num_blocks, entries_per_block;
  uint32_t nope_dim, rope_dim;
  uint32_t max_blocks; /* columns of block_table */
  uint32_t key_dim;    /* numbers of an indexer key; 0 without keys */
  kvx_hybrid_keys_t keys;
  kvx_dtype_t dtype;          /* of entry and index_key: F32 or BF16 */
  uint32_t flags;             /* THRESHOLDS, with NVFP4 or MXFP4 */
  const void *entry;          /* [num_rows, nope_dim + rope_dim] */
  const void *index_key;      /* [num_rows, key_dim]; NULL without keys */
  const int32_t *slots;       /* [num_rows], -1: skipped, less: refused; NULL: none is */
  const int32_t *entry_ids;   /* [num_rows] number of the entry in its request */
  const uint8_t *mask;        /* [num_rows], 0: skipped; NULL: none is */
  const int32_t *block_table; /* [num_rows, max_blocks] */
  uint8_t *fp8;               /* [num_blocks, entries_per_block, nope_dim] E4M3 */
  void *rope;                 /* [num_blocks, entries_per_block, rope_dim] BF16 */
  float *inv_scale;           /* [num_blocks, entries_per_block]; NULL: no scales, all are 1 */
  uint8_t *key_codes;         /* [num_blocks, entries_per_block, key_dim / 2], FP8: key_dim; NULL
                                 without keys */
  uint8_t *key_scales;        /* [num_blocks, entries_per_block, groups], FP8: one float; NULL
                                 without keys */
} kvx_hybrid_flush_t;

/* What becomes of tails after a flush. 88 bytes. */
typedef struct kvx_hybrid_state_t {
  uint32_t size;
  kvx_memory_type_t memory;
  uint32_t num_rows, num_slots, ratio, row;
  kvx_dtype_t state;    /* F32 or BF16 */
  uint32_t reserved;    /* 0 */
  const int32_t *slots; /* [num_rows], distinct; -1: skipped */
  const uint8_t *mask;  /* [num_rows], 0: skipped; NULL: none is */
  void *ka, *za;        /* [num_slots, ratio, row] */
  void *kb, *zb;        /* the same; NULL: HCA */
  int32_t *tail_len;    /* [num_slots] */
} kvx_hybrid_state_t;

/* Rows into the pages of vLLM and SGLang, or out of them. 56 bytes. */
typedef struct kvx_hybrid_pages_t {
  uint32_t size;
  kvx_memory_type_t memory;
  uint32_t num_rows, num_pages, entries_per_page;
  kvx_dtype_t dtype;    /* of rows: F32 or BF16 */
  uint64_t page_stride; /* bytes from a page to the next */
  const int64_t *slots; /* [num_rows] page * entries_per_page + entry; -1: skipped */
  void *rows;           /* [num_rows, 512] */
  void *pages;
} kvx_hybrid_pages_t;

/* Quantises tokens and writes them behind the newest of their rings, in their order. Of more than
 * `window` tokens of one slot only the last are written; the head advances by all.
 * Mutates fp8, rope, inv_scale, pos and head. */
KVX_API kvx_status_t kvx_hybrid_append_swa(const kvx_hybrid_append_t *append, void *stream);

/* Writes rows behind those that the tails have, in their order. A tail that would have more than
 * `ratio` rows is OUT_OF_RANGE; on a device the rows past it are skipped.
 * Mutates ka, za and tail_len. */
KVX_API kvx_status_t kvx_hybrid_append_tail(const kvx_hybrid_tail_t *tail, void *stream);

/* Entries of tails: a softmax over the tokens of each number, the weighted sum, RMSNorm, and the
 * rotation of neighbouring numbers among the last rope_dim. Mutates out. */
KVX_API kvx_status_t kvx_hybrid_compress(const kvx_hybrid_compress_t *compress, void *stream);

/* Quantises entries and writes entry e of row i to place e % entries_per_block of block
 * block_table[i, e / entries_per_block]; with keys the indexer key, too. Two rows of one place are
 * INVALID_ARGUMENT on HOST memory, here and in the next two calls. Mutates fp8, rope, inv_scale,
 * key_codes and key_scales. */
KVX_API kvx_status_t kvx_hybrid_flush_write(const kvx_hybrid_flush_t *flush, void *stream);

/* With kb and zb (CSA): they become ka and za. Then ka, za and tail_len become 0.
 * Mutates all of these, of the slots that are named. */
KVX_API kvx_status_t kvx_hybrid_rotate_state(const kvx_hybrid_state_t *state, void *stream);

/* Rows to the records of pages: 448 numbers in E4M3 and 64 in BF16, and behind the records of all
 * entries seven E8M0 scales and a zero byte for each. Mutates pages. */
KVX_API kvx_status_t kvx_hybrid_write_pages(const kvx_hybrid_pages_t *pages, void *stream);

/* The values of records. Rows whose slot is -1 are not written. Mutates rows. */
KVX_API kvx_status_t kvx_hybrid_read_pages(const kvx_hybrid_pages_t *pages, void *stream);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* KVX_HYBRID_H_ */
