// What the spec says a call does, one element at a time. Knows docs/spec.md, not libkvx.
#pragma once

#include <cmath>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bury.h"
#include "case.h"
#include "plane_places.h"

namespace fuzz {

struct Place {
  int64_t block = -1;  // -1: null
  int64_t offset = 0;
  bool secondary = false;
  bool unsure = false;    // null, and otherwise out of range: either answer is right
  bool hole = false;      // null in a table without holes: the token would be left out
  uint8_t *at = nullptr;  // POINTERS: where the block begins; its number is 0
};

// Spec: E.2. -1: no block is null. In the size of 1.3 the field at reserved_0 names the block
// itself.
inline int64_t null_block_of(const kvx_span_t &span) {
  if (span.size == 72) return std::max<int64_t>(span.reserved_0, -1);
  return static_cast<int64_t>(span.null_block_plus_1 - 1);
}

// Spec: 5.1, 5.2, E.3, E.8. False: the index is out of range.
inline bool find_place(const End &end, const kvx_cache_desc_t &cache, bool slots, bool table,
                       int kv, uint64_t row, Wide token, uint64_t flat, Place *place,
                       size_t plane = 0) {
  const int64_t block_size = cache.block_size;
  *place = Place{};
  if (slots) {
    const int64_t slot = read_int(end.slots.slots, end.slots.dtype, flat);
    if (slot < 0 || slot == end.slots.invalid_slot) return true;
    if (slot >= int64_t{cache.num_blocks} * block_size) return false;
    place->block = slot / block_size;
    place->offset = slot % block_size;
    return true;
  }
  place->offset = static_cast<int64_t>(token % block_size);
  if (!table) {
    place->block = static_cast<int64_t>(row);
    return row < cache.num_blocks && token < block_size;
  }
  const kvx_block_table_t &t = end.table;
  const int64_t null_block = null_block_of(end.span);
  const bool holes = t.flags & KVX_BLOCK_TABLE_FLAG_HOLES;
  int64_t id;
  if (t.format == KVX_BLOCK_TABLE_POINTERS) {
    const bool whole = t.flags & KVX_BLOCK_TABLE_FLAG_WHOLE;
    const uint64_t planes = t.indices_count / t.seq_count / t.max_blocks_per_seq;
    if (whole) plane = 0;
    const Wide entry = row * Wide{t.max_blocks_per_seq} + token / block_size;
    id = read_int(t.indices, t.index_dtype, static_cast<uint64_t>(entry * planes + plane));
    place->hole = id == 0 && !holes;
    if (id == 0) return true;
    uintptr_t bits = 16;
    const size_t layers = end.span.layers ? end.span.num_layers : 1;  // of a migration, of a gather
    for (size_t l = 0; l < layers; ++l)
      for (const void *data : {end.layers[l].k.data, end.layers[l].v.data})
        bits |= reinterpret_cast<uintptr_t>(data);
    place->block = 0;
    place->at = reinterpret_cast<uint8_t *>(id);
    if (whole) {
      place->at += static_cast<const uint8_t *>((kv ? cache.v : cache.k).data) -
                   static_cast<const uint8_t *>(t.indptr);
    }
    return id > 0 && (id & ((bits & -bits) - 1)) == 0;
  }
  if (t.format == KVX_BLOCK_TABLE_RAGGED) {
    id = read_int(t.indices, t.index_dtype,
                  static_cast<uint64_t>(read_int(t.indptr, t.indptr_dtype, row) + token));
  } else if (t.format == KVX_BLOCK_TABLE_PACKED || t.format == KVX_BLOCK_TABLE_RING) {
    Wide column = token / block_size;
    if (t.format == KVX_BLOCK_TABLE_RING) column %= t.max_blocks_per_seq;
    id = read_int(t.indices, t.index_dtype,
                  static_cast<uint64_t>(row * Wide{t.max_blocks_per_seq} + column));
  } else {
    const uint64_t at =
        static_cast<uint64_t>((row * Wide{2} + kv) * t.max_blocks_per_seq + token / block_size);
    const auto index = static_cast<int32_t>(read_int(t.indices, t.index_dtype, at));
    place->hole = index == -1 && !holes;
    if (index == -1) return true;
    const kvx_tensor_desc_t &tensor = kv ? cache.v : cache.k;
    const int64_t unit = cache.pool.bytes_per_block;
    const int64_t n = tensor.stride[0] * size_of(tensor.dtype) / unit;
    const int64_t i = index & INT32_MAX;
    const int64_t mine =
        (static_cast<const uint8_t *>(tensor.data) - static_cast<const uint8_t *>(cache.k.data)) /
        unit;
    place->secondary = index < 0;
    place->block = i / n;
    int64_t blocks = cache.num_blocks;
    if (place->secondary && end.span.secondary_num_blocks) blocks = end.span.secondary_num_blocks;
    if (place->secondary && !cache.pool.secondary) blocks = 0;
    const bool good = i % n == mine && place->block < blocks;
    if (place->block != null_block) return good;
    place->block = -1;
    place->unsure = !good;
    place->hole = !holes;
    return true;
  }
  place->hole = (id < 0 || id == null_block) && !holes;
  if (id < 0 || id == null_block) return true;
  place->block = id;
  return id < cache.num_blocks;
}

inline uint8_t *element_of(const kvx_cache_desc_t &cache, int kv, const Place &place, int64_t head,
                           int64_t d) {
  const kvx_tensor_desc_t &t = kv ? cache.v : cache.k;
  Wide at;
  if (t.ndim == 5) {
    const int64_t pack = t.shape[4];
    at = Wide{place.block} * t.stride[0] + Wide{head} * t.stride[1] + Wide{d / pack} * t.stride[2] +
         Wide{place.offset} * t.stride[3] + Wide{d % pack} * t.stride[4];
  } else {
    const bool nhd = t.layout == KVX_LAYOUT_BLOCK_NHD;
    at = Wide{place.block} * t.stride[0] + Wide{place.offset} * t.stride[nhd ? 1 : 2] +
         Wide{head} * t.stride[nhd ? 2 : 1] + Wide{d} * t.stride[3];
  }
  auto *base = place.at ? place.at : static_cast<uint8_t *>(t.data);
  if (place.secondary) {
    base = static_cast<uint8_t *>(cache.pool.secondary) +
           (base - static_cast<uint8_t *>(cache.pool.primary));
  }
  return base + static_cast<int64_t>(at * size_of(t.dtype));
}

inline uint8_t *io_element(const kvx_tensor_desc_t &t, uint64_t row, uint64_t token,
                           uint64_t tokens_per_row, int64_t head, int64_t d) {
  Wide at = Wide{head} * t.stride[t.ndim - 2] + Wide{d} * t.stride[t.ndim - 1];
  if (t.ndim == 4) {
    at += static_cast<Wide>(row) * t.stride[0] + static_cast<Wide>(token) * t.stride[1];
  } else {
    at += static_cast<Wide>(row * tokens_per_row + token) * t.stride[0];
  }
  return static_cast<uint8_t *>(t.data) + static_cast<int64_t>(at * size_of(t.dtype));
}

inline int64_t dim_of(const kvx_tensor_desc_t &t) {
  return t.ndim == 5 ? t.shape[2] * t.shape[4] : t.shape[3];
}

// The element that numbers of element `d` lie in, or begin in, where they are of another format.
inline int64_t counterpart(int64_t d, kvx_dtype_t of, kvx_dtype_t other) {
  return d * numbers_of(of) / numbers_of(other);
}

// Whether the first layers of an end have a tensor of CUSTOM whose axes extents do not tell apart.
inline bool is_ambiguous(const End &end, size_t num_layers) {
  for (size_t l = 0; l < std::min(num_layers, end.layers.size()); ++l)
    for (const kvx_tensor_desc_t *tensor : {&end.layers[l].k, &end.layers[l].v})
      if (tensor->data && tensor->layout == KVX_LAYOUT_BLOCK_CUSTOM &&
          !has_distinct_extents(*tensor))
        return true;
  return false;
}
inline bool is_ambiguous(const Case &c) {
  if (c.op != kMigrate) return is_ambiguous(c.op == kGather ? c.src : c.dst, 1);
  return is_ambiguous(c.src, c.src.span.num_layers) || is_ambiguous(c.dst, c.dst.span.num_layers);
}

struct Oracle {
  Case &c;
  const char *bad_index = nullptr;  // what the spec wants refused: the first index out of range
  bool scales_good = true;          // those that are used
  bool inside = false;              // an array lies in what the call writes
  bool unsure = false;              // a bad scale that no token uses: either answer is right
  std::string complaint{};
  uint64_t written = 0;                                     // bytes of elements
  using Finders = std::pair<const void *, const void *>;    // where both ends' indices lie
  std::map<const uint8_t *, Finders> writers{}, readers{};  // of bytes, where lookups differ

  void allow() { unsure = true; }
  void refuse(const char *what) {
    if (!bad_index) bad_index = what;
  }

  void mark(uint8_t *dst, int64_t size, const uint8_t *src, bool same_bytes) {
    Block *block = c.memory.find(dst);
    if (!block || dst + size > block->data.get() + block->size) {
      complaint = "the call names an element outside its memory";
      return;
    }
    const Block *from = src ? c.memory.find(src) : nullptr;
    if (src && (!from || src + size_of(KVX_DTYPE_U8) > from->data.get() + from->size)) {
      complaint = "the call reads an element outside its memory";
      return;
    }
    written += static_cast<uint64_t>(size);
    const auto at = static_cast<size_t>(dst - block->data.get());
    for (size_t i = at; i < at + static_cast<size_t>(size); ++i) {
      if (block->writes[i] < 2) ++block->writes[i];
      block->known[i] = !src || same_bytes;
      block->expected[i] = !src ? 0
                           : same_bytes
                               ? from->before[static_cast<size_t>(src - from->data.get()) + i - at]
                               : 0;
    }
  }

  // Where lookups differ, what one of them writes no other accesses. Spec: E.11
  void claim(const uint8_t *at, int64_t size, const Finders &finders, bool writes) {
    for (int64_t i = 0; i < size; ++i) {
      const auto writer = writers.find(at + i), reader = readers.find(at + i);
      if ((writer != writers.end() && writer->second != finders) ||
          (writes && reader != readers.end() && reader->second != finders)) {
        refuse("a byte that another plane's lookup names");
      }
      // A second reader by another lookup: whoever writes is another one for one of them.
      if (writes) {
        writers[at + i] = finders;
      } else if (reader != readers.end() && reader->second != finders) {
        reader->second = {this, this};
      } else {
        readers[at + i] = finders;
      }
    }
  }

  // The scale of an element must be usable.
  void use_scale(const End &end, int kv, size_t layer, const Place &place, int64_t head) {
    if (!scaled(end, kv, layer) || place.block < 0 || has_groups(dtype_of(end, kv, layer))) return;
    use_scale(end.scales[kv][layer], place, head);
  }
  void use_scale(const kvx_scale_desc_t &s, const Place &place, int64_t head) {
    int64_t at = 0;
    switch (s.granularity) {
      case KVX_SCALE_PER_BLOCK:
        at = place.block * s.stride[0];
        break;
      case KVX_SCALE_PER_HEAD:
        at = head * s.stride[0];
        break;
      case KVX_SCALE_PER_BLOCK_HEAD:
        at = place.block * s.stride[0] + head * s.stride[1];
        break;
      case KVX_SCALE_PER_TOKEN_HEAD:
        at = place.block * s.stride[0] + place.offset * s.stride[1] + head * s.stride[2];
        break;
      default:
        break;
    }
    const float value =
        read_scale(static_cast<const uint8_t *>(s.data) + at * size_of(s.dtype), s.dtype);
    if (!(value > 0 && std::isfinite(value))) scales_good = false;
  }

  static kvx_dtype_t dtype_of(const End &end, int kv, size_t layer) {
    return (kv ? end.layers[layer].v : end.layers[layer].k).dtype;
  }

  // Numbers at one end, and what they have beside them. Spec: E.14, E.18
  struct Affine {
    kvx_dtype_t dtype;
    const kvx_scale_desc_t &scales, &zeros;
    bool covers_tokens() const { return scales.granularity == KVX_SCALE_PER_CHANNEL; }
    int64_t groups() const { return scales.ndim == 4 ? scales.shape[3] : 1; }
    bool has_zeros() const { return is_affine(dtype); }
    // What scales are multiplied by.
    float tensor_scale() const {
      const bool given = !has_zeros() && zeros.data;
      return given ? read_scale(static_cast<const uint8_t *>(zeros.data), zeros.dtype) : 1;
    }
  };
  static Affine affine_of(const End &end, int kv, size_t l) {
    return {dtype_of(end, kv, l), end.scales[kv][l], end.zeros[kv][l]};
  }

  // Scales and zero points of a token and head.
  static uint64_t bytes_beside(const Affine &a) {
    const int64_t zero = a.has_zeros() ? size_of(a.zeros.dtype) : 0;
    return static_cast<uint64_t>(a.groups() * (size_of(a.scales.dtype) + zero));
  }

  static bool is_like(const Affine &a, const Affine &b) {
    return a.dtype == b.dtype && a.covers_tokens() == b.covers_tokens() &&
           a.groups() == b.groups() && a.scales.dtype == b.scales.dtype &&
           (a.has_zeros() ? a.zeros.dtype == b.zeros.dtype : a.tensor_scale() == b.tensor_scale());
  }
  // Whether tokens are copied with their scales and zero points.
  static bool copies(const Affine &from, const Affine &to) {
    return is_like(from, to) && !to.covers_tokens();
  }

  static uint8_t *group_at(const kvx_scale_desc_t &s, Place place, int64_t head, int64_t g) {
    if (s.granularity == KVX_SCALE_PER_GROUP_4X4) {
      const int64_t quarter = s.shape[3] / 4, t = place.offset;
      place.offset = 4 * (t / 4) + g / quarter;
      g = g % quarter * 4 + t % 4;
    }
    const int64_t at = s.granularity == KVX_SCALE_PER_CHANNEL
                           ? place.block * s.stride[0] + head * s.stride[1] + g * s.stride[2]
                           : place.block * s.stride[0] + place.offset * s.stride[1] +
                                 head * s.stride[2] + (s.ndim == 4 ? g * s.stride[3] : 0);
    return const_cast<uint8_t *>(static_cast<const uint8_t *>(s.data)) + at * size_of(s.dtype);
  }

  // `groups` scales and zero points of a token and head, or of a block and head, which a migration
  // stores. from: NULL if they are not copied. is_zero: all are 0.
  void mark_affine(const Affine *from, const Affine &to, const Place (&place)[2], int64_t src_head,
                   int64_t dst_head, int64_t groups, bool is_zero) {
    for (const bool zeros : {false, true}) {
      if (zeros && !to.has_zeros()) break;
      const kvx_scale_desc_t &stored = zeros ? to.zeros : to.scales;
      for (int64_t g = 0; g < groups; ++g) {
        uint8_t *const at = group_at(stored, place[1], dst_head, g);
        const uint8_t *src = is_zero ? nullptr : at;  // of a value that is not known
        if (from) src = group_at(zeros ? from->zeros : from->scales, place[0], src_head, g);
        mark(at, size_of(stored.dtype), src, from != nullptr);
        if (!from) written -= static_cast<uint64_t>(size_of(stored.dtype));
      }
    }
  }

  // The scale of a token and head that the call finds. Spec: E.9
  void mark_found_scale(const kvx_scale_desc_t &s, const Place &place, int64_t head, bool is_zero) {
    uint8_t *const at = group_at(s, place, head, 0);
    mark(at, size_of(s.dtype), at, false);
    written -= static_cast<uint64_t>(size_of(s.dtype));
    Block *const block = c.memory.find(at);
    if (!is_zero || !block) return;
    const float one = 1;  // whose upper half is BF16's
    const uint16_t half = 0x3c00;
    uint8_t bytes[4];
    std::memcpy(bytes, &one, 4);
    if (s.dtype == KVX_DTYPE_BF16) std::memcpy(bytes, bytes + 2, 2);
    if (s.dtype == KVX_DTYPE_F16) std::memcpy(bytes, &half, 2);
    for (int64_t i = 0; i < size_of(s.dtype); ++i) {
      const auto of_block = static_cast<size_t>(at - block->data.get() + i);
      block->known[of_block] = 1;
      block->expected[of_block] = bytes[i];
    }
  }

  // Tokens that go into one unit over tokens: by their offset in the block, where they come from.
  struct CoveredUnit {
    std::map<int64_t, Place> tokens;
  };
  using CoveredKey = std::tuple<size_t, int, int64_t, uint64_t, int64_t>;  // layer, K or V, block,
  std::map<CoveredKey, CoveredUnit> covered{};                             // row, column

  bool covers(const End &end, int kv, size_t l) const {
    return has_groups(dtype_of(end, kv, l)) && affine_of(end, kv, l).covers_tokens();
  }

  // What units over tokens hold afterwards. Spec: E.14
  void mark_covered(const CoveredKey &key, const CoveredUnit &unit, bool zero_fill) {
    const auto &[l, kv, block, row, column] = key;
    const bool requantizes = c.migrate.flags & KVX_FLAG_REQUANTIZE;
    const Affine to = affine_of(c.dst, kv, l);
    const kvx_cache_desc_t &source = c.src.layers[l], &target = c.dst.layers[l];
    const Place &first = unit.tokens.begin()->second;
    bool any = zero_fill, all_of_one_block = first.block >= 0;
    for (const auto &[offset, from] : unit.tokens) {
      any |= from.block >= 0;
      all_of_one_block &=
          from.block == first.block && from.offset == offset && from.secondary == first.secondary;
    }
    if (!any) return;
    const bool one_by_one = c.src.span.slots || (c.src.span.block_table &&
                                                 c.src.table.format == KVX_BLOCK_TABLE_RAGGED);
    const bool same =
        all_of_one_block && unit.tokens.begin()->first == 0 &&
        (!one_by_one || unit.tokens.size() == 1) && has_groups(dtype_of(c.src, kv, l)) &&
        source.block_size == target.block_size && is_like(affine_of(c.src, kv, l), to);
    const int64_t heads = c.migrate.num_heads ? c.migrate.num_heads : source.num_kv_heads;
    const int64_t dim = dim_of(kv ? target.v : target.k);
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t src_head = c.src.span.head_start + h, dst_head = c.dst.span.head_start + h;
      Place place[2] = {first, {}};
      place[1].block = block;
      if (same) {
        const Affine from = affine_of(c.src, kv, l);
        mark_affine(&from, to, place, src_head, dst_head, dim, false);
        written -= static_cast<uint64_t>(dim) * bytes_beside(to);  // a plan does not count them
      } else {
        mark_affine(nullptr, to, place, src_head, dst_head, dim, false);
      }
      const auto mark_token = [&](int64_t offset, const Place *from, bool moves) {
        place[1].offset = offset;
        for (int64_t d = 0; d < dim; ++d) {
          uint8_t *const at = element_of(target, kv, place[1], dst_head, d);
          mark(at, 1, same ? element_of(source, kv, *from, src_head, d) : at, same);
          if (!moves) --written;
        }
      };
      const int64_t begin = unit.tokens.begin()->first;
      for (int64_t before = 0; requantizes && before < begin; ++before)
        mark_token(before, nullptr, false);
      for (const auto &[offset, from] : unit.tokens) {
        if (from.block >= 0) use_scale(c.src, kv, l, from, src_head);
        mark_token(offset, &from, from.block >= 0 || zero_fill);
      }
    }
  }

  void mark_covered(bool zero_fill) {
    const CoveredKey *last = nullptr;  // keys of a block follow each other
    for (const auto &[key, unit] : covered) {
      bool moves = zero_fill;
      for (const auto &[offset, from] : unit.tokens) moves |= from.block >= 0;
      if (!moves) continue;
      const auto block_of = [](const CoveredKey &k) {
        return std::tuple(std::get<0>(k), std::get<1>(k), std::get<2>(k));
      };
      if (last && block_of(*last) == block_of(key))
        return refuse("a block of two rows, or twice of one");
      last = &key;
      mark_covered(key, unit, zero_fill);
    }
  }

  bool is_rotated(int kv) const { return c.migrate.flags >> (kv ? 12 : 8) & 15u; }

  bool scaled(const End &end, int kv, size_t layer) const {
    if (c.op == kMigrate && !(kv ? end.span.v_scales : end.span.k_scales)) return false;
    return !end.scales[kv].empty() && end.scales[kv][layer].data;
  }

  // Every scale, used or not.
  void look_at_scales(const End &end) {
    for (const int kv : {0, 1})
      for (size_t l = 0; l < end.scales[kv].size(); ++l)
        if (!has_groups(dtype_of(end, kv, l)) && !(c.finds_scales() && &end == &c.dst))
          look_at_scale(end.scales[kv][l]);
    for (const PlaneCase &plane : end.planes)
      if (plane.desc.scale && !has_groups(plane.desc.dtype)) look_at_scale(plane.scale);
  }
  void look_at_scale(const kvx_scale_desc_t &s) {
    Block *block = s.data ? c.memory.find(s.data) : nullptr;
    if (!block) return;
    for (size_t at = 0; at + static_cast<size_t>(size_of(s.dtype)) <= block->size;
         at += static_cast<size_t>(size_of(s.dtype))) {
      const float value = read_scale(block->data.get() + at, s.dtype);
      if (!(value > 0 && std::isfinite(value))) unsure = true;
    }
  }

  // What a row holds at an end; -1: the table itself is wrong.
  Wide held(const End &end, const kvx_cache_desc_t &cache, bool table, uint64_t row) {
    if (!table) return cache.block_size;
    const kvx_block_table_t &t = end.table;
    if (t.format != KVX_BLOCK_TABLE_RAGGED) return Wide{t.max_blocks_per_seq} * cache.block_size;
    return Wide{read_int(t.indptr, t.indptr_dtype, row + 1)} -
           read_int(t.indptr, t.indptr_dtype, row);
  }

  // Kernels count in 32 bits.
  bool on_device() const {
    const End &end = c.dst;
    return (end.layers.empty() ? end.planes[0].desc.memory : end.layers[0].k.memory) ==
           KVX_MEMORY_DEVICE;
  }

  bool exact(const End &end) const {
    return end.table.format == KVX_BLOCK_TABLE_RAGGED &&
           (end.table.flags & KVX_BLOCK_TABLE_FLAG_EXACT);
  }

  void check_indptr(const kvx_block_table_t &t) {
    if (t.format != KVX_BLOCK_TABLE_RAGGED) return;
    int64_t last = 0;
    for (uint32_t i = 0; i <= t.seq_count; ++i) {
      const int64_t value = read_int(t.indptr, t.indptr_dtype, i);
      if ((i == 0 && value != 0) || value < last) refuse("indptr");
      last = value;
    }
    if (last != t.indices_count) refuse("the end of indptr");
  }

  // The place of a token that the call writes is that of no other. A device does not compare.
  std::set<std::tuple<size_t, int, const uint8_t *, bool, int64_t, int64_t>> taken{};
  void take(const Place &place, size_t l, int kv) {
    const bool is_new =
        taken.insert({l, kv, place.at, place.secondary, place.block, place.offset}).second;
    if (!is_new && !on_device()) refuse("two tokens with one place");
  }

  void write() {
    const kvx_cache_desc_t &cache = c.dst.layers[0];
    for (int kv = 0; kv < (is_absent(cache.v) ? 1 : 2); ++kv) {
      const kvx_tensor_desc_t &io = kv ? c.io.value : c.io.key, &to = kv ? cache.v : cache.k;
      const bool same = io.dtype == to.dtype && !scaled(c.dst, kv, 0) && !c.finds_scales();
      for (uint64_t t = 0; t < c.io.num_tokens; ++t) {
        Place place;
        if (!find_place(c.dst, cache, true, false, kv, 0, 0, t, &place)) refuse("a slot");
        if (bad_index) return;
        if (place.block < 0) continue;
        take(place, 0, kv);
        for (int64_t h = 0; h < cache.num_kv_heads; ++h) {
          if (c.finds_scales()) {
            mark_found_scale(c.dst.scales[kv][0], place, h, false);
          } else {
            use_scale(c.dst, kv, 0, place, h);
          }
          for (int64_t d = 0; d < dim_of(to); ++d) {
            mark(element_of(cache, kv, place, h, d), size_of(to.dtype),
                 io_element(io, 0, t, 0, h, counterpart(d, to.dtype, io.dtype)), same);
          }
        }
      }
    }
  }

  void gather() {
    c.src.span.size = c.with_options && c.options.size == 40 ? 72 : sizeof c.src.span;
    const kvx_cache_desc_t &cache = c.src.layers[0];
    const kvx_block_table_t &table = c.src.table;
    const bool zero_fill = c.with_options && (c.options.flags & KVX_FLAG_ZERO_FILL);
    const uint32_t beams = table.format == KVX_BLOCK_TABLE_KV_OFFSETS ? table.beam_width : 1;
    if (c.io.num_tokens == 0) return allow();  // indices that no token uses
    check_indptr(table);
    for (uint64_t row = 0; !bad_index && row < uint64_t{table.seq_count} * beams; ++row) {
      const int64_t length = read_int(c.lens.lengths, c.lens.dtype, row / beams);
      const Wide most = held(c.src, cache, true, row);
      if (exact(c.src) && length != most) refuse("an inexact row");
      if (length < 0 || length > most) {
        std::min<Wide>(length, c.gather.max_seq_len) <= most &&length > 0 ? allow()
                                                                          : refuse("a length");
      }
      for (int kv = 0; !bad_index && kv < (is_absent(cache.v) ? 1 : 2); ++kv) {
        const kvx_tensor_desc_t &io = kv ? c.io.value : c.io.key, &from = kv ? cache.v : cache.k;
        const bool same = io.dtype == from.dtype && !scaled(c.src, kv, 0);
        for (uint64_t t = 0; t < c.gather.max_seq_len; ++t) {
          Place place;
          const bool stored = t < static_cast<uint64_t>(length);
          const auto plane = static_cast<size_t>(kv);
          if (stored && !find_place(c.src, cache, false, true, kv, row, t, 0, &place, plane))
            refuse("a table entry");
          if (place.hole && !zero_fill) refuse("a hole");
          if (bad_index) return;
          if (place.unsure) allow();
          if (place.block < 0 && !zero_fill) continue;
          for (int64_t h = 0; h < cache.num_kv_heads; ++h) {
            use_scale(c.src, kv, 0, place, h);
            for (int64_t d = 0; d < io.shape[io.ndim - 1]; ++d) {
              uint8_t *to = io_element(io, row, t, c.gather.max_seq_len, h, d);
              const int64_t at = counterpart(d, io.dtype, from.dtype);
              const uint8_t *src = place.block < 0 ? nullptr : element_of(cache, kv, place, h, at);
              mark(to, size_of(io.dtype), src, same);
            }
          }
        }
      }
    }
  }

  void migrate() {
    const End *ends[2] = {&c.src, &c.dst};
    uint32_t beams = 1;
    for (const End *end : ends) {
      const bool offsets = end->table.format == KVX_BLOCK_TABLE_KV_OFFSETS;
      if (end->span.block_table && offsets) beams = std::max(beams, end->table.beam_width);
    }
    const uint64_t rows = uint64_t{c.lens.seq_count} * beams;
    if (rows == 0) return allow();
    bool used_lookup[2], by_planes = false;  // a span's, and whether planes have their own
    for (int e = 0; e < 2; ++e) {
      used_lookup[e] = c.src.span.num_layers > 0;
      for (const PlaneCase &plane : ends[e]->planes) by_planes |= Finder(*ends[e], plane).own;
      if (used_lookup[e] && ends[e]->span.block_table) check_indptr(ends[e]->table);
    }
    const bool zero_fill = c.migrate.flags & KVX_FLAG_ZERO_FILL;
    Wide total = 0;
    for (uint64_t row = 0; row < rows; ++row) {
      const int64_t length = read_int(c.lens.lengths, c.lens.dtype, row / beams);
      if (length < 0) refuse("a length");
      total += length;
      for (const End *end : ends) {
        if (end->span.slots || !c.src.span.num_layers) continue;
        const int64_t start =
            end->span.starts ? read_int(end->starts.lengths, end->starts.dtype, row) : 0;
        const bool ring = end->span.block_table && end->table.format == KVX_BLOCK_TABLE_RING;
        const Wide most = held(*end, end->layers[0], end->span.block_table, row);
        const Wide beyond = (ring ? 0 : Wide{start}) + length - most;
        if (ring && on_device() && start > UINT32_MAX) allow();
        if (end->span.block_table && exact(*end) && beyond != 0) refuse("an inexact row");
        if (start < 0 || beyond > 0)
          length == 0 && start >= 0 ? allow() : refuse("a start or a length");
        if (end == &c.dst && length > 0 && start % end->layers[0].block_size != 0 &&
            !(c.migrate.flags & KVX_FLAG_REQUANTIZE)) {
          for (size_t l = 0; l < c.dst.span.num_layers; ++l)
            for (int kv = 0; kv < (is_absent(end->layers[l].v) ? 1 : 2); ++kv)
              if (covers(c.dst, kv, l)) refuse("a start within a unit");
        }
      }
    }
    for (const End *end : ends) {
      if (end->span.slots && c.src.span.num_layers && total != end->slots.token_count)
        refuse("token_count");
    }
    // Blocks of tokens that move, and of tokens whose other end is null: K or V, pool, id.
    std::set<std::tuple<int, bool, int64_t>> used[2], touched[2];
    std::set<const Block *> pointed[2];  // buffers of blocks that lie anywhere, and of others
    uint64_t flat = 0;
    const uint64_t rows_of_layers = c.src.span.num_layers ? rows : 0;
    for (uint64_t row = 0; !bad_index && row < rows_of_layers; ++row) {
      const int64_t length = read_int(c.lens.lengths, c.lens.dtype, row / beams);
      for (int64_t t = 0; !bad_index && t < length; ++t, ++flat) {
        size_t plane = 0;
        for (size_t l = 0; l < c.src.span.num_layers; ++l) {
          const kvx_cache_desc_t *caches[2] = {&c.src.layers[l], &c.dst.layers[l]};
          for (int kv = 0; kv < (is_absent(caches[0]->v) ? 1 : 2); ++kv, ++plane) {
            Place place[2];
            for (int e = 0; e < 2; ++e) {
              const kvx_span_t &span = ends[e]->span;
              const int64_t start =
                  span.starts ? read_int(ends[e]->starts.lengths, ends[e]->starts.dtype, row) : 0;
              if (!find_place(*ends[e], *caches[e], span.slots, span.block_table, kv, row,
                              Wide{start} + t, flat, &place[e], plane)) {
                refuse("a table entry or slot");
              }
              if (place[e].hole && (e == 1 || !zero_fill)) refuse("a hole");
            }
            if (bad_index) return;
            for (int e = 0; e < 2; ++e) {
              if (place[e].unsure) allow();
              const bool moves = place[0].block >= 0 && place[1].block >= 0;
              const bool fills = e == 1 && zero_fill;
              if (place[e].at && place[1].block >= 0 && (fills || place[0].block >= 0))
                pointed[e].insert(c.memory.find(place[e].at));
              if (place[e].block >= 0 && !place[e].at)
                (moves ? used : touched)[e].insert({kv, place[e].secondary, place[e].block});
            }
            if (place[1].block >= 0 && (place[0].block >= 0 || zero_fill)) take(place[1], l, kv);
            if (place[1].block >= 0 && covers(c.dst, kv, l)) {
              const auto token = static_cast<int64_t>(
                  t + (c.dst.span.starts ? read_int(c.dst.starts.lengths, c.dst.starts.dtype, row)
                                         : 0));
              covered[{l, kv, place[1].block, row, token / caches[1]->block_size}]
                  .tokens[place[1].offset] = place[0];
              continue;
            }
            if (place[1].block < 0 || (place[0].block < 0 && !zero_fill)) continue;
            const kvx_tensor_desc_t &from = kv ? caches[0]->v : caches[0]->k,
                                    &to = kv ? caches[1]->v : caches[1]->k;
            const bool both_affine = has_groups(from.dtype) && has_groups(to.dtype);
            const bool same = both_affine ? copies(affine_of(c.src, kv, l), affine_of(c.dst, kv, l))
                                          : from.dtype == to.dtype && !is_rotated(kv) &&
                                                !scaled(c.src, kv, l) && !scaled(c.dst, kv, l);
            const int64_t heads =
                c.migrate.num_heads ? c.migrate.num_heads : caches[0]->num_kv_heads;
            for (int64_t h = 0; h < heads; ++h) {
              const int64_t src_head = c.src.span.head_start + h,
                            dst_head = c.dst.span.head_start + h;
              if (place[0].block >= 0) {
                use_scale(c.src, kv, l, place[0], src_head);
                if (!c.finds_scales()) use_scale(c.dst, kv, l, place[1], dst_head);
              }
              const bool is_zero = place[0].block < 0;
              if (c.finds_scales())
                mark_found_scale(c.dst.scales[kv][l], place[1], dst_head, is_zero);
              if (has_groups(to.dtype)) {
                const Affine target = affine_of(c.dst, kv, l);
                if (both_affine && same && !is_zero) {
                  const Affine source = affine_of(c.src, kv, l);
                  mark_affine(&source, target, place, src_head, dst_head, target.groups(), false);
                } else {
                  mark_affine(nullptr, target, place, src_head, dst_head, target.groups(), is_zero);
                  if (both_affine && same) written += bytes_beside(target);
                }
              }
              for (int64_t d = 0; d < dim_of(to); ++d) {
                const int64_t at = counterpart(d, to.dtype, from.dtype);
                const uint8_t *src = place[0].block < 0
                                         ? nullptr
                                         : element_of(*caches[0], kv, place[0], src_head, at);
                uint8_t *const dst = element_of(*caches[1], kv, place[1], dst_head, d);
                mark(dst, size_of(to.dtype), src, same);
                if (!by_planes) continue;
                claim(dst, size_of(to.dtype), {}, true);
                if (src) claim(src, size_of(from.dtype), {}, false);
              }
            }
          }
        }
      }
    }
    mark_covered(zero_fill);
    for (const Block *block : pointed[1]) {
      if (!pointed[0].count(block)) continue;
      // Of some heads a block may interleave with itself. A device does not look.
      c.migrate.num_heads && !on_device() ? allow() : refuse("a block that is read is written");
    }
    if (by_planes || c.src.span.num_planes) planes(rows, beams, zero_fill);
    // What is within a pool, and what is not.
    if (c.src.span.num_layers ? c.src.layers[0].k.data != c.dst.layers[0].k.data
                              : c.src.planes[0].desc.data != c.dst.planes[0].desc.data) {
      return;
    }
    for (const auto &block : used[1]) {
      if (used[0].count(block)) refuse("a block of the same pool is read and written");
    }
    for (int e = 0; e < 2; ++e) {
      for (const auto &[kv, secondary, id] : touched[e]) {
        for (const int any : {0, 1}) {
          if (used[1 - e].count({any, secondary, id}) || touched[1 - e].count({any, secondary, id}))
            allow();
        }
      }
    }
  }

  // The planes beside the layers, pair by pair. Spec: E.11
  void planes(uint64_t rows, uint32_t beams, bool zero_fill) {
    for (size_t i = 0; !bad_index && i < c.src.span.num_planes; ++i) {
      const kvx_plane_t &first = c.src.planes[i].desc;
      for (size_t j = 0; j < c.dst.span.num_planes; ++j) {
        const kvx_plane_t &other = c.dst.planes[j].desc;
        if (first.layer != other.layer || first.role != other.role) continue;
        move_plane(c.src.planes[i], c.dst.planes[j], rows, beams, zero_fill);
      }
    }
  }

  void move_plane(const PlaneCase &from, const PlaneCase &to, uint64_t rows, uint32_t beams,
                  bool zero_fill) {
    const PlaneCase *const both[2] = {&from, &to};
    const End *const ends[2] = {&c.src, &c.dst};
    const Finder finders[2] = {{c.src, from}, {c.dst, to}};
    const kvx_plane_t &src = from.desc, &dst = to.desc;
    const uint32_t tokens = src.tokens_per_entry;
    const auto entries_of = [tokens](int64_t length) -> int64_t {
      return tokens ? length / tokens : length > 0;
    };
    const auto start_of = [&](int e, uint64_t row) -> int64_t {
      const bool any = tokens && ends[e]->span.starts && !finders[e].slots;
      return any ? read_int(ends[e]->starts.lengths, ends[e]->starts.dtype, row) : 0;
    };
    Wide total = 0;
    for (uint64_t row = 0; row < rows; ++row) {
      const int64_t length = read_int(c.lens.lengths, c.lens.dtype, row / beams);
      if (length < 0) refuse("a length");
      total += entries_of(length);
    }
    for (int e = 0; e < 2; ++e) {
      if (finders[e].table) check_indptr(*finders[e].table);
      if (finders[e].names_tokens(src) && total != finders[e].slots->token_count)
        refuse("token_count");
      for (uint64_t row = 0; !bad_index && row < rows; ++row) {
        if (finders[e].names_tokens(src)) break;
        const int64_t start = start_of(e, row);
        const int64_t length = read_int(c.lens.lengths, c.lens.dtype, row / beams);
        const bool wrong = start < 0 || (tokens > 1 && start % tokens != 0);
        const Wide at = tokens > 1 ? start / tokens : start;
        const bool ring = finders[e].table && finders[e].table->format == KVX_BLOCK_TABLE_RING;
        if (ring && on_device() && start > UINT32_MAX) allow();
        const Wide beyond =
            (ring ? 0 : at) + entries_of(length) - fuzz::held(finders[e], both[e]->desc, row);
        const bool exact = finders[e].table && tokens == 1 &&
                           finders[e].table->format == KVX_BLOCK_TABLE_RAGGED &&
                           (finders[e].table->flags & KVX_BLOCK_TABLE_FLAG_EXACT);
        if (exact && beyond != 0) refuse("an inexact row");
        if (wrong) refuse("a start");
        if (beyond > 0) entries_of(length) == 0 ? allow() : refuse("a start or a length");
      }
    }
    const bool own = finders[0].own || finders[1].own;
    // Dense planes are found alike if they have as many blocks.
    const auto name_of = [&](int e) -> const void * {
      if (const void *indices = finders[e].indices()) return indices;
      return reinterpret_cast<const void *>(extent_of(both[e]->desc, KVX_AXIS_BLOCK));
    };
    const Finders name = own ? Finders{name_of(0), name_of(1)} : Finders{};
    const bool scaled[2] = {from.desc.scale && from.scale.data && !has_groups(src.dtype),
                            to.desc.scale && to.scale.data && !has_groups(dst.dtype)};
    const Affine beside[2] = {{src.dtype, from.scale, from.zero}, {dst.dtype, to.scale, to.zero}};
    const bool both_affine = has_groups(src.dtype) && has_groups(dst.dtype);
    const bool same = both_affine ? copies(beside[0], beside[1])
                                  : src.dtype == dst.dtype && !scaled[0] && !scaled[1];
    const bool cuts = c.migrate.num_heads && !(src.flags & KVX_PLANE_REPLICATED);
    const int64_t heads = cuts ? c.migrate.num_heads : extent_of(src, KVX_AXIS_HEAD);
    std::set<int64_t> used[2], zeroed;
    std::set<std::pair<int64_t, int64_t>> places;
    uint64_t flat = 0;
    for (uint64_t row = 0; !bad_index && row < rows; ++row) {
      const int64_t length = read_int(c.lens.lengths, c.lens.dtype, row / beams);
      for (int64_t t = 0; !bad_index && t < entries_of(length); ++t, ++flat) {
        Place place[2];
        for (int e = 0; e < 2; ++e) {
          const Wide entry = (tokens > 1 ? start_of(e, row) / tokens : start_of(e, row)) + Wide{t};
          if (!find_entry(finders[e], both[e]->desc, null_block_of(ends[e]->span), row, entry, flat,
                          &place[e].block, &place[e].offset)) {
            return refuse("a table entry or slot of a plane");
          }
          const kvx_block_table_t *const table = finders[e].table;
          const bool holes = !table || (table->flags & KVX_BLOCK_TABLE_FLAG_HOLES);
          if (place[e].block < 0 && !holes && (e == 1 || !zero_fill))
            return refuse("a hole of a plane");
        }
        const bool reads = place[0].block >= 0;
        if (place[1].block < 0) continue;
        if (!reads) zeroed.insert(place[1].block);
        if (!reads && !zero_fill) continue;
        if (!places.insert({place[1].block, place[1].offset}).second && !on_device())
          return refuse("two entries with one place");
        if (reads) used[0].insert(place[0].block), used[1].insert(place[1].block);
        for (int64_t h = 0; h < heads; ++h) {
          const int64_t src_head = h + (cuts ? c.src.span.head_start : 0);
          const int64_t dst_head = h + (cuts ? c.dst.span.head_start : 0);
          if (reads && scaled[0]) use_scale(from.scale, place[0], src_head);
          if (reads && scaled[1]) use_scale(to.scale, place[1], dst_head);
          if (has_groups(dst.dtype)) {
            const bool copied = both_affine && same;
            mark_affine(copied && reads ? &beside[0] : nullptr, beside[1], place, src_head,
                        dst_head, beside[1].groups(), !reads);
            if (copied && !reads) written += bytes_beside(beside[1]);
          }
          for (int64_t d = 0; d < extent_of(dst, KVX_AXIS_DIM); ++d) {
            const int64_t at = counterpart(d, dst.dtype, src.dtype);
            const uint8_t *const read =
                reads ? element_of(src, place[0].block, place[0].offset, src_head, at) : nullptr;
            uint8_t *const write = element_of(dst, place[1].block, place[1].offset, dst_head, d);
            mark(write, size_of(dst.dtype), read, same);
            claim(write, size_of(dst.dtype), name, true);
            if (read) claim(read, size_of(src.dtype), name, false);
          }
        }
      }
    }
    if (src.data != dst.data) return;  // not the same pool
    for (const int64_t block : used[0]) {
      if (used[1].count(block)) refuse("a block of the same pool is read and written");
      if (zeroed.count(block)) zero_fill ? refuse("a block that is read is cleared") : allow();
    }
  }

  void run() {
    for (auto &block : c.memory.blocks) {
      block->writes.assign(block->size, 0);
      block->known.assign(block->size, 0);
      block->expected.assign(block->size, 0);
    }
    if (!c.mutated) look_at_scales(c.src), look_at_scales(c.dst);
    inside = array_meets_destination(c);
    if (inside) return refuse("an array inside the destination");
    if (c.op == kMigrate && c.dst.span.block_table &&
        (c.dst.table.flags & KVX_BLOCK_TABLE_FLAG_WHOLE)) {
      // Between planes of a block that tokens may move to. Spec: E.15
      const Block *const block = c.memory.find(c.dst.table.indptr);
      for (const Array &array : arrays_of(&c))
        if (block && c.memory.find(*array.pointer) == block) allow();
    }
    if (c.op == kWrite) write();
    if (c.op == kGather) gather();
    if (c.op == kMigrate) migrate();
  }

  // Tokens share a place, so what is stored there, and by whom last, is left open.
  bool writes_twice() const {
    for (const auto &block : c.memory.blocks) {
      for (const uint8_t writes : block->writes)
        if (writes > 1) return true;
    }
    return false;
  }

  // Compares memory with what an accepted call may have done to it.
  void compare() {
    if (c.described != KVX_UNKNOWN && c.described != written) {
      complaint = "the plan says that it writes " + std::to_string(c.described) + " bytes, not " +
                  std::to_string(written);
    }
    for (size_t b = 0; b < c.memory.blocks.size() && complaint.empty(); ++b) {
      const Block &block = *c.memory.blocks[b];
      for (size_t i = 0; i < block.size; ++i) {
        const uint8_t now = block.data[i];
        const bool right = block.writes[i] == 0
                               ? now == block.before[i]
                               : block.writes[i] > 1 || !block.known[i] || now == block.expected[i];
        if (right) continue;
        complaint = "byte " + std::to_string(i) + " of buffer " + std::to_string(b) + " is " +
                    std::to_string(now) + ", expected " +
                    std::to_string(block.writes[i] ? block.expected[i] : block.before[i]) +
                    (block.writes[i] ? " (a token's)" : " (untouched)");
        break;
      }
    }
  }
};

}  // namespace fuzz
