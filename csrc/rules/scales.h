// Rules of kvx_scale_desc_t: the scales of one K or V tensor.
#pragma once

#include "rules/path.h"

namespace kvx {

// Checks that `scales` fit `tensor` of `cache`, which has passed check_cache(). NULL data: nothing
// to check.
kvx_status_t check_scales(const Path &path, const kvx_scale_desc_t &scales,
                          const kvx_cache_desc_t &cache, const kvx_tensor_desc_t &tensor,
                          const Path &tensor_path);

// Refuses scales of blocks if there is a secondary pool, whose blocks have none. Spec: E.8
kvx_status_t check_secondary_scales(const Path &path, const kvx_cache_desc_t &cache,
                                    const kvx_scale_desc_t &scales);

// Refuses scales of blocks for a POINTERS table, whose blocks have none. Spec: E.12
kvx_status_t check_pointer_scales(const Path &path, const kvx_scale_desc_t &scales);

// Checks the room for scales that the call computes and stores. `scales` have passed
// check_scales(). Spec: E.9
kvx_status_t check_found_scales(const Path &path, const kvx_scale_desc_t *scales,
                                const Path &tensor_path, const kvx_tensor_desc_t &tensor);

}  // namespace kvx
