// Rules of kvx_pool_desc_t: the pool whose sub-blocks a KV_OFFSETS table counts.
#pragma once

#include "rules/path.h"

namespace kvx {

// `cache` has passed check_cache().
kvx_status_t check_pool(const Path &path, const kvx_cache_desc_t &cache);

// Checks that `cache`, which has passed check_pool(), is a layer of the same pool as `first`: one
// table serves both. Spec: E.8
kvx_status_t check_same_pool(const Path &path, const kvx_cache_desc_t &cache,
                             const kvx_cache_desc_t &first);

}  // namespace kvx
