// Questions about a descriptor of a tensor or of scales: its axes, its bytes.
#pragma once

#include "extent.h"
#include "formats/format.h"

namespace kvx {

// Position of each axis in a layout's shape; outer is -1 where dim is one axis.
struct Axes {
  int block, token, head, outer, inner;
};
inline Axes axes_of(const kvx_tensor_desc_t &tensor) {
  if (tensor.layout == KVX_LAYOUT_BLOCK_NHD) return {0, 1, 2, -1, 3};
  if (tensor.ndim == 5) return {0, 3, 1, 2, 4};
  return {0, 2, 1, -1, 3};
}

inline bool is_absent(const kvx_tensor_desc_t &tensor) {
  return tensor.data == nullptr && tensor.ndim == 0;
}

// Whether only `data` may differ: every rule about the rest that holds for one holds for the other.
inline bool have_same_form(const kvx_tensor_desc_t &a, const kvx_tensor_desc_t &b) {
  if (a.size != b.size || a.dtype != b.dtype || a.layout != b.layout || a.memory != b.memory ||
      a.ndim != b.ndim) {
    return false;
  }
  int64_t differing = 0;
  for (uint32_t axis = 0; axis < a.ndim; ++axis)
    differing |= (a.shape[axis] ^ b.shape[axis]) | (a.stride[axis] ^ b.stride[axis]);
  return !differing;
}

// Elements of dim per token and head: units of the format.
inline int64_t units_of(const kvx_tensor_desc_t &tensor) {
  const Axes axes = axes_of(tensor);
  return tensor.shape[axes.inner] * (axes.outer < 0 ? 1 : tensor.shape[axes.outer]);
}

// Numbers of dim per token and head.
inline int64_t dim_of(const kvx_tensor_desc_t &tensor) {
  return numbers_of(tensor.dtype, units_of(tensor));
}

// Byte stride of an axis, from the descriptor.
inline int64_t stride_bytes(const kvx_tensor_desc_t &tensor, int axis) {
  return tensor.stride[axis] * size_of(tensor.dtype);
}

// Elements from a tensor's first to its last.
inline int64_t extent_elements(const kvx_tensor_desc_t &tensor) {
  int64_t last = 0;
  for (uint32_t axis = 0; axis < tensor.ndim; ++axis)
    last += (tensor.shape[axis] - 1) * tensor.stride[axis];
  return last + 1;
}
inline int64_t extent_bytes(const kvx_tensor_desc_t &tensor) {
  return extent_elements(tensor) * size_of(tensor.dtype);
}
inline Extent extent_of(const kvx_tensor_desc_t &tensor) {
  const auto *data = static_cast<const uint8_t *>(tensor.data);
  return {data, data + extent_bytes(tensor)};
}

inline Extent extent_of(const kvx_scale_desc_t &scales) {
  int64_t last = 0;
  if (scales.granularity != KVX_SCALE_PER_TENSOR) {
    for (uint32_t axis = 0; axis < scales.ndim; ++axis)
      last += (scales.shape[axis] - 1) * scales.stride[axis];
  }
  return extent_at(scales.data, static_cast<uint64_t>((last + 1) * size_of(scales.dtype)));
}

// Whether no byte of the tensor's extent lies between its elements.
inline bool is_gapless(const kvx_tensor_desc_t &tensor) {
  int64_t elements = 1;
  for (uint32_t axis = 0; axis < tensor.ndim; ++axis) elements *= tensor.shape[axis];
  return elements * size_of(tensor.dtype) == extent_bytes(tensor);
}

}  // namespace kvx
