// Rules of kvx_span_t: one end of a migration.
#pragma once

#include "kvx/kvx_migrate.h"
#include "rules/path.h"

namespace kvx {

kvx_status_t check_span(const Path &path, const kvx_span_t *span);

// Checks that the span, which has passed check_span(), has `rows` sequences or beams, as the call's
// lengths do.
kvx_status_t check_rows(const Path &path, const kvx_span_t &span, uint64_t rows);

// Checks that head_start leaves room for `num_heads` heads in that layer.
kvx_status_t check_heads(const Path &path, const kvx_span_t &span, uint32_t layer,
                         uint32_t num_heads);

}  // namespace kvx
