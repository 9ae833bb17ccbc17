#include "rules/format.h"

#include "error.h"

namespace kvx {

kvx_status_t fail_units(const Path &path, kvx_dtype_t dtype, int64_t head_dim) {
  const auto numbers = static_cast<ll>(numbers_of(dtype, 1)), dim = static_cast<ll>(head_dim);
  const bool spans_heads = head_dim > 0 && numbers % dim == 0;
  return KVX_INVALID(
      "%s.dtype is %s, whose units hold %lld numbers, but head_dim is %lld, expected a multiple%s "
      "(spec E.10)",
      KVX_AT(path), name_of(dtype), numbers, dim,
      spans_heads ? "; where the heads of a token follow each other, describe heads and dim as one "
                    "axis: num_kv_heads 1, head_dim that of all heads"
                  : "");
}

}  // namespace kvx
