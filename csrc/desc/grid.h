// The elements of an array in memory, and whether two arrays share a byte.
#pragma once

#include <algorithm>
#include <array>

#include "desc/tensor.h"
#include "kvx/kvx_plane.h"

namespace kvx {

class Grid {
 public:
  explicit Grid(const kvx_tensor_desc_t &tensor) : Grid(tensor.data, tensor.dtype) {
    add_axes(tensor);
  }
  explicit Grid(const kvx_scale_desc_t &scales) : Grid(scales.data, scales.dtype) {
    if (scales.granularity != KVX_SCALE_PER_TENSOR) add_axes(scales);  // which has no axes
  }
  explicit Grid(const kvx_plane_t &plane) : Grid(plane.data, plane.dtype) {
    for (uint32_t axis = 0; axis < plane.num_axes; ++axis)
      add(plane.axes[axis].extent, plane.axes[axis].stride_bytes);
  }

  bool operator==(const Grid &other) const {
    return begin_ == other.begin_ && size_ == other.size_ && num_axes_ == other.num_axes_ &&
           std::equal(axes_.begin(), axes_.begin() + num_axes_, other.axes_.begin());
  }

  // Whether an element of one has a byte of an element of the other. Arrays whose strides have
  // nothing in common may take too many steps to tell: they count as sharing.
  bool meets(const Grid &other) const {
    uint32_t steps = kMostSteps;
    return meet(*this, other, &steps);
  }

 private:
  static constexpr uint32_t kMostAxes = std::max(KVX_MAX_TENSOR_DIMS, KVX_MAX_PLANE_AXES);
  static constexpr uint32_t kMostSteps = 1 << 14;

  struct Axis {
    int64_t stride, extent;  // bytes; elements
    bool operator==(const Axis &) const = default;
  };

  Grid(const void *data, kvx_dtype_t dtype)
      : begin_(reinterpret_cast<intptr_t>(data)), size_(size_of(dtype)) {}

  template <class Desc>
  void add_axes(const Desc &desc) {
    const int64_t element = size_;                     // which grows
    for (uint32_t axis = 0; axis < desc.ndim; ++axis)  // one element may have any stride
      if (desc.shape[axis] > 1) add(desc.shape[axis], desc.stride[axis] * element);
  }

  // Keeps the largest stride first. An axis without a stride names one element, and one that steps
  // from element to element makes a longer one.
  void add(int64_t extent, int64_t stride) {
    if (extent <= 1 || stride <= 0) return;
    if (stride == size_) return static_cast<void>(size_ *= extent);
    uint32_t at = num_axes_++;
    for (; at > 0 && axes_[at - 1].stride < stride; --at) axes_[at] = axes_[at - 1];
    axes_[at] = {stride, extent};
  }

  int64_t end() const {
    int64_t last = 0;
    for (uint32_t i = 0; i < num_axes_; ++i) last += axes_[i].stride * (axes_[i].extent - 1);
    return begin_ + last + size_;
  }

  // The elements of index `index` of the axis of the largest stride.
  Grid behind(int64_t index) const {
    Grid rest = *this;
    rest.begin_ += index * axes_[0].stride;
    rest.num_axes_ = num_axes_ - 1;
    std::copy(axes_.begin() + 1, axes_.begin() + num_axes_, rest.axes_.begin());
    return rest;
  }

  static bool meet(const Grid &a, const Grid &b, uint32_t *steps) {
    if (a.begin_ >= b.end() || b.begin_ >= a.end()) return false;
    if (!a.num_axes_ && !b.num_axes_) return true;
    if (*steps == 0) return true;
    --*steps;
    const int64_t of_a = a.num_axes_ ? a.axes_[0].stride : 0;
    const int64_t of_b = b.num_axes_ ? b.axes_[0].stride : 0;
    if (of_a < of_b) return meet(b, a, steps);
    // What b has within reach of an index of a. Where both step alike, only how far apart two
    // indices are matters.
    const bool alike = of_a == of_b;
    const Grid rest = a.behind(0), other = alike ? b.behind(0) : b;
    const int64_t least = alike ? 1 - b.axes_[0].extent : 0, most = a.axes_[0].extent - 1;
    const int64_t first = std::max(least, above(other.begin_ - rest.end(), of_a));
    const int64_t last = std::min(most, -above(rest.begin_ - other.end(), of_a));
    for (int64_t i = first; i <= last; ++i) {
      Grid moved = rest;
      moved.begin_ += i * of_a;
      if (meet(moved, other, steps)) return true;
    }
    return false;
  }

  // The least i with i * step > distance.
  static int64_t above(int64_t distance, int64_t step) {
    const int64_t quotient = distance / step;
    return distance < 0 && quotient * step > distance ? quotient : quotient + 1;
  }

  intptr_t begin_;
  int64_t size_;  // of what lies together
  uint32_t num_axes_ = 0;
  std::array<Axis, kMostAxes> axes_;
};

}  // namespace kvx
