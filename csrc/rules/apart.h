// Memory that must stay apart: the two ends of a migration, a pool and its secondary pool, and what
// a call reads to find its way from what it writes. For arguments that are valid otherwise.
#pragma once

#include "desc/view.h"
#include "rules/path.h"

namespace kvx {

// The secondary pool of `num_layers` layers, which are called `path`, lies in the address space and
// apart from the primary pool. Nothing to check where there is none. Spec: 4.2, E.8
kvx_status_t check_secondary(const Path &path, const kvx_cache_desc_t *const *layers,
                             uint32_t num_layers, uint32_t secondary_num_blocks);

// Slots, tables, lengths, starts and scales that are read lie apart from what is written. Spec: 7
kvx_status_t check_apart(const kvx_cache_desc_t &cache, const kvx_write_desc_t &write,
                         bool finds_scales);
// And, in a gather, the secondary pool.
kvx_status_t check_apart(const kvx_cache_desc_t &cache, const kvx_gather_desc_t &gather,
                         const kvx_gather_options_t *options);
// And so do the two ends, unless they are the same pool. Spec: E.3
kvx_status_t check_apart(const kvx_migrate_desc_t &migrate);

}  // namespace kvx
