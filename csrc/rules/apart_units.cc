#include "rules/apart_units.h"

#include <algorithm>
#include <array>
#include <vector>

#include "desc/affine.h"
#include "desc/extents.h"
#include "desc/plane.h"

namespace kvx {
namespace {

constexpr uint32_t kMostAxes = std::max(KVX_MAX_TENSOR_DIMS, KVX_MAX_PLANE_AXES);

// The elements of an array.
class Grid {
 public:
  Grid(const void *data, kvx_dtype_t dtype)
      : data_(static_cast<const uint8_t *>(data)), size_(size_of(dtype)) {}
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

  // Of the elements of index 0 of the first `behind` axes.
  Extent extent(uint32_t behind = 0) const {
    int64_t last = 0;
    for (uint32_t i = behind; i < num_axes_; ++i) last += axes_[i].reach();
    return {data_, data_ + last + size_};
  }

  bool operator==(const Grid &other) const {
    return data_ == other.data_ && size_ == other.size_ && num_axes_ == other.num_axes_ &&
           std::equal(axes_.begin(), axes_.begin() + num_axes_, other.axes_.begin());
  }

  // Whether an element at a corner of either holds a byte of the other. Of two arrays with the same
  // strides, these meet if any do.
  bool meets(const Grid &other) const {
    if (!intersect(extent(), other.extent())) return false;
    const uint32_t outer = same_axes(other);
    const Grid a = behind(outer), b = other.behind(outer);
    return intersect(a.extent(), b.extent()) && (a.holds_corner(b) || b.holds_corner(a));
  }

 private:
  struct Axis {
    int64_t stride, extent;  // bytes; elements
    int64_t reach() const { return stride * (extent - 1); }
    bool operator==(const Axis &other) const {
      return stride == other.stride && extent == other.extent;
    }
  };

  template <class Desc>
  void add_axes(const Desc &desc) {
    for (uint32_t axis = 0; axis < desc.ndim; ++axis)  // one element may have any stride
      if (desc.shape[axis] > 1) add(desc.shape[axis], desc.stride[axis] * size_);
  }

  // Keeps the largest stride first. Indices of an axis without a stride name one element.
  void add(int64_t extent, int64_t stride) {
    if (extent <= 1 || stride == 0) return;
    uint32_t at = num_axes_++;
    for (; at > 0 && axes_[at - 1].stride < stride; --at) axes_[at] = axes_[at - 1];
    axes_[at] = {stride, extent};
  }

  // No two elements overlap: what is behind an axis' smaller strides belongs to its next index.
  bool holds(const uint8_t *byte) const {
    if (byte < data_) return false;
    int64_t left = byte - data_;
    for (uint32_t i = 0; i < num_axes_; ++i)
      left -= std::min(left / axes_[i].stride, axes_[i].extent - 1) * axes_[i].stride;
    return left < size_;
  }

  // The first axes, of both, along which only elements of one index can meet: what has an index
  // lies within a step. Units beside their data usually have all of these in common.
  uint32_t same_axes(const Grid &other) const {
    uint32_t count = 0;
    for (; count < num_axes_ && count < other.num_axes_; ++count) {
      const Extent a = extent(count + 1), b = other.extent(count + 1);
      const int64_t bytes = std::max(a.end, b.end) - std::min(a.begin, b.begin);
      if (!(axes_[count] == other.axes_[count]) || bytes > axes_[count].stride) break;
    }
    return count;
  }

  // The elements of index 0 of the first `count` axes.
  Grid behind(uint32_t count) const {
    Grid rest = *this;
    rest.num_axes_ = num_axes_ - count;
    std::copy(axes_.begin() + count, axes_.begin() + num_axes_, rest.axes_.begin());
    return rest;
  }

  bool holds_corner(const Grid &other) const {
    for (uint32_t corner = 0; corner >> other.num_axes_ == 0; ++corner) {
      const uint8_t *at = other.data_;
      for (uint32_t i = 0; i < other.num_axes_; ++i)
        if (corner >> i & 1) at += other.axes_[i].reach();
      if (holds(at) || holds(at + other.size_ - 1)) return true;
    }
    return false;
  }

  const uint8_t *data_;
  int64_t size_;
  uint32_t num_axes_ = 0;
  std::array<Axis, kMostAxes> axes_;
};

enum class Kind : uint8_t { kData, kScales, kZeros };

// An array that the call accesses, and its name.
struct Used {
  Extent extent;
  const void *array;  // as Kind and is_plane say: a tensor, a plane, or scales
  Kind kind;
  bool is_dst, is_plane, is_v, written;
  uint32_t index;     // of the layer or plane
  uint32_t order;     // in which they were added
  uint32_t grid = 0;  // 1 + index of its grid; 0: not needed so far

  Grid make_grid() const {
    if (kind != Kind::kData) return Grid(*static_cast<const kvx_scale_desc_t *>(array));
    if (is_plane) return Grid(*static_cast<const kvx_plane_t *>(array));
    return Grid(*static_cast<const kvx_tensor_desc_t *>(array));
  }
};

template <class Visit>
void visit_name(const Used &of, Visit visit) {
  const Path span{nullptr, of.is_dst ? "dst" : "src"};
  const Path item{&span, of.is_plane ? "planes" : "layers", of.index};
  if (of.is_plane && of.kind == Kind::kData) return visit(item);
  if (of.is_plane) return visit(Path{&item, of.kind == Kind::kZeros ? "zero" : "scale"});
  if (of.kind == Kind::kData) return visit(Path{&item, of.is_v ? "v" : "k"});
  if (of.kind == Kind::kZeros) return visit(Path{&span, of.is_v ? "v_zeros" : "k_zeros", of.index});
  visit(Path{&span, of.is_v ? "v_scales" : "k_scales", of.index});
}

[[gnu::cold]] kvx_status_t fail_units(const Used &written, const Used &other) {
  kvx_status_t status = KVX_STATUS_INVALID_ARGUMENT;
  visit_name(written, [&](const Path &path) {
    visit_name(other, [&](const Path &with) {
      status = KVX_INVALID(
          "%s.data is %p: it shares memory with %s, and the call writes it; expected memory of its "
          "own (spec E.14)",
          KVX_AT(path), static_cast<const void *>(written.extent.begin), KVX_AT(with));
    });
  });
  return status;
}

bool is_same(const kvx_scale_desc_t *a, const kvx_scale_desc_t *b) {
  return a && a->data && b && a->data == b->data && (a == b || Grid(*a) == Grid(*b));
}

class AllUsed {
 public:
  void add_dst(const kvx_span_t &dst) {
    all_.reserve(size_t{6} * dst.num_layers + size_t{3} * dst.num_planes);
    for (uint32_t l = 0; l < dst.num_layers; ++l) {
      for (const bool is_v : {false, true}) {
        const kvx_tensor_desc_t &tensor = tensor_of(dst, l, is_v);
        if (is_absent(tensor)) continue;
        const bool written = is_affine(tensor.dtype);
        add(tensor, {Kind::kData, true, false, is_v, true, l});
        add(scales_of(dst, l, is_v), {Kind::kScales, true, false, is_v, written, l});
        const bool writes_zeros = written && !has_group_scales(tensor.dtype);
        add(zeros_of(dst, l, is_v), {Kind::kZeros, true, false, is_v, writes_zeros, l});
      }
    }
    for (uint32_t i = 0; i < dst.num_planes; ++i) {
      const kvx_plane_t &plane = *dst.planes[i];
      const bool written = is_affine(plane.dtype);
      add(plane, {Kind::kData, true, true, false, true, i});
      add(plane.scale, {Kind::kScales, true, true, false, written, i});
      const bool writes_zeros = written && !has_group_scales(plane.dtype);
      add(plane.zero, {Kind::kZeros, true, true, false, writes_zeros, i});
    }
  }

  // Adds what the source has beside its data in one pool with `dst`, unless `dst` has the same.
  void add_src(const kvx_span_t &src, const kvx_span_t &dst) {
    const auto add_new = [&](const kvx_scale_desc_t *from, const kvx_scale_desc_t *to, Name name) {
      if (!is_same(from, to)) add(from, name);
    };
    for (uint32_t l = 0; l < src.num_layers; ++l) {
      for (const bool is_v : {false, true}) {
        add_new(scales_of(src, l, is_v), scales_of(dst, l, is_v),
                {Kind::kScales, false, false, is_v, false, l});
        add_new(zeros_of(src, l, is_v), zeros_of(dst, l, is_v),
                {Kind::kZeros, false, false, is_v, false, l});
      }
    }
    for (uint32_t i = 0; i < src.num_planes; ++i) {
      const kvx_plane_t &from = *src.planes[i], &to = *find_plane(dst, from.layer, from.role, i);
      add_new(from.scale, to.scale, {Kind::kScales, false, true, false, false, i});
      add_new(from.zero, to.zero, {Kind::kZeros, false, true, false, false, i});
    }
  }

  // Compares what lies beside data, with each other and with data. Compares elements only of arrays
  // whose extents overlap: those of most caches do not.
  kvx_status_t check() {
    std::sort(all_.begin(), all_.end(), [](const Used &a, const Used &b) {
      return a.extent.begin != b.extent.begin ? a.extent.begin < b.extent.begin : a.order < b.order;
    });
    for (auto a = all_.begin(); a != all_.end(); ++a) {
      for (auto b = a + 1; b != all_.end() && b->extent.begin < a->extent.end; ++b) {
        const bool are_data = a->kind == Kind::kData && b->kind == Kind::kData;
        if (are_data || !(a->written || b->written) || !meet(&*a, &*b)) continue;
        const bool names_b = b->written && (b->kind != Kind::kData || !a->written);
        return names_b ? fail_units(*b, *a) : fail_units(*a, *b);
      }
    }
    return KVX_STATUS_OK;
  }

 private:
  struct Name {
    Kind kind;
    bool is_dst, is_plane, is_v, written;
    uint32_t index;
  };

  template <class Desc>
  void add(const Desc &desc, const Name &name) {
    all_.push_back({extent_of(desc), &desc, name.kind, name.is_dst, name.is_plane, name.is_v,
                    name.written, name.index, static_cast<uint32_t>(all_.size())});
  }
  void add(const kvx_scale_desc_t *numbers, const Name &name) {
    if (numbers && numbers->data) add(*numbers, name);
  }

  bool meet(Used *a, Used *b) {
    for (Used *used : {a, b}) {
      if (used->grid) continue;
      grids_.push_back(used->make_grid());
      used->grid = static_cast<uint32_t>(grids_.size());
    }
    return grids_[a->grid - 1].meets(grids_[b->grid - 1]);
  }

  std::vector<Used> all_;
  std::vector<Grid> grids_;
};

}  // namespace

kvx_status_t check_units_apart(const kvx_migrate_desc_t &migrate) {
  const kvx_span_t &src = *migrate.src, &dst = *migrate.dst;
  AllUsed used;
  used.add_dst(dst);
  if (are_same_pool(src, dst)) used.add_src(src, dst);
  return used.check();
}

}  // namespace kvx
