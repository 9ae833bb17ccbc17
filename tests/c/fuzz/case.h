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

// A plane beside the layers. Its pointers say only whether they are given.
struct PlaneCase {
  kvx_plane_t desc{};
  kvx_scale_desc_t scale{};
  kvx_block_table_t table{};
  kvx_slot_mapping_t slots{};
};

// One end of a call: the layers of a cache and how tokens are found in them. A write has a
// destination with slots, a gather a source with a table, a migration both ends.
struct End {
  std::vector<kvx_cache_desc_t> layers;
  bool from_pool = false;
  kvx_block_table_t table{};
  kvx_slot_mapping_t slots{};
  kvx_seq_lens_t starts{};
  std::vector<kvx_scale_desc_t> scales[2];  // K, V: per layer, or empty
  std::vector<kvx_scale_desc_t> zeros[2];   // zero points, as scales
  std::vector<PlaneCase> planes;
  std::vector<std::vector<uint8_t *>> blocks;  // POINTERS: of K and V of each layer, by id
  kvx_span_t span{};                           // its pointers say only whether they are given
};

// How a migration is made: in one call, or by a plan whose descriptors go before it runs, with
// other lookups in between or without, or by the copies that the plan lists.
enum Way { kCall, kPlan, kPlanOfOthers, kPlanRanges };

struct Case {
  Op op;
  Way way = kCall;
  mutable uint64_t described = KVX_UNKNOWN;  // bytes that the plan says it writes
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
    if (v.size >= sizeof v) {
      if (v.k_zeros) v.k_zeros = list(end.zeros[0], end.zeros[0].size());
      if (v.v_zeros) v.v_zeros = list(end.zeros[1], end.zeros[1].size());
    }
    if (v.planes && v.size >= sizeof v) {
      std::vector<kvx_plane_t> planes;
      for (const PlaneCase &plane : end.planes) {
        planes.push_back(plane.desc);
        kvx_plane_t &desc = planes.back();
        if (desc.scale) desc.scale = put(plane.scale);
        if (desc.block_table) desc.block_table = put(plane.table);
        if (desc.slots) desc.slots = put(plane.slots);
      }
      v.planes = list(planes, std::min<size_t>(v.num_planes, planes.size()));
    }
    return put(v);
  }
};

inline const kvx_migrate_desc_t *put_migration(const Case &c, Placed *placed) {
  kvx_migrate_desc_t migrate = c.migrate;
  if (migrate.seq_lens) migrate.seq_lens = placed->put(c.lens);
  if (migrate.src) migrate.src = placed->span(c.src);
  if (migrate.dst) migrate.dst = placed->span(c.dst);
  return placed->put(migrate);
}

// The case without sequences, found in the same way. Planes' own tables and slots stay.
inline Case of_no_sequences(const Case &c) {
  static const int64_t none = 0;
  Case empty;
  empty.op = c.op;
  empty.src = c.src, empty.dst = c.dst, empty.lens = c.lens, empty.migrate = c.migrate;
  empty.lens.seq_count = 0;
  for (End *end : {&empty.src, &empty.dst}) {
    end->table.seq_count = end->table.indices_count = 0;
    if (end->table.format == KVX_BLOCK_TABLE_RAGGED) {
      end->table.indptr_count = 1;
      end->table.indptr = &none;
    }
    end->slots.token_count = end->starts.seq_count = 0;
  }
  return empty;
}

struct Copies {
  std::vector<kvx_range_t> all;

  // The last first: the order is free.
  void carry_out() const {
    for (size_t i = all.size(); i-- > 0;) {
      if (all[i].src) {
        std::memcpy(all[i].dst, all[i].src, all[i].bytes);
      } else {
        std::memset(all[i].dst, 0, all[i].bytes);
      }
    }
  }
};

inline int take(void *context, const kvx_range_t *ranges, uint64_t count) {
  auto &all = static_cast<Copies *>(context)->all;
  all.insert(all.end(), ranges, ranges + count);
  return 0;
}

// Describes the plan, and carries its copies out or, where it converts, runs it.
inline kvx_status_t carry_out(const Case &c, const kvx_plan_t *plan) {
  kvx_plan_info_t info{};
  info.size = sizeof info;
  kvx_status_t status = kvx_plan_describe(plan, nullptr, &info, nullptr, 0);
  if (status != KVX_STATUS_OK) return status;
  std::vector<kvx_plane_info_t> planes(info.num_planes);
  for (kvx_plane_info_t &plane : planes) plane.size = sizeof plane;
  status = kvx_plan_describe(plan, nullptr, &info, planes.data(), info.num_planes);
  if (status != KVX_STATUS_OK) return status;
  c.described = info.bytes_written;
  bool converts = false;
  for (const kvx_plane_info_t &plane : planes) converts |= plane.flags & KVX_PLANE_INFO_CONVERTS;
  if (converts) return kvx_plan_run(plan, nullptr, nullptr);
  Copies copies;
  status = kvx_plan_ranges(plan, nullptr, take, &copies);
  if (status == KVX_STATUS_OK) copies.carry_out();
  return status;
}

// All that the caller has given is gone when the plan runs, save the memory that it describes.
inline kvx_status_t call_plan(const Case &c) {
  kvx_plan_t *plan = nullptr;
  {
    Placed placed;
    const bool of_others = c.way == kPlanOfOthers;
    const kvx_status_t status =
        of_others ? kvx_plan_create(put_migration(of_no_sequences(c), &placed), &plan)
                  : kvx_plan_create(put_migration(c, &placed), &plan);
    if (status != KVX_STATUS_OK) return status;
  }
  const std::unique_ptr<kvx_plan_t, decltype(&kvx_plan_free)> freed(plan, kvx_plan_free);
  if (c.way == kPlan) return kvx_plan_run(plan, nullptr, nullptr);
  if (c.way == kPlanRanges) return carry_out(c, plan);
  Placed placed;
  kvx_plan_lookups_t lookups{};
  lookups.size = sizeof lookups;
  lookups.seq_lens = placed.put(c.lens);
  for (const End *end : {&c.src, &c.dst}) {
    kvx_end_lookup_t &to = end == &c.src ? lookups.src : lookups.dst;
    if (end->span.block_table) to.block_table = placed.put(end->table);
    if (end->span.slots) to.slots = placed.put(end->slots);
    if (end->span.starts) to.starts = placed.put(end->starts);
  }
  return kvx_plan_run(plan, placed.put(lookups), nullptr);
}

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
  if (c.way != kCall) return call_plan(c);
  return kvx_migrate_kv(put_migration(c, &placed), nullptr);
}

}  // namespace fuzz
