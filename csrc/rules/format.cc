#include "rules/format.h"

#include "error.h"

namespace kvx {

kvx_status_t fail_units(const Path &path, kvx_dtype_t dtype, int64_t head_dim) {
  return KVX_INVALID(
      "%s.dtype is %s, whose units hold %lld numbers, but head_dim is %lld, expected a multiple "
      "(spec E.10)",
      KVX_AT(path), name_of(dtype), static_cast<ll>(numbers_of(dtype, 1)),
      static_cast<ll>(head_dim));
}

}  // namespace kvx
