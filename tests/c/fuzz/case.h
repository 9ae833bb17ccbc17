// A call and everything it points to.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "kvx/kvx_ext.h"
#include "memory.h"

namespace fuzz {

enum Op { kValidate, kWrite, kGather, kMigrate, kOps };

// A plane beside the layers. Its pointers say only whether they are given.
struct PlaneCase {
  kvx_plane_t desc{};
  kvx_scale_desc_t scale{}, zero{};
  kvx_block_table_t table{};
  kvx_slot_mapping_t slots{};
};

// One end of a call: the layers of a cache and how tokens are found in them. A write has a
// destination with slots, a gather a source with a table, a migration both ends.
struct End {
  std::vector<kvx_cache_desc_t> layers;
  bool from_pool = false;
  kvx_block_table_t table{};
  kvx_slot_mapping_t slots{};
  kvx_seq_lens_t starts{};
  std::vector<kvx_scale_desc_t> scales[2];  // K, V: per layer, or empty
  std::vector<kvx_scale_desc_t> zeros[2];   // zero points, as scales
  std::vector<PlaneCase> planes;
  std::vector<std::vector<uint8_t *>> blocks;  // POINTERS: of K and V of each layer, by id
  kvx_span_t span{};                           // its pointers say only whether they are given
};

// How a call is made: as one, or by a plan whose descriptors go before it runs, with other lookups
// in between or without, or by the copies that the plan lists; a write also as one of layers.
enum Way { kCall, kPlan, kPlanOfOthers, kPlanRanges, kLayers };

// Whether extents alone tell axes apart, as those of CUSTOM must. Spec: 4.2
inline bool has_distinct_extents(const kvx_tensor_desc_t &tensor) {
  for (uint32_t i = 0; i < tensor.ndim; ++i)
    for (uint32_t j = 0; j < i; ++j)
      if (tensor.shape[i] > 1 && tensor.shape[i] == tensor.shape[j]) return false;
  return true;
}

struct Case {
  Op op;
  Way way = kCall;
  mutable uint64_t described = KVX_UNKNOWN;  // bytes that the plan says it writes
  Memory memory;
  End src, dst;
  kvx_kv_io_desc_t io{};
  kvx_write_desc_t write{};
  kvx_write_options_t write_options{};
  bool with_write_options = false;
  kvx_gather_desc_t gather{};
  kvx_gather_options_t options{};
  bool with_options = false;
  kvx_seq_lens_t lens{};
  kvx_migrate_desc_t migrate{};
  bool mutated = false;
  std::string story;  // what was mutated

  // Spec: E.9
  bool finds_scales() const {
    const uint32_t flags = op == kMigrate                       ? migrate.flags
                           : op == kWrite && with_write_options ? write_options.flags
                                                                : 0;
    return flags & KVX_FLAG_FIND_SCALES;
  }
  kvx_cache_desc_t &cache() { return op == kGather ? src.layers[0] : dst.layers[0]; }
};

inline const void *const kGiven = &kGiven;  // a pointer that is set when the call is put together

// The structs of a call in memory that is exactly as long as their `size` says.
struct Placed {
  std::vector<std::unique_ptr<uint8_t[]>> memory;

  template <class T>
  T *put(const T &value) {
    const size_t bytes = std::min<size_t>(std::max<size_t>(value.size, 4), sizeof(T));
    memory.emplace_back(new uint8_t[bytes]);
    std::memcpy(memory.back().get(), &value, bytes);
    return reinterpret_cast<T *>(memory.back().get());
  }
  template <class T>
  const T *const *list(const std::vector<T> &values, size_t count) {
    memory.emplace_back(new uint8_t[std::max<size_t>(count, 1) * sizeof(T *)]);
    auto **pointers = reinterpret_cast<const T **>(memory.back().get());
    for (size_t i = 0; i < count; ++i) pointers[i] = put(values[i]);
    return pointers;
  }
  const kvx_span_t *span(const End &end) {
    kvx_span_t v = end.span;
    if (v.layers) v.layers = list(end.layers, std::min<size_t>(v.num_layers, end.layers.size()));
    if (v.block_table) v.block_table = put(end.table);
    if (v.slots) v.slots = put(end.slots);
    if (v.starts) v.starts = put(end.starts);
    if (v.k_scales) v.k_scales = list(end.scales[0], end.scales[0].size());
    if (v.v_scales) v.v_scales = list(end.scales[1], end.scales[1].size());
    if (v.size >= sizeof v) {
      if (v.k_zeros) v.k_zeros = list(end.zeros[0], end.zeros[0].size());
      if (v.v_zeros) v.v_zeros = list(end.zeros[1], end.zeros[1].size());
    }
    if (v.planes && v.size >= sizeof v) {
      std::vector<kvx_plane_t> planes;
      for (const PlaneCase &plane : end.planes) {
        planes.push_back(plane.desc);
        kvx_plane_t &desc = planes.back();
        if (desc.scale) desc.scale = put(plane.scale);
        if (desc.zero) desc.zero = put(plane.zero);
        if (desc.block_table) desc.block_table = put(plane.table);
        if (desc.slots) desc.slots = put(plane.slots);
      }
      v.planes = list(planes, std::min<size_t>(v.num_planes, planes.size()));
    }
    return put(v);
  }
};

}  // namespace fuzz
