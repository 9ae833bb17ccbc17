// Validates a call before a plan is made: every rule of the spec that can be checked without
// reading indices, once, with its sentence. Each struct has a file in this folder.
#pragma once

#include "kvx/kvx_attend.h"
#include "kvx/kvx_lookup.h"

namespace kvx {

kvx_status_t validate_cache(const kvx_cache_desc_t *cache);
kvx_status_t validate_write(const kvx_cache_desc_t *cache, const kvx_write_desc_t *write,
                            const kvx_write_options_t *options);
kvx_status_t validate_write_layers(const kvx_cache_desc_t *const *caches,
                                   const kvx_write_desc_t *const *writes, uint32_t num_layers,
                                   const kvx_write_options_t *options);
kvx_status_t validate_gather(const kvx_cache_desc_t *cache, const kvx_gather_desc_t *gather,
                             const kvx_gather_options_t *options);
kvx_status_t validate_migrate(const kvx_migrate_desc_t *migrate);
kvx_status_t validate_find(const kvx_find_desc_t *find);
kvx_status_t validate_attend(const kvx_cache_desc_t *cache, const kvx_attend_desc_t *attend);

}  // namespace kvx
