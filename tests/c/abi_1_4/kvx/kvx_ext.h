/* KVX beyond v1: the error sentence, options of gather, migration between caches, the backend.
 *
 * The conventions of kvx_abi.h hold here too: `size` first, strides in elements, pointers borrowed
 * for the call, nothing written before the whole call has been validated. */
#ifndef KVX_EXT_H_
#define KVX_EXT_H_

#include "kvx/kvx_abi.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Why the last failed call on this thread failed: one sentence with the field, what it is, what was
 * expected, the spec section and, where there is one, the way out. "" if none has failed. Valid
 * until the next failing call on the same thread. */
KVX_API const char *kvx_last_error(void);

/* Whether this library can serve a program compiled for ABI version abi_major.abi_minor: OK, or
 * INCOMPATIBLE where the major versions differ or the program's minor version is later than the
 * library's. KVX_CHECK_VERSION() asks for the version of the header that it is compiled with.
 * Spec: 3 */
KVX_API kvx_status_t kvx_check_version(uint32_t abi_major, uint32_t abi_minor);
#define KVX_CHECK_VERSION() kvx_check_version(KVX_ABI_VERSION_MAJOR, KVX_ABI_VERSION_MINOR)

/* What this build and this machine offer. */
typedef struct kvx_backend_info_t {
  uint32_t size;
  uint32_t has_cuda;    /* 1: built with CUDA kernels */
  uint32_t num_threads; /* threads that a large call on HOST memory uses, the caller's included */
  uint32_t reserved;
  const char *cpu_isa;   /* what the copies use: "avx512vbmi", "avx512", "avx2" or "portable" */
  const char *version;   /* version of the library, "major.minor.patch" */
  uint64_t stream_bytes; /* calls that move at least this many bytes store past the caches */
} kvx_backend_info_t;

KVX_API kvx_status_t kvx_backend_info(kvx_backend_info_t *info);

/* What calls on DEVICE memory skipped because an index, a length or a scale in the data was out of
 * range. A device call cannot look before it runs, so it skips such tokens and remembers. This
 * waits for `stream` and answers OK if nothing has been skipped on the current device, by calls on
 * any stream, since it was last asked; otherwise what a call on HOST memory would have answered,
 * with the first of them and their number in the sentence. */
KVX_API kvx_status_t kvx_device_status(void *stream);

/* Sets how many threads a large call on HOST memory uses, for the whole process. 1: the caller
 * alone. 0: back to the default, KVX_NUM_THREADS or else the cores of the process, at most 16. */
KVX_API kvx_status_t kvx_set_num_threads(uint32_t num_threads);

/* Runs work(data) on `num_threads` threads of the host's at once, 0 for as many as it likes, the
 * calling one among them, and returns when all have returned. This is GOMP_parallel, which the
 * OpenMP runtimes of GCC, LLVM and Intel export; `flags` is 0. */
typedef void (*kvx_team_t)(void (*work)(void *data), void *data, unsigned num_threads,
                           unsigned flags);

/* Lets large calls on HOST memory that this thread makes use the host's `num_threads` threads
 * instead of libkvx's own: those that have just worked for the host are awake, so that smaller
 * calls are worth sharing too. KVX_NUM_THREADS and kvx_set_num_threads, where given, bound them.
 * NULL: libkvx's own again. A forked child is back to those. */
KVX_API kvx_status_t kvx_set_team(kvx_team_t team, uint32_t num_threads);

/* Zero the destination tokens that have no source: null blocks and, for gather, rows past the
 * sequence's length. Without the flag they keep what they held. */
#define KVX_FLAG_ZERO_FILL (1u << 0)

/* Of a call that runs on the device: a background transfer, which uses a handful of
 * multiprocessors and leaves the others to the model. */
#define KVX_FLAG_BACKGROUND (1u << 1)

/* Of a call that runs on the device: the copy engines move the bytes, no multiprocessor does. Both
 * ends must store the same bytes. Slots, tables, lengths and starts are read by the host, so they
 * lie in HOST memory, and are checked as for HOST memory before anything moves. */
#define KVX_FLAG_COPY_ENGINE (1u << 2)

/* Of a write or a migration into FP8: the scales are found on the way, one per token and head, and
 * stored where PER_TOKEN_HEAD scales of the destination point. Spec: E.9 */
#define KVX_FLAG_FIND_SCALES (1u << 3)

/* The value of null_block_plus_1 for block `id`. The field is 0 where no block is null. Negative
 * table entries are null in any case. */
#define KVX_NULL_BLOCK(id) ((uint64_t)(id) + 1)

/* Options of kvx_write_kv_ext. 8 bytes. */
typedef struct kvx_write_options_t {
  uint32_t size;
  uint32_t flags; /* KVX_FLAG_BACKGROUND, _COPY_ENGINE, _FIND_SCALES */
} kvx_write_options_t;

/* kvx_write_kv with options; NULL options are those of kvx_write_kv. */
KVX_API kvx_status_t kvx_write_kv_ext(const kvx_cache_desc_t *cache, const kvx_write_desc_t *write,
                                      const kvx_write_options_t *options, void *stream);

/* Options of kvx_gather_kv_ext. 48 bytes; until 1.3 it was 40 bytes, and reserved_0 was
 * `null_block_id`: see kvx_view_t. */
typedef struct kvx_gather_options_t {
  uint32_t size;
  uint32_t flags; /* KVX_FLAG_ZERO_FILL, _BACKGROUND, _COPY_ENGINE */
  int64_t reserved_0;
  uint32_t secondary_num_blocks; /* blocks in cache.pool.secondary; 0: as many as num_blocks */
  uint32_t reserved_1;
  const kvx_scale_desc_t *k_scale; /* of the cache's K, if it is FP8; NULL: 1 */
  const kvx_scale_desc_t *v_scale;
  uint64_t null_block_plus_1; /* KVX_NULL_BLOCK(id) of a block that holds nothing (vLLM: id 0); 0:
                                 every block holds tokens. Since 1.4 */
} kvx_gather_options_t;

/* kvx_gather_kv with options; NULL options are those of kvx_gather_kv. */
KVX_API kvx_status_t kvx_gather_kv_ext(const kvx_cache_desc_t *cache,
                                       const kvx_gather_desc_t *gather,
                                       const kvx_gather_options_t *options, void *stream);

/* One end of a migration: the layers of one engine's cache and where each sequence lies in them.
 *
 * At most one of `block_table` and `slots` is given:
 *   block_table  PACKED, RAGGED or KV_OFFSETS, shared by all layers
 *   slots        one slot per moved token, the sequences one after the other
 *   neither      dense: sequence s is block s (HF's [batch, head, token, dim], a StaticCache, ...)
 *
 * 80 bytes. Until 1.3 it was 72 bytes, and reserved_0 was `null_block_id`, the block itself: a
 * struct of that size keeps that meaning. */
typedef struct kvx_view_t {
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
  uint64_t null_block_plus_1; /* as in kvx_gather_options_t */
} kvx_view_t;

/* kvx_migrate_kv's arguments.
 *
 * Token `src.starts[s] + i` of sequence s goes to token `dst.starts[s] + i`, for i < seq_lens[s]
 * and, if it is given, i < max_seq_len, heads src.head_start + h to dst.head_start + h, for h <
 * num_heads, in layers l of both ends. */
typedef struct kvx_migrate_desc_t {
  uint32_t size;
  uint32_t flags;       /* KVX_FLAG_ZERO_FILL, _BACKGROUND, _COPY_ENGINE, _FIND_SCALES */
  uint32_t num_heads;   /* 0: all heads; both ends then hold the same number */
  uint32_t max_seq_len; /* tokens of a sequence that move at most; 0: all. A device, where lengths
                           are not known before it runs, looks for no more of them */
  const kvx_seq_lens_t *seq_lens; /* tokens to move of each sequence */
  const kvx_view_t *src;
  const kvx_view_t *dst;
} kvx_migrate_desc_t;

/* Moves sequences from one cache into another in one pass: other layout, block size, dtype, scales,
 * table and head range, all layers in one call, no staging.
 *
 * Mutates the destination tokens named above, nothing else. Both ends may be the same pool if their
 * blocks are disjoint. Null blocks are skipped on either side. On HOST memory a slot, block or
 * length out of range gives OUT_OF_RANGE and nothing is written. Spec: E.3 */
KVX_API kvx_status_t kvx_migrate_kv(const kvx_migrate_desc_t *migrate, void *stream);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* KVX_EXT_H_ */
