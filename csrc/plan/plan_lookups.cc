#include "plan/plan_lookups.h"

#include <initializer_list>

#include "desc/memory.h"

namespace kvx {
namespace {

void set_table(Lookup *a, const BlockShape &shape, const kvx_block_table_t &table,
               uint64_t null_block_plus_1) {
  set_dense(a, shape.num_blocks, shape.block_size);
  a->null_block = static_cast<int64_t>(null_block_plus_1 - 1);  // -1: none
  a->max_blocks_per_seq = table.max_blocks_per_seq;
  a->indices = ints(table.indices, table.index_dtype);
  a->indices_count = table.indices_count;
  a->mode = mode_of(table.format);
  a->holes = table.flags & KVX_BLOCK_TABLE_FLAG_HOLES;
  if (a->mode == LookupMode::kRagged) {
    a->exact = table.flags & KVX_BLOCK_TABLE_FLAG_EXACT;
    a->num_rows = table.seq_count;
    a->indptr = ints(table.indptr, table.indptr_dtype);
  } else if (a->mode == LookupMode::kPointers && !names_whole_blocks(table)) {
    a->planes_per_entry = 1;
    if (table.indices_count)
      a->planes_per_entry = table.indices_count / table.seq_count / table.max_blocks_per_seq;
  }
}

}  // namespace

void set_dense(Lookup *a, uint64_t rows, uint64_t tokens_per_row) {
  a->mode = LookupMode::kDense;
  a->tokens_per_entry = 1;
  a->block_size = static_cast<uint32_t>(tokens_per_row);
  a->num_blocks = rows;
  a->null_block = -1;
}

void set_slots(Lookup *a, const BlockShape &shape, const kvx_slot_mapping_t &slots) {
  set_dense(a, shape.num_blocks, shape.block_size);
  a->mode = LookupMode::kSlots;
  a->indices = ints(slots.slots, slots.dtype);
  a->indices_count = slots.token_count;
  a->invalid_slot = slots.invalid_slot;
}

void set_table(Lookup *a, const kvx_cache_desc_t &cache, const kvx_tensor_desc_t &tensor, bool is_v,
               const kvx_block_table_t &table, uint64_t null_block_plus_1,
               uint32_t secondary_num_blocks) {
  set_table(a, {cache.num_blocks, cache.block_size}, table, null_block_plus_1);
  if (!is_kv_offsets(table)) return;
  a->is_v = is_v;
  const int64_t block_bytes = tensor.stride[axes_of(tensor).block] * size_of(tensor.dtype);
  const auto *k = static_cast<const uint8_t *>(cache.k.data);
  a->sub_blocks = static_cast<uint32_t>(block_bytes / cache.pool.bytes_per_block);
  a->sub_block = static_cast<uint32_t>((static_cast<const uint8_t *>(tensor.data) - k) /
                                       cache.pool.bytes_per_block);
  if (cache.pool.secondary)
    a->secondary_blocks = secondary_num_blocks ? secondary_num_blocks : cache.num_blocks;
}

uint32_t pointer_shift(const kvx_block_table_t &table, const kvx_cache_desc_t *const *layers,
                       uint32_t num_layers) {
  uintptr_t bits = 16 | reinterpret_cast<uintptr_t>(table.indptr);
  for (uint32_t l = 0; l < num_layers; ++l)
    for (const void *data : {layers[l]->k.data, layers[l]->v.data})
      bits |= reinterpret_cast<uintptr_t>(data);
  return static_cast<uint32_t>(__builtin_ctzll(bits));
}

void set_span(Lookup *a, const kvx_span_t &span, bool is_v) {
  const kvx_cache_desc_t &cache = *span.layers[0];
  const kvx_tensor_desc_t &tensor = is_v ? cache.v : cache.k;
  if (span.slots) {
    set_slots(a, {cache.num_blocks, cache.block_size}, *span.slots);
  } else if (span.block_table) {
    set_table(a, cache, tensor, is_v, *span.block_table, span.null_block_plus_1,
              span.secondary_num_blocks);
    if (is_pointers(span))
      a->pointer_shift = pointer_shift(*span.block_table, span.layers, span.num_layers);
  } else {
    set_dense(a, cache.num_blocks, cache.block_size);
  }
  if (span.starts) a->starts = ints(span.starts->lengths, span.starts->dtype);
}

void set_span(Lookup *a, const kvx_span_t &span, const kvx_plane_t &plane) {
  const bool is_own = !uses_lookup_of_span(plane);
  const kvx_slot_mapping_t *const slots = is_own ? plane.slots : span.slots;
  const kvx_block_table_t *const table = is_own ? plane.block_table : span.block_table;
  const BlockShape shape = {shape_of(plane).num_blocks,
                            static_cast<uint64_t>(extent_of(plane, KVX_AXIS_TOKEN))};
  if (plane.tokens_per_entry == 0) {  // a sequence's slot is the block of its entry
    set_dense(a, shape.num_blocks, 1);
    a->is_own = is_own;
    a->tokens_per_entry = 0;
    if (!plane.slots) return;
    a->mode = LookupMode::kPacked;
    a->holes = true;
    a->max_blocks_per_seq = 1;
    a->indices = ints(plane.slots->slots, plane.slots->dtype);
    a->indices_count = plane.slots->token_count;
    a->null_block = plane.slots->invalid_slot;
    return;
  }
  if (slots) {
    set_slots(a, shape, *slots);
  } else if (table) {
    set_table(a, shape, *table, span.null_block_plus_1);
  } else {
    set_dense(a, shape.num_blocks, shape.block_size);
  }
  a->is_own = is_own;
  a->tokens_per_entry = plane.tokens_per_entry;
  if (span.starts) a->starts = ints(span.starts->lengths, span.starts->dtype);
}

uint32_t lookup_of(Plan *plan, const kvx_migrate_desc_t &migrate, const kvx_plane_t &src,
                   const kvx_plane_t &dst) {
  LookupPair &lookup = plan->lookups.add();
  set_span(&lookup.src, *migrate.src, src);
  set_span(&lookup.dst, *migrate.dst, dst);
  lookup.src.holes |= plan->zero_fill;
  const auto last = static_cast<uint32_t>(plan->lookups.size() - 1);
  for (uint32_t i = 0; i < last; ++i) {
    if (plan->lookups[i] != lookup) continue;
    plan->lookups.drop_last();
    return i;
  }
  return last;
}

}  // namespace kvx
