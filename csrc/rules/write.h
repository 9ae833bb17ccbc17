// Rules of kvx_write_desc_t and kvx_write_options_t, by the names that a call has for them.
#pragma once

#include "kvx/kvx_ops.h"
#include "rules/path.h"

namespace kvx {

// Checks the options, which may be NULL; `*flags`: theirs.
kvx_status_t check_write_options(const kvx_write_options_t *options, uint32_t *flags);

// Checks a write into a cache that has passed check_cache(). `owner`: of the slots, in errors.
kvx_status_t check_write(const Path &cache_path, const kvx_cache_desc_t &cache, const Path &path,
                         const kvx_write_desc_t *write, const char *owner, uint32_t flags);

}  // namespace kvx
