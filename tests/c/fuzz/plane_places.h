// Where the tokens of a plane beside the layers lie. Knows docs/spec.md, E.11.
#pragma once

#include <algorithm>

#include "case.h"

namespace fuzz {

inline int64_t extent_of(const kvx_plane_t &plane, kvx_axis_t axis) {
  int64_t extent = 1;
  for (uint32_t i = 0; i < plane.num_axes; ++i)
    if (plane.axes[i].axis == axis) extent *= plane.axes[i].extent;
  return extent;
}

// From the first byte to the last.
inline Wide bytes_of(const kvx_plane_t &plane) {
  Wide bytes = size_of(plane.dtype);
  for (uint32_t i = 0; i < std::min<uint32_t>(plane.num_axes, KVX_MAX_PLANE_AXES); ++i) {
    const kvx_plane_axis_t &part = plane.axes[i];
    if (part.extent > 1) bytes += Wide{part.extent - 1} * part.stride_bytes;
  }
  return bytes;
}

inline uint8_t *element_of(const kvx_plane_t &plane, int64_t block, int64_t entry, int64_t head,
                           int64_t d) {
  int64_t left[] = {block, entry, head, d};  // by kvx_axis_t
  Wide at = 0;
  for (uint32_t i = plane.num_axes; i-- > 0;) {
    const kvx_plane_axis_t &part = plane.axes[i];
    int64_t &index = left[part.axis];
    if (part.extent > 1) at += Wide{index % part.extent} * part.stride_bytes;
    index /= part.extent;
  }
  return static_cast<uint8_t *>(plane.data) + static_cast<int64_t>(at);
}

// How a plane's tokens are found at one end: by its own table or slots, or by those of the span.
struct Finder {
  const kvx_block_table_t *table = nullptr;
  const kvx_slot_mapping_t *slots = nullptr;
  bool own = false;

  Finder(const End &end, const PlaneCase &plane) {
    const kvx_plane_t &desc = plane.desc;
    own = desc.block_table || desc.slots || desc.tokens_per_entry == 0;
    if (desc.block_table) table = &plane.table;
    if (desc.slots) slots = &plane.slots;
    if (own) return;
    if (end.span.block_table) table = &end.table;
    if (end.span.slots) slots = &end.slots;
  }
  const void *indices() const { return table ? table->indices : slots ? slots->slots : nullptr; }
  // One slot for each entry, and no rows.
  bool names_tokens(const kvx_plane_t &plane) const { return slots && plane.tokens_per_entry > 0; }
};

// Entries of a row at most.
inline Wide held(const Finder &finder, const kvx_plane_t &plane, uint64_t row) {
  if (plane.tokens_per_entry == 0) return 1;
  const int64_t entries = extent_of(plane, KVX_AXIS_TOKEN);
  if (!finder.table) return entries;
  const kvx_block_table_t &t = *finder.table;
  if (t.format != KVX_BLOCK_TABLE_RAGGED) return Wide{t.max_blocks_per_seq} * entries;
  return Wide{read_int(t.indptr, t.indptr_dtype, row + 1)} -
         read_int(t.indptr, t.indptr_dtype, row);
}

// The block and the entry in it, or -1 for null. False: the index is out of range. `flat` counts
// the tokens of all rows.
inline bool find_entry(const Finder &finder, const kvx_plane_t &plane, int64_t null_block,
                       uint64_t row, Wide entry, uint64_t flat, int64_t *block, int64_t *offset) {
  const int64_t blocks = extent_of(plane, KVX_AXIS_BLOCK);
  const int64_t entries = extent_of(plane, KVX_AXIS_TOKEN);
  *block = -1;
  if (finder.slots) {
    const bool by_token = plane.tokens_per_entry > 0;
    const kvx_slot_mapping_t &s = *finder.slots;
    const int64_t slot = read_int(s.slots, s.dtype, by_token ? flat : row);
    if (slot < 0 || slot == s.invalid_slot) return true;
    *block = by_token ? slot / entries : slot;
    *offset = by_token ? slot % entries : 0;
    return *block < blocks;
  }
  *offset = static_cast<int64_t>(entry % entries);
  if (!finder.table) {
    *block = static_cast<int64_t>(row);
    return *block < blocks && entry < entries;
  }
  const kvx_block_table_t &t = *finder.table;
  Wide column = entry / entries;
  if (t.format == KVX_BLOCK_TABLE_RING) column %= t.max_blocks_per_seq;
  const Wide at = t.format == KVX_BLOCK_TABLE_RAGGED
                      ? read_int(t.indptr, t.indptr_dtype, row) + entry
                      : row * Wide{t.max_blocks_per_seq} + column;
  const int64_t id = read_int(t.indices, t.index_dtype, static_cast<uint64_t>(at));
  if (id < 0 || id == null_block) return true;
  *block = id;
  return id < blocks;
}

}  // namespace fuzz
