// Memory that must stay apart, call by call: the two ends of a migration, a pool and its secondary
// pool, and what a call reads to find tokens from what it writes. For arguments that are valid
// otherwise.
#pragma once

#include "kvx/kvx_migrate.h"

namespace kvx {

// Slots and scales, from K and V. `finds_scales`: the scales are written too. Spec: 7
kvx_status_t check_apart(const kvx_cache_desc_t &cache, const kvx_write_desc_t &write,
                         bool finds_scales);

// Table, lengths and scales, from key and value; the secondary pool, from the primary. Spec: 7, E.8
kvx_status_t check_apart(const kvx_cache_desc_t &cache, const kvx_gather_desc_t &gather,
                         const kvx_gather_options_t *options);

// Everything that either end reads, from the destination. Spec: 7, E.3
kvx_status_t check_apart(const kvx_migrate_desc_t &migrate);
// The first of these rules alone, of a migration whose layers and scales have been checked.
kvx_status_t check_arrays_apart(const kvx_migrate_desc_t &migrate);

}  // namespace kvx
