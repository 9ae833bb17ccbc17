// Other lookups for a migration that is kept.
#pragma once

#include "kvx/kvx_plan.h"

namespace kvx {

// A valid migration with other lookups, and the first of its layers alone.
struct OtherLookups {
  kvx_span_t src, dst, first_src, first_dst;
  kvx_migrate_desc_t all, first;
};

// Replaces what `lookups` gives, and checks every rule that this could break. `kept` is valid, but
// for its lookups.
kvx_status_t replace_lookups(const kvx_migrate_desc_t &kept, const kvx_plan_lookups_t *lookups,
                             OtherLookups *other);

}  // namespace kvx
