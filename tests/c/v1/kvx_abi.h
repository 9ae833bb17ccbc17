/* The structs, enums and functions of the KVX v1 specification, alone: what a program sees that was
 * written from it. Sizes and offsets are those of LP64. Spec: 3 to 7 */
#ifndef KVX_ABI_H_
#define KVX_ABI_H_

#include <stddef.h>
#include <stdint.h>

#define KVX_ABI_VERSION_MAJOR 1
#define KVX_ABI_VERSION_MINOR 0
#define KVX_ABI_VERSION_PATCH 0

/* Enough for the packed layout, [block, head, dim / pack, token, pack]. */
#define KVX_MAX_TENSOR_DIMS 5

#if defined(_WIN32)
#define KVX_API __declspec(dllexport)
#else
#define KVX_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Result of every call. Spec: 8 */
typedef enum kvx_status_t {
  KVX_STATUS_OK = 0,
  KVX_STATUS_INVALID_ARGUMENT = 1, /* malformed descriptor: field missing, wrong or inconsistent */
  KVX_STATUS_UNSUPPORTED = 2,      /* well formed, but not something this build can do */
  KVX_STATUS_OUT_OF_RANGE = 3,     /* a slot, block, offset or length points outside the cache */
  KVX_STATUS_INCOMPATIBLE = 4,     /* ABI major versions differ */
  KVX_STATUS_INTERNAL_ERROR = 5    /* a bug or an exhausted system resource */
} kvx_status_t;

/* Element types. Spec: 4.3 */
typedef enum kvx_dtype_t {
  KVX_DTYPE_INVALID = 0,
  KVX_DTYPE_F16 = 1,
  KVX_DTYPE_BF16 = 2,
  KVX_DTYPE_F32 = 3,
  KVX_DTYPE_F8_E4M3 = 4, /* OCP E4M3 ("fn"): no infinity, NaN is 0x7f, largest value 448 */
  KVX_DTYPE_F8_E5M2 = 5, /* OCP E5M2: largest finite value 57344 */
  KVX_DTYPE_S32 = 6,
  KVX_DTYPE_S64 = 7,
  KVX_DTYPE_U32 = 8,
  KVX_DTYPE_U64 = 9,
  KVX_DTYPE_U8 = 10 /* as a cache dtype: opaque bytes, copied to U8 and never converted */
} kvx_dtype_t;

/* Where a buffer lives. HOST is valid for every call; UNIFIED is used where the call runs. */
typedef enum kvx_memory_type_t {
  KVX_MEMORY_UNKNOWN = 0,
  KVX_MEMORY_HOST = 1,
  KVX_MEMORY_DEVICE = 2,
  KVX_MEMORY_UNIFIED = 3
} kvx_memory_type_t;

/* Order of the axes in `shape` and `stride`; the strides are free. Spec: 4.2 */
typedef enum kvx_layout_t {
  KVX_LAYOUT_INVALID = 0,
  KVX_LAYOUT_BLOCK_NHD = 1,        /* [num_blocks, block_size, num_kv_heads, head_dim] */
  KVX_LAYOUT_BLOCK_HND = 2,        /* [num_blocks, num_kv_heads, block_size, head_dim] */
  KVX_LAYOUT_BLOCK_HND_PACKED = 3, /* [num_blocks, num_kv_heads, head_dim/pack, block_size, pack] */
  KVX_LAYOUT_BLOCK_CUSTOM = 15     /* 4-D as HND, 5-D as HND_PACKED; no canonical strides implied */
} kvx_layout_t;

/* How a sequence's tokens are found in the cache. Spec: 5.1 */
typedef enum kvx_block_table_format_t {
  KVX_BLOCK_TABLE_INVALID = 0,
  KVX_BLOCK_TABLE_PACKED = 1,    /* [seq_count, max_blocks_per_seq] block ids */
  KVX_BLOCK_TABLE_RAGGED = 2,    /* one block id per token, split into sequences by indptr */
  KVX_BLOCK_TABLE_KV_OFFSETS = 3 /* [seq_count, beam_width, 2, max_blocks_per_seq] KVCacheIndex */
} kvx_block_table_format_t;

typedef enum kvx_block_table_flags_t {
  KVX_BLOCK_TABLE_FLAG_NONE = 0,
  KVX_BLOCK_TABLE_FLAG_KVCACHEINDEX = 1 << 0 /* MUST be set for KV_OFFSETS */
} kvx_block_table_flags_t;

/* What one scale covers. value = stored * scale; stored = round(x / scale). Spec: 6.6 */
typedef enum kvx_scale_granularity_t {
  KVX_SCALE_NONE = 0,
  KVX_SCALE_PER_TENSOR = 1,     /* one scale; ndim 0, or any shape of one element */
  KVX_SCALE_PER_BLOCK = 2,      /* [num_blocks] */
  KVX_SCALE_PER_HEAD = 3,       /* [num_kv_heads] */
  KVX_SCALE_PER_BLOCK_HEAD = 4, /* [num_blocks, num_kv_heads] */
} kvx_scale_granularity_t;

/* ABI version of a library or of a caller. 16 bytes. Spec: 3 */
typedef struct kvx_version_t {
  uint32_t size;      /* set by kvx_get_version: sizeof(kvx_version_t) */
  uint32_t abi_major; /* differing majors cannot talk to each other */
  uint32_t abi_minor; /* later minors only add */
  uint32_t abi_patch;
} kvx_version_t;

/* One K, V, key or value tensor. Frozen for major version 1 (it is embedded). 112 bytes. Spec: 6.2
 *
 * Axes are those of `layout`, extents in shape[0..ndim), steps in stride[0..ndim). Strides are >= 0
 * and no two elements of a cache tensor or of an output share memory; an axis of extent 1 may have
 * any stride. `data` is aligned to the element size; 16 bytes or more lets vector code run.
 *
 * A cache without V (MLA) has v.data == NULL and v.ndim == 0. */
typedef struct kvx_tensor_desc_t {
  uint32_t size;
  kvx_dtype_t dtype;
  kvx_layout_t layout; /* ignored for the key and value tensors of kvx_kv_io_desc_t */
  kvx_memory_type_t memory;
  uint32_t ndim;                       /* 4, or 5 for packed; 3 or 4 for IO tensors */
  int64_t shape[KVX_MAX_TENSOR_DIMS];  /* elements */
  int64_t stride[KVX_MAX_TENSOR_DIMS]; /* elements */
  void *data;                          /* element [0, 0, ...] */
} kvx_tensor_desc_t;

/* The pool behind a KV_OFFSETS table, seen from one layer. Frozen (embedded). 32 bytes. Spec: 6.7
 *
 * A KVCacheIndex counts sub-blocks of `bytes_per_block` bytes from `primary` or, with bit 31 set,
 * from `secondary`; -1 is null. One table serves all layers of a pool: the layer is chosen by
 * moving both base pointers, so here they are the pool's addresses plus the layer's offset. */
typedef struct kvx_pool_desc_t {
  uint32_t size;
  kvx_memory_type_t memory; /* of `primary` */
  uint32_t bytes_per_block; /* one K or V sub-block of one layer, in bytes */
  void *primary;            /* K of block 0 of this layer; equals cache.k.data */
  void *secondary;          /* the same place in the secondary pool, or NULL */
} kvx_pool_desc_t;

/* The cache of one layer. 280 bytes. Spec: 6.1 */
typedef struct kvx_cache_desc_t {
  uint32_t size;
  uint32_t num_blocks;   /* physical blocks that k and v address */
  uint32_t block_size;   /* tokens per block */
  uint32_t num_kv_heads; /* heads held here (one tensor-parallel rank's share) */
  uint32_t head_dim;     /* of K; V's is its own shape */
  kvx_tensor_desc_t k;
  kvx_tensor_desc_t v;  /* data NULL and ndim 0: no V */
  kvx_pool_desc_t pool; /* needed for KV_OFFSETS only, else zero */
} kvx_cache_desc_t;

/* Logical to physical blocks. 64 bytes. Spec: 5.1, 6.3
 *
 * Entries past the blocks that a sequence's length needs are never read. A negative entry is null:
 * it is never dereferenced, its tokens are skipped (kvx_gather_options_t can zero them). */
typedef struct kvx_block_table_t {
  uint32_t size;
  kvx_block_table_format_t format;
  kvx_dtype_t index_dtype;     /* S32 or S64; KV_OFFSETS: S32 */
  kvx_dtype_t indptr_dtype;    /* RAGGED: S32 or S64 */
  uint32_t seq_count;          /* sequences */
  uint32_t beam_width;         /* KV_OFFSETS: >= 1; else 1, or 0 for unset */
  uint32_t max_blocks_per_seq; /* columns of PACKED and KV_OFFSETS; not used by RAGGED */
  const void *indices;         /* [indices_count] */
  const void *indptr;     /* RAGGED: [seq_count + 1] running token counts, first 0; else NULL */
  uint32_t indices_count; /* PACKED: seq_count * max_blocks_per_seq
                             RAGGED: indptr[seq_count]
                             KV_OFFSETS: seq_count * beam_width * 2 * max_blocks_per_seq */
  uint32_t indptr_count;  /* RAGGED: seq_count + 1; else 0 */
  uint32_t flags;         /* kvx_block_table_flags_t */
} kvx_block_table_t;

/* Where each new token goes: slot = block_id * block_size + block_offset. 32 bytes. Spec: 5.2, 6.4
 */
typedef struct kvx_slot_mapping_t {
  uint32_t size;
  kvx_dtype_t dtype;    /* S32 or S64 */
  uint32_t token_count; /* equals io.num_tokens */
  int64_t invalid_slot; /* skipped, as every negative slot is; usually -1 */
  const void *slots;    /* [token_count] */
} kvx_slot_mapping_t;

/* Cached tokens per sequence. 24 bytes. Spec: 5.3, 6.5 */
typedef struct kvx_seq_lens_t {
  uint32_t size;
  kvx_dtype_t dtype;   /* S32 or S64 */
  uint32_t seq_count;  /* equals the table's */
  const void *lengths; /* [seq_count], tokens, >= 0 */
} kvx_seq_lens_t;

/* New tokens going in, or cached tokens coming out. Frozen (embedded). 248 bytes. Spec: 6.8
 *
 * write:  key, value: [>= num_tokens, num_kv_heads, head_dim]; rows past num_tokens are padding.
 * gather: [seq_count * beam_width, max_seq_len, num_kv_heads, head_dim], or the same rows as 3-D
 *         [num_tokens, num_kv_heads, head_dim]; num_tokens = seq_count * beam_width * max_seq_len.
 * Any strides; dtypes F16, BF16, F32, F8_E4M3, F8_E5M2, or U8 where the cache is U8. */
typedef struct kvx_kv_io_desc_t {
  uint32_t size;
  kvx_tensor_desc_t key;
  kvx_tensor_desc_t value; /* data NULL and ndim 0 when the cache has no V */
  uint32_t num_tokens;
  uint32_t num_kv_heads; /* equals cache.num_kv_heads */
  uint32_t head_dim;     /* equals cache.head_dim */
} kvx_kv_io_desc_t;

/* Scales of an FP8 tensor. Frozen (embedded). 104 bytes. Spec: 6.6 */
typedef struct kvx_scale_desc_t {
  uint32_t size;
  kvx_dtype_t dtype; /* F32, F16 or BF16 */
  kvx_scale_granularity_t granularity;
  uint32_t ndim;
  int64_t shape[KVX_MAX_TENSOR_DIMS];
  int64_t stride[KVX_MAX_TENSOR_DIMS]; /* in elements of dtype; may step over inline data */
  const void *data;                    /* NULL: no scales (or the per-tensor pointer, see write) */
} kvx_scale_desc_t;

/* kvx_write_kv's arguments. 512 bytes. Spec: 6.9 */
typedef struct kvx_write_desc_t {
  uint32_t size;
  kvx_kv_io_desc_t io;
  kvx_slot_mapping_t slots;
  const void *k_scale;           /* one F32, used when k_scale_desc.data is NULL */
  const void *v_scale;           /* one F32, used when v_scale_desc.data is NULL */
  kvx_scale_desc_t k_scale_desc; /* zero when unused */
  kvx_scale_desc_t v_scale_desc;
} kvx_write_desc_t;

/* kvx_gather_kv's arguments. 352 bytes. Spec: 6.10 */
typedef struct kvx_gather_desc_t {
  uint32_t size;
  kvx_kv_io_desc_t io;
  kvx_block_table_t block_table;
  kvx_seq_lens_t seq_lens;
  uint32_t max_seq_len; /* rows per sequence in io; a longer sequence is cut to it */
} kvx_gather_desc_t;

/* Fills *version, whatever it held. INVALID_ARGUMENT if version is NULL. Spec: 3, 7 */
KVX_API kvx_status_t kvx_get_version(kvx_version_t *version);

/* Checks everything about a cache that can be checked without reading it. Spec: 7.1 */
KVX_API kvx_status_t kvx_validate_cache_desc(const kvx_cache_desc_t *cache);

/* Writes num_tokens new tokens into the slots of a cache, converting dtype and scale on the way.
 *
 * Mutates the slots named by `write->slots`, nothing else. Slots that are negative or equal to
 * invalid_slot are skipped. Two tokens on one slot leave that slot unspecified. On HOST memory a
 * slot past the cache gives OUT_OF_RANGE and nothing is written.
 * `stream`: the CUDA stream to run on (NULL: the default stream); ignored for HOST memory.
 * Spec: 7 */
KVX_API kvx_status_t kvx_write_kv(const kvx_cache_desc_t *cache, const kvx_write_desc_t *write,
                                  void *stream);

/* Gathers each sequence's first min(length, max_seq_len) tokens into io.key and io.value.
 *
 * Mutates those rows of io, nothing else: rows past a sequence's length keep what they held. On
 * HOST memory a block id past the cache gives OUT_OF_RANGE and nothing is written.
 * Spec: 7 */
KVX_API kvx_status_t kvx_gather_kv(const kvx_cache_desc_t *cache, const kvx_gather_desc_t *gather,
                                   void *stream);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* KVX_ABI_H_ */
