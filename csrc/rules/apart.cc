#include "rules/apart.h"

#include <algorithm>
#include <vector>

#include "desc/plane.h"
#include "desc/scale.h"
#include "error.h"

namespace kvx {
namespace {

// `bytes` from `data` on, or as many as there are before the address space ends.
Extent extent_at(const void *data, uint64_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(data);
  const uintptr_t end = begin + std::min<uint64_t>(bytes, UINTPTR_MAX - begin);
  return {static_cast<const uint8_t *>(data), reinterpret_cast<const uint8_t *>(end)};
}

Extent hull(const Extent &a, const Extent &b) {
  return {std::min(a.begin, b.begin), std::max(a.end, b.end)};
}

Extent extent_of_scales(const kvx_scale_desc_t &scales) {
  int64_t last = 0;
  if (scales.granularity != KVX_SCALE_PER_TENSOR) {
    for (uint32_t axis = 0; axis < scales.ndim; ++axis)
      last += (scales.shape[axis] - 1) * scales.stride[axis];
  }
  return extent_at(scales.data, static_cast<uint64_t>((last + 1) * size_of(scales.dtype)));
}

uint64_t secondary_blocks(const kvx_cache_desc_t &cache, const kvx_tensor_desc_t &tensor,
                          uint32_t secondary_num_blocks) {
  const int64_t step = tensor.stride[axes_of(tensor).block] * size_of(tensor.dtype);
  // An index of 31 bits names no sub-block further out.
  const auto most =
      static_cast<uint64_t>((int64_t{1} << 31) * cache.pool.bytes_per_block / step + 1);
  return std::min<uint64_t>(secondary_num_blocks ? secondary_num_blocks : cache.num_blocks, most);
}

// Where the secondary pool has a tensor. False: past 2^62 bytes or the end of the address space.
bool find_secondary(const kvx_cache_desc_t &cache, const kvx_tensor_desc_t &tensor,
                    uint32_t secondary_num_blocks, Extent *extent) {
  const auto step = static_cast<uint64_t>(tensor.stride[axes_of(tensor).block]) *
                    static_cast<uint64_t>(size_of(tensor.dtype));
  const uint64_t one_block =
      static_cast<uint64_t>(extent_bytes(tensor)) - (uint64_t{cache.num_blocks} - 1) * step;
  const uint64_t bytes =
      (secondary_blocks(cache, tensor, secondary_num_blocks) - 1) * step + one_block;
  const uintptr_t offset =
      reinterpret_cast<uintptr_t>(tensor.data) - reinterpret_cast<uintptr_t>(cache.pool.primary);
  uintptr_t begin, end;
  if (bytes > uint64_t{1} << 62 ||
      __builtin_add_overflow(reinterpret_cast<uintptr_t>(cache.pool.secondary), offset, &begin) ||
      __builtin_add_overflow(begin, bytes, &end)) {
    return false;
  }
  *extent = {reinterpret_cast<const uint8_t *>(begin), reinterpret_cast<const uint8_t *>(end)};
  return true;
}

// Tensors of a view are numbered: K and V of each layer by turns, then the planes.
uint64_t num_tensors(const kvx_view_t &view) {
  return uint64_t{2} * view.num_layers + view.num_planes;
}
bool is_plane(const kvx_view_t &view, uint64_t i) { return i >= uint64_t{2} * view.num_layers; }
const kvx_plane_t &plane_at(const kvx_view_t &view, uint64_t i) {
  return *view.planes[i - uint64_t{2} * view.num_layers];
}
// Of a layer.
const kvx_tensor_desc_t &tensor_at(const kvx_view_t &view, uint64_t i) {
  return i % 2 ? view.layers[i / 2]->v : view.layers[i / 2]->k;
}

// In the primary pool, or in the secondary, which planes are not in.
bool is_there(const kvx_view_t &view, uint64_t i, bool secondary) {
  return is_plane(view, i) ? !secondary : !is_absent(tensor_at(view, i));
}

Extent extent_at(const kvx_view_t &view, uint64_t i, bool secondary) {
  if (is_plane(view, i)) return extent_of(bytes_of(plane_at(view, i)));
  const kvx_tensor_desc_t &tensor = tensor_at(view, i);
  Extent extent = extent_of(tensor);
  if (secondary) find_secondary(*view.layers[i / 2], tensor, view.secondary_num_blocks, &extent);
  return extent;
}

// What a tensor is called: `layers[3].v`, `planes[2]`.
class TensorPath {
 public:
  TensorPath(const Path &view_path, const kvx_view_t &view, uint64_t i)
      : parent_{
            &view_path, is_plane(view, i) ? "planes" : "layers",
            static_cast<int64_t>(is_plane(view, i) ? i - uint64_t{2} * view.num_layers : i / 2)},
        path_(is_plane(view, i) ? parent_ : Path{&parent_, i % 2 ? "v" : "k"}) {}
  TensorPath(const TensorPath &) = delete;
  TensorPath &operator=(const TensorPath &) = delete;

  operator const Path &() const { return path_; }

 private:
  Path parent_, path_;
};

// Extents in the order of their beginnings: whether any meets another is known in log n.
class Extents {
 public:
  void add(const Extent &extent) { all_.push_back(extent); }

  void sort() {
    std::sort(all_.begin(), all_.end(),
              [](const Extent &a, const Extent &b) { return a.begin < b.begin; });
    // Each one's end becomes the furthest so far.
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

// No byte of the tensor's extent is between its elements.
bool is_gapless(const kvx_tensor_desc_t &tensor) {
  int64_t elements = 1;
  for (uint32_t axis = 0; axis < tensor.ndim; ++axis) elements *= tensor.shape[axis];
  return elements * size_of(tensor.dtype) == extent_bytes(tensor);
}

bool is_gapless_at(const kvx_view_t &view, uint64_t i) {
  return is_plane(view, i) ? kvx::is_gapless(plane_at(view, i)) : is_gapless(tensor_at(view, i));
}

bool contains(const Extent &extent, const uint8_t *at) {
  return extent.begin <= at && at < extent.end;
}

[[gnu::cold]] kvx_status_t fail_scales(const Path &path, const void *data,
                                       const Path &tensor_path) {
  return KVX_INVALID(
      "%s.data is %p: it lies among the elements of %s, which the call writes; "
      "pass a copy of the scales (spec 7)",
      KVX_AT(path), data, KVX_AT(tensor_path));
}

// Scales may lie beside the rows that they are of, but not where there is no room between rows.
bool lie_within(const kvx_scale_desc_t &scales, const Extent &written) {
  const Extent read = extent_of_scales(scales);
  return contains(written, read.begin) || contains(written, read.end - 1);
}

kvx_status_t check_scales_apart(const Path &path, const kvx_scale_desc_t &scales,
                                const Path &tensor_path, const kvx_tensor_desc_t &tensor) {
  if (!scales.data || is_absent(tensor)) return KVX_STATUS_OK;
  if (!lie_within(scales, extent_of(tensor)) || !is_gapless(tensor)) return KVX_STATUS_OK;
  return fail_scales(path, scales.data, tensor_path);
}

// An array that a call reads to find its way, and what it is called.
struct Array {
  const char *owner, *group, *field;
  Extent extent;
};

Array array_of(const char *owner, const char *group, const char *field, const void *data,
               kvx_dtype_t dtype, uint64_t count) {
  return {owner, group, field, extent_at(data, count * static_cast<uint64_t>(size_of(dtype)))};
}
Array array_of(const char *owner, const kvx_slot_mapping_t &slots) {
  return array_of(owner, "slots", "slots", slots.slots, slots.dtype, slots.token_count);
}
Array array_of(const char *owner, const char *group, const kvx_seq_lens_t &lens) {
  return array_of(owner, group, "lengths", lens.lengths, lens.dtype, lens.seq_count);
}
// `owner`: of the field block_table.
Array indices_of(const char *owner, const kvx_block_table_t &table) {
  return array_of(owner, "block_table", "indices", table.indices, table.index_dtype,
                  table.indices_count);
}
Array indptr_of(const char *owner, const kvx_block_table_t &table) {
  return array_of(owner, "block_table", "indptr", table.indptr, table.indptr_dtype,
                  table.indptr_count);
}

bool meet(const Array &array, const Extent &written) {
  return intersect(array.extent, written) && array.extent.begin != array.extent.end;
}

// To know where a tensor ends takes a loop over its axes, and most arrays lie before it.
bool meet(const Array &array, const kvx_tensor_desc_t &tensor) {
  return array.extent.end > tensor.data && meet(array, extent_of(tensor));
}

[[gnu::cold]] kvx_status_t fail_array(const Array &array, const Path &path) {
  return KVX_INVALID(
      "%s.%s.%s is %p: its %llu bytes meet %s, which the call writes; pass a copy of the array "
      "(spec 7)",
      array.owner, array.group, array.field, static_cast<const void *>(array.extent.begin),
      static_cast<ull>(array.extent.end - array.extent.begin), KVX_AT(path));
}

// The memory of all layers and planes, in the primary or the secondary pool.
Extent all_of(const kvx_view_t &view, bool secondary) {
  Extent all = {reinterpret_cast<const uint8_t *>(UINTPTR_MAX), nullptr};
  for (uint64_t i = 0; i < num_tensors(view); ++i) {
    if (!is_there(view, i, secondary)) continue;
    all = hull(all, extent_at(view, i, secondary));
  }
  return all;
}

// Names the first two tensors that meet.
kvx_status_t fail_ends(const Path &src_path, const Path &dst_path, const kvx_migrate_desc_t &m,
                       uint64_t i, const Extent &from) {
  uint64_t j = 0;
  while (!is_there(*m.dst, j, false) || !intersect(from, extent_at(*m.dst, j, false))) ++j;
  return KVX_INVALID(
      "%s shares memory with %s, but the two views are not the same pool, so their blocks "
      "cannot be told apart; migrate through other memory (spec E.3)",
      KVX_AT(TensorPath(dst_path, *m.dst, j)), KVX_AT(TensorPath(src_path, *m.src, i)));
}

// Views that share memory are the same pool (whose blocks are then compared) or refused.
kvx_status_t check_ends_apart(const Path &src_path, const Path &dst_path,
                              const kvx_migrate_desc_t &migrate, const Extent &written) {
  const kvx_view_t &src = *migrate.src, &dst = *migrate.dst;
  for (const auto &[src_second, dst_second] :
       {std::pair{false, false}, {true, false}, {false, true}, {true, true}}) {
    if ((src_second && !has_secondary(src)) || (dst_second && !has_secondary(dst))) continue;
    const Extent to = dst_second ? all_of(dst, true) : written;
    if (!intersect(all_of(src, src_second), to)) continue;
    if (are_same_pool(src, dst)) return KVX_STATUS_OK;
    // The two lie in one stretch of memory; tensors that interleave without touching share none.
    Extents tensors;
    for (uint64_t j = 0; j < num_tensors(dst); ++j)
      if (is_there(dst, j, dst_second)) tensors.add(extent_at(dst, j, dst_second));
    tensors.sort();
    for (uint64_t i = 0; i < num_tensors(src); ++i) {
      if (!is_there(src, i, src_second)) continue;
      const Extent from = extent_at(src, i, src_second);
      if (!tensors.meet(from)) continue;
      if (!src_second && !dst_second) return fail_ends(src_path, dst_path, migrate, i, from);
      return KVX_INVALID(
          "dst shares memory with src through a secondary pool, but they are not the same "
          "pool; migrate through other memory (spec E.3)");
    }
  }
  return KVX_STATUS_OK;
}

kvx_status_t check_scales_apart(const kvx_cache_desc_t &cache, const kvx_write_desc_t &write,
                                const Array &slots, bool finds_scales) {
  const Path cache_path{nullptr, "cache"}, path{nullptr, "write"};
  const Path k{&cache_path, "k"}, v{&cache_path, "v"};
  for (const bool is_v : {false, true}) {
    const kvx_scale_desc_t &desc = is_v ? write.v_scale_desc : write.k_scale_desc;
    const void *const pointer = is_v ? write.v_scale : write.k_scale;
    if (!desc.data && !pointer) continue;
    const Path scale{&path, desc.data ? (is_v ? "v_scale_desc" : "k_scale_desc")
                                      : (is_v ? "v_scale" : "k_scale")};
    const kvx_scale_desc_t scales = scale_or_pointer(desc, pointer);
    if (finds_scales && meet(slots, extent_of_scales(scales))) return fail_array(slots, scale);
    KVX_TRY(check_scales_apart(scale, scales, k, cache.k));
    KVX_TRY(check_scales_apart(scale, scales, v, cache.v));
  }
  return KVX_STATUS_OK;
}

const kvx_scale_desc_t *scale_at(const kvx_view_t &view, uint64_t i) {
  if (is_plane(view, i)) return plane_at(view, i).scale;
  const auto *const *list = i % 2 ? view.v_scales : view.k_scales;
  return list ? list[i / 2] : nullptr;
}

// The scales of one end lie apart from all tensors that are written.
kvx_status_t check_scales_apart(const Path &path, const kvx_view_t &view, const Path &dst_path,
                                const kvx_view_t &dst, const Extents &gapless) {
  for (uint64_t i = 0; i < num_tensors(view); ++i) {
    const kvx_scale_desc_t *scales = scale_at(view, i);
    if (!scales || !scales->data || !gapless.meet(extent_of_scales(*scales))) continue;
    for (uint64_t j = 0; j < num_tensors(dst); ++j) {
      if (!is_there(dst, j, false) || !is_gapless_at(dst, j) ||
          !lie_within(*scales, extent_at(dst, j, false))) {
        continue;
      }
      const TensorPath tensor(dst_path, dst, j);
      if (is_plane(view, i)) {
        const TensorPath plane(path, view, i);
        return fail_scales({&static_cast<const Path &>(plane), "scale"}, scales->data, tensor);
      }
      const auto layer = static_cast<int64_t>(i / 2);
      return fail_scales({&path, i % 2 ? "v_scales" : "k_scales", layer}, scales->data, tensor);
    }
  }
  return KVX_STATUS_OK;
}

bool has_scales(const kvx_view_t &view) {
  if (view.k_scales || view.v_scales) return true;
  for (uint32_t i = 0; i < view.num_planes; ++i)
    if (view.planes[i]->scale) return true;
  return false;
}

kvx_status_t check_scales_apart(const Path &src_path, const Path &dst_path,
                                const kvx_migrate_desc_t &migrate) {
  const kvx_view_t &src = *migrate.src, &dst = *migrate.dst;
  if (!has_scales(src) && !has_scales(dst)) return KVX_STATUS_OK;
  Extents gapless;
  for (uint64_t j = 0; j < num_tensors(dst); ++j)
    if (is_there(dst, j, false) && is_gapless_at(dst, j)) gapless.add(extent_at(dst, j, false));
  gapless.sort();
  KVX_TRY(check_scales_apart(src_path, src, dst_path, dst, gapless));
  return check_scales_apart(dst_path, dst, dst_path, dst, gapless);
}

// Calls visit with each array of a migration, until it does not return OK.
template <class Visit>
[[gnu::always_inline]] inline kvx_status_t each_array(const kvx_migrate_desc_t &migrate,
                                                      Visit visit) {
  KVX_TRY(visit(array_of("migrate", "seq_lens", *migrate.seq_lens)));
  for (const bool is_dst : {false, true}) {
    const kvx_view_t &view = is_dst ? *migrate.dst : *migrate.src;
    const char *const owner = is_dst ? "dst" : "src";
    if (view.slots) KVX_TRY(visit(array_of(owner, *view.slots)));
    if (view.starts) KVX_TRY(visit(array_of(owner, "starts", *view.starts)));
    if (view.block_table) {
      KVX_TRY(visit(indices_of(owner, *view.block_table)));
      KVX_TRY(visit(indptr_of(owner, *view.block_table)));
    }
    const char *const planes = is_dst ? "dst.planes[]" : "src.planes[]";
    for (uint32_t i = 0; i < view.num_planes; ++i) {
      const kvx_plane_t &plane = *view.planes[i];
      if (plane.slots) KVX_TRY(visit(array_of(planes, *plane.slots)));
      if (!plane.block_table) continue;
      KVX_TRY(visit(indices_of(planes, *plane.block_table)));
      KVX_TRY(visit(indptr_of(planes, *plane.block_table)));
    }
  }
  return KVX_STATUS_OK;
}

// `written`: the hull of the destination's tensors and planes.
kvx_status_t check_arrays(const Path &dst_path, const kvx_migrate_desc_t &migrate,
                          const Extent &written) {
  const kvx_view_t &dst = *migrate.dst;
  const bool finds_scales = migrate.flags & KVX_FLAG_FIND_SCALES;
  if (!finds_scales && !has_secondary(dst)) {  // far apart, as usual
    bool any = false;
    KVX_TRY(each_array(migrate, [&](const Array &array) {
      any |= meet(array, written);
      return KVX_STATUS_OK;
    }));
    if (!any) return KVX_STATUS_OK;
  }
  const auto check = [&](const Path &path, const Extent &extent) {
    return each_array(migrate, [&](const Array &array) {
      return meet(array, extent) ? fail_array(array, path) : KVX_STATUS_OK;
    });
  };
  for (uint64_t i = 0; i < num_tensors(dst); ++i) {
    if (!is_there(dst, i, false)) continue;
    KVX_TRY(check(TensorPath(dst_path, dst, i), extent_at(dst, i, false)));
    if (is_plane(dst, i)) continue;
    const Path layer{&dst_path, "layers", static_cast<int64_t>(i / 2)}, pool{&layer, "pool"};
    if (has_secondary(dst)) KVX_TRY(check({&pool, "secondary"}, extent_at(dst, i, true)));
    if (finds_scales) {
      KVX_TRY(check({&dst_path, i % 2 ? "v_scales" : "k_scales", static_cast<int64_t>(i / 2)},
                    extent_of_scales(*scale_at(dst, i))));
    }
  }
  return KVX_STATUS_OK;
}

}  // namespace

kvx_status_t check_secondary(const Path &path, const kvx_cache_desc_t *const *layers,
                             uint32_t num_layers, uint32_t secondary_num_blocks) {
  if (!layers[0]->pool.secondary) return KVX_STATUS_OK;
  Extents primary;
  for (const bool is_primary : {true, false}) {
    for (uint32_t i = 0; i < 2 * num_layers; ++i) {
      const kvx_cache_desc_t &cache = *layers[i / 2];
      const kvx_tensor_desc_t &tensor = i % 2 ? cache.v : cache.k;
      if (is_absent(tensor)) continue;
      if (is_primary) {
        primary.add(extent_of(tensor));
        continue;
      }
      Path layer = path;
      if (path.parent) layer.index = i / 2;
      const Path pool{&layer, "pool"};
      Extent extent;
      const bool fits = find_secondary(cache, tensor, secondary_num_blocks, &extent);
      // Calls of v1 cannot say how many blocks there are: one at least.
      const uint32_t known = secondary_num_blocks ? secondary_num_blocks : 1;
      if (fits) find_secondary(cache, tensor, known, &extent);
      if (fits && !primary.meet(extent)) continue;
      const uint32_t compared = fits ? known : secondary_num_blocks;
      return KVX_INVALID(
          "%s.secondary is %p: its blocks up to %llu %s; expected other memory, or the number of "
          "blocks that it has in secondary_num_blocks (spec %s)",
          KVX_AT(pool), cache.pool.secondary,
          static_cast<ull>(secondary_blocks(cache, tensor, compared) - 1),
          fits ? "meet those of the primary pool" : "reach past the end of memory",
          fits ? "E.8" : "4.2");
    }
    primary.sort();
  }
  return KVX_STATUS_OK;
}

kvx_status_t check_apart(const kvx_cache_desc_t &cache, const kvx_write_desc_t &write,
                         bool finds_scales) {
  if (write.io.num_tokens == 0) return KVX_STATUS_OK;
  const Array slots = array_of("write", write.slots);
  for (const bool is_v : {false, true}) {
    const kvx_tensor_desc_t &tensor = is_v ? cache.v : cache.k;
    if (is_absent(tensor) || !meet(slots, tensor)) continue;
    const Path cache_path{nullptr, "cache"};
    return fail_array(slots, {&cache_path, is_v ? "v" : "k"});
  }
  const bool has_scales =
      write.k_scale || write.v_scale || write.k_scale_desc.data || write.v_scale_desc.data;
  return has_scales ? check_scales_apart(cache, write, slots, finds_scales) : KVX_STATUS_OK;
}

kvx_status_t check_apart(const kvx_cache_desc_t &cache, const kvx_gather_desc_t &gather,
                         const kvx_gather_options_t *options) {
  const Path cache_path{nullptr, "cache"}, path{nullptr, "gather"}, with{nullptr, "options"};
  if (is_kv_offsets(gather.block_table)) {
    const kvx_cache_desc_t *const layer = &cache;
    KVX_TRY(check_secondary(cache_path, &layer, 1, options ? options->secondary_num_blocks : 0));
  }
  if (gather.io.num_tokens == 0) return KVX_STATUS_OK;
  const Path io{&path, "io"};
  const Path key{&io, "key"}, value{&io, "value"};
  for (const Array &array :
       {indices_of("gather", gather.block_table), indptr_of("gather", gather.block_table),
        array_of("gather", "seq_lens", gather.seq_lens)}) {
    if (meet(array, gather.io.key)) return fail_array(array, key);
    if (!is_absent(cache.v) && meet(array, gather.io.value)) return fail_array(array, value);
  }
  for (const bool is_v : {false, true}) {
    const kvx_scale_desc_t *scales = !options ? nullptr
                                     : is_v   ? options->v_scale
                                              : options->k_scale;
    if (!scales) continue;
    const Path scale{&with, is_v ? "v_scale" : "k_scale"};
    KVX_TRY(check_scales_apart(scale, *scales, key, gather.io.key));
    KVX_TRY(check_scales_apart(scale, *scales, value, gather.io.value));
  }
  return KVX_STATUS_OK;
}

kvx_status_t check_apart(const kvx_migrate_desc_t &migrate) {
  const Path src_path{nullptr, "src"}, dst_path{nullptr, "dst"};
  const Extent written = all_of(*migrate.dst, false);
  KVX_TRY(check_ends_apart(src_path, dst_path, migrate, written));
  if (migrate.seq_lens->seq_count == 0) return KVX_STATUS_OK;
  KVX_TRY(check_arrays(dst_path, migrate, written));
  return check_scales_apart(src_path, dst_path, migrate);
}

}  // namespace kvx
