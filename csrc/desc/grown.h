// Structs that have grown since an earlier ABI version: turns a caller's struct of the earlier size
// into one of this version, and never reads past its `size`.
#pragma once

#include "kvx/kvx_migrate.h"

namespace kvx {

// The sizes that kvx_gather_options_t and kvx_span_t had until ABI 1.3.
constexpr uint32_t kGatherOptionsSize13 = 40;
constexpr uint32_t kSpanSize13 = 72;
// The size of kvx_span_t in ABI 1.4: missing fields are zero.
constexpr uint32_t kSpanSize14 = 80;

// `options` itself or, if it is of an earlier size, `*room` filled from it. NULL stays NULL.
const kvx_gather_options_t *grown(const kvx_gather_options_t *options, kvx_gather_options_t *room);
const kvx_span_t *grown(const kvx_span_t *span, kvx_span_t *room);

// The null block of a Lookup, -1 for none, from a null_block_plus_1.
inline int64_t null_block_of(uint64_t plus_1) { return static_cast<int64_t>(plus_1 - 1); }

}  // namespace kvx
