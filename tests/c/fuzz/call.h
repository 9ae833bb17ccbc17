// Makes a call: at once, or by a plan.
#pragma once

#include <memory>
#include <vector>

#include "case.h"
#include "kvx/kvx_layers.h"

namespace fuzz {

inline const kvx_migrate_desc_t *put_migration(const Case &c, Placed *placed) {
  kvx_migrate_desc_t migrate = c.migrate;
  if (migrate.seq_lens) migrate.seq_lens = placed->put(c.lens);
  if (migrate.src) migrate.src = placed->span(c.src);
  if (migrate.dst) migrate.dst = placed->span(c.dst);
  return placed->put(migrate);
}

// The case without tokens, found in the same way. Planes' own tables and slots stay.
inline Case of_no_tokens(const Case &c) {
  static const int64_t none = 0;
  Case empty;
  empty.op = c.op;
  empty.src = c.src, empty.dst = c.dst, empty.lens = c.lens, empty.migrate = c.migrate;
  empty.io = c.io, empty.write = c.write, empty.gather = c.gather, empty.options = c.options;
  empty.with_options = c.with_options;
  empty.write_options = c.write_options, empty.with_write_options = c.with_write_options;
  empty.lens.seq_count = 0;
  empty.io.num_tokens = 0;
  for (kvx_tensor_desc_t *tensor : {&empty.io.key, &empty.io.value}) {
    if (is_absent(*tensor)) continue;
    tensor->data = nullptr;
    tensor->shape[0] = 0;
  }
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

struct WriteArguments {
  const kvx_cache_desc_t *cache;
  const kvx_write_desc_t *write;
  const kvx_write_options_t *options;
};

inline WriteArguments put_write(const Case &c, Placed *placed) {
  kvx_write_desc_t write = c.write;
  write.io = c.io;
  write.slots = c.dst.slots;
  if (!c.dst.scales[0].empty()) write.k_scale_desc = c.dst.scales[0][0];
  if (!c.dst.scales[1].empty()) write.v_scale_desc = c.dst.scales[1][0];
  return {placed->put(c.dst.layers[0]), placed->put(write),
          c.with_write_options ? placed->put(c.write_options) : nullptr};
}

struct GatherArguments {
  const kvx_cache_desc_t *cache;
  const kvx_gather_desc_t *gather;
  const kvx_gather_options_t *options;
};

inline GatherArguments put_gather(const Case &c, Placed *placed) {
  kvx_gather_desc_t gather = c.gather;
  gather.io = c.io;
  gather.block_table = c.src.table;
  gather.seq_lens = c.lens;
  GatherArguments given{placed->put(c.src.layers[0]), placed->put(gather), nullptr};
  if (!c.with_options) return given;
  kvx_gather_options_t options = c.options;
  options.reserved_0 = c.src.span.reserved_0;
  options.null_block_plus_1 = c.src.span.null_block_plus_1;
  options.secondary_num_blocks = c.src.span.secondary_num_blocks;
  if (!c.src.scales[0].empty()) options.k_scale = placed->put(c.src.scales[0][0]);
  if (!c.src.scales[1].empty()) options.v_scale = placed->put(c.src.scales[1][0]);
  given.options = placed->put(options);
  return given;
}

inline kvx_status_t create_plan(const Case &c, kvx_plan_t **plan) {
  Placed placed;
  if (c.op == kWrite) {
    const WriteArguments given = put_write(c, &placed);
    return kvx_plan_create_write(given.cache, given.write, given.options, plan);
  }
  if (c.op == kGather) {
    const GatherArguments given = put_gather(c, &placed);
    return kvx_plan_create_gather(given.cache, given.gather, given.options, plan);
  }
  return kvx_plan_create(put_migration(c, &placed), plan);
}

// The tokens of the case, for a plan that was made of none.
inline const kvx_plan_lookups_t *put_lookups(const Case &c, Placed *placed) {
  kvx_plan_lookups_t lookups{};
  lookups.size = sizeof lookups;
  if (c.op == kWrite) lookups.dst.slots = placed->put(c.dst.slots);
  if (c.op == kGather) {
    lookups.src.block_table = placed->put(c.src.table);
    lookups.max_seq_len = c.gather.max_seq_len;
  }
  if (c.op != kMigrate) lookups.io = placed->put(c.io);
  if (c.op != kWrite) lookups.seq_lens = placed->put(c.lens);
  for (const End *end : {&c.src, &c.dst}) {
    if (c.op != kMigrate) break;
    kvx_end_lookup_t &to = end == &c.src ? lookups.src : lookups.dst;
    if (end->span.block_table) to.block_table = placed->put(end->table);
    if (end->span.slots) to.slots = placed->put(end->slots);
    if (end->span.starts) to.starts = placed->put(end->starts);
  }
  return placed->put(lookups);
}

// All that the caller has given is gone when the plan runs, save the memory that it describes.
inline kvx_status_t call_plan(const Case &c) {
  kvx_plan_t *plan = nullptr;
  const kvx_status_t status =
      c.way == kPlanOfOthers ? create_plan(of_no_tokens(c), &plan) : create_plan(c, &plan);
  if (status != KVX_STATUS_OK) return status;
  const std::unique_ptr<kvx_plan_t, decltype(&kvx_plan_free)> freed(plan, kvx_plan_free);
  if (c.way == kPlan) return kvx_plan_run(plan, nullptr, nullptr);
  if (c.way == kPlanRanges) return carry_out(c, plan);
  Placed placed;
  return kvx_plan_run(plan, put_lookups(c, &placed), nullptr);
}

inline kvx_status_t call(const Case &c) {
  if (c.op != kValidate && c.way != kCall && c.way != kLayers) return call_plan(c);
  Placed placed;
  if (c.op == kValidate) return kvx_validate_cache_desc(placed.put(c.dst.layers[0]));
  if (c.op == kWrite) {
    const WriteArguments given = put_write(c, &placed);
    if (c.way == kLayers)
      return kvx_write_layers(&given.cache, &given.write, 1, given.options, nullptr);
    if (!given.options) return kvx_write_kv(given.cache, given.write, nullptr);
    return kvx_write_kv_ext(given.cache, given.write, given.options, nullptr);
  }
  if (c.op == kGather) {
    const GatherArguments given = put_gather(c, &placed);
    if (!given.options) return kvx_gather_kv(given.cache, given.gather, nullptr);
    return kvx_gather_kv_ext(given.cache, given.gather, given.options, nullptr);
  }
  return kvx_migrate_kv(put_migration(c, &placed), nullptr);
}

}  // namespace fuzz
