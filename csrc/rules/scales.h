// Rules of kvx_scale_desc_t: the scales of one K or V tensor.
#pragma once

#include "rules/path.h"

namespace kvx {

// `scales` fit `tensor` of `cache`, which has passed check_cache(). Nothing to check where its data
// is NULL.
kvx_status_t check_scales(const Path &path, const kvx_scale_desc_t &scales,
                          const kvx_cache_desc_t &cache, const kvx_tensor_desc_t &tensor,
                          const Path &tensor_path);

// Blocks of a secondary pool have no scales of their own. Spec: E.8
kvx_status_t check_secondary_scales(const Path &path, const kvx_cache_desc_t &cache,
                                    const kvx_scale_desc_t &scales);

// Blocks that a POINTERS table names have no scales of their own. Spec: E.12
kvx_status_t check_pointer_scales(const Path &path, const kvx_scale_desc_t &scales);

// Room for scales that the call computes and stores. `scales` have passed check_scales(). Spec: E.9
kvx_status_t check_found_scales(const Path &path, const kvx_scale_desc_t *scales,
                                const Path &tensor_path, const kvx_tensor_desc_t &tensor);

}  // namespace kvx
