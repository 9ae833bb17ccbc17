// Rules of every tensor, of a cache or of tokens on their way: element type, memory, alignment,
// extents and strides.
#pragma once

#include "desc/tensor.h"
#include "rules/path.h"

namespace kvx {

inline kvx_status_t check_element_type(const Path &path, kvx_dtype_t dtype) {
  if (is_element_type(dtype)) return KVX_STATUS_OK;
  return KVX_INVALID("%s.dtype is %d (%s), expected %s (spec 4.3)", KVX_AT(path), dtype,
                     name_of(dtype), kElementTypes);
}

inline kvx_status_t check_memory(const Path &path, kvx_memory_type_t memory) {
  if (memory == KVX_MEMORY_HOST || memory == KVX_MEMORY_DEVICE || memory == KVX_MEMORY_UNIFIED)
    return KVX_STATUS_OK;
  return KVX_INVALID("%s.memory is %d, expected HOST (1), DEVICE (2) or UNIFIED (3) (spec 4.3)",
                     KVX_AT(path), memory);
}

inline kvx_status_t check_shape(const Path &path, const kvx_tensor_desc_t &tensor, int axis,
                                int64_t expected, const char *meaning, const char *section) {
  if (tensor.shape[axis] == expected) return KVX_STATUS_OK;
  return KVX_INVALID("%s.shape[%d] is %lld, expected %s %lld (%s)", KVX_AT(path), axis,
                     static_cast<ll>(tensor.shape[axis]), meaning, static_cast<ll>(expected),
                     section);
}

// Checks that strides are not negative, and that the last element is within 2^62 bytes of the
// first. `*extent`: elements from the first to the last, both included.
kvx_status_t check_strides(const Path &path, uint32_t ndim, const int64_t *shape,
                           const int64_t *stride, kvx_dtype_t dtype, int64_t *extent);

// Checks that no two elements share memory: from the smallest stride up, each stride exceeds the
// extent of all axes below it. Every order of axes with any padding passes.
kvx_status_t check_disjoint(const Path &path, uint32_t ndim, const int64_t *shape,
                            const int64_t *stride);

inline bool is_aligned(uintptr_t address, kvx_dtype_t dtype) {
  return (address & (static_cast<uintptr_t>(alignment_of(dtype)) - 1)) == 0;
}
inline bool is_aligned(const void *data, kvx_dtype_t dtype) {
  return is_aligned(reinterpret_cast<uintptr_t>(data), dtype);
}

inline kvx_status_t check_aligned(const Path &path, const void *data, kvx_dtype_t dtype) {
  if (is_aligned(data, dtype)) return KVX_STATUS_OK;
  return fail(KVX_STATUS_UNSUPPORTED,
              "%s.data is %p, expected a multiple of %lld bytes (%s, spec 4.4)", KVX_AT(path), data,
              static_cast<ll>(alignment_of(dtype)), name_of(dtype));
}

// Checks that `data` is not NULL and aligned, and that `extent` elements end within the address
// space.
inline kvx_status_t check_data_pointer(const Path &path, const kvx_tensor_desc_t &tensor,
                                       int64_t extent) {
  if (!tensor.data) return KVX_INVALID("%s.data is NULL (spec 6.2)", KVX_AT(path));
  const auto bytes = static_cast<uintptr_t>(extent * size_of(tensor.dtype));
  if (reinterpret_cast<uintptr_t>(tensor.data) > UINTPTR_MAX - bytes) {
    return KVX_INVALID("%s.data is %p: its %llu bytes reach past the end of memory (spec 4.2)",
                       KVX_AT(path), tensor.data, static_cast<ull>(bytes));
  }
  return check_aligned(path, tensor.data, tensor.dtype);
}

}  // namespace kvx
