// Rules of kvx_cache_desc_t: K and V of one layer.
#pragma once

#include "rules/path.h"

namespace kvx {

kvx_status_t check_cache(const Path &path, const kvx_cache_desc_t *cache);

}  // namespace kvx
