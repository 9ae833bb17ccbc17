// Scales and zero points that a call writes share no memory with anything else that it reads or
// writes. Spec: 7, E.14
#pragma once

#include "kvx/kvx_migrate.h"
#include "rules/path.h"

namespace kvx {

// Compares elements, since units may lie between the bytes of data. Where both ends are one pool,
// scales of the source may be the same arrays.
kvx_status_t check_units_apart(const kvx_migrate_desc_t &migrate);

}  // namespace kvx
