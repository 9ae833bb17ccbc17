// Rules of kvx_view_t: one end of a migration.
#pragma once

#include "kvx/kvx_migrate.h"
#include "rules/path.h"

namespace kvx {

kvx_status_t check_view(const Path &path, const kvx_view_t *view);

// The view, which has passed check_view(), has `rows` sequences or beams, as the call's lengths.
kvx_status_t check_rows(const Path &path, const kvx_view_t &view, uint64_t rows);

// Its head_start leaves room for `num_heads` heads in that layer.
kvx_status_t check_heads(const Path &path, const kvx_view_t &view, uint32_t layer,
                         uint32_t num_heads);

}  // namespace kvx
