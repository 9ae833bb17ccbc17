// The rules of formats whose units hold several numbers. Spec: E.10
#pragma once

#include "formats/format.h"
#include "rules/path.h"

namespace kvx {

// head_dim, in numbers, is whole units of the format.
kvx_status_t check_whole_units(const Path &path, kvx_dtype_t dtype, int64_t head_dim);

// What the extent of dim is called in sentences.
constexpr const char *dim_name(kvx_dtype_t dtype) {
  return is_scalar(dtype) ? "head_dim" : "head_dim in units";
}

}  // namespace kvx
