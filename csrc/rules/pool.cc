#include "rules/pool.h"

#include "rules/struct.h"
#include "rules/tensor.h"

namespace kvx {
namespace {

int64_t block_stride_bytes(const kvx_tensor_desc_t &tensor) {
  return stride_bytes(tensor, axes_of(tensor).block);
}

// Bytes from K to V of the same block; 0 without V.
int64_t v_offset(const kvx_cache_desc_t &cache) {
  if (is_absent(cache.v)) return 0;
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(cache.v.data) -
                              reinterpret_cast<uintptr_t>(cache.k.data));
}

// Checks that a block of K or V fits into a sub-block, and that blocks are whole sub-blocks apart.
kvx_status_t check_blocks(const Path &path, const kvx_tensor_desc_t &tensor,
                          const kvx_cache_desc_t &cache) {
  const int64_t size = size_of(tensor.dtype), bytes_per_block = cache.pool.bytes_per_block;
  const Axes axes = axes_of(tensor);
  int64_t extent = 1;
  for (uint32_t axis = 0; axis < tensor.ndim; ++axis) {
    if (static_cast<int>(axis) != axes.block)
      extent += (tensor.shape[axis] - 1) * tensor.stride[axis];
  }
  if (extent * size > bytes_per_block) {
    return KVX_INVALID(
        "%s has blocks of %lld bytes, expected at most pool.bytes_per_block %lld (spec 6.7)",
        KVX_AT(path), static_cast<ll>(extent * size), static_cast<ll>(bytes_per_block));
  }
  int64_t block_stride;
  if (__builtin_mul_overflow(tensor.stride[axes.block], size, &block_stride)) block_stride = 0;
  if (block_stride == 0 || block_stride % bytes_per_block != 0 ||
      block_stride / bytes_per_block > INT32_MAX) {
    return KVX_INVALID(
        "%s.stride[%d] is %lld (x %lld bytes), expected a multiple of pool.bytes_per_block %lld "
        "(spec E.8)",
        KVX_AT(path), axes.block, static_cast<ll>(tensor.stride[axes.block]), static_cast<ll>(size),
        static_cast<ll>(bytes_per_block));
  }
  return KVX_STATUS_OK;
}

kvx_status_t check_secondary_aligned(const Path &pool, const kvx_cache_desc_t &cache,
                                     const kvx_tensor_desc_t &tensor) {
  if (!cache.pool.secondary || is_absent(tensor)) return KVX_STATUS_OK;
  const uintptr_t offset =
      reinterpret_cast<uintptr_t>(tensor.data) - reinterpret_cast<uintptr_t>(cache.k.data);
  const uintptr_t address = reinterpret_cast<uintptr_t>(cache.pool.secondary) + offset;
  if (is_aligned(address, tensor.dtype)) return KVX_STATUS_OK;
  return fail(KVX_STATUS_UNSUPPORTED,
              "%s.secondary is %p, expected a multiple of %lld bytes (%s, spec 4.4)", KVX_AT(pool),
              cache.pool.secondary, static_cast<ll>(alignment_of(tensor.dtype)),
              name_of(tensor.dtype));
}

}  // namespace

kvx_status_t check_pool(const Path &path, const kvx_cache_desc_t &cache) {
  const Path pool{&path, "pool"};
  KVX_TRY(check_struct(pool, &cache.pool));
  if (cache.block_size & (cache.block_size - 1)) {
    return KVX_INVALID("%s.block_size is %u, expected a power of two for KV_OFFSETS (spec 5.1)",
                       KVX_AT(path), cache.block_size);
  }
  KVX_TRY(check_memory(pool, cache.pool.memory));
  if (!cache.pool.primary) return KVX_INVALID("%s.primary is NULL (spec 6.7)", KVX_AT(pool));
  KVX_TRY(check_nonzero(pool, "bytes_per_block", cache.pool.bytes_per_block));
  if (cache.k.data != cache.pool.primary) {
    return KVX_INVALID("%s.k.data is %p, expected pool.primary %p (spec E.8)", KVX_AT(path),
                       cache.k.data, cache.pool.primary);
  }
  KVX_TRY(check_blocks({&path, "k"}, cache.k, cache));
  KVX_TRY(check_secondary_aligned(pool, cache, cache.k));
  KVX_TRY(check_secondary_aligned(pool, cache, cache.v));
  if (is_absent(cache.v)) return KVX_STATUS_OK;
  KVX_TRY(check_blocks({&path, "v"}, cache.v, cache));
  const int64_t k_step = block_stride_bytes(cache.k), v_step = block_stride_bytes(cache.v);
  if (v_step != k_step) {
    return KVX_INVALID("%s.v steps %lld bytes per block, expected that of k, %lld (spec E.8)",
                       KVX_AT(path), static_cast<ll>(v_step), static_cast<ll>(k_step));
  }
  const int64_t offset = v_offset(cache);
  if (offset < 0 || offset >= k_step || offset % cache.pool.bytes_per_block != 0) {
    return KVX_INVALID(
        "%s.v.data is %lld bytes past k.data, expected a multiple of pool.bytes_per_block %u below "
        "the block's %lld bytes (spec E.8)",
        KVX_AT(path), static_cast<ll>(offset), cache.pool.bytes_per_block, static_cast<ll>(k_step));
  }
  return KVX_STATUS_OK;
}

kvx_status_t check_same_pool(const Path &path, const kvx_cache_desc_t &cache,
                             const kvx_cache_desc_t &first) {
  if (cache.pool.bytes_per_block == first.pool.bytes_per_block &&
      block_stride_bytes(cache.k) == block_stride_bytes(first.k) &&
      is_absent(cache.v) == is_absent(first.v) && v_offset(cache) == v_offset(first) &&
      !cache.pool.secondary == !first.pool.secondary) {
    return KVX_STATUS_OK;
  }
  return KVX_INVALID(
      "%s is not of the same pool as layers[0]: one KV_OFFSETS table serves "
      "one pool; migrate pool by pool (spec E.8)",
      KVX_AT(path));
}

}  // namespace kvx
