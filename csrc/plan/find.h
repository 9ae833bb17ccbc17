// Runs kvx_find_tokens: the lookup of one end, without a copy.
#pragma once

#include "kvx/kvx_lookup.h"

namespace kvx {

// Takes validated arguments; fills `find.places`.
kvx_status_t find_tokens(const kvx_find_desc_t &find);

}  // namespace kvx
