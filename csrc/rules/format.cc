#include "rules/format.h"

#include "error.h"

namespace kvx {

kvx_status_t check_whole_units(const Path &path, kvx_dtype_t dtype, int64_t head_dim) {
  const int64_t numbers = numbers_of(dtype, 1);
  if (head_dim % numbers == 0) return KVX_STATUS_OK;
  return KVX_INVALID(
      "%s.dtype is %s, whose units hold %lld numbers, but head_dim is %lld, expected a multiple "
      "(spec E.10)",
      KVX_AT(path), name_of(dtype), static_cast<ll>(numbers), static_cast<ll>(head_dim));
}

}  // namespace kvx
