// Rules of kvx_cache_desc_t: K and V of one layer.
#pragma once

#include "rules/path.h"

namespace kvx {

kvx_status_t check_cache(const Path &path, const kvx_cache_desc_t *cache);
// The same, faster where `cache` has the form of one that is valid, as the layers of a model have.
kvx_status_t check_cache(const Path &path, const kvx_cache_desc_t *cache,
                         const kvx_cache_desc_t &valid);

}  // namespace kvx
