#include "cpu/run.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>
#include <optional>

#include "cpu/affine.h"
#include "cpu/convert.h"
#include "cpu/copier.h"
#include "cpu/float_env.h"
#include "cpu/threads.h"
#include "plan/walk.h"

namespace kvx::cpu {
namespace {

constexpr uint64_t kBytesPerHelper = 1 << 20;  // waking a thread for less costs more than it saves
constexpr uint64_t kBytesPerHostThread = 32 << 10;  // the same for a thread that is awake
constexpr uint64_t kScatteredBytes = 16;     // cost of an element that has a cache line of its own
constexpr uint64_t kBytesPerItem = 4 << 20;  // of one layer, K and V together
constexpr uint64_t kSmallBytes = 512 << 10;  // the nearer caches hold source and destination
constexpr uint64_t kMostOfPlane = 1 << 20;   // bytes of a plane's block, for the order of blocks
constexpr uint64_t kBytesPerRow = 1 << 10;   // as many move in the time that skips rows of a walk

// A run of tokens: at both ends each token is a token_stride after the one before.
struct TokenRun {
  uint8_t *src = nullptr, *dst = nullptr;
  int64_t tokens = 0;
  Place src_place, dst_place;  // where the pair asks for them
};

// Moves runs of tokens of one pair: joins runs that continue, then copies or converts.
class Mover {
 public:
  Mover(const PlanePair &pair, Stages *stages, uint64_t tokens, bool streaming)
      : pair_(pair),
        copy_(pair.src, pair.dst, pair.num_heads, pair.head_dim, streaming),
        splits_tokens_(pair.src.token_pack || pair.dst.token_pack),
        joins_blocks_(!splits_tokens_ && !pair.src_scales.block_stride &&
                      !pair.src_scales.token_stride && !pair.dst_scales.block_stride &&
                      !pair.dst_scales.token_stride),
        needs_places_(splits_tokens_ || !joins_blocks_ || pair.convert) {
    if (pair.convert) convert_.emplace(pair, stages, tokens, streaming);
  }
  ~Mover() { flush({pending_.dst, pending_.src}); }

  void add(const Place &from, const Place &to, int64_t tokens) {
    uint8_t *src = address_of(pair_.src, from), *dst = address_of(pair_.dst, to);
    if (pending_.tokens && continues(src, dst, from, to)) {
      pending_.tokens += tokens;
      return;
    }
    flush({dst, src});
    pending_.src = src, pending_.dst = dst, pending_.tokens = tokens;
    if (__builtin_expect(needs_places_, false)) pending_.src_place = from, pending_.dst_place = to;
  }

  [[gnu::noinline]] void clear(const Place &to, int64_t tokens) {
    Place at = to;
    for (int64_t left = tokens; left > 0;) {
      const int64_t count = tokens_of_loops(pair_.dst, pair_.dst, at.offset, at.offset, left);
      Loops loops;
      make_loops(pair_.dst, pair_.dst, count, pair_.num_heads, dst_units(pair_),
                 size_of(pair_.dst.dtype), &loops);
      clear_loops(loops, 0, address_of(pair_.dst, at));
      at.offset += static_cast<uint32_t>(count);
      left -= count;
    }
    if (!pair_.find_scales) return;
    const ScaleCursor scale(pair_.dst_scales, to);
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t h = 0; h < pair_.num_heads; ++h) scale.store(t, h, 1.0f);
  }

 private:
  // Whether tokens that begin there follow the pending ones.
  bool continues(const uint8_t *src, const uint8_t *dst, const Place &from, const Place &to) const {
    const TokenRun &run = pending_;
    if (!joins_blocks_ && (from.block != run.src_place.block || to.block != run.dst_place.block))
      return false;
    if (__builtin_expect(splits_tokens_, false)) {
      return from.offset == run.src_place.offset + run.tokens &&
             to.offset == run.dst_place.offset + run.tokens;
    }
    return src == run.src + run.tokens * pair_.src.token_stride &&
           dst == run.dst + run.tokens * pair_.dst.token_stride;
  }

  [[gnu::always_inline]] void flush(const Next &next) {
    if (!pending_.tokens) return;
    if (__builtin_expect(splits_tokens_, false)) {
      move_parts();
    } else if (convert_) {
      (*convert_)(pending_.dst, pending_.src, next.src, pending_.tokens, pending_.src_place,
                  pending_.dst_place);
    } else {
      copy_(pending_.dst, pending_.src, next, pending_.tokens);
    }
    pending_.tokens = 0;
  }

  // Moves the pending tokens, as many at a time as one set of loops covers.
  [[gnu::noinline]] void move_parts() {
    Place from = pending_.src_place, to = pending_.dst_place;
    for (int64_t left = pending_.tokens; left > 0;) {
      const uint8_t *const src = address_of(pair_.src, from);
      uint8_t *const dst = address_of(pair_.dst, to);
      const auto reach = convert_ ? tokens_of_part : tokens_of_loops;
      const int64_t count = reach(pair_.src, pair_.dst, from.offset, to.offset, left);
      if (convert_) {
        (*convert_)(dst, src, src, count, from, to);
      } else {
        copy_(dst, src, {dst, src}, count);
      }
      from.offset += static_cast<uint32_t>(count);
      to.offset += static_cast<uint32_t>(count);
      left -= count;
    }
  }

  static void clear_loops(const Loops &loops, int depth, uint8_t *dst) {
    if (depth == loops.count) {
      memset(dst, 0, static_cast<size_t>(loops.run));
      return;
    }
    const Loop &loop = loops.at[depth];
    for (int64_t i = 0; i < loop.count; ++i) clear_loops(loops, depth + 1, dst + i * loop.dst);
  }

  const PlanePair &pair_;
  Copier copy_;
  std::optional<Converter> convert_;
  const bool splits_tokens_, joins_blocks_, needs_places_;
  TokenRun pending_;
};

// Whether V begins within K's first token: they may be halves of the last axis.
bool interleave(const Plane &k, const Plane &v) {
  return std::abs(v.base - k.base) < std::max(k.token_stride, k.head_stride);
}

// Moves tokens [begin, end) of pairs that share a lookup.
template <size_t kPairs>
void move_tokens(const Plan &plan, const PlanePair &pair, Mover *const (&movers)[kPairs],
                 uint64_t begin, uint64_t end) {
  walk(plan, pair, begin, end, [&](uint64_t, const Place &from, const Place &to, uint64_t count) {
    for (Mover *mover : movers) {
      if (to.block < 0) continue;
      if (from.block >= 0) {
        mover->add(from, to, static_cast<int64_t>(count));
      } else if (plan.zero_fill) {
        mover->clear(to, static_cast<int64_t>(count));
      }
    }
    return KVX_STATUS_OK;
  });
}

// Whether most chunks of the first block in a table of addresses lie nearer to the following chunk
// than to that of their plane in the second block. It decides the order of copies alone, so what a
// table has there may be anything.
bool chunks_follow(const Lookup &lookup) {
  const uint64_t planes = lookup.planes_per_entry;
  if (lookup.max_blocks_per_seq < 2) return false;
  const auto distance = [&](uint64_t i, uint64_t j) {
    const auto a = static_cast<uint64_t>(lookup.indices[i]);
    const auto b = static_cast<uint64_t>(lookup.indices[j]);
    return a < b ? b - a : a - b;
  };
  uint64_t near = 0;
  for (uint64_t i = 0; i + 1 < planes; ++i) near += distance(i, i + 1) < distance(i, i + planes);
  return near * 2 >= planes;
}

// Whether planes of a block lie nearer to each other than a plane's blocks do: in one piece, in a
// pool whose blocks have all layers, or in memory of their own that was allocated block by block.
bool blocks_come_first(const Lookup &lookup, const Plane &first, const Plane &second) {
  switch (lookup.mode) {
    case LookupMode::kDense:
    case LookupMode::kSlots:
      return false;
    case LookupMode::kPointers:
      return !lookup.planes_per_entry || chunks_follow(lookup);
    default:
      return std::abs(second.base - first.base) < first.block_stride;
  }
}

// Whether two pairs are copied by the same loops.
bool copies_alike(const PlanePair &a, const PlanePair &b) {
  const auto are_alike = [](const Plane &one, const Plane &other) {
    return one.token_stride == other.token_stride && one.head_stride == other.head_stride &&
           one.outer_stride == other.outer_stride && one.inner_stride == other.inner_stride &&
           one.pack == other.pack && one.dtype == other.dtype && !one.token_pack;
  };
  return !a.convert && !a.affine && a.num_heads == b.num_heads && a.head_dim == b.head_dim &&
         are_alike(a.src, b.src) && are_alike(a.dst, b.dst);
}

// The plan, cut into items: a range of tokens of one layer, V right after K, so that data
// prefetched for K serves V. Where blocks come first at both ends, an item is a block of all
// layers.
class Job {
 public:
  Job(const Plan &plan, uint64_t tokens) : plan_(plan), lengths_(tokens) {
    for (const LookupPair &lookup : plan.lookups) tokens_ = std::max(tokens_, entries_of(lookup));
    uint64_t all_layers = 0, all_costs = 0;  // of one token
    for (size_t l = 0; l < plan.layers.size(); ++l) {
      uint64_t bytes = 0;
      for (const PlanePair *pair = plan.begin_of(l); pair != plan.end_of(l); ++pair) {
        if (pair->affine) continue;
        const int64_t units = dst_units(*pair);
        const auto elements = per_token(uint64_t{pair->num_heads} * static_cast<uint64_t>(units),
                                        plan.lookups[pair->lookup]);
        const auto size = static_cast<uint64_t>(size_of(pair->dst.dtype));
        bytes += elements * size;
        all_costs += elements * (is_dense_vector(pair->dst, units) ? size : kScatteredBytes);
      }
      widest_layer_ = std::max(widest_layer_, bytes);
      all_layers += bytes;
    }
    if (__builtin_mul_overflow(all_layers, tokens_, &bytes_)) bytes_ = UINT64_MAX;
    if (__builtin_mul_overflow(all_costs, tokens_, &cost_)) cost_ = UINT64_MAX;
  }

  // Cuts the job up. Returns the number of threads that it is worth, without the caller's.
  uint64_t cut() {
    if (!bytes_) return 0;
    const uint64_t lent = cost_ >= kBytesPerHostThread ? num_host_threads() : 0;
    const uint64_t wanted = std::min((lent ? lent : num_threads()) - 1,
                                     cost_ / (lent ? kBytesPerHostThread : kBytesPerHelper));
    tokens_per_item_ = std::max<uint64_t>(kBytesPerItem / widest_layer_, 1);
    if (lent || cost_ > bytes_)  // a few tokens are worth sharing
      tokens_per_item_ = std::min(tokens_per_item_, (tokens_ - 1) / (wanted + 1) + 1);
    streaming_ = bytes_ >= stream_bytes();
    block_by_block_ = streaming_ && cut_blocks(wanted + 1);
    items_per_layer_ = (tokens_ - 1) / tokens_per_item_ + 1;
    const uint64_t layers = block_by_block_ ? 1 : plan_.layers.size();
    if (__builtin_mul_overflow(items_per_layer_, layers, &items_)) items_ = UINT64_MAX;
    return std::min(wanted, items_ - 1);
  }

  void run() {
    const uint64_t helpers = cut();
    if (!bytes_) return;
    // Allocates the caller's stages before the first write: if memory runs out, nothing is written.
    callers_stages_.emplace(plan_, tokens_);
    if (items_ == 1) {  // the usual decode step: nothing to share
      move_item(0, &*callers_stages_);
      return finish();
    }
    run_with_helpers(static_cast<uint32_t>(helpers), help, this);
  }

 private:
  // The most entries of all rows together.
  uint64_t entries_of(const LookupPair &lookup) const {
    const uint32_t tokens = lookup.src.tokens_per_entry;
    return tokens ? lengths_ / tokens : std::min(plan_.rows.count, lengths_);
  }

  // The elements of an entry divided by its tokens, at least one.
  uint64_t per_token(uint64_t elements, const LookupPair &lookup) const {
    const uint64_t entries = entries_of(lookup);
    return entries == tokens_ ? elements
                              : elements / (tokens_ / std::max<uint64_t>(entries, 1)) + 1;
  }

  // The entry at which an item begins or ends if its tokens do so at `token`.
  uint64_t entry_at(uint64_t token, const LookupPair &lookup) const {
    const uint64_t entries = entries_of(lookup);
    if (entries == tokens_) return token;
    if (token == tokens_) return entries;
    return std::min(token / (tokens_ / std::max<uint64_t>(entries, 1)), entries);
  }

  static void help(void *context, bool is_caller) {
    auto *job = static_cast<Job *>(context);
    if (is_caller) return job->work(&*job->callers_stages_);
    const StandardFloats standard;  // the caller has its own
    try {
      Stages own(job->plan_, job->tokens_);
      job->work(&own);
    } catch (const std::bad_alloc &) {
      // The other threads, at least the caller, do this thread's share.
    }
  }

  void work(Stages *stages) {
    if (block_by_block_) {
      move_blocks();
    } else {
      for (uint64_t item; (item = next_++) < items_;) move_item(item, stages);
    }
    finish();
  }

  // Orders a thread's streaming stores before what its caller does next.
  void finish() const {
#if defined(__x86_64__)
    if (streaming_) _mm_sfence();
#endif
  }

  void move_item(uint64_t item, Stages *stages) {
    if (items_per_layer_ == 1) return move_layer(item, 0, tokens_, stages);
    const uint64_t begin = item % items_per_layer_ * tokens_per_item_;
    const uint64_t end = std::min(tokens_per_item_, tokens_ - begin) + begin;
    move_layer(item / items_per_layer_, begin, end, stages);
  }

  // Cuts a job of several blocks for each of `threads` into items of a block each, if all planes
  // are copied by the same loops, and both ends have blocks of one size that come before their
  // planes.
  bool cut_blocks(uint64_t threads) {
    if (plan_.layers.size() < 2 || plan_.lookups.size() > 1 || plan_.zero_fill) return false;
    if (plan_.begin_of(0) == plan_.end_of(0) || plan_.begin_of(1) == plan_.end_of(1)) return false;
    const PlanePair &first = *plan_.begin_of(0), &second = *plan_.begin_of(1);
    const Lookup &src = plan_.lookups[0].src, &dst = plan_.lookups[0].dst;
    const uint64_t tokens = dst.block_size, bytes = widest_layer_ * tokens;
    if (src.tokens_per_entry != 1 || src.block_size != tokens || tokens * 2 * threads > tokens_)
      return false;
    if (bytes > kMostOfPlane || bytes < plan_.rows.count * kBytesPerRow) return false;
    for (const PlanePair &pair : plan_.pairs)
      if (!copies_alike(pair, first)) return false;
    if (!blocks_come_first(src, first.src, second.src) ||
        !blocks_come_first(dst, first.dst, second.dst)) {
      return false;
    }
    tokens_per_item_ = tokens;
    return true;
  }

  // Moves items, all planes of each. Tokens of many planes are found before they are moved: what
  // the search reads would otherwise wait behind the stores of the plane before.
  void move_blocks() {
    const PlanePair &first = plan_.pairs[0];
    Copier copy(first.src, first.dst, first.num_heads, first.head_dim, streaming_);
    struct Run {
      uint8_t *dst;
      const uint8_t *src;
      int64_t tokens;
    };
    std::array<Run, 256> found;
    size_t count = 0;
    const auto move = [&] {
      for (size_t i = 0; i < count; ++i) {
        const Run &run = found[i], &next = found[i + 1 < count ? i + 1 : i];
        copy(run.dst, run.src, {next.dst, next.src}, run.tokens);
      }
      count = 0;
    };
    for (uint64_t item; (item = next_++) < items_; move()) {
      const uint64_t begin = item * tokens_per_item_;
      const uint64_t end = std::min(tokens_per_item_, tokens_ - begin) + begin;
      for (const PlanePair &pair : plan_.pairs) {
        walk(plan_, pair, begin, end,
             [&](uint64_t, const Place &from, const Place &to, uint64_t tokens) {
               if (from.block < 0 || to.block < 0) return KVX_STATUS_OK;
               if (count == found.size()) move();
               found[count++] = {address_of(pair.dst, to), address_of(pair.src, from),
                                 static_cast<int64_t>(tokens)};
               return KVX_STATUS_OK;
             });
      }
    }
  }

  void move_layer(size_t layer, uint64_t begin, uint64_t end, Stages *stages) {
    const PlanePair *pair = plan_.begin_of(layer), *const last = plan_.end_of(layer);
    while (pair != last) {
      const PlanePair &k = *pair++;
      if (__builtin_expect(k.affine != 0, false)) continue;
      const LookupPair &lookup = plan_.lookups[k.lookup];
      const uint64_t first = entry_at(begin, lookup), end_entry = entry_at(end, lookup);
      Mover move_k(k, stages, tokens_, streaming_);
      // Small calls look tokens up once for two planes. Large calls write one plane at a time,
      // unless K and V interleave in the source.
      if (pair != last && pair->lookup == k.lookup && !pair->affine && !lookup.differs_by_plane() &&
          (bytes_ < kSmallBytes || interleave(k.src, pair->src))) {
        Mover move_v(*pair++, stages, tokens_, streaming_);
        move_tokens(plan_, k, {&move_k, &move_v}, first, end_entry);
      } else {
        move_tokens(plan_, k, {&move_k}, first, end_entry);
      }
    }
  }

  const Plan &plan_;
  const uint64_t lengths_;         // added up
  uint64_t tokens_ = 0;            // or, where no plane has an entry for each, the most entries
  uint64_t widest_layer_ = 0;      // bytes of one token
  uint64_t bytes_ = 0, cost_ = 0;  // of the job; the dense bytes that would take as long
  uint64_t tokens_per_item_ = 1, items_per_layer_ = 0, items_ = 0;
  bool streaming_ = false, block_by_block_ = false;
  std::optional<Stages> callers_stages_;
  std::atomic<uint64_t> next_{0};
};

}  // namespace

uint64_t stream_bytes() {
  // A quarter of the last-level cache: smaller destinations are still cached when they are read.
  // Virtual machines often report the host's cache, so there is an upper bound.
  static const uint64_t bytes = [] {
    uint64_t cache = 0;
#if defined(_SC_LEVEL3_CACHE_SIZE)
    cache = static_cast<uint64_t>(std::max(sysconf(_SC_LEVEL3_CACHE_SIZE), 0L));
#endif
    return std::clamp<uint64_t>(cache / 4, 8 << 20, 16 << 20);
  }();
  return bytes;
}

void run(const Plan &plan, uint64_t tokens) {
  Job(plan, tokens).run();
  if (plan.affine.size()) run_affine(plan, tokens);
}

uint32_t count_threads(const Plan &plan, uint64_t tokens) {
  const auto threads = static_cast<uint32_t>(Job(plan, tokens).cut()) + 1;
  return plan.affine.size() ? std::max(threads, count_affine_threads(plan, tokens)) : threads;
}

}  // namespace kvx::cpu
