// Questions about tables and spans: their rows, their pools.
#pragma once

#include "desc/tensor.h"
#include "kvx/kvx_lookup.h"
#include "kvx/kvx_ops.h"

namespace kvx {

inline bool is_kv_offsets(const kvx_block_table_t &table) {
  return table.format == KVX_BLOCK_TABLE_KV_OFFSETS;
}
inline bool is_kv_offsets(const kvx_span_t &span) {
  return span.block_table && is_kv_offsets(*span.block_table);
}

inline bool is_pointers(const kvx_block_table_t &table) {
  return table.format == KVX_BLOCK_TABLE_POINTERS;
}
inline bool is_pointers(const kvx_span_t &span) {
  return span.block_table && is_pointers(*span.block_table);
}

// Each address of a POINTERS table is that of a block with all planes of the span in it.
inline bool names_whole_blocks(const kvx_block_table_t &table) {
  return is_pointers(table) && (table.flags & KVX_BLOCK_TABLE_FLAG_WHOLE);
}

inline const kvx_tensor_desc_t &tensor_of(const kvx_span_t &span, uint32_t l, bool is_v) {
  return is_v ? span.layers[l]->v : span.layers[l]->k;
}

// The scales of a layer; NULL: none.
inline const kvx_scale_desc_t *scales_of(const kvx_span_t &span, uint32_t l, bool is_v) {
  const kvx_scale_desc_t *const *const list = is_v ? span.v_scales : span.k_scales;
  return list ? list[l] : nullptr;
}

// The rows of a table: sequences, or their beams.
inline uint64_t rows_of(const kvx_block_table_t &table) {
  return uint64_t{table.seq_count} * (is_kv_offsets(table) ? table.beam_width : 1);
}

// Rows of a migration: one per length or, where a KV_OFFSETS table has as many sequences as there
// are lengths, one per beam of each.
uint64_t rows_of(const kvx_migrate_desc_t &migrate);

// A migration with the rows and source of `find`; its destination is the source.
inline kvx_migrate_desc_t as_source(const kvx_find_desc_t &find) {
  return {sizeof(kvx_migrate_desc_t), 0, 0, 0, find.seq_lens, find.span, find.span};
}

// The numbers of a vector of K, or V, that a migration with these flags rotates together; 0: none.
inline uint32_t hadamard_order(uint32_t flags, bool is_v) {
  const uint32_t log2 = flags >> (is_v ? 12 : 8) & 15u;
  return log2 ? 1u << log2 : 0;
}

// Whether the span's table may name blocks of a secondary pool.
inline bool has_secondary(const kvx_span_t &span) {
  return is_kv_offsets(span) && span.num_layers && span.layers[0]->pool.secondary;
}

// Whether both ends are the same tensors, so that their block ids mean the same blocks.
bool are_same_pool(const kvx_span_t &src, const kvx_span_t &dst);

}  // namespace kvx
