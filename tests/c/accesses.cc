// Accesses of csrc/extent.h, on random pieces of a short array, against a comparison of all pairs.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

#include "extent.h"

namespace {

constexpr uint32_t kNobody = kvx::Accesses::kNobody;

struct Piece {
  uint32_t begin, end, owner, part;
  bool written;
  bool operator==(const Piece &) const = default;
};

bool may_overlap(const Piece &a, const Piece &b) {
  if (!a.written && !b.written) return true;
  return a.owner == b.owner && (a.owner != kNobody || a == b);
}

// The least byte that two pieces share which may not; -1: none.
long expected(const std::vector<Piece> &pieces) {
  long first = -1;
  for (size_t i = 0; i < pieces.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      const Piece &a = pieces[i], &b = pieces[j];
      const long begin = std::max(a.begin, b.begin);
      if (may_overlap(a, b) || begin >= std::min(a.end, b.end)) continue;
      if (first < 0 || begin < first) first = begin;
    }
  }
  return first;
}

}  // namespace

int main() {
  static uint8_t memory[64];
  long meetings = 0;
  for (unsigned seed = 1; seed <= 3; ++seed) {
    std::mt19937 random(seed);
    const auto below = [&](uint32_t end) { return static_cast<uint32_t>(random() % end); };
    for (int round = 0; round < 200000; ++round) {
      std::vector<Piece> pieces(1 + below(7));
      kvx::Accesses accesses;
      for (Piece &piece : pieces) {
        const uint32_t begin = below(60), bytes = 1 + below(4);
        const uint32_t owner = below(3) ? below(3) : kNobody;
        piece = {begin, begin + bytes, owner, below(2), below(3) == 0};
        if (&piece != pieces.data() && below(4) == 0) piece = *(&piece - 1);
        if (owner != kNobody) piece.part = 0;
        accesses.add({memory + piece.begin, memory + piece.end}, piece.owner, piece.written,
                     piece.part);
      }
      const auto *const at = static_cast<const uint8_t *>(accesses.meet());
      const long found = at ? at - memory : -1, wanted = expected(pieces);
      meetings += wanted >= 0;
      if (found == wanted) continue;
      std::printf("seed %u, round %d: found %ld, expected %ld\n", seed, round, found, wanted);
      return 1;
    }
  }
  std::printf("%ld of 600000 meet\n", meetings);
  return meetings > 50000 && meetings < 550000 ? 0 : 1;
}
