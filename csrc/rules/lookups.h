// Replaces the lookups of a kept migration.
#pragma once

#include "kvx/kvx_plan.h"

namespace kvx {

// A valid migration with other lookups, and the first of its layers alone.
struct OtherLookups {
  kvx_span_t src, dst, first_src, first_dst;
  kvx_migrate_desc_t all, first;
};

// Replaces the lookups that `lookups` has, and checks every rule that this could break. All of
// `kept` but its lookups is valid.
kvx_status_t replace_lookups(const kvx_migrate_desc_t &kept, const kvx_plan_lookups_t *lookups,
                             OtherLookups *other);

}  // namespace kvx
