#include "abi/kept_call.h"

#include <atomic>
#include <initializer_list>

#include "desc/scale.h"
#include "error.h"
#include "plan/kept.h"
#include "rules/lookups.h"
#include "rules/validate.h"

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

// The memory of an end of a migration: that of its first tensor.
kvx_memory_type_t memory_of(const kvx_span_t &span) {
  if (span.num_layers) return span.layers[0]->k.memory;
  return span.num_planes ? span.planes[0]->memory : KVX_MEMORY_HOST;
}

backend::Route route_of(const kvx_cache_desc_t &cache, const kvx_write_desc_t &write) {
  return {false, write.io.key.memory, cache.k.memory};
}
backend::Route route_of(const kvx_cache_desc_t &cache, const kvx_gather_desc_t &gather) {
  return {false, cache.k.memory, gather.io.key.memory};
}

struct Migration final : kvx_plan_t {
  explicit Migration(const kvx_migrate_desc_t &given)
      : kept(given),
        plans_anew(must_plan_anew(kept.desc())),
        had_sequences(given.seq_lens->seq_count != 0) {}

  kvx_status_t visit(const kvx_plan_lookups_t *lookups, const Visit &visit) const override {
    if (!lookups && !plans_anew) return visit(context_of(prepared.plan));
    OtherLookups other;
    KVX_TRY(replace_lookups(kept.desc(), lookups, &other));
    KVX_TRY(check_all_layers(other.all));
    Plan plan;
    plan_migrate(plans_anew ? other.all : other.first, &plan);
    if (!plans_anew) {
      plan.check_same_pool = prepared.plan.check_same_pool;
      plan.pairs.borrow(prepared.plan.pairs);
      plan.layers.borrow(prepared.plan.layers);
    }
    return visit(context_of(plan));
  }

  // Checks once, for all layers, the rules that a migration of no sequences cannot break.
  kvx_status_t check_all_layers(const kvx_migrate_desc_t &migrate) const {
    if (had_sequences.load(std::memory_order_relaxed) || !migrate.seq_lens->seq_count)
      return KVX_STATUS_OK;
    KVX_TRY(validate_migrate(&migrate));
    had_sequences.store(true, std::memory_order_relaxed);
    return KVX_STATUS_OK;
  }

  CallContext context_of(const Plan &plan) const {
    const auto &tensors = prepared.tensors;
    const backend::Route route = {prepared.on_device, memory_of(*kept.desc().src),
                                  memory_of(*kept.desc().dst)};
    return {plan, tensors.begin(), tensors.size(), route, false, *kept.desc().src, reached_by};
  }

  const KeptMigration kept;
  const bool plans_anew;
  mutable std::atomic<bool> had_sequences;  // a valid call, so far
  Prepared prepared;                        // with the lookups that the plan was made with
};

// The part that plans of writes and gathers share. `Kept` is a KeptWrite or a KeptGather.
template <class Kept>
struct OneCache final : kvx_plan_t {
  template <class... Given>
  explicit OneCache(const Given &...given) : kept(given...), plans_anew(has_scales(kept)) {
    span.layers = &layer;
    span.num_layers = 1;
  }

  kvx_status_t visit(const kvx_plan_lookups_t *lookups, const Visit &visit) const override {
    if (!lookups && !plans_anew) return visit_with(kept.call, plan, visit);
    auto call = kept.call;
    if (lookups) KVX_TRY(replace_lookups(kept.cache, kept.call, &kept.options, *lookups, &call));
    Plan anew;
    kept.make_plan(call, &anew);
    return visit_with(call, anew, visit);
  }

  template <class Call>
  kvx_status_t visit_with(const Call &call, const Plan &planned, const Visit &visit) const {
    const CallTensors tensors = tensors_of(kept.cache, call);
    backend::Route route = route_of(kept.cache, call);
    KVX_TRY(backend::place(tensors.data(), tensors.size(), &route.on_device));
    return visit({planned, tensors.data(), tensors.size(), route, call.io.num_tokens == 0, span,
                  reached_by});
  }

  const Kept kept;
  const bool plans_anew;
  const kvx_cache_desc_t *const layer = &kept.cache;
  kvx_span_t span{};
  Plan plan;  // of the call that it was made with
};

template <class Kept, class... Given>
kvx_status_t keep_one_cache(std::unique_ptr<kvx_plan_t> *made, const Given &...given) {
  auto plan = std::make_unique<OneCache<Kept>>(given...);
  bool on_device;
  const CallTensors tensors = tensors_of(plan->kept.cache, plan->kept.call);
  KVX_TRY(backend::place(tensors.data(), tensors.size(), &on_device));
  plan->kept.make_plan(plan->kept.call, &plan->plan);
  *made = std::move(plan);
  return KVX_STATUS_OK;
}

}  // namespace

kvx_status_t keep(const kvx_migrate_desc_t *migrate, std::unique_ptr<kvx_plan_t> *made) {
  KVX_TRY(validate_migrate(migrate));
  auto plan = std::make_unique<Migration>(*migrate);
  KVX_TRY(prepare(plan->kept.desc(), &plan->prepared));
  *made = std::move(plan);
  return KVX_STATUS_OK;
}

kvx_status_t keep(const kvx_cache_desc_t *cache, const kvx_write_desc_t *write,
                  const kvx_write_options_t *options, std::unique_ptr<kvx_plan_t> *plan) {
  KVX_TRY(validate_write(cache, write, options));
  return keep_one_cache<KeptWrite>(plan, *cache, *write, options);
}

kvx_status_t keep(const kvx_cache_desc_t *cache, const kvx_gather_desc_t *gather,
                  const kvx_gather_options_t *options, std::unique_ptr<kvx_plan_t> *plan) {
  KVX_TRY(validate_gather(cache, gather, options));
  return keep_one_cache<KeptGather>(plan, *cache, *gather, options);
}

}  // namespace kvx
