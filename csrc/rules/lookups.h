// Replaces the lookups of a kept migration, write or gather.
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

// The same for a write and for a gather: `other` becomes `kept` with what `lookups`, which are not
// NULL, give.
kvx_status_t replace_lookups(const kvx_cache_desc_t &cache, const kvx_write_desc_t &kept,
                             const kvx_write_options_t *options, const kvx_plan_lookups_t &lookups,
                             kvx_write_desc_t *other);
kvx_status_t replace_lookups(const kvx_cache_desc_t &cache, const kvx_gather_desc_t &kept,
                             const kvx_gather_options_t *options, const kvx_plan_lookups_t &lookups,
                             kvx_gather_desc_t *other);

}  // namespace kvx
