// Copies a call's descriptors with all descriptors that they point to. The memory that these
// describe stays the caller's.
#pragma once

#include <deque>
#include <tuple>
#include <vector>

#include "plan/plan.h"

namespace kvx {

class KeptMigration {
 public:
  // `given` is valid, and of this version's structs.
  explicit KeptMigration(const kvx_migrate_desc_t &given);
  KeptMigration(const KeptMigration &) = delete;
  KeptMigration &operator=(const KeptMigration &) = delete;

  const kvx_migrate_desc_t &desc() const { return desc_; }

 private:
  // Copies a struct, of the size that this version has; NULL for NULL.
  template <class T>
  T *keep(const T *given);
  // Copies a list of pointers to structs.
  template <class T>
  const T *const *keep(const T *const *given, uint32_t count);
  kvx_span_t *keep_span(const kvx_span_t &given);
  const kvx_plane_t *keep_plane(const kvx_plane_t &given);

  // Deques, whose items never move.
  std::tuple<std::deque<kvx_span_t>, std::deque<kvx_cache_desc_t>, std::deque<kvx_plane_t>,
             std::deque<kvx_block_table_t>, std::deque<kvx_slot_mapping_t>,
             std::deque<kvx_seq_lens_t>, std::deque<kvx_scale_desc_t>>
      structs_;
  std::deque<std::vector<const void *>> lists_;
  kvx_migrate_desc_t desc_;
};

// Copies a write. `write` is valid, in structs of this version; `options` may be NULL.
struct KeptWrite {
  KeptWrite(const kvx_cache_desc_t &given_cache, const kvx_write_desc_t &given,
            const kvx_write_options_t *given_options);

  void make_plan(const kvx_write_desc_t &now, Plan *plan) const {
    plan_write(cache, now, options.flags, plan);
  }

  kvx_cache_desc_t cache;
  kvx_write_desc_t call;
  kvx_write_options_t options{};
};

// Copies a gather.
struct KeptGather {
  KeptGather(const kvx_cache_desc_t &given_cache, const kvx_gather_desc_t &given,
             const kvx_gather_options_t *given_options);
  KeptGather(const KeptGather &) = delete;
  KeptGather &operator=(const KeptGather &) = delete;

  void make_plan(const kvx_gather_desc_t &now, Plan *plan) const {
    plan_gather(cache, now, options, plan);
  }

  kvx_cache_desc_t cache;
  kvx_gather_desc_t call;
  kvx_gather_options_t options{};
  kvx_scale_desc_t k_scale, v_scale;  // those of `options`
};

// Whether there are scales, which planning may read.
bool has_scales(const KeptWrite &write);
bool has_scales(const KeptGather &gather);

}  // namespace kvx
