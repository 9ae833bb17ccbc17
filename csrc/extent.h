// Memory from a first byte to a last, and whether what a call writes meets anything else of it.
#pragma once

#include <algorithm>
#include <compare>
#include <cstdint>
#include <vector>

namespace kvx {

struct Extent {
  const uint8_t *begin, *end;
  auto operator<=>(const Extent &) const = default;
};

// `bytes` from `data` on, cut at the end of the address space.
inline Extent extent_at(const void *data, uint64_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(data);
  const uintptr_t end = begin + std::min<uint64_t>(bytes, UINTPTR_MAX - begin);
  return {static_cast<const uint8_t *>(data), reinterpret_cast<const uint8_t *>(end)};
}

inline bool intersect(const Extent &a, const Extent &b) {
  return a.begin < b.end && b.begin < a.end;
}

// The extent from the first byte of either to the last.
inline Extent hull(const Extent &a, const Extent &b) {
  return {std::min(a.begin, b.begin), std::max(a.end, b.end)};
}

inline bool contains(const Extent &extent, const uint8_t *at) {
  return extent.begin <= at && at < extent.end;
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

// What a call reads and writes, piece by piece: no two pieces of different owners may overlap if
// one of them is written.
class Accesses {
 public:
  // The owner of pieces that only the same pieces may overlap: the same extent of the same part,
  // both written or both read.
  static constexpr uint32_t kNobody = UINT32_MAX;

  // Pieces of an owner have been compared by other means.
  void add(const Extent &extent, uint32_t owner, bool written, uint32_t part = 0) {
    const Piece piece{extent, part, owner, written};
    if (!all_.empty()) {
      Piece &last = all_.back();
      if (last == piece) return;
      if (owner != kNobody && last.owner == owner && last.written == written &&
          last.extent.end == extent.begin) {
        last.extent.end = extent.end;
        return;
      }
    }
    all_.push_back(piece);
  }

  // The first byte that two share; NULL: none.
  const void *meet() {
    std::sort(all_.begin(), all_.end());
    all_.erase(std::unique(all_.begin(), all_.end()), all_.end());
    Furthest any, written;
    for (const Piece &piece : all_) {
      const uint8_t *const begin = piece.extent.begin;
      if (begin < written.of_others(piece.owner) ||
          (piece.written && begin < any.of_others(piece.owner))) {
        return begin;
      }
      any.add(piece);
      if (piece.written) written.add(piece);
    }
    return nullptr;
  }

 private:
  struct Piece {
    Extent extent;
    uint32_t part, owner;
    bool written;
    auto operator<=>(const Piece &) const = default;
  };

  // The furthest end of the pieces so far, and the furthest of all owners but one.
  struct Furthest {
    const uint8_t *end = nullptr, *of_rest = nullptr;
    uint32_t owner = kNobody;

    const uint8_t *of_others(uint32_t one) const {
      return one == owner && one != kNobody ? of_rest : end;
    }
    void add(const Piece &piece) {
      const uint8_t *const its = piece.extent.end;
      if (piece.owner == owner) {
        end = std::max(end, its);
      } else if (its > end) {
        of_rest = end, end = its, owner = piece.owner;
      } else {
        of_rest = std::max(of_rest, its);
      }
    }
  };

  std::vector<Piece> all_;
};

}  // namespace kvx
