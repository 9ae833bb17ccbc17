/* KVX blocks: KVBM's kernels as functions of KVX, batched, one launch for all blocks and layers.
 *
 * A block has `nt` tokens of `nl` layers, `no` outer chunks (2: K and V), `nh` heads and `hd`
 * numbers of a head. It is one of
 *
 *   block stack   nl * no chunks at any address: [nt, nh, hd] (NHD) or [nh, nt, hd] (HND)
 *   operational   one buffer: [nl, no, nt * nh * hd], the axes of a chunk as they are in the stack
 *   universal     one buffer: [nh, nl, no, nt, hd], in which the heads of a rank are one slice
 *
 * Buffers are contiguous, named by tables of pointers: blocks[(b * nl + l) * no + o] is a chunk,
 * universals[b] and operationals[b] are a block. For other strides, dtypes and block sizes, and for
 * any other cache at either end, use POINTERS tables and kvx_migrate_kv.
 *
 * Tables are read where the call runs: by the host for HOST memory, by the kernel for DEVICE
 * memory, so that a CUDA graph can capture the call; the host reads the copy engines' tables. On
 * HOST memory a call is refused if memory that it writes overlaps other memory that it accesses.
 *
 * Each function names the KVBM function that it replaces. Spec: E.15
 * Source: ai-dynamo/dynamo lib/kvbm-kernels, cuda/tensor_kernels.cu and cuda/vectorized_copy.cu */
#ifndef KVX_BLOCKS_H_
#define KVX_BLOCKS_H_

#include <stdbool.h>

#include "kvx/kvx_abi.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Order of the axes of a chunk: KVBM's layout_value. */
typedef enum kvx_stack_layout_t {
  KVX_STACK_NHD = 0, /* [nt, nh, hd] */
  KVX_STACK_HND = 1  /* [nh, nt, hd] */
} kvx_stack_layout_t;

/* How bytes move between stacks and operational blocks: KVBM's backend_value. */
typedef enum kvx_copy_backend_t {
  KVX_COPY_AUTO = 0,              /* the first of VECTORIZED_KERNEL, MEMCPY_BATCH and MEMCPY_ASYNC
                                     that can do the call */
  KVX_COPY_VECTORIZED_KERNEL = 1, /* a kernel that moves 8 bytes or more at a time: every address
                                     and the bytes of a chunk are multiples of 8 */
  KVX_COPY_KERNEL_ONLY = 2,       /* a kernel, whatever the alignment */
  KVX_COPY_MEMCPY_ASYNC = 3,      /* cudaMemcpyAsync for each chunk; on HOST memory memcpy */
  KVX_COPY_MEMCPY_BATCH = 4       /* cudaMemcpyBatchAsync; UNSUPPORTED if there is none */
} kvx_copy_backend_t;

/* KVBM's direction_value. */
typedef enum kvx_copy_direction_t {
  KVX_BLOCK_TO_OPERATIONAL = 0,
  KVX_OPERATIONAL_TO_BLOCK = 1
} kvx_copy_direction_t;

/* KVBM's mode of memcpy_batch. */
typedef enum kvx_memcpy_mode_t {
  KVX_MEMCPY_BATCH_OR_ASYNC = 0, /* one batch if the runtime has batches, else copy by copy */
  KVX_MEMCPY_ASYNC = 1,          /* copy by copy */
  KVX_MEMCPY_BATCH = 2           /* one batch; UNSUPPORTED if the runtime has none */
} kvx_memcpy_mode_t;

/* Sizes of blocks. 56 bytes. */
typedef struct kvx_blocks_t {
  uint32_t size;
  kvx_memory_type_t memory; /* HOST or DEVICE, of all blocks */
  uint32_t nb;              /* blocks; 0: the call does nothing */
  uint32_t nl, no, nt, nh, hd;
  uint32_t itemsize; /* bytes of a number: 1, 2, 4 or 8. Numbers are copied, never interpreted */
  kvx_stack_layout_t layout; /* kvx_operational_copy does not use it */
  uint32_t universal_heads;  /* heads of a universal block; 0: nh */
  uint32_t head_start;       /* index in the universal block of the stack's first head */
  uint32_t alignment; /* DEVICE: a power of two that divides every address, 16 at most; 0: 16.
                         Others are skipped and counted for kvx_device_status. HOST: unused */
  uint32_t reserved;  /* 0 */
} kvx_blocks_t;

/* Copies block stacks into universal blocks. KVBM: kvbm_kernels_launch_universal_from_block.
 *
 * universals: [nb]; blocks: [nb * nl * no]
 * Mutates the heads of the universal blocks that the stacks have, nothing else. Spec: E.15 */
KVX_API kvx_status_t kvx_universal_from_block(void *const *universals, const void *const *blocks,
                                              const kvx_blocks_t *sizes, void *stream);

/* Copies universal blocks into block stacks. KVBM: kvbm_kernels_launch_block_from_universal.
 * Spec: E.15 */
KVX_API kvx_status_t kvx_block_from_universal(const void *const *universals, void *const *blocks,
                                              const kvx_blocks_t *sizes, void *stream);

/* Copies block stacks into operational blocks, or back. KVBM: kvbm_kernels_launch_operational_copy.
 *
 * blocks, operationals: [nb * nl * no] and [nb], read where the call runs
 * blocks_host, operationals_host: the same addresses, read by the host. VECTORIZED_KERNEL checks
 *          alignment in them, and the two MEMCPY backends copy from them. On HOST memory, and with
 *          KERNEL_ONLY, they may be NULL
 * used:    filled with the backend that did the call; may be NULL
 * A backend that cannot do the call is refused, with the reason: INVALID_ARGUMENT or UNSUPPORTED.
 * Spec: E.15 */
KVX_API kvx_status_t kvx_operational_copy(const void *const *blocks_host, void *const *blocks,
                                          const void *const *operationals_host,
                                          void *const *operationals, const kvx_blocks_t *sizes,
                                          kvx_copy_direction_t direction,
                                          kvx_copy_backend_t backend, kvx_copy_backend_t *used,
                                          void *stream);

/* Copies `bytes` bytes from srcs[i] to dsts[i], for each of num_pairs. KVBM:
 * kvbm_kernels_launch_vectorized_copy.
 *
 * srcs, dsts: [num_pairs], read where the call runs
 * alignment:  as in kvx_blocks_t, but 0 is none: a kernel looks at the addresses of each pair, and
 *             moves 16, 8, 4 bytes or 1 at a time
 * Spec: E.15 */
KVX_API kvx_status_t kvx_vectorized_copy(const void *const *srcs, void *const *dsts, uint64_t bytes,
                                         uint32_t num_pairs, kvx_memory_type_t memory,
                                         uint32_t alignment, void *stream);

/* The same by memcpy, from tables that the host reads. KVBM: kvbm_kernels_memcpy_batch. With DEVICE
 * memory either address of a pair may also be in host memory. Spec: E.15 */
KVX_API kvx_status_t kvx_memcpy_batch(const void *const *srcs, void *const *dsts, uint64_t bytes,
                                      uint32_t num_pairs, kvx_memory_type_t memory,
                                      kvx_memcpy_mode_t mode, void *stream);

/* Whether this build has cudaMemcpyBatchAsync. KVBM: kvbm_kernels_has_memcpy_batch_async. */
KVX_API bool kvx_has_memcpy_batch_async(void);

/* Whether this build has no CUDA kernels: calls on DEVICE memory are UNSUPPORTED, those on HOST
 * memory work. KVBM: kvbm_kernels_is_stub_build. */
KVX_API bool kvx_is_stub_build(void);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* KVX_BLOCKS_H_ */
