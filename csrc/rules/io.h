// Rules of kvx_kv_io_desc_t: tokens on their way into or out of a cache.
#pragma once

#include "formats/format.h"
#include "rules/path.h"

namespace kvx {

// Checks the tokens that a write reads. `cache` has passed check_cache().
kvx_status_t check_input(const Path &path, const kvx_cache_desc_t &cache,
                         const kvx_kv_io_desc_t &io);

// Checks the tensors that a gather writes: `rows` sequences or beams of `max_seq_len` tokens, in
// one axis or two.
kvx_status_t check_output(const Path &path, const kvx_cache_desc_t &cache,
                          const kvx_kv_io_desc_t &io, uint32_t rows, uint32_t max_seq_len);

// Fails because one is opaque bytes and the other numbers.
[[gnu::cold]] kvx_status_t fail_opaque(const Path &path, kvx_dtype_t one, const Path &other_path,
                                       kvx_dtype_t other);

// Checks that `one` converts to `other`: both are numbers, or both opaque bytes.
inline kvx_status_t check_convertible(const Path &path, kvx_dtype_t one, const Path &other_path,
                                      kvx_dtype_t other) {
  if (one == other || is_opaque(one) == is_opaque(other)) return KVX_STATUS_OK;
  return fail_opaque(path, one, other_path, other);
}

}  // namespace kvx
