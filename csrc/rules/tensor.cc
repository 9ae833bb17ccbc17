#include "rules/tensor.h"

#include <algorithm>

namespace kvx {

namespace {

bool is_too_far(int64_t elements, kvx_dtype_t dtype) {
  int64_t bytes;
  return __builtin_mul_overflow(elements, size_of(dtype), &bytes) || bytes > int64_t{1} << 62;
}

// The error of the first axis that breaks a rule of check_strides.
[[gnu::cold]] kvx_status_t explain_strides(const Path &path, uint32_t ndim, const int64_t *shape,
                                           const int64_t *stride, kvx_dtype_t dtype) {
  int64_t reached = 1, reach;
  for (uint32_t axis = 0; axis < ndim; ++axis) {
    if (stride[axis] < 0) {
      return KVX_INVALID("%s.stride[%u] is %lld, expected at least 0 (spec 4.2)", KVX_AT(path),
                         axis, static_cast<ll>(stride[axis]));
    }
    if (__builtin_mul_overflow(std::max<int64_t>(shape[axis], 1) - 1, stride[axis], &reach) ||
        __builtin_add_overflow(reached, reach, &reached) || is_too_far(reached, dtype)) {
      return KVX_INVALID(
          "%s.stride[%u] is %lld: with shape[%u] %lld the tensor reaches past 2^62 bytes (spec "
          "4.2)",
          KVX_AT(path), axis, static_cast<ll>(stride[axis]), axis, static_cast<ll>(shape[axis]));
    }
  }
  return KVX_STATUS_OK;
}

// The rule of check_disjoint for axes of at least one element, in any order.
[[gnu::noinline]] kvx_status_t check_sorted_strides(const Path &path, uint32_t ndim,
                                                    const int64_t *shape, const int64_t *stride) {
  uint32_t order[KVX_MAX_TENSOR_DIMS], n = 0;
  for (uint32_t axis = ndim; axis-- > 0;) {
    if (shape[axis] == 1) continue;
    uint32_t at = n++;
    for (; at > 0 && stride[order[at - 1]] >= stride[axis]; --at) order[at] = order[at - 1];
    order[at] = axis;
  }
  int64_t extent = 1;
  for (uint32_t i = 0; i < n; ++i) {
    const uint32_t axis = order[i];
    if (stride[axis] < extent) {
      return KVX_INVALID(
          "%s.stride[%u] is %lld, expected at least %lld: elements overlap (spec 4.2)",
          KVX_AT(path), axis, static_cast<ll>(stride[axis]), static_cast<ll>(extent));
    }
    extent += (shape[axis] - 1) * stride[axis];
  }
  return KVX_STATUS_OK;
}

}  // namespace

kvx_status_t check_strides(const Path &path, uint32_t ndim, const int64_t *shape,
                           const int64_t *stride, kvx_dtype_t dtype, int64_t *extent) {
  int64_t reached = 1, reach;
  bool broken = false;
  for (uint32_t axis = 0; axis < ndim; ++axis) {
    broken |= stride[axis] < 0;
    broken |= __builtin_mul_overflow(std::max<int64_t>(shape[axis], 1) - 1, stride[axis], &reach);
    broken |= __builtin_add_overflow(reached, reach, &reached);
  }
  if (__builtin_expect(broken || is_too_far(reached, dtype), false))
    return explain_strides(path, ndim, shape, stride, dtype);
  *extent = reached;
  return KVX_STATUS_OK;
}

kvx_status_t check_disjoint(const Path &path, uint32_t ndim, const int64_t *shape,
                            const int64_t *stride) {
  // The usual tensor's strides fall from axis to axis: nothing is to be sorted.
  int64_t extent = 1;
  bool falls = true;
  for (uint32_t axis = ndim; axis-- > 0;) {
    if (shape[axis] == 0) return KVX_STATUS_OK;
    falls &= stride[axis] >= extent || shape[axis] == 1;
    extent += (shape[axis] - 1) * stride[axis];
  }
  return __builtin_expect(falls, true) ? KVX_STATUS_OK
                                       : check_sorted_strides(path, ndim, shape, stride);
}

}  // namespace kvx
