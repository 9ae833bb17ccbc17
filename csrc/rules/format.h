// The rules of formats whose units hold several numbers. Spec: E.10
#pragma once

#include "formats/format.h"
#include "rules/path.h"

namespace kvx {

// Fails because head_dim is not whole units of the format.
[[gnu::cold]] kvx_status_t fail_units(const Path &path, kvx_dtype_t dtype, int64_t head_dim);

// Checks that head_dim, in numbers, is whole units of the format.
inline kvx_status_t check_whole_units(const Path &path, kvx_dtype_t dtype, int64_t head_dim) {
  const bool whole = is_scalar(dtype) || head_dim % numbers_of(dtype, 1) == 0;
  return whole ? KVX_STATUS_OK : fail_units(path, dtype, head_dim);
}

// The name of the extent of dim in errors.
constexpr const char *dim_name(kvx_dtype_t dtype) {
  return is_scalar(dtype) ? "head_dim" : "head_dim in units";
}

}  // namespace kvx
