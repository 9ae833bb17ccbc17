// Tokens into rings and tails, in HOST memory.
#include <memory>
#include <vector>

#include "hybrid/numbers.h"
#include "hybrid/quantize.h"
#include "hybrid/rows.h"
#include "hybrid/run.h"

namespace kvx::hybrid {
namespace {

// The row of its ring or tail that a token is written to; kNowhere: it is skipped.
constexpr uint64_t kNowhere = UINT64_MAX;

class Places {
 public:
  explicit Places(uint32_t count) {
    if (count > kFew) many_.reset(new uint64_t[count]);
  }
  uint64_t &operator[](uint64_t i) { return many_ ? many_[i] : few_[i]; }
  const uint64_t &operator[](uint64_t i) const { return many_ ? many_[i] : few_[i]; }

 private:
  static constexpr uint32_t kFew = 256;  // a decode step allocates nothing
  uint64_t few_[kFew];
  std::unique_ptr<uint64_t[]> many_;
};

bool is_slot(int32_t slot, uint32_t num_slots) {
  return slot >= 0 && static_cast<uint32_t>(slot) < num_slots;
}

// Tokens of a token's span behind it.
uint64_t later_of_span(const kvx_hybrid_append_t &a, uint64_t i) {
  const auto span = static_cast<uint32_t>(a.span_of[i]);
  if (span >= a.num_spans) return UINT64_MAX;
  return static_cast<uint32_t>(a.span_starts[span + 1]) - 1 - i;
}

// Gives each token its place and advances the heads. Tokens that later ones of the call would
// overwrite have none.
void place_tokens(const kvx_hybrid_append_t &a, Places *places) {
  std::vector<uint32_t> left;  // of each slot, without spans
  const bool drops = a.num_tokens > a.window;
  if (drops && !a.num_spans) {
    left.resize(a.num_slots);
    for (uint64_t i = 0; i < a.num_tokens; ++i)
      if (is_slot(a.slots[i], a.num_slots)) ++left[static_cast<uint32_t>(a.slots[i])];
  }
  for (uint64_t i = 0; i < a.num_tokens; ++i) {
    (*places)[i] = kNowhere;
    const int32_t slot = a.slots[i];
    if (!is_slot(slot, a.num_slots)) continue;
    const auto of = static_cast<uint32_t>(slot);
    const auto head = static_cast<uint32_t>(a.head[of]);
    a.head[of] = static_cast<int32_t>(head + 1);
    uint64_t later = 0;
    if (drops) later = a.num_spans ? later_of_span(a, i) : --left[of];
    if (later < a.window) (*places)[i] = uint64_t{of} * a.window + head % a.window;
  }
}

}  // namespace

void run(const kvx_hybrid_append_t &a) {
  Places places(a.num_tokens);
  place_tokens(a, &places);
  const uint64_t dim = uint64_t{a.nope_dim} + a.rope_dim;
  each_row(a.num_tokens, 3 * dim, [&](uint64_t i) {
    const uint64_t to = places[i];
    if (to == kNowhere) return;
    quantize_row(a.fp8 + to * a.nope_dim, number_at(a.rope, KVX_DTYPE_BF16, to * a.rope_dim),
                 a.inv_scale ? a.inv_scale + to : nullptr, number_at(a.x, KVX_DTYPE_BF16, i * dim),
                 KVX_DTYPE_BF16, a.nope_dim, a.rope_dim);
    a.pos[to] =
        static_cast<int32_t>(position_of(a.positions, a.position_bytes, static_cast<uint32_t>(i)));
  });
}

void run(const kvx_hybrid_tail_t &t) {
  Places places(t.num_tokens);
  for (uint64_t i = 0; i < t.num_tokens; ++i) {
    places[i] = kNowhere;
    if (!is_slot(t.slots[i], t.num_slots)) continue;
    const auto of = static_cast<uint32_t>(t.slots[i]);
    const auto len = static_cast<uint32_t>(t.tail_len[of]);
    if (len >= t.ratio) continue;
    t.tail_len[of] = static_cast<int32_t>(len + 1);
    places[i] = uint64_t{of} * t.ratio + len;
  }
  each_row(t.num_tokens, uint64_t{t.row} * 8, [&](uint64_t i) {
    if (places[i] == kNowhere) return;
    const uint64_t from = i * t.row, to = places[i] * t.row;
    to_dtype(number_at(t.ka, t.state, to), t.state, number_at(t.k, t.dtype, from), t.dtype, t.row);
    to_dtype(number_at(t.za, t.state, to), t.state, number_at(t.z, t.dtype, from), t.dtype, t.row);
  });
}

}  // namespace kvx::hybrid
