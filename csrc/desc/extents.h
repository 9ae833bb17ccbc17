// First and last byte of arrays, of scales, and of many tensors at once.
#pragma once

#include <algorithm>
#include <vector>

#include "desc/tensor.h"

namespace kvx {

// `bytes` from `data` on, cut at the end of the address space.
inline Extent extent_at(const void *data, uint64_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(data);
  const uintptr_t end = begin + std::min<uint64_t>(bytes, UINTPTR_MAX - begin);
  return {static_cast<const uint8_t *>(data), reinterpret_cast<const uint8_t *>(end)};
}

inline Extent extent_of(const kvx_scale_desc_t &scales) {
  int64_t last = 0;
  if (scales.granularity != KVX_SCALE_PER_TENSOR) {
    for (uint32_t axis = 0; axis < scales.ndim; ++axis)
      last += (scales.shape[axis] - 1) * scales.stride[axis];
  }
  return extent_at(scales.data, static_cast<uint64_t>((last + 1) * size_of(scales.dtype)));
}

// The extent from the first byte of either to the last.
inline Extent hull(const Extent &a, const Extent &b) {
  return {std::min(a.begin, b.begin), std::max(a.end, b.end)};
}

inline bool contains(const Extent &extent, const uint8_t *at) {
  return extent.begin <= at && at < extent.end;
}

// Whether no byte of the tensor's extent lies between its elements.
inline bool is_gapless(const kvx_tensor_desc_t &tensor) {
  int64_t elements = 1;
  for (uint32_t axis = 0; axis < tensor.ndim; ++axis) elements *= tensor.shape[axis];
  return elements * size_of(tensor.dtype) == extent_bytes(tensor);
}

// Many extents, sorted, so that finding one that overlaps a given extent takes log n steps.
class Extents {
 public:
  void add(const Extent &extent) { all_.push_back(extent); }

  // Call it once, after the last add() and before the first meet().
  void sort() {
    std::sort(all_.begin(), all_.end(),
              [](const Extent &a, const Extent &b) { return a.begin < b.begin; });
    // Each end becomes the furthest so far.
    for (size_t i = 1; i < all_.size(); ++i) all_[i].end = std::max(all_[i].end, all_[i - 1].end);
  }

  bool meet(const Extent &extent) const {
    const auto after = std::lower_bound(
        all_.begin(), all_.end(), extent,
        [](const Extent &one, const Extent &other) { return one.begin < other.end; });
    return after != all_.begin() && extent.begin < std::prev(after)->end;
  }

 private:
  std::vector<Extent> all_;
};

}  // namespace kvx
