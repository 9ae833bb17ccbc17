// Pools share no memory: the primary and the secondary pool of one cache, and the two ends of a
// migration.
#pragma once

#include "desc/tensor.h"
#include "kvx/kvx_migrate.h"
#include "rules/path.h"

namespace kvx {

// Checks that the secondary pool of `num_layers` layers, which errors call `path`, is within the
// address space and apart from the primary pool. Without one there is nothing to check. Spec: 4.2,
// E.8
kvx_status_t check_secondary(const Path &path, const kvx_cache_desc_t *const *layers,
                             uint32_t num_layers, uint32_t secondary_num_blocks);

// Checks that the two ends share no memory, unless they are the same pool: then the blocks that
// move are compared in the data. `written`: from the first byte of the destination's tensors to the
// last. Spec: E.3
kvx_status_t check_ends_apart(const Path &src_path, const Path &dst_path,
                              const kvx_migrate_desc_t &migrate, const Extent &written);

}  // namespace kvx
