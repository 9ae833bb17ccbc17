// What a backend runs: planes reduced to byte strides, and the lookups that find tokens in them.
// The last to know a layout's name.
#pragma once

#include "desc/span.h"
#include "plan/affine.h"
#include "plan/lookup.h"
#include "plan/small_vector.h"

namespace kvx {

// A plane, such as K or V of a layer, at one end. Number d of the vector of a (block, token, head)
// lies at block * block_stride + token * token_stride + head * head_stride + (d / pack) *
// outer_stride + (d % pack) * inner_stride bytes from the base. Where its tokens are split,
// token_pack is not 0, and token * token_stride becomes (token / token_pack) * token_outer_stride +
// (token % token_pack) * token_stride.
struct Plane {
  uint8_t *base;
  uint8_t *secondary;  // base in the secondary pool, or NULL
  int64_t block_stride, token_stride, head_stride;
  int64_t outer_stride, inner_stride;
  int64_t token_outer_stride;
  uint32_t pack, token_pack;
  kvx_dtype_t dtype;
};

// The address of a place's token in a plane with these bases, whose tokens are not split.
KVX_HD uint8_t *address_of(const Plane &plane, uint8_t *base, uint8_t *secondary,
                           const Place &place) {
  return (place.secondary ? secondary : base) + place.block * plane.block_stride +
         place.offset * plane.token_stride;
}
inline uint8_t *address_of(const Plane &plane, const Place &place) {
  const int64_t token = !plane.token_pack
                            ? place.offset * plane.token_stride
                            : place.offset / plane.token_pack * plane.token_outer_stride +
                                  place.offset % plane.token_pack * plane.token_stride;
  // The base of blocks that lie anywhere is NULL, to which a pointer may not be added.
  const uint8_t *const base = place.secondary ? plane.secondary : plane.base;
  return reinterpret_cast<uint8_t *>(
      reinterpret_cast<uintptr_t>(base) +
      static_cast<uintptr_t>(place.block * plane.block_stride + token));
}

// The scale of (block, token, head) lies at data + block * block_stride + ...; NULL data means 1.
struct Scales {
  const uint8_t *data;
  kvx_dtype_t dtype;
  int64_t block_stride, token_stride, head_stride;
};

// Which tensor of a plane a pair moves: the data, or what is beside it.
enum class BesideData : uint8_t { kNo, kScales, kZeros };

// A plane from one cache to the other.
struct PlanePair {
  Plane src, dst;
  Scales src_scales, dst_scales;
  uint32_t num_heads;
  uint32_t head_dim;  // numbers or, if bytes are copied, units of the format
  uint32_t lookup;    // index in the plan's lookups
  uint32_t plane;     // index in the span: K and V of layer 0, of layer 1, ...
  bool is_v;          // for errors
  bool convert;       // dtype or scale differs; otherwise bytes are copied
  bool find_scales;   // computes dst_scales and stores them
  BesideData beside;  // of U8_ZERO, U8_BIAS and F4_E2M1, where these are copied
  uint32_t hadamard;  // numbers that are rotated together on their way; 0: none are
  uint32_t affine;    // 1 + index in the plan's affine pairs; 0: none
};

// The lookups of a plane at both ends.
struct LookupPair {
  Lookup src, dst;

  // Whether both find the same tokens in the same places, under the same names.
  bool operator==(const LookupPair &) const = default;

  // Whether each plane of the span has places of its own.
  KVX_HD bool differs_by_plane() const { return src.planes_per_entry || dst.planes_per_entry; }
};

// The tokens that move: row r has min(lens[r / rows_per_len], max_len) of them, or `uniform_len`
// when there are no lens.
struct Rows {
  uint64_t count;
  uint32_t rows_per_len;
  uint64_t uniform_len;
  uint64_t max_len;
  Ints lens;
  bool fill_to_max;               // rows go on to max_len with tokens that have no source
  uint32_t tokens_per_entry = 1;  // cut() and stored() count entries

  KVX_HD int64_t length_of(uint64_t row) const {
    if (!lens.data) return static_cast<int64_t>(uniform_len);
    return lens[rows_per_len == 1 ? row : divide(row, rows_per_len).quotient];
  }
  // The tokens that move of a row with this length.
  KVX_HD uint64_t cut(int64_t length) const {
    const auto len = static_cast<uint64_t>(length);
    return entries_of(len < max_len ? len : max_len, tokens_per_entry);
  }
  KVX_HD uint64_t stored(uint64_t row) const { return cut(length_of(row)); }
};

enum class Call : uint8_t { kWrite, kGather, kMigrate };

// The caller's names of the fields whose data can be out of range.
struct FieldNames {
  const char *src_table, *dst_table, *src_starts, *dst_starts, *lens;
};

struct Plan {
  Call call = Call::kWrite;
  Rows rows{};
  bool zero_fill = false;
  bool background = false, copy_engine = false;  // flags for a device
  int owner = -1;                // the device that has allocated all but HOST memory; -1: not known
  bool check_same_pool = false;  // both ends share memory: their blocks must be disjoint

  SmallVector<LookupPair, 2> lookups;
  SmallVector<PlanePair, 2> pairs;  // those of a layer follow each other
  SmallVector<uint32_t, 1> layers;  // end of each layer's pairs; the other planes follow
  SmallVector<AffinePair, 1> affine;

  // The rows, counted in the entries of a lookup.
  Rows rows_of(const LookupPair &lookup) const {
    Rows found = rows;
    found.tokens_per_entry = lookup.src.tokens_per_entry;
    return found;
  }

  // The pairs of a layer.
  const PlanePair *begin_of(size_t layer) const {
    return pairs.begin() + (layer ? layers[layer - 1] : 0);
  }
  const PlanePair *end_of(size_t layer) const { return pairs.begin() + layers[layer]; }
};

// Each takes validated arguments and fills a new plan.
void plan_write(const kvx_cache_desc_t &cache, const kvx_write_desc_t &write, uint32_t flags,
                Plan *plan);
void plan_gather(const kvx_cache_desc_t &cache, const kvx_gather_desc_t &gather,
                 const kvx_gather_options_t &options, Plan *plan);
void plan_migrate(const kvx_migrate_desc_t &migrate, Plan *plan);
// Makes a plan without pairs; both ends of its lookup are the span's.
void plan_find(const kvx_find_desc_t &find, Plan *plan);

}  // namespace kvx
