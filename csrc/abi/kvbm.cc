// The exported functions of kvx_kvbm.h: KVBM's arguments and results around kvx_blocks.h.
#include <cstdint>
#include <initializer_list>

#include "desc/memory.h"
#include "error.h"
#include "kvx/kvx_blocks.h"
#include "kvx/kvx_kvbm.h"

namespace kvx {
namespace {

// The number of the cudaError_t that says the same.
int cuda_error(kvx_status_t status) {
  switch (status) {
    case KVX_STATUS_OK:
      return 0;  // cudaSuccess
    case KVX_STATUS_UNSUPPORTED:
      return 801;  // cudaErrorNotSupported
    case KVX_STATUS_INTERNAL_ERROR:
      return 999;  // cudaErrorUnknown
    default:
      return 1;  // cudaErrorInvalidValue
  }
}

kvx_memory_type_t memory_here() { return unified_is_host() ? KVX_MEMORY_HOST : KVX_MEMORY_DEVICE; }

struct NamedSize {
  const char *name;
  size_t value;
};

kvx_status_t check_sizes(std::initializer_list<NamedSize> sizes, bool *is_empty) {
  *is_empty = false;
  for (const NamedSize &size : sizes) {
    if (size.value > UINT32_MAX) {
      return KVX_INVALID("%s is %zu, expected less than 2^32 (spec E.15)", size.name, size.value);
    }
    *is_empty |= size.value == 0;
  }
  return KVX_STATUS_OK;
}

kvx_status_t itemsize_of(int dtype_value, uint32_t *itemsize) {
  constexpr uint32_t kBytes[] = {2, 2, 4, 8};
  if (dtype_value < 0 || dtype_value > 3) {
    return KVX_INVALID(
        "dtype_value is %d, expected F16 (0), BF16 (1), F32 (2) or F64 (3); kvx_blocks.h copies "
        "numbers of 1 byte, too (spec E.15)",
        dtype_value);
  }
  *itemsize = kBytes[dtype_value];
  return KVX_STATUS_OK;
}

// Numbers of `itemsize` bytes, aligned as such.
kvx_blocks_t blocks_of(size_t nb, size_t nl, size_t no, size_t nt, size_t nh, size_t hd,
                       uint32_t itemsize) {
  kvx_blocks_t blocks{};
  blocks.size = sizeof blocks;
  blocks.memory = memory_here();
  blocks.nb = static_cast<uint32_t>(nb);
  blocks.nl = static_cast<uint32_t>(nl);
  blocks.no = static_cast<uint32_t>(no);
  blocks.nt = static_cast<uint32_t>(nt);
  blocks.nh = static_cast<uint32_t>(nh);
  blocks.hd = static_cast<uint32_t>(hd);
  blocks.itemsize = itemsize;
  blocks.alignment = itemsize;
  return blocks;
}

template <class Universals, class Blocks>
kvx_status_t universal(kvx_status_t (*call)(Universals, Blocks, const kvx_blocks_t *, void *),
                       Universals universals, Blocks blocks, size_t nb, size_t nh, size_t nl,
                       size_t no, size_t nt, size_t hd, int dtype_value, int layout_value,
                       void *stream) {
  uint32_t itemsize;
  bool is_empty;
  KVX_TRY(itemsize_of(dtype_value, &itemsize));
  KVX_TRY(check_sizes(
      {{"num_blocks", nb}, {"nh", nh}, {"nl", nl}, {"no", no}, {"nt", nt}, {"hd", hd}}, &is_empty));
  if (is_empty) return KVX_STATUS_OK;
  kvx_blocks_t sizes = blocks_of(nb, nl, no, nt, nh, hd, itemsize);
  sizes.layout = static_cast<kvx_stack_layout_t>(layout_value);
  return call(universals, blocks, &sizes, stream);
}

kvx_status_t operational(const void *const *blocks_host, const void *const *blocks_device,
                         void *const *operationals_host, void *const *operationals_device,
                         size_t nb, size_t nl, size_t no, size_t inner, size_t elem_size,
                         int dtype_value, int direction_value, int backend_value, void *stream) {
  uint32_t itemsize;
  bool is_empty;
  KVX_TRY(itemsize_of(dtype_value, &itemsize));
  KVX_TRY(check_sizes({{"num_blocks", nb}, {"nl", nl}, {"no", no}, {"inner", inner}}, &is_empty));
  if (is_empty) return KVX_STATUS_OK;
  if (elem_size != itemsize) {
    return KVX_INVALID("elem_size is %zu, expected %u as dtype_value %d has (spec E.15)", elem_size,
                       itemsize, dtype_value);
  }
  const kvx_blocks_t sizes = blocks_of(nb, nl, no, 1, 1, inner, itemsize);
  if (sizes.memory == KVX_MEMORY_HOST) {
    blocks_device = blocks_host;
    operationals_device = operationals_host;
  }
  const auto copy = [&](kvx_copy_backend_t backend) {
    return kvx_operational_copy(
        blocks_host, const_cast<void *const *>(blocks_device),
        const_cast<const void *const *>(operationals_host), operationals_device, &sizes,
        static_cast<kvx_copy_direction_t>(direction_value), backend, nullptr, stream);
  };
  const auto backend = static_cast<kvx_copy_backend_t>(backend_value);
  if (backend != KVX_COPY_AUTO || (blocks_device && operationals_device)) return copy(backend);
  const kvx_status_t batched = copy(KVX_COPY_MEMCPY_BATCH);
  return batched == KVX_STATUS_UNSUPPORTED ? copy(KVX_COPY_MEMCPY_ASYNC) : batched;
}

kvx_status_t vectorized_copy(const void *const *srcs, void *const *dsts, size_t bytes,
                             int num_pairs, void *stream) {
  if (num_pairs < 0) {
    return KVX_INVALID("num_pairs is %d, expected 0 or more (spec E.15)", num_pairs);
  }
  if (!bytes) return KVX_STATUS_OK;
  return kvx_vectorized_copy(srcs, dsts, bytes, static_cast<uint32_t>(num_pairs), memory_here(), 0,
                             stream);
}

kvx_status_t memcpy_batch(const void *const *srcs, void *const *dsts, size_t bytes, size_t count,
                          int mode, void *stream) {
  bool is_empty;
  KVX_TRY(check_sizes({{"num_copies", count}}, &is_empty));
  if (is_empty || !bytes) return KVX_STATUS_OK;
  return kvx_memcpy_batch(srcs, dsts, bytes, static_cast<uint32_t>(count), memory_here(),
                          static_cast<kvx_memcpy_mode_t>(mode), stream);
}

}  // namespace
}  // namespace kvx

extern "C" {

int kvbm_kernels_launch_universal_from_block(void *const *universal_ptrs_device,
                                             const void *const *block_ptrs_device,
                                             size_t num_blocks, size_t nh, size_t nl, size_t no,
                                             size_t nt, size_t hd, int dtype_value,
                                             int layout_value, void *stream) {
  return kvx::cuda_error(kvx::universal(kvx_universal_from_block, universal_ptrs_device,
                                        block_ptrs_device, num_blocks, nh, nl, no, nt, hd,
                                        dtype_value, layout_value, stream));
}

int kvbm_kernels_launch_block_from_universal(const void *const *universal_ptrs_device,
                                             void *const *block_ptrs_device, size_t num_blocks,
                                             size_t nh, size_t nl, size_t no, size_t nt, size_t hd,
                                             int dtype_value, int layout_value, void *stream) {
  return kvx::cuda_error(kvx::universal(kvx_block_from_universal, universal_ptrs_device,
                                        block_ptrs_device, num_blocks, nh, nl, no, nt, hd,
                                        dtype_value, layout_value, stream));
}

int kvbm_kernels_launch_operational_copy(const void *const *block_ptrs_host,
                                         const void *const *block_ptrs_device,
                                         void *const *operational_ptrs_host,
                                         void *const *operational_ptrs_device, size_t num_blocks,
                                         size_t nl, size_t no, size_t inner, size_t elem_size,
                                         int dtype_value, int direction_value, int backend_value,
                                         void *stream) {
  return kvx::cuda_error(kvx::operational(
      block_ptrs_host, block_ptrs_device, operational_ptrs_host, operational_ptrs_device,
      num_blocks, nl, no, inner, elem_size, dtype_value, direction_value, backend_value, stream));
}

int kvbm_kernels_launch_vectorized_copy(void **src_ptrs_device, void **dst_ptrs_device,
                                        size_t copy_size_bytes, int num_pairs, void *stream) {
  return kvx::cuda_error(
      kvx::vectorized_copy(src_ptrs_device, dst_ptrs_device, copy_size_bytes, num_pairs, stream));
}

int kvbm_kernels_memcpy_batch(const void *const *src_ptrs_host, void *const *dst_ptrs_host,
                              size_t size_per_copy, size_t num_copies, int mode, void *stream) {
  return kvx::cuda_error(
      kvx::memcpy_batch(src_ptrs_host, dst_ptrs_host, size_per_copy, num_copies, mode, stream));
}

bool kvbm_kernels_has_memcpy_batch_async(void) { return kvx_has_memcpy_batch_async(); }

bool kvbm_kernels_is_stub_build(void) { return kvx_is_stub_build(); }

}  // extern "C"
