// Arrays of indices inside the tensors of a call, and whether they meet what it writes. Spec: 7
#pragma once

#include <algorithm>
#include <vector>

#include "case.h"
#include "plane_places.h"

namespace fuzz {

struct ByteRange {
  const uint8_t *begin;
  Wide bytes;
};

// An array that the call reads to find its way: where its pointer stands, and how long it is.
struct Array {
  const void **pointer;
  ByteRange byte_range() const { return {static_cast<const uint8_t *>(*pointer), bytes}; }
  Wide bytes;
};

inline std::vector<Array> arrays_of(Case *c) {
  std::vector<Array> all;
  const auto add = [&](const void **pointer, kvx_dtype_t dtype, uint64_t count) {
    if (count) all.push_back({pointer, static_cast<Wide>(count) * size_of(dtype)});
  };
  const auto add_table = [&](kvx_block_table_t *table) {
    add(&table->indices, table->index_dtype, table->indices_count);
    if (table->format == KVX_BLOCK_TABLE_RAGGED)
      add(&table->indptr, table->indptr_dtype, table->indptr_count);
  };
  if (c->op == kWrite) add(&c->dst.slots.slots, c->dst.slots.dtype, c->dst.slots.token_count);
  if (c->op == kGather) add_table(&c->src.table);
  if (c->op == kGather || c->op == kMigrate)
    add(&c->lens.lengths, c->lens.dtype, c->lens.seq_count);
  for (End *end : {&c->src, &c->dst}) {
    if (c->op != kMigrate) break;
    if (end->span.block_table) add_table(&end->table);
    if (end->span.slots) add(&end->slots.slots, end->slots.dtype, end->slots.token_count);
    if (end->span.starts) add(&end->starts.lengths, end->starts.dtype, end->starts.seq_count);
    for (PlaneCase &plane : end->planes) {
      if (plane.desc.block_table) add_table(&plane.table);
      if (plane.desc.slots) add(&plane.slots.slots, plane.slots.dtype, plane.slots.token_count);
    }
  }
  return all;
}

template <class Desc>
ByteRange extent_of(const Desc &desc, uint32_t ndim, const void *data) {
  Wide last = 0;
  for (uint32_t axis = 0; axis < ndim; ++axis)
    last += Wide{desc.shape[axis] - 1} * desc.stride[axis];
  return {static_cast<const uint8_t *>(data), (last + 1) * size_of(desc.dtype)};
}

inline std::vector<ByteRange> written_by(const Case &c) {
  std::vector<ByteRange> all;
  if (c.op == kGather) {
    for (const kvx_tensor_desc_t *io : {&c.io.key, &c.io.value})
      if (!is_absent(*io)) all.push_back(extent_of(*io, io->ndim, io->data));
    return all;
  }
  const bool migrates = c.op == kMigrate;
  const size_t layers = migrates ? c.dst.span.num_layers : 1;
  for (size_t i = 0; migrates && i < c.dst.span.num_planes; ++i) {
    const kvx_plane_t &plane = c.dst.planes[i].desc;
    all.push_back({static_cast<const uint8_t *>(plane.data), bytes_of(plane)});
  }
  for (size_t l = 0; l < layers; ++l) {
    const kvx_cache_desc_t &cache = c.dst.layers[l];
    for (const int kv : {0, 1}) {
      const kvx_tensor_desc_t &tensor = kv ? cache.v : cache.k;
      if (is_absent(tensor)) continue;
      all.push_back(extent_of(tensor, tensor.ndim, tensor.data));
      if ((c.finds_scales() || is_affine(tensor.dtype)) && c.dst.scales[kv].size() > l) {
        const kvx_scale_desc_t &scale = c.dst.scales[kv][l];
        all.push_back(extent_of(scale, scale.ndim, scale.data));
      }
      const bool pools = migrates && c.dst.span.block_table && cache.pool.secondary &&
                         c.dst.table.format == KVX_BLOCK_TABLE_KV_OFFSETS;
      if (!pools) continue;
      kvx_tensor_desc_t second = tensor;
      if (c.dst.span.secondary_num_blocks) second.shape[0] = c.dst.span.secondary_num_blocks;
      all.push_back(extent_of(second, second.ndim,
                              static_cast<const uint8_t *>(cache.pool.secondary) +
                                  (static_cast<const uint8_t *>(tensor.data) -
                                   static_cast<const uint8_t *>(cache.pool.primary))));
    }
  }
  return all;
}

// The spec wants the call refused, for a valid call with buried arrays.
inline bool array_meets_destination(Case &c) {
  const bool none = c.op == kMigrate ? c.lens.seq_count == 0 : c.io.num_tokens == 0;
  if (none || c.op == kValidate) return false;
  const std::vector<ByteRange> written = written_by(c);
  for (const Array &array : arrays_of(&c)) {
    const ByteRange a = array.byte_range();
    for (const ByteRange &w : written)
      if (a.begin - w.begin < w.bytes && w.begin - a.begin < a.bytes) return true;
  }
  return false;
}

// Moves one of the arrays, with what it holds, into the memory of a tensor at either end.
inline void bury(Random &random, Case *c) {
  std::vector<Array> arrays = arrays_of(c);
  std::vector<void *> places;
  const auto add = [&](void *data) {
    if (data) places.push_back(data);
  };
  for (const End *end : {&c->src, &c->dst}) {
    for (const kvx_cache_desc_t &cache : end->layers)
      add(cache.k.data), add(cache.v.data), add(cache.pool.secondary);
    for (const PlaneCase &plane : end->planes) add(plane.desc.data);
  }
  add(c->io.key.data), add(c->io.value.data);
  if (arrays.empty() || places.empty()) return;
  const Array &array = random.pick(arrays);
  Block *block = c->memory.find(random.pick(places));
  const auto bytes = static_cast<size_t>(array.bytes);
  if (!block || !*array.pointer || block->size < bytes) return;
  uint8_t *const to = block->data.get() + random.below((block->size - bytes) / 8 + 1) * 8;
  std::memmove(to, *array.pointer, bytes);
  *array.pointer = to;
  c->story += "  an array was buried in a tensor\n";
}

}  // namespace fuzz
