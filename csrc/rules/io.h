// Rules of kvx_kv_io_desc_t: tokens on their way into or out of a cache.
#pragma once

#include "rules/path.h"

namespace kvx {

// The tokens that a write reads. `cache` has passed check_cache().
kvx_status_t check_input(const Path &path, const kvx_cache_desc_t &cache,
                         const kvx_kv_io_desc_t &io);

// Where a gather writes: `rows` sequences or beams of `max_seq_len` tokens, in one axis or two.
kvx_status_t check_output(const Path &path, const kvx_cache_desc_t &cache,
                          const kvx_kv_io_desc_t &io, uint32_t rows, uint32_t max_seq_len);

// `one` becomes `other` without loss of meaning: both are numbers, or both opaque bytes.
kvx_status_t check_convertible(const Path &path, kvx_dtype_t one, const Path &other_path,
                               kvx_dtype_t other);

}  // namespace kvx
