// Rules of what lies beside U8_ZERO, U8_BIAS and F4_E2M1. Spec: E.14, E.18
#pragma once

#include "kvx/kvx_migrate.h"
#include "rules/path.h"

namespace kvx {

// The scales and zero points of a tensor of `cache`, which has passed check_cache(); NULL: none. Of
// another format: it has no zero points.
kvx_status_t check_zeros(const Path &scale_path, const kvx_scale_desc_t *scales,
                         const Path &zero_path, const kvx_scale_desc_t *zeros,
                         const kvx_cache_desc_t &cache, const kvx_tensor_desc_t &tensor,
                         const Path &tensor_path);

// Calls that have no fields for zero points take no format with them.
[[gnu::cold]] kvx_status_t fail_zeros(const Path &path, kvx_dtype_t dtype);
inline kvx_status_t check_no_zeros(const Path &path, kvx_dtype_t dtype) {
  return dtype == KVX_DTYPE_U8_ZERO || dtype == KVX_DTYPE_U8_BIAS || dtype == KVX_DTYPE_F4_E2M1
             ? fail_zeros(path, dtype)
             : KVX_STATUS_OK;
}

// What a destination obeys besides, of spans that have passed check_span(): its scales and zero
// points are written, and units that cover tokens are filled in order.
kvx_status_t check_zeros_written(const kvx_migrate_desc_t &migrate);

// The part of it that other arrays of indices need.
kvx_status_t check_zeros_and_arrays(const kvx_migrate_desc_t &migrate);

}  // namespace kvx
