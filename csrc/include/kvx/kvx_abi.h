/* KVX v1: the standard description of a paged KV cache, as C.
 *
 * A KVX descriptor says where the K and V of every token of a cache lie, without owning or moving
 * a byte of it. This header has the v1 descriptors and the two v1 operations: write new tokens into
 * a cache, and gather cached tokens out of it. Everything beyond v1 is in headers by concern:
 * kvx_error.h, kvx_host.h, kvx_ops.h, kvx_layers.h, kvx_migrate.h, kvx_plane.h, kvx_plan.h,
 * kvx_lookup.h, kvx_blocks.h, kvx_encode.h, kvx_lossless.h, kvx_turboquant.h, kvx_attend.h;
 * kvx_ext.h includes them all.
 * "Spec:" refers to sections of docs/spec.md.
 *
 * Conventions
 *   - Every struct begins with `size`, set by the caller to sizeof(the struct). A smaller value is
 *     refused, but 0 of an embedded struct that is not used; a larger one, from a newer header of
 *     the same major version, is accepted.
 *   - Strides are in elements. Fields in bytes have "bytes" in their name.
 *   - All pointers are borrowed for the duration of the call and never retained.
 *   - Functions are thread-safe as long as concurrent calls do not write overlapping memory.
 *   - Nothing is written before the whole call has been validated.
 *   - Unused fields are zero. Sizes and offsets below are for LP64.
 */
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

/* Result of every call. kvx_last_error() in kvx_error.h says why a call failed. Spec: 8 */
typedef enum kvx_status_t {
  KVX_STATUS_OK = 0,
  KVX_STATUS_INVALID_ARGUMENT = 1, /* malformed descriptor: field missing, wrong or inconsistent */
  KVX_STATUS_UNSUPPORTED = 2,      /* well formed, but not something this build can do */
  KVX_STATUS_OUT_OF_RANGE = 3,     /* a slot, block, offset or length points outside the cache */
  KVX_STATUS_INCOMPATIBLE = 4,     /* the library does not serve the caller's ABI version */
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
  KVX_DTYPE_U8 = 10,          /* as a cache dtype: opaque bytes, copied to U8 and never converted */
  KVX_DTYPE_F8_E4M3FNUZ = 11, /* AMD's: no infinity, NaN is 0x80, largest value 240 */
  KVX_DTYPE_Q8_0 = 12,        /* an element is a unit: 32 numbers along dim in 34 bytes */
  KVX_DTYPE_Q4_0 = 13,        /* an element is a unit: 32 numbers along dim in 18 bytes */
  KVX_DTYPE_U8_ZERO = 14, /* value = (q - zero) * scale, with a scale and a zero point per group of
                             numbers beside the data: OpenVINO's u8. Spec: E.14 */
  KVX_DTYPE_U8_BIAS = 15, /* value = q * scale + zero: MLX's 8 bits. Spec: E.14 */
  KVX_DTYPE_Q4_1 = 16,    /* a unit of 32 numbers in 20 bytes */
  KVX_DTYPE_IQ4_NL = 17,  /* 32 numbers in 18 bytes */
  KVX_DTYPE_Q5_0 = 18,    /* 32 numbers in 22 bytes */
  KVX_DTYPE_Q5_1 = 19,    /* 32 numbers in 24 bytes */
  KVX_DTYPE_Q4_K = 20,    /* 256 numbers in 144 bytes */
  KVX_DTYPE_Q5_K = 21,    /* 256 numbers in 176 bytes */
  KVX_DTYPE_Q6_K = 22,    /* 256 numbers in 210 bytes */
  KVX_DTYPE_F4_E2M1 = 23, /* an element is a byte of two numbers along dim, with a scale per group
                             of numbers beside the data: NVFP4, MX. Spec: E.18 */
  KVX_DTYPE_MXFP4 = 24,   /* 32 numbers in 17 bytes */
  KVX_DTYPE_F8_E8M0 = 25, /* 2^(bits - 127), NaN is 0xff: scales of F4_E2M1 alone */
  KVX_DTYPE_TQ2 = 26,     /* TurboQuant: 128 numbers in 34 bytes. Spec: E.20 */
  KVX_DTYPE_TQ3 = 27,     /* 128 numbers in 50 bytes */
  KVX_DTYPE_TQ4 = 28,     /* 128 numbers in 66 bytes */
  KVX_DTYPE_S8 = 29 /* signed integers with a scale or without: -127 to 127, -128 is read, never
                       written. TensorRT-LLM's and vLLM's int8. Spec: E.6 */
} kvx_dtype_t;

/* The memory of a buffer. HOST is valid for every call; UNIFIED is used where the call runs. */
typedef enum kvx_memory_type_t {
  KVX_MEMORY_UNKNOWN = 0,
  KVX_MEMORY_HOST = 1,
  KVX_MEMORY_DEVICE = 2,
  KVX_MEMORY_UNIFIED = 3
} kvx_memory_type_t;

/* Order of the axes in `shape` and `stride`; the strides are free. CUSTOM says nothing that the
 * others do not: its axes are told apart by their extents, so that no two above 1 may be equal.
 * Spec: 4.2 */
typedef enum kvx_layout_t {
  KVX_LAYOUT_INVALID = 0,
  KVX_LAYOUT_BLOCK_NHD = 1,        /* [num_blocks, block_size, num_kv_heads, head_dim] */
  KVX_LAYOUT_BLOCK_HND = 2,        /* [num_blocks, num_kv_heads, block_size, head_dim] */
  KVX_LAYOUT_BLOCK_HND_PACKED = 3, /* [num_blocks, num_kv_heads, head_dim/pack, block_size, pack] */
  KVX_LAYOUT_BLOCK_CUSTOM = 15     /* 4-D as HND, 5-D as HND_PACKED; no two equal extents */
} kvx_layout_t;

/* How a sequence's tokens are found in the cache. Spec: 5.1 */
typedef enum kvx_block_table_format_t {
  KVX_BLOCK_TABLE_INVALID = 0,
  KVX_BLOCK_TABLE_PACKED = 1,     /* [seq_count, max_blocks_per_seq] block ids */
  KVX_BLOCK_TABLE_RAGGED = 2,     /* one block id per token, split into sequences by indptr */
  KVX_BLOCK_TABLE_KV_OFFSETS = 3, /* [seq_count, beam_width, 2, max_blocks_per_seq] KVCacheIndex */
  KVX_BLOCK_TABLE_POINTERS = 4,   /* [seq_count, max_blocks_per_seq, planes] addresses, U64: where
                                     a block begins in K of layer 0, V of layer 0, K of layer 1, ...
                                     (K alone without V). Spec: E.12 */
  KVX_BLOCK_TABLE_RING = 5        /* [seq_count, max_blocks_per_seq] block ids; token t is in entry
                                     t / block_size % max_blocks_per_seq, so that only a sequence's
                                     last tokens are kept. Spec: E.16 */
} kvx_block_table_format_t;

typedef enum kvx_block_table_flags_t {
  KVX_BLOCK_TABLE_FLAG_NONE = 0,
  KVX_BLOCK_TABLE_FLAG_KVCACHEINDEX = 1 << 0, /* MUST be set for KV_OFFSETS */
  KVX_BLOCK_TABLE_FLAG_EXACT = 1 << 1, /* RAGGED: a sequence has one entry for each of its tokens,
                                          and no more */
  KVX_BLOCK_TABLE_FLAG_WHOLE = 1 << 2, /* POINTERS: [seq_count, max_blocks_per_seq] addresses, each
                                          of a block that holds all planes; indptr is the address of
                                          the one that the tensors describe. Spec: E.15 */
  KVX_BLOCK_TABLE_FLAG_HOLES = 1 << 3  /* entries that tokens of a call need may be null: these
                                          tokens are left out. Without it such a call is refused.
                                          Spec: 5.1 */
} kvx_block_table_flags_t;

/* What one scale covers. value = stored * scale; stored = round(x / scale). Spec: 6.6 */
typedef enum kvx_scale_granularity_t {
  KVX_SCALE_NONE = 0,
  KVX_SCALE_PER_TENSOR = 1,      /* one scale; ndim 0, or any shape of one element */
  KVX_SCALE_PER_BLOCK = 2,       /* [num_blocks] */
  KVX_SCALE_PER_HEAD = 3,        /* [num_kv_heads] */
  KVX_SCALE_PER_BLOCK_HEAD = 4,  /* [num_blocks, num_kv_heads] */
  KVX_SCALE_PER_TOKEN_HEAD = 16, /* [num_blocks, block_size, num_kv_heads] */
  KVX_SCALE_PER_CHANNEL = 32,    /* [num_blocks, num_kv_heads, head_dim]: one for all tokens of a
                                    block; of U8_ZERO and U8_BIAS. Spec: E.14 */
  KVX_SCALE_PER_GROUP = 33,    /* [num_blocks, block_size, num_kv_heads, groups]: head_dim / groups
                                  numbers share one; of U8_ZERO, U8_BIAS and F4_E2M1 */
  KVX_SCALE_PER_GROUP_4X4 = 34 /* the same, and tokens and groups swap places in fours; of F4_E2M1.
                                  Spec: E.18 */
} kvx_scale_granularity_t;

/* ABI version of a library or of a caller. 16 bytes. Spec: 3 */
typedef struct kvx_version_t {
  uint32_t size;      /* set by kvx_get_version: sizeof(kvx_version_t) */
  uint32_t abi_major; /* different majors are incompatible */
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
  void *secondary;          /* the same position in the secondary pool, or NULL */
} kvx_pool_desc_t;

/* The cache of one layer. 280 bytes. Spec: 6.1 */
typedef struct kvx_cache_desc_t {
  uint32_t size;
  uint32_t num_blocks;   /* physical blocks that k and v address */
  uint32_t block_size;   /* tokens per block */
  uint32_t num_kv_heads; /* heads in this cache: one tensor-parallel rank's share */
  uint32_t head_dim;     /* of K; V's is its own shape */
  kvx_tensor_desc_t k;
  kvx_tensor_desc_t v;  /* data NULL and ndim 0: no V */
  kvx_pool_desc_t pool; /* needed for KV_OFFSETS only, else zero */
} kvx_cache_desc_t;

/* Logical to physical blocks. 64 bytes. Spec: 5.1, 6.3
 *
 * Entries past the blocks that a sequence's length needs are never read. A negative entry is null:
 * it stands for no block. A call whose tokens need one is refused with OUT_OF_RANGE, unless the
 * table has HOLES: these tokens are then skipped; or the call zeroes what has no source. A place is
 * written once: on HOST memory a block that two tokens of a call would overwrite is refused. */
typedef struct kvx_block_table_t {
  uint32_t size;
  kvx_block_table_format_t format;
  kvx_dtype_t index_dtype;     /* S32 or S64; KV_OFFSETS: S32; POINTERS: U64 */
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

/* The slot of each new token: block_id * block_size + block_offset. 32 bytes. Spec: 5.2, 6.4 */
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
 * write:  key, value: [>= num_tokens, num_kv_heads, head_dim]; tokens past num_tokens are padding.
 * gather: [seq_count * beam_width, max_seq_len, num_kv_heads, head_dim], or the same as 3-D
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

/* Scales of an FP8 or S8 tensor, or scales or zero points of U8_ZERO and U8_BIAS. Frozen
 * (embedded). 104 bytes. Spec: 6.6 */
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
  uint32_t max_seq_len; /* tokens per sequence in io; longer sequences are cut */
} kvx_gather_desc_t;

/* Fills *version; its `size` need not be set. INVALID_ARGUMENT if version is NULL. Spec: 3, 7 */
KVX_API kvx_status_t kvx_get_version(kvx_version_t *version);

/* Checks everything about a cache that can be checked without reading it. Spec: 7.1 */
KVX_API kvx_status_t kvx_validate_cache_desc(const kvx_cache_desc_t *cache);

/* Writes num_tokens new tokens into the slots of a cache, converting dtype and scale on the way.
 *
 * Mutates the slots in `write->slots`, nothing else. Slots that are negative or equal to
 * invalid_slot are skipped. On HOST memory a slot past the cache gives OUT_OF_RANGE, a slot of two
 * tokens or one that key or value lie in INVALID_ARGUMENT, and nothing is written.
 * `stream`: the CUDA stream to run on (NULL: the default stream); ignored for HOST memory.
 * Spec: 7 */
KVX_API kvx_status_t kvx_write_kv(const kvx_cache_desc_t *cache, const kvx_write_desc_t *write,
                                  void *stream);

/* Gathers each sequence's first min(length, max_seq_len) tokens into io.key and io.value.
 *
 * Mutates those tokens of io, nothing else: tokens past a sequence's length keep what they held. On
 * HOST memory a block id past the cache gives OUT_OF_RANGE and nothing is written. Key and value
 * share no memory with each other or the cache.
 * Spec: 7 */
KVX_API kvx_status_t kvx_gather_kv(const kvx_cache_desc_t *cache, const kvx_gather_desc_t *gather,
                                   void *stream);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* KVX_ABI_H_ */
