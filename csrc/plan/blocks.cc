#include "plan/blocks.h"

#include <algorithm>

namespace kvx {
namespace {

// One end: descriptors of a block without memory of its own; the table has the addresses.
class BlockEnd {
 public:
  BlockEnd(const Chunk &chunk, const Chunks &chunks, uint32_t num_blocks, kvx_memory_type_t memory,
           uint32_t alignment, const void *table)
      : caches_(chunks.count), layers_(chunks.count) {
    // The bits of the tensors' addresses that are 0 are those of all addresses.
    const uintptr_t begin = (uintptr_t{1} << 20) | alignment;
    const int64_t shape[] = {1, chunks.num_heads, chunk.num_tokens, chunk.head_bytes};
    const int64_t stride[] = {0, chunks.head_stride, chunks.token_stride, 1};
    for (uint32_t i = 0; i < chunks.count; ++i) {
      kvx_cache_desc_t &cache = caches_[i];
      cache.size = sizeof cache;
      cache.num_blocks = 1;
      cache.block_size = chunk.num_tokens;
      cache.num_kv_heads = chunks.num_heads;
      cache.head_dim = chunk.head_bytes;
      cache.k.size = sizeof cache.k;
      cache.k.dtype = KVX_DTYPE_U8;
      cache.k.layout = KVX_LAYOUT_BLOCK_HND;
      cache.k.memory = memory;
      cache.k.ndim = 4;
      std::copy(shape, shape + 4, cache.k.shape);
      std::copy(stride, stride + 4, cache.k.stride);
      cache.k.data = reinterpret_cast<void *>(
          begin + (chunks.is_whole ? static_cast<uintptr_t>(i * chunks.step) : 0));
      layers_[i] = &cache;
    }
    table_.size = sizeof table_;
    table_.format = KVX_BLOCK_TABLE_POINTERS;
    table_.index_dtype = KVX_DTYPE_U64;
    table_.seq_count = 1;
    table_.max_blocks_per_seq = num_blocks;
    table_.indices = table;
    table_.indices_count = num_blocks * (chunks.is_whole ? 1 : chunks.count);
    if (chunks.is_whole) {
      table_.flags = KVX_BLOCK_TABLE_FLAG_WHOLE;
      table_.indptr = reinterpret_cast<const void *>(begin);
    }
    span_.size = sizeof span_;
    span_.num_layers = chunks.count;
    span_.layers = layers_.data();
    span_.block_table = &table_;
    span_.head_start = chunks.head_start;
  }

  const kvx_span_t *span() const { return &span_; }

 private:
  std::vector<kvx_cache_desc_t> caches_;
  std::vector<const kvx_cache_desc_t *> layers_;
  kvx_block_table_t table_{};
  kvx_span_t span_{};
};

}  // namespace

Chunks stack_chunks(const kvx_blocks_t &sizes) {
  const int64_t head = int64_t{sizes.hd} * sizes.itemsize;
  const bool nhd = sizes.layout == KVX_STACK_NHD;
  return {sizes.nl * sizes.no,          false,    0, nhd ? head * sizes.nh : head,
          nhd ? head : head * sizes.nt, sizes.nh, 0};
}

Chunks universal_chunks(const kvx_blocks_t &sizes) {
  const int64_t head = int64_t{sizes.hd} * sizes.itemsize, step = head * sizes.nt;
  const uint32_t count = sizes.nl * sizes.no;
  const uint32_t heads = sizes.universal_heads ? sizes.universal_heads : sizes.nh;
  return {count, true, step, head, step * count, heads, sizes.head_start};
}

Chunk run_of(uint64_t bytes) {
  uint32_t tokens = 1;
  while (tokens < 256 && bytes % (tokens * 2) == 0 && bytes / (tokens * 2) % 16 == 0 &&
         bytes / (tokens * 2) >= 256) {
    tokens *= 2;
  }
  return {tokens, 1, static_cast<uint32_t>(bytes / tokens)};
}

Chunks run_chunks(uint32_t count, bool is_whole, const Chunk &run) {
  const int64_t bytes = int64_t{run.num_tokens} * run.head_bytes;
  return {count, is_whole, bytes, run.head_bytes, bytes, 1, 0};
}

void plan_blocks(const Chunk &chunk, uint32_t num_blocks, kvx_memory_type_t memory,
                 uint32_t alignment, const Chunks &src, const void *src_table, const Chunks &dst,
                 const void *dst_table, Plan *plan) {
  const BlockEnd from(chunk, src, num_blocks, memory, alignment, src_table);
  const BlockEnd to(chunk, dst, num_blocks, memory, alignment, dst_table);
  const kvx_seq_lens_t lens = {sizeof lens, KVX_DTYPE_S64, 1, nullptr};
  const kvx_migrate_desc_t migrate = {sizeof migrate, 0,           chunk.num_heads, 0,
                                      &lens,          from.span(), to.span()};
  plan_migrate(migrate, plan);
  plan->rows.uniform_len = uint64_t{num_blocks} * chunk.num_tokens;
}

}  // namespace kvx
