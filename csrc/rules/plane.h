// Rules of planes, which a span has beside its layers. Spec: E.11
#pragma once

#include "desc/span.h"
#include "rules/path.h"

namespace kvx {

// Checks the planes of a span whose table, slots and layers have passed their rules.
kvx_status_t check_planes(const Path &path, const kvx_span_t &span);

// Checks that each plane has its counterpart at the other end.
kvx_status_t check_plane_pairs(const Path &src_path, const Path &dst_path,
                               const kvx_migrate_desc_t &migrate);

// Checks that tables of planes have `rows` rows, and dense planes room for as many sequences.
kvx_status_t check_plane_rows(const Path &path, const kvx_span_t &span, uint64_t rows);

// Refuses planes that kernels do not move yet, for a call that runs on a device.
kvx_status_t check_planes_for_device(const kvx_migrate_desc_t &migrate);

}  // namespace kvx
