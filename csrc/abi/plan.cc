// The exported functions of kvx_plan.h.
#include <memory>

#include "abi/guarded.h"
#include "abi/kept_call.h"
#include "error.h"
#include "plan/check.h"
#include "plan/describe.h"
#include "plan/ranges.h"
#include "rules/struct.h"

static_assert(sizeof(kvx_end_lookup_t) == 24);
static_assert(sizeof(kvx_plan_lookups_t) == 72);
static_assert(sizeof(kvx_plane_info_t) == 80);
static_assert(sizeof(kvx_plan_info_t) == 96);
static_assert(sizeof(kvx_range_t) == 32);

namespace kvx {
namespace {

template <class... Given>
kvx_status_t create(kvx_plan_t **made, const Given *...given) {
  if (!made) return KVX_INVALID("plan is NULL");
  *made = nullptr;
  std::unique_ptr<kvx_plan_t> plan;
  KVX_TRY(keep(given..., &plan));
  *made = plan.release();
  return KVX_STATUS_OK;
}

template <class Function>
kvx_status_t visit(const kvx_plan_t *plan, const kvx_plan_lookups_t *lookups,
                   const Function &function) {
  if (!plan) return KVX_INVALID("plan is NULL");
  return plan->visit(lookups, Visit(function));
}

// Checks the data of a call as far as the host can read them, and counts its tokens.
kvx_status_t check_data(const CallContext &call, uint64_t *tokens) {
  *tokens = 0;
  return call.is_empty ? KVX_STATUS_OK : kvx::check_data(call.plan, tokens);
}

// Whether the host can count a call's tokens: it can read the indices, and no scale is needed.
bool is_countable(const CallContext &call) {
  if (!call.route.on_device || call.is_empty) return true;
  for (const PlanePair &pair : call.plan.pairs)
    if (pair.src_scales.data || pair.dst_scales.data) return false;
  return !backend::find_unreadable(call.plan, call.route.on_device);
}

kvx_status_t describe(const CallContext &call, kvx_plan_info_t *info, kvx_plane_info_t *planes,
                      uint32_t num_planes) {
  const Plan &plan = call.plan;
  KVX_TRY(check_struct({nullptr, "info"}, info));
  if (planes ? num_planes != plan.pairs.size() : num_planes != 0) {
    return KVX_INVALID(
        "num_planes is %u, expected info.num_planes %zu, or 0 with planes NULL "
        "(spec E.13)",
        num_planes, plan.pairs.size());
  }
  for (uint32_t i = 0; i < num_planes; ++i)
    KVX_TRY(check_struct({nullptr, "planes", i}, &planes[i]));
  const bool counts = is_countable(call);
  uint64_t tokens = KVX_UNKNOWN;
  if (counts) KVX_TRY(check_data(call, &tokens));
  const uint32_t size = info->size;
  *info = {};
  info->size = size;
  describe_planes(plan, call.span, info, planes);
  if (counts) count_moves(plan, tokens, info, planes);
  backend::describe(plan, tokens, call.route, info, planes);
  if (counts && info->copy_bytes_per_second > 0)
    info->seconds = static_cast<double>(info->bytes_written) / info->copy_bytes_per_second;
  return KVX_STATUS_OK;
}

kvx_status_t ranges(const CallContext &call, kvx_take_ranges_t take, void *context) {
  if (!take) return KVX_INVALID("take is NULL");
  KVX_TRY(check_copies(call.plan));
  if (const char *name = backend::find_unreadable(call.plan, call.route.on_device)) {
    return KVX_INVALID(
        "%s lies in device memory, expected host memory: the host lists ranges "
        "(spec E.13)",
        name);
  }
  uint64_t tokens;
  KVX_TRY(check_data(call, &tokens));
  list_ranges(call.plan, tokens, take, context);
  return KVX_STATUS_OK;
}

}  // namespace
}  // namespace kvx

extern "C" {

kvx_status_t kvx_plan_create(const kvx_migrate_desc_t *migrate, kvx_plan_t **plan) {
  return kvx::guarded([=] { return kvx::create(plan, migrate); });
}

kvx_status_t kvx_plan_create_write(const kvx_cache_desc_t *cache, const kvx_write_desc_t *write,
                                   const kvx_write_options_t *options, kvx_plan_t **plan) {
  return kvx::guarded([=] { return kvx::create(plan, cache, write, options); });
}

kvx_status_t kvx_plan_create_gather(const kvx_cache_desc_t *cache, const kvx_gather_desc_t *gather,
                                    const kvx_gather_options_t *options, kvx_plan_t **plan) {
  return kvx::guarded([=] { return kvx::create(plan, cache, gather, options); });
}

void kvx_plan_free(kvx_plan_t *plan) { delete plan; }

kvx_status_t kvx_plan_run(const kvx_plan_t *plan, const kvx_plan_lookups_t *lookups, void *stream) {
  return kvx::guarded([=] {
    return kvx::visit(plan, lookups, [=](const kvx::CallContext &call) {
      if (call.is_empty) return KVX_STATUS_OK;
      return kvx::backend::run(call.plan, call.tensors, call.num_tensors, call.route.on_device,
                               stream, &call.reached_by);
    });
  });
}

kvx_status_t kvx_plan_describe(const kvx_plan_t *plan, const kvx_plan_lookups_t *lookups,
                               kvx_plan_info_t *info, kvx_plane_info_t *planes,
                               uint32_t num_planes) {
  return kvx::guarded([=] {
    return kvx::visit(plan, lookups, [=](const kvx::CallContext &call) {
      return kvx::describe(call, info, planes, num_planes);
    });
  });
}

kvx_status_t kvx_plan_ranges(const kvx_plan_t *plan, const kvx_plan_lookups_t *lookups,
                             kvx_take_ranges_t take, void *context) {
  return kvx::guarded([=] {
    return kvx::visit(plan, lookups, [=](const kvx::CallContext &call) {
      return kvx::ranges(call, take, context);
    });
  });
}

}  // extern "C"
