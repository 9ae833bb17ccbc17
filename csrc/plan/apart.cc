#include "plan/apart.h"

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include "error.h"
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

constexpr size_t kWholeBlock = SIZE_MAX - 1;  // in place of a pair

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

// Memory that a call reads or writes: a block of a plane, or an array of indices.
struct Piece {
  uintptr_t begin, end;
  size_t pair;  // the pair of the block
  bool written;
  bool anywhere;  // a block that a table names by its address

  bool operator<(const Piece &other) const {
    return std::tie(begin, end, pair, written, anywhere) <
           std::tie(other.begin, other.end, other.pair, other.written, other.anywhere);
  }
  bool operator==(const Piece &other) const { return !(*this < other) && !(other < *this); }
};

class Pieces {
 public:
  void add(const Ints &ints, uint64_t count) {
    if (ints.data && count)
      add(static_cast<const uint8_t *>(ints.data), count * (ints.wide ? 8 : 4), SIZE_MAX, false,
          false);
  }

  // The block of a plane, or of all planes.
  void add(const Reach &reach, const Plane &plane, Place place, size_t number, bool written) {
    place.offset = 0;
    add(address_of(plane, place) + (reach.begin - reach.begin_of(plane)),
        static_cast<uint64_t>(reach.end - reach.begin), reach.is_whole ? kWholeBlock : number,
        written, reach.is_anywhere);
  }

  kvx_status_t check() {
    std::sort(all_.begin(), all_.end());
    all_.erase(std::unique(all_.begin(), all_.end()), all_.end());
    uintptr_t ends[2][2] = {};  // the furthest end so far: [written][anywhere]
    for (const Piece &piece : all_) {
      for (const bool written : {false, true}) {
        for (const bool anywhere : {false, true}) {
          // Blocks with ids have been compared as tensors.
          if (piece.begin < ends[written][anywhere] && (piece.written || written) &&
              (piece.anywhere || anywhere)) {
            return fail_piece(piece);
          }
        }
      }
      uintptr_t &furthest = ends[piece.written][piece.anywhere];
      furthest = std::max(furthest, piece.end);
    }
    return KVX_STATUS_OK;
  }

 private:
  [[gnu::cold]] static kvx_status_t fail_piece(const Piece &piece) {
    return KVX_INVALID(
        "the bytes at %p are those of a block that the call writes, and of another block or "
        "an array of indices; expected them apart (spec E.12)",
        reinterpret_cast<const void *>(piece.begin));
  }

  void add(const uint8_t *data, uint64_t bytes, size_t pair, bool written, bool anywhere) {
    const auto begin = reinterpret_cast<uintptr_t>(data);
    const Piece piece{begin, begin + bytes, pair, written, anywhere};
    if (all_.empty() || !(all_.back() == piece)) all_.push_back(piece);
  }

  std::vector<Piece> all_;
};

// Checks that blocks with addresses of their own, if they are written, share no memory with
// anything else that the call accesses.
[[gnu::noinline]] kvx_status_t check_pointers_apart(const Plan &plan, uint64_t tokens) {
  Pieces pieces;
  for (const LookupPair &lookup : plan.lookups) {
    for (const Lookup *a : {&lookup.src, &lookup.dst}) {
      pieces.add(a->indices, a->indices_count);
      pieces.add(a->indptr, uint64_t{a->num_rows} + 1);
      pieces.add(a->starts, plan.rows.count);
    }
  }
  pieces.add(plan.rows.lens, plan.rows.count / plan.rows.rows_per_len);
  std::optional<Reach> read, written;  // of whole blocks the same for all pairs
  for (size_t i = 0; i < plan.pairs.size(); ++i) {
    const PlanePair &pair = plan.pairs[i];
    const LookupPair &lookup = plan.lookups[pair.lookup];
    if (!read || !read->is_whole) read.emplace(plan, End{pair, pair.src, lookup.src}, false);
    if (!written || !written->is_whole)
      written.emplace(plan, End{pair, pair.dst, lookup.dst}, true);
    walk(plan, pair, 0, tokens, [&](uint64_t, const Place &from, const Place &to, uint64_t) {
      if (to.block < 0 || (from.block < 0 && !plan.zero_fill)) return KVX_STATUS_OK;
      pieces.add(*written, pair.dst, to, i, true);
      if (from.block >= 0) pieces.add(*read, pair.src, from, i, false);
      return KVX_STATUS_OK;
    });
  }
  return pieces.check();
}

// ---- Planes with lookups of their own

// Numbers the lookup of a pair. All planes that use the spans' tables or slots have the same
// number: their blocks have been compared by id.
uint32_t finder_of(const Plan &plan, const PlanePair &pair) {
  const LookupPair &lookup = plan.lookups[pair.lookup];
  return lookup.src.is_own || lookup.dst.is_own ? pair.lookup + 1 : 0;
}

// Memory of several finders: no two may overlap if one of them writes.
class WrittenRanges {
 public:
  void add(const uint8_t *data, uint64_t bytes, uint32_t finder, bool written) {
    const auto begin = reinterpret_cast<uintptr_t>(data);
    if (!all_.empty() && all_.back().finder == finder && all_.back().written == written) {
      if (all_.back().end == begin) return static_cast<void>(all_.back().end += bytes);
      if (all_.back().begin == begin && all_.back().end == begin + bytes) return;
    }
    all_.push_back({begin, begin + bytes, finder, written});
  }

  // The first address that two share; NULL: none.
  const void *meet() {
    std::sort(all_.begin(), all_.end(),
              [](const Piece &a, const Piece &b) { return a.begin < b.begin; });
    Furthest any, written;
    for (const Piece &piece : all_) {
      if (piece.begin < written.of_others(piece.finder) ||
          (piece.written && piece.begin < any.of_others(piece.finder))) {
        return reinterpret_cast<const void *>(piece.begin);
      }
      any.add(piece);
      if (piece.written) written.add(piece);
    }
    return nullptr;
  }

 private:
  struct Piece {
    uintptr_t begin, end;
    uint32_t finder;
    bool written;
  };

  // The furthest end of the pieces so far, and the furthest of all other finders.
  struct Furthest {
    uintptr_t end = 0, next = 0;
    uint32_t finder = UINT32_MAX;

    uintptr_t of_others(uint32_t one) const { return one == finder ? next : end; }
    void add(const Piece &piece) {
      if (piece.finder == finder) {
        end = std::max(end, piece.end);
      } else if (piece.end > end) {
        next = end, end = piece.end, finder = piece.finder;
      } else {
        next = std::max(next, piece.end);
      }
    }
  };

  std::vector<Piece> all_;
};

// Adds a plane from its first byte to its last, in each of its pools.
void add_plane(const End &end, uint32_t finder, bool written, WrittenRanges *ranges) {
  const auto add = [&](const uint8_t *base, uint64_t num_blocks) {
    if (!base || !num_blocks) return;
    const auto last = static_cast<int64_t>(num_blocks - 1) * end.plane.block_stride;
    ranges->add(base, static_cast<uint64_t>(last) + bytes_of_block(end), finder, written);
  };
  add(end.plane.base, end.lookup.num_blocks);
  add(end.plane.secondary, end.lookup.secondary_blocks);
}

void add_block(const End &end, Place place, uint32_t finder, bool written, WrittenRanges *ranges) {
  place.offset = 0;
  ranges->add(address_of(end.plane, place), bytes_of_block(end), finder, written);
}

// Adds the elements of `count` tokens.
void add_elements(const End &end, Place place, uint64_t count, uint32_t finder, bool written,
                  WrittenRanges *ranges) {
  const Plane &plane = end.plane;
  const int64_t num_elements = end.num_elements(), size = size_of(plane.dtype);
  for (; count > 0; --count, ++place.offset) {
    for (int64_t h = 0; h < end.pair.num_heads; ++h) {
      const uint8_t *at = address_of(plane, place) + h * plane.head_stride;
      for (int64_t i = 0; i < num_elements; i += plane.pack, at += plane.outer_stride) {
        const int64_t together = std::min<int64_t>(num_elements - i, plane.pack);
        if (plane.inner_stride == size) {
          ranges->add(at, static_cast<uint64_t>(together * size), finder, written);
          continue;
        }
        for (int64_t j = 0; j < together; ++j)
          ranges->add(at + j * plane.inner_stride, static_cast<uint64_t>(size), finder, written);
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
  WrittenRanges planes;
  for (const PlanePair &pair : plan.pairs) {
    const LookupPair &lookup = plan.lookups[pair.lookup];
    add_plane({pair, pair.src, lookup.src}, finder_of(plan, pair), false, &planes);
    add_plane({pair, pair.dst, lookup.dst}, finder_of(plan, pair), true, &planes);
  }
  if (!planes.meet()) return KVX_STATUS_OK;
  WrittenRanges blocks;
  each_end(plan, tokens,
           [&](const End &end, const Place &place, uint64_t, uint32_t finder, bool written) {
             add_block(end, place, finder, written, &blocks);
           });
  if (!blocks.meet()) return KVX_STATUS_OK;
  WrittenRanges elements;
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
  WrittenRanges elements;
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
