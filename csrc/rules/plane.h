// Rules of planes: what a span carries beside its layers. Spec: E.11
#pragma once

#include "desc/span.h"
#include "rules/path.h"

namespace kvx {

// The planes of a span whose own table, slots and layers have passed their rules.
kvx_status_t check_planes(const Path &path, const kvx_span_t &span);

// Each plane has its counterpart at the other end.
kvx_status_t check_plane_pairs(const Path &src_path, const Path &dst_path,
                               const kvx_migrate_desc_t &migrate);

// Tables of planes have `rows` rows, dense planes room for as many sequences.
kvx_status_t check_plane_rows(const Path &path, const kvx_span_t &span, uint64_t rows);

// What kernels do not move yet: the call runs on a device.
kvx_status_t check_planes_for_device(const kvx_migrate_desc_t &migrate);

}  // namespace kvx
