#include "rules/apart_units.h"

#include <algorithm>
#include <vector>

#include "desc/affine.h"
#include "desc/grid.h"
#include "desc/plane.h"

namespace kvx {
namespace {

enum class UnitPart : uint8_t { kData, kScales, kZeros };

// An array that the call accesses, and its name.
struct Used {
  Extent extent;
  const void *array;  // as UnitPart and is_plane say: a tensor, a plane, or scales
  UnitPart kind;
  bool is_dst, is_plane, is_v, written;
  uint32_t index;     // of the layer or plane
  uint32_t order;     // in which they were added
  uint32_t grid = 0;  // 1 + index of its grid; 0: not needed so far

  Grid make_grid() const {
    if (kind != UnitPart::kData) return Grid(*static_cast<const kvx_scale_desc_t *>(array));
    if (is_plane) return Grid(*static_cast<const kvx_plane_t *>(array));
    return Grid(*static_cast<const kvx_tensor_desc_t *>(array));
  }
};

template <class Visit>
void visit_name(const Used &of, Visit visit) {
  const Path span{nullptr, of.is_dst ? "dst" : "src"};
  const Path item{&span, of.is_plane ? "planes" : "layers", of.index};
  if (of.is_plane && of.kind == UnitPart::kData) return visit(item);
  if (of.is_plane) return visit(Path{&item, of.kind == UnitPart::kZeros ? "zero" : "scale"});
  if (of.kind == UnitPart::kData) return visit(Path{&item, of.is_v ? "v" : "k"});
  if (of.kind == UnitPart::kZeros)
    return visit(Path{&span, of.is_v ? "v_zeros" : "k_zeros", of.index});
  visit(Path{&span, of.is_v ? "v_scales" : "k_scales", of.index});
}

[[gnu::cold]] kvx_status_t fail_units(const Used &written, const Used &other, const char *section) {
  kvx_status_t status = KVX_STATUS_INVALID_ARGUMENT;
  visit_name(written, [&](const Path &path) {
    visit_name(other, [&](const Path &with) {
      status = KVX_INVALID(
          "%s.data is %p: it shares memory with %s, and the call writes it; expected memory of its "
          "own (spec %s)",
          KVX_AT(path), static_cast<const void *>(written.extent.begin), KVX_AT(with), section);
    });
  });
  return status;
}

bool is_same(const kvx_scale_desc_t *a, const kvx_scale_desc_t *b) {
  return a && a->data && b && a->data == b->data && (a == b || Grid(*a) == Grid(*b));
}

class AllUsed {
 public:
  // finds_scales: the call finds the scales of K and V, and writes them.
  void add_dst(const kvx_span_t &dst, bool finds_scales) {
    all_.reserve(size_t{6} * dst.num_layers + size_t{3} * dst.num_planes);
    for (uint32_t l = 0; l < dst.num_layers; ++l) {
      for (const bool is_v : {false, true}) {
        const kvx_tensor_desc_t &tensor = tensor_of(dst, l, is_v);
        if (is_absent(tensor)) continue;
        const bool written = is_affine(tensor.dtype);
        add(tensor, {UnitPart::kData, true, false, is_v, true, l});
        add(scales_of(dst, l, is_v),
            {UnitPart::kScales, true, false, is_v, written || finds_scales, l});
        const bool writes_zeros = written && !has_group_scales(tensor.dtype);
        add(zeros_of(dst, l, is_v), {UnitPart::kZeros, true, false, is_v, writes_zeros, l});
      }
    }
    for (uint32_t i = 0; i < dst.num_planes; ++i) {
      const kvx_plane_t &plane = *dst.planes[i];
      const bool written = is_affine(plane.dtype);
      add(plane, {UnitPart::kData, true, true, false, true, i});
      add(plane.scale, {UnitPart::kScales, true, true, false, written, i});
      const bool writes_zeros = written && !has_group_scales(plane.dtype);
      add(plane.zero, {UnitPart::kZeros, true, true, false, writes_zeros, i});
    }
  }

  // Adds what the source has; of one pool with `dst`, what is not the same memory there.
  void add_src(const kvx_span_t &src, const kvx_span_t &dst, bool same_pool) {
    for (uint32_t l = 0; !same_pool && l < src.num_layers; ++l) {
      for (const bool is_v : {false, true}) {
        const kvx_tensor_desc_t &tensor = tensor_of(src, l, is_v);
        if (!is_absent(tensor)) add(tensor, {UnitPart::kData, false, false, is_v, false, l});
      }
    }
    for (uint32_t i = 0; !same_pool && i < src.num_planes; ++i)
      add(*src.planes[i], {UnitPart::kData, false, true, false, false, i});
    const auto add_new = [&](const kvx_scale_desc_t *from, const kvx_scale_desc_t *to, Name name) {
      if (!same_pool || !is_same(from, to)) add(from, name);
    };
    for (uint32_t l = 0; l < src.num_layers; ++l) {
      for (const bool is_v : {false, true}) {
        add_new(scales_of(src, l, is_v), scales_of(dst, l, is_v),
                {UnitPart::kScales, false, false, is_v, false, l});
        add_new(zeros_of(src, l, is_v), zeros_of(dst, l, is_v),
                {UnitPart::kZeros, false, false, is_v, false, l});
      }
    }
    for (uint32_t i = 0; i < src.num_planes; ++i) {
      const kvx_plane_t &from = *src.planes[i], &to = *find_plane(dst, from.layer, from.role, i);
      add_new(from.scale, to.scale, {UnitPart::kScales, false, true, false, false, i});
      add_new(from.zero, to.zero, {UnitPart::kZeros, false, true, false, false, i});
    }
  }

  // Compares what lies beside data, with each other and with data. Compares elements only of arrays
  // whose extents overlap: those of most caches do not.
  kvx_status_t check(const char *section) {
    std::sort(all_.begin(), all_.end(), [](const Used &a, const Used &b) {
      return a.extent.begin != b.extent.begin ? a.extent.begin < b.extent.begin : a.order < b.order;
    });
    for (auto a = all_.begin(); a != all_.end(); ++a) {
      for (auto b = a + 1; b != all_.end() && b->extent.begin < a->extent.end; ++b) {
        const bool are_data = a->kind == UnitPart::kData && b->kind == UnitPart::kData;
        if (are_data || !(a->written || b->written) || !meet(&*a, &*b)) continue;
        const bool names_b = b->written && (b->kind != UnitPart::kData || !a->written);
        return names_b ? fail_units(*b, *a, section) : fail_units(*a, *b, section);
      }
    }
    return KVX_STATUS_OK;
  }

 private:
  struct Name {
    UnitPart kind;
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
  const bool finds_scales = migrate.flags & KVX_FLAG_FIND_SCALES;
  const bool same_pool = are_same_pool(src, dst);
  AllUsed used;
  used.add_dst(dst, finds_scales);
  if (same_pool || finds_scales) used.add_src(src, dst, same_pool);
  return used.check(finds_scales ? "7" : "E.14");
}

}  // namespace kvx
