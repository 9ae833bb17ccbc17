// Index arrays (slots, tables, lengths, starts) share no memory with what the call writes.
#pragma once

#include "desc/span.h"
#include "kvx/kvx_migrate.h"
#include "rules/path.h"

namespace kvx {

// An array that a call reads to find tokens, and its name: owner.group.field.
struct Array {
  const char *owner, *group, *field;
  Extent extent;
};

inline Array array_of(const char *owner, const char *group, const char *field, const void *data,
                      kvx_dtype_t dtype, uint64_t count) {
  return {owner, group, field, extent_at(data, count * static_cast<uint64_t>(size_of(dtype)))};
}
inline Array array_of(const char *owner, const kvx_slot_mapping_t &slots) {
  return array_of(owner, "slots", "slots", slots.slots, slots.dtype, slots.token_count);
}
inline Array array_of(const char *owner, const char *group, const kvx_seq_lens_t &lens) {
  return array_of(owner, group, "lengths", lens.lengths, lens.dtype, lens.seq_count);
}
inline Array indices_of(const char *owner, const kvx_block_table_t &table) {
  return array_of(owner, "block_table", "indices", table.indices, table.index_dtype,
                  table.indices_count);
}
inline Array indptr_of(const char *owner, const kvx_block_table_t &table) {
  return array_of(owner, "block_table", "indptr", table.indptr, table.indptr_dtype,
                  table.indptr_count);
}

inline bool meet(const Array &array, const Extent &written) {
  return intersect(array.extent, written) && array.extent.begin != array.extent.end;
}

[[gnu::cold]] kvx_status_t fail_array(const Array &array, const Path &written);

inline kvx_status_t check_array_apart(const Array &array, const Path &path, const Extent &written) {
  return meet(array, written) ? fail_array(array, path) : KVX_STATUS_OK;
}
// Compares with the tensor's start first: its end takes a loop over the axes, and most arrays are
// before it.
inline kvx_status_t check_array_apart(const Array &array, const Path &path,
                                      const kvx_tensor_desc_t &written) {
  if (array.extent.end <= written.data) return KVX_STATUS_OK;
  return check_array_apart(array, path, extent_of(written));
}

// Calls visit with each array of a migration, until it does not return OK.
template <class Visit>
[[gnu::always_inline]] inline kvx_status_t each_array(const kvx_migrate_desc_t &migrate,
                                                      Visit visit) {
  KVX_TRY(visit(array_of("migrate", "seq_lens", *migrate.seq_lens)));
  for (const bool is_dst : {false, true}) {
    const kvx_span_t &span = is_dst ? *migrate.dst : *migrate.src;
    const char *const owner = is_dst ? "dst" : "src";
    if (span.slots) KVX_TRY(visit(array_of(owner, *span.slots)));
    if (span.starts) KVX_TRY(visit(array_of(owner, "starts", *span.starts)));
    if (span.block_table) {
      KVX_TRY(visit(indices_of(owner, *span.block_table)));
      KVX_TRY(visit(indptr_of(owner, *span.block_table)));
    }
    const char *const planes = is_dst ? "dst.planes[]" : "src.planes[]";
    for (uint32_t i = 0; i < span.num_planes; ++i) {
      const kvx_plane_t &plane = *span.planes[i];
      if (plane.slots) KVX_TRY(visit(array_of(planes, *plane.slots)));
      if (!plane.block_table) continue;
      KVX_TRY(visit(indices_of(planes, *plane.block_table)));
      KVX_TRY(visit(indptr_of(planes, *plane.block_table)));
    }
  }
  return KVX_STATUS_OK;
}

// Checks all arrays of a migration. `written`: from the first byte of the destination's tensors to
// the last.
kvx_status_t check_arrays_apart(const Path &dst_path, const kvx_migrate_desc_t &migrate,
                                const Extent &written);

}  // namespace kvx
