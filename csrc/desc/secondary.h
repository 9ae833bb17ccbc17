// The memory of a KV_OFFSETS table's secondary pool, which no tensor descriptor covers.
#pragma once

#include "desc/tensor.h"
#include "kvx/kvx_migrate.h"

namespace kvx {

// Blocks of `tensor` in the secondary pool: `secondary_num_blocks` or, if that is 0, as many as in
// the primary pool; at most as many as an index can name.
uint64_t secondary_blocks(const kvx_cache_desc_t &cache, const kvx_tensor_desc_t &tensor,
                          uint32_t secondary_num_blocks);

// Finds the extent of `tensor` in the secondary pool. False: past 2^62 bytes or the end of the
// address space.
bool find_secondary(const kvx_cache_desc_t &cache, const kvx_tensor_desc_t &tensor,
                    uint32_t secondary_num_blocks, Extent *extent);

// K or V of layer `l`, in the primary pool or, for a span that has one, the secondary pool.
Extent extent_of(const kvx_span_t &span, uint32_t l, bool is_v, bool in_secondary);

// The extent from the first byte of all layers and planes to the last, in one of the pools; planes
// are in the primary.
Extent extent_of(const kvx_span_t &span, bool in_secondary);

}  // namespace kvx
