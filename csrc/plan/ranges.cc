#include "plan/ranges.h"

#include <utility>
#include <vector>

#include "error.h"
#include "plan/loops.h"
#include "plan/walk.h"

namespace kvx {
namespace {

constexpr size_t kBatch = 4096;  // ranges passed at once

// Collects ranges for the caller; a range that continues the one before joins it.
class Batch {
 public:
  Batch(kvx_take_ranges_t take, void *context) : take_(take), context_(context) {
    ranges_.reserve(kBatch);
  }

  bool is_taken() const { return !has_enough_; }

  // NULL `src`: zeros.
  void add(uint32_t plane, uint8_t *dst, const uint8_t *src, uint64_t bytes) {
    if (!ranges_.empty()) {
      kvx_range_t &last = ranges_.back();
      const auto *const end = static_cast<const uint8_t *>(last.src) + last.bytes;
      const bool continues_src = src ? last.src && src == end : !last.src;
      if (continues_src && last.plane == plane &&
          dst == static_cast<uint8_t *>(last.dst) + last.bytes) {
        last.bytes += bytes;
        return;
      }
    }
    if (ranges_.size() == kBatch) flush();
    ranges_.push_back({plane, 0, src, dst, bytes});
  }

  void flush() {
    if (!ranges_.empty() && !has_enough_)
      has_enough_ = take_(context_, ranges_.data(), ranges_.size()) != 0;
    ranges_.clear();
  }

 private:
  const kvx_take_ranges_t take_;
  void *const context_;
  std::vector<kvx_range_t> ranges_;
  bool has_enough_ = false;
};

// Lists runs of tokens of one pair: joins runs that continue, then splits them into runs of bytes.
class Lister {
 public:
  Lister(const PlanePair &pair, uint32_t plane, Batch *batch)
      : pair_(pair), plane_(plane), batch_(*batch), by_element_(!can_loop(pair.src, pair.dst)) {}

  void add(Place from, Place to, int64_t tokens) {
    for (int64_t left = tokens; left > 0;) {
      const Plane &src = from.block < 0 ? pair_.dst : pair_.src;  // no source
      const int64_t at = from.block < 0 ? to.offset : from.offset;
      const int64_t count = tokens_of_loops(src, pair_.dst, at, to.offset, left);
      add_run(from.block < 0 ? nullptr : address_of(pair_.src, from), address_of(pair_.dst, to),
              count);
      from.offset += static_cast<uint32_t>(count);
      to.offset += static_cast<uint32_t>(count);
      left -= count;
    }
  }

  void flush() {
    if (!tokens_) return;
    const bool by_element = src_ && by_element_;
    Loops loops;
    make_loops(src_ ? pair_.src : pair_.dst, pair_.dst, tokens_, pair_.num_heads,
               by_element ? 1 : pair_.head_dim, size_of(pair_.dst.dtype), &loops);
    for (int64_t d = 0; d < (by_element ? int64_t{pair_.head_dim} : 1); ++d) {
      list(loops, dst_ + element_offset(pair_.dst, d),
           src_ ? src_ + element_offset(pair_.src, d) : nullptr);
    }
    tokens_ = 0;
  }

 private:
  void add_run(const uint8_t *src, uint8_t *dst, int64_t tokens) {
    const bool continues_src = src ? src_ && src == src_ + tokens_ * pair_.src.token_stride : !src_;
    const bool splits = pair_.src.token_pack || pair_.dst.token_pack;
    if (tokens_ && !splits && continues_src && dst == dst_ + tokens_ * pair_.dst.token_stride) {
      tokens_ += tokens;
      return;
    }
    flush();
    src_ = src;
    dst_ = dst;
    tokens_ = tokens;
  }

  void list(const Loops &loops, uint8_t *dst, const uint8_t *src) {
    const auto bytes = static_cast<uint64_t>(loops.run);
    int64_t done[Loops::kMost] = {};  // iterations done, by loop
    for (int i = 0; i >= 0 && batch_.is_taken();) {
      batch_.add(plane_, dst, src, bytes);
      for (i = loops.count - 1; i >= 0; --i) {
        const Loop &loop = loops.at[i];
        dst += loop.dst;
        if (src) src += loop.src;
        if (++done[i] < loop.count) break;
        dst -= loop.count * loop.dst;
        if (src) src -= loop.count * loop.src;
        done[i] = 0;
      }
    }
  }

  const PlanePair &pair_;
  const uint32_t plane_;
  Batch &batch_;
  const bool by_element_;
  const uint8_t *src_ = nullptr;  // NULL: zeros
  uint8_t *dst_ = nullptr;
  int64_t tokens_ = 0;
};

}  // namespace

kvx_status_t check_copies(const Plan &plan) {
  for (size_t layer = 0; layer < plan.layers.size(); ++layer) {
    for (const PlanePair *pair = plan.begin_of(layer); pair != plan.end_of(layer); ++pair) {
      if (!pair->convert) continue;
      if (pair->affine && plan.affine[pair->affine - 1].keeps_units) {
        return fail(
            KVX_STATUS_UNSUPPORTED,
            "%c of layer %zu has scales that cover all tokens of a block (PER_CHANNEL), but "
            "ranges are copies of tokens: run the plan (spec E.13)",
            pair->is_v ? 'V' : 'K', layer);
      }
      return fail(KVX_STATUS_UNSUPPORTED,
                  "%c of layer %zu has another %s at each end, but ranges are copies of bytes: run "
                  "the plan, or describe both ends alike (spec E.13)",
                  pair->is_v ? 'V' : 'K', layer,
                  pair->hadamard                       ? "rotation"
                  : pair->src.dtype == pair->dst.dtype ? "scale"
                                                       : "dtype");
    }
  }
  return KVX_STATUS_OK;
}

void list_ranges(const Plan &plan, uint64_t tokens, kvx_take_ranges_t take, void *context) {
  Batch batch(take, context);
  for (size_t i = 0; i < plan.pairs.size() && batch.is_taken(); ++i) {
    const PlanePair &pair = plan.pairs[i];
    Lister lister(pair, static_cast<uint32_t>(i), &batch);
    walk(plan, pair, 0, tokens, [&](uint64_t, const Place &from, const Place &to, uint64_t count) {
      if (to.block >= 0 && (from.block >= 0 || plan.zero_fill))
        lister.add(from, to, static_cast<int64_t>(count));
      return batch.is_taken() ? KVX_STATUS_OK
                              : KVX_STATUS_INTERNAL_ERROR;  // any error ends the walk
    });
    lister.flush();
  }
  batch.flush();
}

}  // namespace kvx
