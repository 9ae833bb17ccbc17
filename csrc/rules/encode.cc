#include "rules/encode.h"

#include "error.h"

namespace kvx {

kvx_status_t check_hadamard(const float *values, uint64_t rows, uint32_t dim, int64_t row_stride,
                            uint32_t order, uint32_t *used) {
  constexpr uint32_t kMost = KVX_HADAMARD_MAX_ORDER;
  if (!dim) return KVX_INVALID("dim is 0, expected at least 2 (spec E.17)");
  const uint32_t largest = dim & -dim;
  *used = order ? order : largest;
  if (!order && (largest < 2 || largest > kMost)) {
    return KVX_INVALID(
        "dim is %u, whose largest power of two is %u, expected 2 to %u; name an order that divides "
        "dim, or rotate a part of each row (spec E.17)",
        dim, largest, kMost);
  }
  if (*used < 2 || *used > kMost || (*used & (*used - 1))) {
    return KVX_INVALID("order is %u, expected a power of two from 2 to %u, or 0 (spec E.17)", order,
                       kMost);
  }
  if (dim % *used) {
    return KVX_INVALID("order is %u, which does not divide dim %u; expected at most %u (spec E.17)",
                       order, dim, largest);
  }
  if (!rows) return KVX_STATUS_OK;
  if (!values) return KVX_INVALID("values is NULL, expected %u numbers per row (spec E.17)", dim);
  const auto begin = reinterpret_cast<uintptr_t>(values);
  if (begin % alignof(float)) {
    return KVX_INVALID("values is %p, expected a multiple of 4 bytes (spec E.17)",
                       static_cast<const void *>(values));
  }
  if (rows > 1 && row_stride < int64_t{dim}) {
    return KVX_INVALID(
        "row_stride is %lld, expected at least dim %u: rows would share numbers (spec E.17)",
        static_cast<ll>(row_stride), dim);
  }
  uint64_t reach = 0;  // bytes, from the first number to the end of the last row
  const bool is_past =
      (rows > 1 && __builtin_mul_overflow(rows - 1, static_cast<uint64_t>(row_stride), &reach)) ||
      reach >= uint64_t{1} << 60 || (reach = (reach + dim) * sizeof(float), begin + reach < begin);
  if (is_past) {
    return KVX_INVALID(
        "rows is %llu and row_stride %lld: they reach past the end of the address space (spec "
        "E.17)",
        static_cast<ull>(rows), static_cast<ll>(row_stride));
  }
  return KVX_STATUS_OK;
}

}  // namespace kvx
