// kvx_attend.h: validate, plan, run.
#include "plan/attend.h"

#include "abi/guarded.h"
#include "kvx/kvx_attend.h"
#include "rules/validate.h"

static_assert(sizeof(kvx_attend_desc_t) == 264);

extern "C" kvx_status_t kvx_attend_kv(const kvx_cache_desc_t *cache,
                                      const kvx_attend_desc_t *attend) {
  return kvx::guarded([=]() -> kvx_status_t {
    KVX_TRY(kvx::validate_attend(cache, attend));
    kvx::Attention plan;
    KVX_TRY(kvx::plan_attend(*cache, *attend, &plan));
    kvx::backend::attend(plan);
    return KVX_STATUS_OK;
  });
}
