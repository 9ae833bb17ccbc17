// Rules of F4_E2M1: scales of groups, and the scale of the tensor. Spec: E.18
#pragma once

#include "kvx/kvx_migrate.h"
#include "rules/path.h"

namespace kvx {

// What lies beside a tensor of `cache` that is F4_E2M1; NULL: not given. `tensor_scale` is in the
// place of zero points.
kvx_status_t check_group_scales(const Path &path, const kvx_scale_desc_t *scales,
                                const Path &tensor_scale_path, const kvx_scale_desc_t *tensor_scale,
                                const kvx_cache_desc_t &cache, const kvx_tensor_desc_t &tensor,
                                const Path &tensor_path);

}  // namespace kvx
