// The exported functions of kvx_plan.h.
#include <initializer_list>
#include <memory>

#include "abi/guarded.h"
#include "abi/prepared.h"
#include "error.h"
#include "plan/check.h"
#include "plan/describe.h"
#include "plan/kept.h"
#include "plan/ranges.h"
#include "rules/lookups.h"
#include "rules/path.h"
#include "rules/validate.h"

static_assert(sizeof(kvx_end_lookup_t) == 24);
static_assert(sizeof(kvx_plan_lookups_t) == 64);
static_assert(sizeof(kvx_plane_info_t) == 80);
static_assert(sizeof(kvx_plan_info_t) == 96);
static_assert(sizeof(kvx_range_t) == 32);

struct kvx_plan_t {
  explicit kvx_plan_t(const kvx_migrate_desc_t &given) : migration(given) {}

  kvx::KeptMigration migration;
  kvx::Prepared prepared;  // with the lookups that the plan was made with
  bool must_plan_anew = false;
};

namespace kvx {
namespace {

bool has_data(const kvx_scale_desc_t *const *scales, uint32_t num_layers) {
  for (uint32_t l = 0; scales && l < num_layers; ++l)
    if (scales[l] && scales[l]->data) return true;
  return false;
}

// Whether each call must plan anew: planning reads scales of one number, and planes may have
// lookups of their own.
bool must_plan_anew(const kvx_migrate_desc_t &migrate) {
  for (const kvx_span_t *span : {migrate.src, migrate.dst}) {
    if (span->num_planes || has_data(span->k_scales, span->num_layers) ||
        has_data(span->v_scales, span->num_layers)) {
      return true;
    }
  }
  return false;
}

kvx_status_t create(const kvx_migrate_desc_t *given, kvx_plan_t **made) {
  if (!made) return KVX_INVALID("plan is NULL");
  *made = nullptr;
  const Grown migrate(given);
  KVX_TRY(validate_migrate(migrate.get()));
  auto plan = std::make_unique<kvx_plan_t>(*migrate.get());
  KVX_TRY(prepare(plan->migration.desc(), &plan->prepared));
  plan->must_plan_anew = must_plan_anew(plan->migration.desc());
  *made = plan.release();
  return KVX_STATUS_OK;
}

// Calls visit with the plan for these lookups.
template <class Visit>
kvx_status_t with_lookups(const kvx_plan_t *kept, const kvx_plan_lookups_t *lookups, Visit visit) {
  if (!kept) return KVX_INVALID("plan is NULL");
  if (!lookups && !kept->must_plan_anew) return visit(kept->prepared.plan);
  OtherLookups other;
  KVX_TRY(replace_lookups(kept->migration.desc(), lookups, &other));
  Plan plan;
  plan_migrate(kept->must_plan_anew ? other.all : other.first, &plan);
  if (!kept->must_plan_anew) {
    plan.check_same_pool = kept->prepared.plan.check_same_pool;
    plan.pairs.borrow(kept->prepared.plan.pairs);
    plan.layers.borrow(kept->prepared.plan.layers);
  }
  return visit(plan);
}

// Checks `size` of a struct that the call fills.
template <class T>
kvx_status_t check_room(const Path &path, const T *room) {
  if (!room) return KVX_INVALID("%s is NULL", KVX_AT(path));
  if (room->size >= sizeof *room) return KVX_STATUS_OK;
  return KVX_INVALID("%s.size is %u, expected at least %zu (spec 6)", KVX_AT(path), room->size,
                     sizeof *room);
}

// Whether the host can count a device's plan: it can read the indices, and no scale is needed.
bool is_countable(const Plan &plan, bool on_device) {
  if (!on_device) return true;
  for (const PlanePair &pair : plan.pairs)
    if (pair.src_scales.data || pair.dst_scales.data) return false;
  return !backend::find_unreadable(plan, on_device);
}

kvx_status_t describe(const kvx_plan_t *kept, const kvx_plan_lookups_t *lookups,
                      kvx_plan_info_t *info, kvx_plane_info_t *planes, uint32_t num_planes) {
  return with_lookups(kept, lookups, [=](const Plan &plan) -> kvx_status_t {
    KVX_TRY(check_room({nullptr, "info"}, info));
    if (planes ? num_planes != plan.pairs.size() : num_planes != 0) {
      return KVX_INVALID(
          "num_planes is %u, expected info.num_planes %zu, or 0 with planes NULL "
          "(spec E.13)",
          num_planes, plan.pairs.size());
    }
    for (uint32_t i = 0; i < num_planes; ++i)
      KVX_TRY(check_room({nullptr, "planes", i}, &planes[i]));
    const bool on_device = kept->prepared.on_device;
    const bool counts = is_countable(plan, on_device);
    uint64_t tokens = KVX_UNKNOWN;
    if (counts) KVX_TRY(check_data(plan, &tokens));
    const uint32_t size = info->size;
    *info = {};
    info->size = size;
    describe_planes(plan, *kept->migration.desc().src, info, planes);
    if (counts) count_moves(plan, tokens, info, planes);
    backend::describe(plan, tokens, on_device, info, planes);
    if (counts && info->copy_bytes_per_second > 0)
      info->seconds = static_cast<double>(info->bytes_written) / info->copy_bytes_per_second;
    return KVX_STATUS_OK;
  });
}

kvx_status_t ranges(const kvx_plan_t *kept, const kvx_plan_lookups_t *lookups,
                    kvx_take_ranges_t take, void *context) {
  return with_lookups(kept, lookups, [=](const Plan &plan) -> kvx_status_t {
    if (!take) return KVX_INVALID("take is NULL");
    KVX_TRY(check_copies(plan));
    if (const char *name = backend::find_unreadable(plan, kept->prepared.on_device)) {
      return KVX_INVALID(
          "%s lies in device memory, expected host memory: the host lists ranges "
          "(spec E.13)",
          name);
    }
    uint64_t tokens;
    KVX_TRY(check_data(plan, &tokens));
    list_ranges(plan, tokens, take, context);
    return KVX_STATUS_OK;
  });
}

}  // namespace
}  // namespace kvx

extern "C" {

kvx_status_t kvx_plan_create(const kvx_migrate_desc_t *migrate, kvx_plan_t **plan) {
  return kvx::guarded([=] { return kvx::create(migrate, plan); });
}

void kvx_plan_free(kvx_plan_t *plan) { delete plan; }

kvx_status_t kvx_plan_run(const kvx_plan_t *plan, const kvx_plan_lookups_t *lookups, void *stream) {
  return kvx::guarded([=] {
    return kvx::with_lookups(plan, lookups,
                             [=](const kvx::Plan &now) { return plan->prepared.run(now, stream); });
  });
}

kvx_status_t kvx_plan_describe(const kvx_plan_t *plan, const kvx_plan_lookups_t *lookups,
                               kvx_plan_info_t *info, kvx_plane_info_t *planes,
                               uint32_t num_planes) {
  return kvx::guarded([=] { return kvx::describe(plan, lookups, info, planes, num_planes); });
}

kvx_status_t kvx_plan_ranges(const kvx_plan_t *plan, const kvx_plan_lookups_t *lookups,
                             kvx_take_ranges_t take, void *context) {
  return kvx::guarded([=] { return kvx::ranges(plan, lookups, take, context); });
}

}  // extern "C"
