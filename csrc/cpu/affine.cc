#include "cpu/affine.h"

#include <algorithm>
#include <atomic>
#include <cmath>

#include "cpu/affine_ends.h"
#include "cpu/float_env.h"
#include "cpu/threads.h"

namespace kvx::cpu {
namespace {

constexpr uint64_t kBytesPerHelper = 128
                                     << 10;  // less than for a copy, since quantizing takes longer
constexpr uint64_t kBytesPerItem = 256 << 10;

// Tokens [first, last) of one row, and the number of tokens in all rows before.
struct Part {
  uint64_t row, first, last, flat;
  RowLookup<uint64_t> src, dst;
};

// Calls visit(token, from, to, count) for runs of tokens that stay in one block at both ends.
template <class Visit>
void each_run(const LookupPair &lookup, const PlanePair &pair, const Part &part, Visit visit) {
  for (uint64_t token = part.first; token < part.last;) {
    Place from, to;
    find(lookup.src, part.src, token, part.flat + token, pair.plane, &from);
    find(lookup.dst, part.dst, token, part.flat + token, pair.plane, &to);
    const uint64_t count =
        std::max<uint64_t>(std::min({part.last - token, uint64_t{from.run}, uint64_t{to.run}}), 1);
    visit(token, from, to, static_cast<uint32_t>(count));
    token += count;
  }
}

// Moves tokens whose units at the destination lie within a token, or whose format has no units.
class TokenMover {
 public:
  TokenMover(const Plan &plan, const PlanePair &pair, const AffinePair &affine)
      : plan_(plan), pair_(pair), src_(pair, affine.src), dst_(pair, affine.dst) {}

  void operator()(const Part &part) {
    each_run(plan_.lookups[pair_.lookup], pair_, part,
             [&](uint64_t, Place from, Place to, uint32_t count) {
               if (to.block < 0 || (from.block < 0 && !plan_.zero_fill)) return;
               if (src_.covers_tokens()) return move_heads(from, to, count);
               for (uint32_t i = 0; i < count; ++i, ++from.offset, ++to.offset)
                 for (uint32_t head = 0; head < pair_.num_heads; ++head) move(from, to, head);
             });
  }

 private:
  // Moves head by head, so that the units of a block are read once.
  void move_heads(const Place &from, const Place &to, uint32_t count) {
    for (uint32_t head = 0; head < pair_.num_heads; ++head) {
      Place src = from, dst = to;
      for (uint32_t i = 0; i < count; ++i, ++src.offset, ++dst.offset) move(src, dst, head);
    }
  }

  void move(const Place &from, const Place &to, uint32_t head) {
    const auto dim = static_cast<int64_t>(pair_.head_dim);
    if (from.block < 0) return dst_.clear(to, head);
    float values[kPiece];
    const auto read = [&](int64_t first, int64_t count) {
      src_.read(from, head, first, count, values);
    };
    if (!dst_.group()) {
      dst_.set_scale(to, head);
      if (pair_.find_scales) {
        float most = 0.0f;
        for (int64_t d = 0; d < dim; d += kPiece) {
          const int64_t count = std::min(dim - d, kPiece);
          read(d, count);
          for (int64_t i = 0; i < count; ++i) most = std::max(most, std::abs(values[i]));
        }
        dst_.find_scale(to, head, most);
      }
      for (int64_t d = 0; d < dim; d += kPiece) {
        const int64_t count = std::min(dim - d, kPiece);
        read(d, count);
        dst_.write(to, head, d, count, values);
      }
      return;
    }
    const auto group = static_cast<int64_t>(dst_.group());
    if (group <= kPiece) return quantize_pieces(to, head, read, values);
    for (int64_t begin = 0; begin < dim; begin += group) {
      Bounds bounds;
      for (int64_t d = 0; d < group; d += kPiece) {
        const int64_t count = std::min(group - d, kPiece);
        read(begin + d, count);
        kernels().bound(&bounds, values, count);
      }
      const ScaleZero unit = dst_.find_unit(bounds);
      dst_.store_unit(to, head, begin / group, unit);
      for (int64_t d = 0; d < group; d += kPiece) {
        const int64_t count = std::min(group - d, kPiece);
        read(begin + d, count);
        dst_.quantize(to, head, begin + d, count, values, unit);
      }
    }
  }

  // Of groups that fit the buffer `values`, which read(first, count) fills: as many at a time as
  // do.
  template <class Read>
  void quantize_pieces(const Place &to, uint32_t head, Read read, const float *values) {
    const auto dim = static_cast<int64_t>(pair_.head_dim);
    const auto group = static_cast<int64_t>(dst_.group());
    const int64_t piece = kPiece / group * group;
    for (int64_t begin = 0; begin < dim; begin += piece) {
      const int64_t count = std::min(dim - begin, piece);
      read(begin, count);
      if (dst_.has_groups()) {
        dst_.quantize_groups(to, head, begin, count, values);
        continue;
      }
      for (int64_t d = 0; d < count; d += group) {
        Bounds bounds;
        kernels().bound(&bounds, values + d, group);
        const ScaleZero unit = dst_.find_unit(bounds);
        dst_.store_unit(to, head, (begin + d) / group, unit);
        dst_.quantize(to, head, begin + d, group, values + d, unit);
      }
    }
  }

  const Plan &plan_;
  const PlanePair &pair_;
  AffineSource src_;
  AffineTarget dst_;
};

// Moves tokens into units that cover those of a block: as many as go into one block at a time.
class BlockMover {
 public:
  BlockMover(const Plan &plan, const PlanePair &pair, const AffinePair &affine)
      : plan_(plan),
        pair_(pair),
        lookup_(plan.lookups[pair.lookup]),
        affine_(affine),
        src_(pair, affine.src),
        dst_(pair, affine.dst),
        old_(as_source(pair), affine.dst) {}

  void operator()(const Part &part) {
    Part unit = part;
    while (unit.first < part.last) {
      const uint64_t position = unit.dst.start + unit.first;
      unit.last =
          std::min(part.last, unit.first + affine_.block_size - position % affine_.block_size);
      move(unit);
      unit.first = unit.last;
    }
  }

 private:
  // The destination as a source, to read its tokens.
  static PlanePair as_source(const PlanePair &pair) {
    PlanePair reversed = pair;
    reversed.src = pair.dst;
    reversed.src_scales = {};
    return reversed;
  }

  void move(const Part &unit) {
    // All tokens are in the block of the first; a token in a null block has no source.
    Place from, to;
    find(lookup_.src, unit.src, unit.first, unit.flat + unit.first, pair_.plane, &from);
    find(lookup_.dst, unit.dst, unit.first, unit.flat + unit.first, pair_.plane, &to);
    if (to.block < 0) return;
    const auto tokens = static_cast<uint32_t>(unit.last - unit.first);
    if (affine_.keeps_units && from.block >= 0 && from.offset == 0 && to.offset == 0 &&
        from.run >= tokens) {
      for (uint32_t head = 0; head < pair_.num_heads; ++head) copy(from, to, tokens, head);
      return;
    }
    bool any = false;
    each_token(unit, [&](const Place &at, const Place &) { any |= at.block >= 0; });
    if (!any && !plan_.zero_fill) return;
    for (uint32_t head = 0; head < pair_.num_heads; ++head)
      for (int64_t d = 0; d < pair_.head_dim; d += kPiece)
        quantize(unit, to, head, d, std::min<int64_t>(pair_.head_dim - d, kPiece));
  }

  template <class Visit>
  void each_token(const Part &unit, Visit visit) {
    each_run(lookup_, pair_, unit, [&](uint64_t, Place from, Place to, uint32_t count) {
      for (uint32_t i = 0; i < count; ++i, ++from.offset, ++to.offset)
        if (to.block >= 0) visit(from, to);
    });
  }

  void copy(Place from, Place to, uint32_t tokens, uint32_t head) {
    dst_.copy_units(to, src_, from, head);
    for (uint32_t i = 0; i < tokens; ++i, ++from.offset, ++to.offset)
      dst_.copy_bytes(to, src_, from, head);
  }

  // Calls visit(place, values) for each token of the block that keeps its numbers: tokens before
  // those that move, and between them.
  template <class Visit>
  void each_vector(const Part &unit, const Place &block, uint32_t head, int64_t first,
                   int64_t count, Visit visit) {
    float values[kPiece];
    const auto keep = [&](const Place &at) {
      old_.decode_each(at, head, first, count, values, old_scales_, old_zeros_);
      visit(at, values);
    };
    if (affine_.requantizes) {
      Place at = block;
      for (at.offset = 0; at.offset < block.offset; ++at.offset) keep(at);
    }
    each_token(unit, [&](const Place &from, const Place &to) {
      if (from.block >= 0) {
        src_.read(from, head, first, count, values);
        visit(to, values);
      } else if (plan_.zero_fill) {
        std::fill_n(values, count, 0.0f);
        visit(to, values);
      } else if (affine_.requantizes) {
        keep(to);
      }
    });
  }

  void quantize(const Part &unit, const Place &block, uint32_t head, int64_t first, int64_t count) {
    if (affine_.requantizes) old_.load_units(block, head, first, count, old_scales_, old_zeros_);
    float least[kPiece], largest[kPiece], scales[kPiece], zeros[kPiece];
    std::fill_n(least, count, INFINITY);
    std::fill_n(largest, count, -INFINITY);
    each_vector(unit, block, head, first, count, [&](const Place &, const float *values) {
      kernels().bound_each(least, largest, values, count);
    });
    for (int64_t i = 0; i < count; ++i) {
      const ScaleZero found = dst_.find_unit({least[i], largest[i]});
      scales[i] = found.scale, zeros[i] = found.zero;
    }
    each_vector(unit, block, head, first, count, [&](const Place &at, const float *values) {
      dst_.quantize_each(at, head, first, count, values, scales, zeros);
    });
    for (int64_t i = 0; i < count; ++i)
      dst_.store_unit(block, head, first + i, {scales[i], zeros[i]});
  }

  const Plan &plan_;
  const PlanePair &pair_;
  const LookupPair &lookup_;
  const AffinePair &affine_;
  AffineSource src_;
  AffineTarget dst_;
  AffineSource old_;
  float old_scales_[kPiece], old_zeros_[kPiece];
};

// Affine pairs cut into items: a range of the tokens of all rows, of one pair.
class AffineJob {
 public:
  AffineJob(const Plan &plan, uint64_t tokens) : plan_(plan), tokens_(tokens) {
    for (const PlanePair &pair : plan.pairs) {
      if (!pair.affine) continue;
      const uint64_t token = uint64_t{pair.num_heads} * pair.head_dim;
      widest_ = std::max(widest_, token);
      uint64_t bytes;
      if (__builtin_mul_overflow(token, tokens, &bytes) ||
          __builtin_add_overflow(bytes_, bytes, &bytes_)) {
        bytes_ = UINT64_MAX;
      }
    }
  }

  // The number of threads that the job is worth, without the caller's.
  uint64_t cut() {
    if (!bytes_) return 0;
    const uint64_t lent = num_host_threads();
    const uint64_t wanted = std::min((lent ? lent : num_threads()) - 1, bytes_ / kBytesPerHelper);
    per_item_ = std::max<uint64_t>(kBytesPerItem / widest_, 1);
    per_item_ = std::min(per_item_, (tokens_ - 1) / (wanted + 1) + 1);
    items_per_pair_ = (tokens_ - 1) / per_item_ + 1;
    if (__builtin_mul_overflow(items_per_pair_, plan_.pairs.size(), &items_)) items_ = UINT64_MAX;
    return std::min(wanted, items_ - 1);
  }

  void run() {
    const uint64_t helpers = cut();
    if (bytes_) run_with_helpers(static_cast<uint32_t>(helpers), help, this);
  }

 private:
  static void help(void *context, bool) {
    const StandardFloats standard;
    static_cast<AffineJob *>(context)->work();
  }

  void work() {
    for (uint64_t item; (item = next_++) < items_;) {
      const PlanePair &pair = plan_.pairs[item / items_per_pair_];
      if (!pair.affine) continue;
      const AffinePair &affine = plan_.affine[pair.affine - 1];
      const uint64_t begin = item % items_per_pair_ * per_item_;
      const uint64_t end = begin + std::min(per_item_, tokens_ - begin);
      if (affine.dst.covers_tokens) {
        each_part(pair, begin, end, affine.block_size, BlockMover(plan_, pair, affine));
      } else {
        each_part(pair, begin, end, 1, TokenMover(plan_, pair, affine));
      }
    }
  }

  // Calls move(part) for the part of tokens [begin, end) in each row. The `unit` tokens of a
  // destination unit are not split: they go with the first.
  template <class Move>
  void each_part(const PlanePair &pair, uint64_t begin, uint64_t end, uint64_t unit, Move move) {
    const LookupPair &lookup = plan_.lookups[pair.lookup];
    const Rows rows = plan_.rows_of(lookup);
    Part part{};
    for (; part.row < rows.count && part.flat < end; ++part.row) {
      const uint64_t stored = rows.stored(part.row);
      const auto within = [&](uint64_t flat) {
        return flat > part.flat ? std::min(flat - part.flat, stored) : 0;
      };
      part.first = within(begin), part.last = within(end);
      if (stored) {
        read_row(lookup.src, part.row, &part.src);
        read_row(lookup.dst, part.row, &part.dst);
        const auto next_unit = [&](uint64_t token) {
          const uint64_t past = (part.dst.start + token) % unit;
          return token && past ? std::min(token + unit - past, stored) : token;
        };
        part.first = next_unit(part.first), part.last = next_unit(part.last);
        if (part.first < part.last) move(part);
      }
      part.flat += stored;
    }
  }

  const Plan &plan_;
  const uint64_t tokens_;
  uint64_t widest_ = 1;  // bytes of one token
  uint64_t bytes_ = 0, per_item_ = 1, items_per_pair_ = 0, items_ = 0;
  std::atomic<uint64_t> next_{0};
};

}  // namespace

void run_affine(const Plan &plan, uint64_t tokens) { AffineJob(plan, tokens).run(); }

uint32_t count_affine_threads(const Plan &plan, uint64_t tokens) {
  return static_cast<uint32_t>(AffineJob(plan, tokens).cut()) + 1;
}

}  // namespace kvx::cpu
