// A call and everything it points to.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "kvx/kvx_ext.h"
#include "memory.h"

namespace fuzz {

enum Op { kValidate, kWrite, kGather, kMigrate, kOps };

// One end of a call: the layers of a cache and how tokens are found in them. A write has a
// destination with slots, a gather a source with a table, a migration both ends.
struct End {
  std::vector<kvx_cache_desc_t> layers;
  bool from_pool = false;
  kvx_block_table_t table{};
  kvx_slot_mapping_t slots{};
  kvx_seq_lens_t starts{};
  std::vector<kvx_scale_desc_t> scales[2];  // K, V: per layer, or empty
  kvx_span_t span{};                        // its pointers say only whether they are given
};

struct Case {
  Op op;
  Memory memory;
  End src, dst;
  kvx_kv_io_desc_t io{};
  kvx_write_desc_t write{};
  kvx_gather_desc_t gather{};
  kvx_gather_options_t options{};
  bool with_options = false;
  kvx_seq_lens_t lens{};
  kvx_migrate_desc_t migrate{};
  bool mutated = false;
  std::string story;  // what was mutated

  kvx_cache_desc_t &cache() { return op == kGather ? src.layers[0] : dst.layers[0]; }
};

inline const void *const kGiven = &kGiven;  // a pointer that is set when the call is put together

// The structs of a call in memory that is exactly as long as their `size` says.
struct Placed {
  std::vector<std::unique_ptr<uint8_t[]>> memory;

  template <class T>
  T *put(const T &value) {
    const size_t bytes = std::min<size_t>(std::max<size_t>(value.size, 4), sizeof(T));
    memory.emplace_back(new uint8_t[bytes]);
    std::memcpy(memory.back().get(), &value, bytes);
    return reinterpret_cast<T *>(memory.back().get());
  }
  template <class T>
  const T *const *list(const std::vector<T> &values, size_t count) {
    memory.emplace_back(new uint8_t[std::max<size_t>(count, 1) * sizeof(T *)]);
    auto **pointers = reinterpret_cast<const T **>(memory.back().get());
    for (size_t i = 0; i < count; ++i) pointers[i] = put(values[i]);
    return pointers;
  }
  const kvx_span_t *span(const End &end) {
    kvx_span_t v = end.span;
    if (v.layers) v.layers = list(end.layers, std::min<size_t>(v.num_layers, end.layers.size()));
    if (v.block_table) v.block_table = put(end.table);
    if (v.slots) v.slots = put(end.slots);
    if (v.starts) v.starts = put(end.starts);
    if (v.k_scales) v.k_scales = list(end.scales[0], end.scales[0].size());
    if (v.v_scales) v.v_scales = list(end.scales[1], end.scales[1].size());
    return put(v);
  }
};

inline kvx_status_t call(const Case &c) {
  Placed placed;
  if (c.op == kValidate) return kvx_validate_cache_desc(placed.put(c.dst.layers[0]));
  if (c.op == kWrite) {
    kvx_write_desc_t write = c.write;
    write.io = c.io;
    write.slots = c.dst.slots;
    if (!c.dst.scales[0].empty()) write.k_scale_desc = c.dst.scales[0][0];
    if (!c.dst.scales[1].empty()) write.v_scale_desc = c.dst.scales[1][0];
    return kvx_write_kv(placed.put(c.dst.layers[0]), placed.put(write), nullptr);
  }
  if (c.op == kGather) {
    kvx_gather_desc_t gather = c.gather;
    gather.io = c.io;
    gather.block_table = c.src.table;
    gather.seq_lens = c.lens;
    const kvx_cache_desc_t *cache = placed.put(c.src.layers[0]);
    if (!c.with_options) return kvx_gather_kv(cache, placed.put(gather), nullptr);
    kvx_gather_options_t options = c.options;
    options.reserved_0 = c.src.span.reserved_0;
    options.null_block_plus_1 = c.src.span.null_block_plus_1;
    options.secondary_num_blocks = c.src.span.secondary_num_blocks;
    if (!c.src.scales[0].empty()) options.k_scale = placed.put(c.src.scales[0][0]);
    if (!c.src.scales[1].empty()) options.v_scale = placed.put(c.src.scales[1][0]);
    return kvx_gather_kv_ext(cache, placed.put(gather), placed.put(options), nullptr);
  }
  kvx_migrate_desc_t migrate = c.migrate;
  if (migrate.seq_lens) migrate.seq_lens = placed.put(c.lens);
  if (migrate.src) migrate.src = placed.span(c.src);
  if (migrate.dst) migrate.dst = placed.span(c.dst);
  return kvx_migrate_kv(placed.put(migrate), nullptr);
}

}  // namespace fuzz
