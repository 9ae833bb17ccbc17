#include "plan/apart.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "error.h"
#include "extent.h"
#include "plan/walk.h"

namespace kvx {
namespace {

// ---- Same pool

// A set of blocks of the primary and the secondary pool.
class Blocks {
 public:
  void add(const Place &place) {
    if (all_.empty() || all_.back() != id_of(place)) all_.push_back(id_of(place));
  }
  void sort() { std::sort(all_.begin(), all_.end()); }
  bool contain(const Place &place) const {
    return std::binary_search(all_.begin(), all_.end(), id_of(place));
  }

 private:
  static uint64_t id_of(const Place &place) {
    return static_cast<uint64_t>(place.block) * 2 + place.secondary;
  }

  std::vector<uint64_t> all_;
};

// Checks that the source and destination blocks of moving tokens differ within one pool.
kvx_status_t check_distinct_blocks(const Plan &plan, uint64_t tokens) {
  for (const LookupPair &lookup : plan.lookups) {
    Blocks sources;
    KVX_TRY(walk(plan, lookup, 0, 0, tokens,
                 [&](uint64_t, const Place &from, const Place &to, uint64_t) {
                   if (from.block >= 0 && to.block >= 0) sources.add(from);
                   return KVX_STATUS_OK;
                 }));
    sources.sort();
    KVX_TRY(walk(plan, lookup, 0, 0, tokens,
                 [&](uint64_t row, const Place &from, const Place &to, uint64_t) {
                   const bool written = to.block >= 0 && (from.block >= 0 || plan.zero_fill);
                   if (!written || !sources.contain(to)) return KVX_STATUS_OK;
                   return KVX_INVALID(
                       "block %lld is a destination of row %llu and a source in the same pool, "
                       "expected disjoint blocks (spec E.3)",
                       static_cast<ll>(to.block), static_cast<ull>(row));
                 }));
  }
  return KVX_STATUS_OK;
}

// A plane at one end of a pair.
struct End {
  const PlanePair &pair;
  const Plane &plane;
  const Lookup &lookup;

  // Elements of a token and head.
  int64_t num_elements() const {
    return pair.convert ? units_of(plane.dtype, pair.head_dim) : pair.head_dim;
  }
};

// Bytes from the first to the last of a block, of the heads that move.
uint64_t bytes_of_block(const End &end) {
  const Plane &plane = end.plane;
  const int64_t last_token = int64_t{end.lookup.block_size} - 1;
  const int64_t last_element = end.num_elements() - 1;
  const int64_t tokens =
      plane.token_pack
          ? last_token / plane.token_pack * plane.token_outer_stride +
                std::min<int64_t>(last_token, plane.token_pack - 1) * plane.token_stride
          : last_token * plane.token_stride;
  const int64_t elements = last_element / plane.pack * plane.outer_stride +
                           std::min<int64_t>(last_element, plane.pack - 1) * plane.inner_stride;
  return static_cast<uint64_t>(tokens + (int64_t{end.pair.num_heads} - 1) * plane.head_stride +
                               elements + size_of(plane.dtype));
}

// ---- Pointers

constexpr uint32_t kWholeBlock = UINT32_MAX;  // in place of a pair

// The bytes that a call accesses of a block that a table names, whatever its address. Of a block
// that holds all planes: from the first byte of any to the last of any.
struct Reach {
  bool is_anywhere, is_whole;
  int64_t begin, end;  // from where the block begins or, unless it is whole, the plane

  Reach(const Plan &plan, const End &of, bool at_dst) {
    is_anywhere = of.lookup.mode == LookupMode::kPointers;
    is_whole = is_anywhere && !of.lookup.planes_per_entry;
    begin = begin_of(of.plane);
    end = begin + static_cast<int64_t>(bytes_of_block(of));
    if (!is_whole) return;
    for (const PlanePair &pair : plan.pairs) {
      const End other{pair, at_dst ? pair.dst : pair.src, of.lookup};
      begin = std::min(begin, begin_of(other.plane));
      end = std::max(end, begin_of(other.plane) + static_cast<int64_t>(bytes_of_block(other)));
    }
  }

  int64_t begin_of(const Plane &plane) const {
    return is_whole ? reinterpret_cast<int64_t>(plane.base) : 0;
  }
};

void add_array(const Ints &ints, uint64_t count, Accesses *accesses) {
  if (ints.data && count)
    accesses->add(extent_at(ints.data, count * (ints.wide ? 8 : 4)), 0, false);
}

// Adds the block of a plane, or of all planes. Blocks with ids have been compared as tensors: they
// and arrays have one owner.
void add_block(const Reach &reach, const Plane &plane, Place place, uint32_t pair, bool written,
               Accesses *accesses) {
  place.offset = 0;
  const uint8_t *const begin = address_of(plane, place) + (reach.begin - reach.begin_of(plane));
  accesses->add({begin, begin + (reach.end - reach.begin)},
                reach.is_anywhere ? Accesses::kNobody : 0, written,
                reach.is_whole ? kWholeBlock : pair);
}

// Checks that blocks with addresses of their own, if they are written, share no memory with
// anything else that the call accesses.
[[gnu::noinline]] kvx_status_t check_pointers_apart(const Plan &plan, uint64_t tokens) {
  Accesses accesses;
  for (const LookupPair &lookup : plan.lookups) {
    for (const Lookup *a : {&lookup.src, &lookup.dst}) {
      add_array(a->indices, a->indices_count, &accesses);
      add_array(a->indptr, uint64_t{a->num_rows} + 1, &accesses);
      add_array(a->starts, plan.rows.count, &accesses);
    }
  }
  add_array(plan.rows.lens, plan.rows.count / plan.rows.rows_per_len, &accesses);
  std::optional<Reach> read, written;  // of whole blocks the same for all pairs
  for (uint32_t i = 0; i < plan.pairs.size(); ++i) {
    const PlanePair &pair = plan.pairs[i];
    const LookupPair &lookup = plan.lookups[pair.lookup];
    if (!read || !read->is_whole) read.emplace(plan, End{pair, pair.src, lookup.src}, false);
    if (!written || !written->is_whole)
      written.emplace(plan, End{pair, pair.dst, lookup.dst}, true);
    walk(plan, pair, 0, tokens, [&](uint64_t, const Place &from, const Place &to, uint64_t) {
      if (to.block < 0 || (from.block < 0 && !plan.zero_fill)) return KVX_STATUS_OK;
      add_block(*written, pair.dst, to, i, true, &accesses);
      if (from.block >= 0) add_block(*read, pair.src, from, i, false, &accesses);
      return KVX_STATUS_OK;
    });
  }
  const void *const at = accesses.meet();
  if (!at) return KVX_STATUS_OK;
  return KVX_INVALID(
      "the bytes at %p are those of a block that the call writes, and of another block or "
      "an array of indices; expected them apart (spec E.12)",
      at);
}

// ---- Planes with lookups of their own

// Numbers the lookup of a pair. All planes that use the spans' tables or slots have the same
// number: their blocks have been compared by id.
uint32_t finder_of(const Plan &plan, const PlanePair &pair) {
  const LookupPair &lookup = plan.lookups[pair.lookup];
  return lookup.src.is_own || lookup.dst.is_own ? pair.lookup + 1 : 0;
}

// Adds a plane from its first byte to its last, in each of its pools.
void add_plane(const End &end, uint32_t finder, bool written, Accesses *accesses) {
  const auto add = [&](const uint8_t *base, uint64_t num_blocks) {
    if (!base || !num_blocks) return;
    const auto last = static_cast<int64_t>(num_blocks - 1) * end.plane.block_stride;
    accesses->add(extent_at(base, static_cast<uint64_t>(last) + bytes_of_block(end)), finder,
                  written);
  };
  add(end.plane.base, end.lookup.num_blocks);
  add(end.plane.secondary, end.lookup.secondary_blocks);
}

void add_block(const End &end, Place place, uint32_t finder, bool written, Accesses *accesses) {
  place.offset = 0;
  accesses->add(extent_at(address_of(end.plane, place), bytes_of_block(end)), finder, written);
}

// Adds the elements of `count` tokens.
void add_elements(const End &end, Place place, uint64_t count, uint32_t finder, bool written,
                  Accesses *accesses) {
  const Plane &plane = end.plane;
  const int64_t num_elements = end.num_elements(), size = size_of(plane.dtype);
  for (; count > 0; --count, ++place.offset) {
    for (int64_t h = 0; h < end.pair.num_heads; ++h) {
      const uint8_t *at = address_of(plane, place) + h * plane.head_stride;
      for (int64_t i = 0; i < num_elements; i += plane.pack, at += plane.outer_stride) {
        const int64_t together = std::min<int64_t>(num_elements - i, plane.pack);
        if (plane.inner_stride == size) {
          accesses->add(extent_at(at, static_cast<uint64_t>(together * size)), finder, written);
          continue;
        }
        for (int64_t j = 0; j < together; ++j)
          accesses->add(extent_at(at + j * plane.inner_stride, static_cast<uint64_t>(size)), finder,
                        written);
      }
    }
  }
}

// Calls add(end, place, count, finder, written) for all that the plan reads and writes.
template <class Add>
void each_end(const Plan &plan, uint64_t tokens, Add add) {
  for (const PlanePair &pair : plan.pairs) {
    const LookupPair &lookup = plan.lookups[pair.lookup];
    const uint32_t finder = finder_of(plan, pair);
    walk(plan, pair, 0, tokens, [&](uint64_t, const Place &from, const Place &to, uint64_t count) {
      if (to.block < 0 || (from.block < 0 && !plan.zero_fill)) return KVX_STATUS_OK;
      add(End{pair, pair.dst, lookup.dst}, to, count, finder, true);
      if (from.block >= 0) add(End{pair, pair.src, lookup.src}, from, count, finder, false);
      return KVX_STATUS_OK;
    });
  }
}

// Checks that planes with lookups of their own write no memory that other lookups use. Compares
// whole planes first; if they overlap, blocks; if these interleave, elements.
[[gnu::noinline]] kvx_status_t check_finds_apart(const Plan &plan, uint64_t tokens) {
  Accesses planes;
  for (const PlanePair &pair : plan.pairs) {
    const LookupPair &lookup = plan.lookups[pair.lookup];
    add_plane({pair, pair.src, lookup.src}, finder_of(plan, pair), false, &planes);
    add_plane({pair, pair.dst, lookup.dst}, finder_of(plan, pair), true, &planes);
  }
  if (!planes.meet()) return KVX_STATUS_OK;
  Accesses blocks;
  each_end(plan, tokens,
           [&](const End &end, const Place &place, uint64_t, uint32_t finder, bool written) {
             add_block(end, place, finder, written, &blocks);
           });
  if (!blocks.meet()) return KVX_STATUS_OK;
  Accesses elements;
  each_end(plan, tokens,
           [&](const End &end, const Place &place, uint64_t count, uint32_t finder, bool written) {
             add_elements(end, place, count, finder, written, &elements);
           });
  const void *const at = elements.meet();
  if (!at) return KVX_STATUS_OK;
  return KVX_INVALID(
      "the bytes at %p are named by two tables or slots of planes, and the call writes them; "
      "expected each byte named by one of them: give both planes one table, or move them in calls "
      "of their own (spec E.11)",
      at);
}

// ---- Keys and values of a write

// At least the bytes from a plane's first to its last; without a division.
uint64_t most_bytes(const End &end) {
  const Plane &plane = end.plane;
  const int64_t num_elements = end.num_elements();
  const int64_t elements = plane.pack >= num_elements
                               ? num_elements * plane.inner_stride
                               : num_elements * (plane.outer_stride + plane.inner_stride);
  const auto tokens =
      int64_t{end.lookup.block_size} * (plane.token_stride + plane.token_outer_stride);
  return end.lookup.num_blocks * static_cast<uint64_t>(plane.block_stride) +
         static_cast<uint64_t>(tokens + int64_t{end.pair.num_heads} * plane.head_stride + elements +
                               size_of(plane.dtype));
}

// Whether key or value of a layer may lie in the layer's K or V.
bool may_meet(const Plan &plan, size_t layer) {
  const LookupPair &lookup = plan.lookups[0];
  for (const PlanePair *a = plan.begin_of(layer); a != plan.end_of(layer); ++a) {
    for (const PlanePair *b = plan.begin_of(layer); b != plan.end_of(layer); ++b) {
      const uint8_t *const read = a->src.base, *const written = b->dst.base;
      const bool apart =
          read < written
              ? static_cast<uint64_t>(written - read) >= most_bytes({*a, a->src, lookup.src})
              : static_cast<uint64_t>(read - written) >= most_bytes({*b, b->dst, lookup.dst});
      if (!apart) return true;
    }
  }
  return false;
}

// Checks that a write reads no element that it writes.
[[gnu::noinline]] kvx_status_t check_inputs_apart(const Plan &plan, uint64_t tokens) {
  Accesses elements;
  each_end(plan, tokens,
           [&](const End &end, const Place &place, uint64_t count, uint32_t, bool written) {
             add_elements(end, place, count, written, written, &elements);
           });
  const void *const at = elements.meet();
  if (!at) return KVX_STATUS_OK;
  return KVX_INVALID(
      "the bytes at %p are those of a key or value and of a slot that the call writes; expected "
      "them apart: pass a copy (spec 7)",
      at);
}

}  // namespace

kvx_status_t check_blocks_apart(const Plan &plan, uint64_t tokens) {
  for (size_t l = 0; plan.call == Call::kWrite && l < plan.layers.size(); ++l)
    if (may_meet(plan, l)) return check_inputs_apart(plan, tokens);
  if (plan.check_same_pool) KVX_TRY(check_distinct_blocks(plan, tokens));
  bool any_anywhere = false, any_own = false;
  for (const LookupPair &lookup : plan.lookups) {
    for (const Lookup *a : {&lookup.src, &lookup.dst})
      any_anywhere |= a->mode == LookupMode::kPointers;
    any_own |= lookup.src.is_own || lookup.dst.is_own;
  }
  if (any_anywhere) KVX_TRY(check_pointers_apart(plan, tokens));
  if (any_own && plan.lookups.size() > 1) KVX_TRY(check_finds_apart(plan, tokens));
  return KVX_STATUS_OK;
}

}  // namespace kvx
