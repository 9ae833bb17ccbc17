// Fills the lookups of a plan from the slots and tables of descriptors that have been checked.
#pragma once

#include "desc/plane.h"
#include "plan/plan.h"

namespace kvx {

inline Ints ints(const void *data, kvx_dtype_t dtype) { return {data, size_of(dtype) == 8}; }

// `rows` of tokens that follow each other: row i is block i.
void set_dense(Lookup *a, uint64_t rows, uint64_t tokens_per_row);

void set_slots(Lookup *a, const BlockShape &shape, const kvx_slot_mapping_t &slots);

// `tensor` is the cache's K or V.
void set_table(Lookup *a, const kvx_cache_desc_t &cache, const kvx_tensor_desc_t &tensor, bool is_v,
               const kvx_block_table_t &table, uint64_t null_block_plus_1,
               uint32_t secondary_num_blocks);

// The bits of a block's address that are 0: as many as in those of the tensors' own, and 4 at most.
uint32_t pointer_shift(const kvx_block_table_t &table, const kvx_cache_desc_t *const *layers,
                       uint32_t num_layers);

// The lookup of K or V of a span.
void set_span(Lookup *a, const kvx_span_t &span, bool is_v);
// The lookup of a plane of a span: its own table or slots, or those of the span.
void set_span(Lookup *a, const kvx_span_t &span, const kvx_plane_t &plane);

// The index of the plan's lookup for two planes; adds it if it is new.
uint32_t lookup_of(Plan *plan, const kvx_migrate_desc_t &migrate, const kvx_plane_t &src,
                   const kvx_plane_t &dst);

}  // namespace kvx
