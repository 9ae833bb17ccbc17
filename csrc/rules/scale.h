// Rules of scales.
#pragma once

#include "rules/path.h"

namespace kvx {

// Scales of one K or V tensor: `desc` is used when its data is set.
kvx_status_t check_scales(const Path &path, const kvx_scale_desc_t &desc,
                          const kvx_cache_desc_t &cache, const kvx_tensor_desc_t &tensor,
                          const Path &tensor_path);

}  // namespace kvx
