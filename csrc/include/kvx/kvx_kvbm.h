/* KVX under KVBM's names: the seven functions of Dynamo's KVBM kernels with KVBM's own arguments,
 * so that a program that was written for libkvbm_kernels links to libkvx instead and runs.
 *
 * Such a program has declarations of its own and includes no header of KVX; C and C++ refuse a
 * second declaration with other types, which is why kvx_ext.h does not include this file. New
 * programs take kvx_blocks.h, which has more: heads of a rank, FP8 and bytes, sentences.
 *
 * A result is a cudaError_t: cudaSuccess (0), cudaErrorInvalidValue (1) for arguments that are
 * refused, cudaErrorNotSupported (801) for what this build, memory or stream cannot do, and
 * cudaErrorUnknown (999). kvx_last_error() has the sentence. Nothing has been written then.
 *
 * Where a build has CUDA and the machine a device, memory is the device's: `_device` tables are
 * read by kernels, `_host` tables by the host. Elsewhere all of it is host memory, and calls copy
 * it there before they return: no function aborts. Sizes are below 2^32, and a chunk below 2^31
 * bytes.
 *
 * dtype_value:     F16 0, BF16 1, F32 2, F64 3
 * layout_value:    NHD 0, HND 1                                        (kvx_stack_layout_t)
 * direction_value: BlockToOperational 0, OperationalToBlock 1          (kvx_copy_direction_t)
 * backend_value:   Auto 0, VectorizedKernel 1, KernelOnly 2, MemcpyAsync 3, MemcpyBatch 4
 *                                                                      (kvx_copy_backend_t)
 * mode:            batch or else copy by copy 0, copy by copy 1, batch 2 (kvx_memcpy_mode_t)
 * stream:          a cudaStream_t
 *
 * Spec: E.15
 * Source: ai-dynamo/dynamo lib/kvbm-kernels, README, cuda/tensor_kernels.cu and cuda/stubs.c */
#ifndef KVX_KVBM_H_
#define KVX_KVBM_H_

#include <stdbool.h>
#include <stddef.h>

#include "kvx/kvx_abi.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Copies block stacks into universal blocks: kvx_universal_from_block.
 *
 * universal_ptrs_device: [num_blocks]; block_ptrs_device: [num_blocks * nl * no]
 * A size of 0 is no work. Addresses are multiples of the dtype's bytes. */
KVX_API int kvbm_kernels_launch_universal_from_block(void *const *universal_ptrs_device,
                                                     const void *const *block_ptrs_device,
                                                     size_t num_blocks, size_t nh, size_t nl,
                                                     size_t no, size_t nt, size_t hd,
                                                     int dtype_value, int layout_value,
                                                     void *stream);

/* Copies universal blocks into block stacks: kvx_block_from_universal. */
KVX_API int kvbm_kernels_launch_block_from_universal(const void *const *universal_ptrs_device,
                                                     void *const *block_ptrs_device,
                                                     size_t num_blocks, size_t nh, size_t nl,
                                                     size_t no, size_t nt, size_t hd,
                                                     int dtype_value, int layout_value,
                                                     void *stream);

/* Copies block stacks into operational blocks, or back: kvx_operational_copy.
 *
 * block_ptrs_*: [num_blocks * nl * no]; operational_ptrs_*: [num_blocks]
 * inner:     nt * nh * hd numbers of elem_size bytes, which is what dtype_value has
 * Auto takes no kernel where a `_device` table is NULL. A size of 0 is no work. */
KVX_API int kvbm_kernels_launch_operational_copy(
    const void *const *block_ptrs_host, const void *const *block_ptrs_device,
    void *const *operational_ptrs_host, void *const *operational_ptrs_device, size_t num_blocks,
    size_t nl, size_t no, size_t inner, size_t elem_size, int dtype_value, int direction_value,
    int backend_value, void *stream);

/* Copies copy_size_bytes bytes of each of num_pairs pairs, by 16, 8, 4 bytes or 1, as the addresses
 * of the pair allow: kvx_vectorized_copy with alignment 0. */
KVX_API int kvbm_kernels_launch_vectorized_copy(void **src_ptrs_device, void **dst_ptrs_device,
                                                size_t copy_size_bytes, int num_pairs,
                                                void *stream);

/* The same by memcpy, from tables that the host reads: kvx_memcpy_batch. */
KVX_API int kvbm_kernels_memcpy_batch(const void *const *src_ptrs_host, void *const *dst_ptrs_host,
                                      size_t size_per_copy, size_t num_copies, int mode,
                                      void *stream);

/* Whether this build has cudaMemcpyBatchAsync: one with CUDA 12.9 or later. Without it, or where
 * memory is the host's, MemcpyBatch and mode 2 are cudaErrorNotSupported. */
KVX_API bool kvbm_kernels_has_memcpy_batch_async(void);

/* Whether this build has no CUDA kernels. */
KVX_API bool kvbm_kernels_is_stub_build(void);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* KVX_KVBM_H_ */
