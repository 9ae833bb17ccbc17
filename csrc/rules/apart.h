// Memory that a call's parts must not share: the two ends of a migration, a pool and its secondary
// pool, and index arrays with what the call writes. For arguments that have passed all other rules.
#pragma once

#include "kvx/kvx_migrate.h"
#include "rules/path.h"

namespace kvx {

// Checks slots and scales against K and V. `owner`: of the slots, in errors; `finds_scales`: the
// scales are written too. Spec: 7
kvx_status_t check_apart(const Path &cache_path, const kvx_cache_desc_t &cache, const Path &path,
                         const kvx_write_desc_t &write, const char *owner, bool finds_scales);

// Checks table, lengths and scales against key and value; the secondary pool against the primary.
// Spec: 7, E.8
kvx_status_t check_apart(const kvx_cache_desc_t &cache, const kvx_gather_desc_t &gather,
                         const kvx_gather_options_t *options);

// Checks everything that either end reads against the destination. Spec: 7, E.3
kvx_status_t check_apart(const kvx_migrate_desc_t &migrate);
// Checks only the index arrays of a migration whose layers and scales have been checked.
kvx_status_t check_arrays_apart(const kvx_migrate_desc_t &migrate);

}  // namespace kvx
