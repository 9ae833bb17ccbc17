// Structs that have grown since an earlier ABI version: a caller's struct of the earlier size
// becomes one of today's, and is never read past the size that it says.
#pragma once

#include "kvx/kvx_migrate.h"

namespace kvx {

// The sizes that kvx_gather_options_t and kvx_span_t had until ABI 1.3.
constexpr uint32_t kGatherOptionsSize13 = 40;
constexpr uint32_t kSpanSize13 = 72;
// And kvx_span_t in ABI 1.4: what it lacks is zero.
constexpr uint32_t kSpanSize14 = 80;

// `options` itself, or `*room` with what it says if it is of an earlier size. NULL stays NULL.
const kvx_gather_options_t *grown(const kvx_gather_options_t *options, kvx_gather_options_t *room);
const kvx_span_t *grown(const kvx_span_t *span, kvx_span_t *room);

// A block id as it stands in a Lookup: -1 for none. `plus_1` is a null_block_plus_1.
inline int64_t null_block_of(uint64_t plus_1) { return static_cast<int64_t>(plus_1 - 1); }

}  // namespace kvx
