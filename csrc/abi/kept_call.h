// What kvx_plan_t is: a call that is kept, and what it does with other lookups.
#pragma once

#include <memory>

#include "abi/prepared.h"
#include "kvx/kvx_plan.h"

namespace kvx {

// What a call needs besides its lookups.
struct CallContext {
  const Plan &plan;
  const NamedTensor *tensors;
  size_t num_tensors;
  backend::Route route;
  bool is_empty;           // a write or gather of no tokens, which looks at nothing
  const kvx_span_t &span;  // whose planes these are
  ReachedBy &reached_by;   // of the plan
};

// A function that outlives the call it is given to.
class Visit {
 public:
  template <class Function>
  explicit Visit(const Function &function)
      : function_(&function), call_([](const void *visit, const CallContext &call) {
          return (*static_cast<const Function *>(visit))(call);
        }) {}

  kvx_status_t operator()(const CallContext &call) const { return call_(function_, call); }

 private:
  const void *function_;
  kvx_status_t (*call_)(const void *, const CallContext &);
};

}  // namespace kvx

struct kvx_plan_t {
  virtual ~kvx_plan_t() = default;
  // Visits what the call does with `lookups`, or NULL for its own. Refuses what a run would refuse
  // before it reads an index.
  virtual kvx_status_t visit(const kvx_plan_lookups_t *lookups, const kvx::Visit &visit) const = 0;

  mutable kvx::ReachedBy reached_by{kvx::kNobody};
};

namespace kvx {

// Each validates a call, and keeps it.
kvx_status_t keep(const kvx_migrate_desc_t *migrate, std::unique_ptr<kvx_plan_t> *plan);
kvx_status_t keep(const kvx_cache_desc_t *cache, const kvx_write_desc_t *write,
                  const kvx_write_options_t *options, std::unique_ptr<kvx_plan_t> *plan);
kvx_status_t keep(const kvx_cache_desc_t *cache, const kvx_gather_desc_t *gather,
                  const kvx_gather_options_t *options, std::unique_ptr<kvx_plan_t> *plan);

}  // namespace kvx
