// The plan of kvx_write_layers: the pairs of all layers, and one lookup.
#pragma once

#include "plan/plan.h"

namespace kvx {

// Takes validated arguments and fills a new plan.
void plan_write_layers(const kvx_cache_desc_t *const *caches, const kvx_write_desc_t *const *writes,
                       uint32_t num_layers, uint32_t flags, Plan *plan);

}  // namespace kvx
