// What the numbers of calls of kvx_hybrid.h show, in HOST memory.
#include <vector>

#include "desc/seen.h"
#include "error.h"
#include "rules/hybrid.h"

namespace kvx {
namespace {

kvx_status_t check_number(const char *name, uint64_t index, int64_t value, int64_t least,
                          int64_t most) {
  if (value >= least && value <= most) return KVX_STATUS_OK;
  return KVX_OUT_OF_RANGE("%s[%llu] is %lld, expected %lld to %lld (spec E.22)", name,
                          static_cast<ull>(index), static_cast<ll>(value), static_cast<ll>(least),
                          static_cast<ll>(most));
}

int64_t position_at(const void *positions, uint32_t bytes, uint64_t i) {
  return bytes == 4 ? static_cast<const int32_t *>(positions)[i]
                    : static_cast<const int64_t *>(positions)[i];
}

// Spans hold all tokens one after the other, those of one slot each; no two have one slot.
template <class Call>
kvx_status_t check_spans(const char *name, const Call &call) {
  if (!call.num_spans) return KVX_STATUS_OK;
  const auto outside = [&](const char *field, uint64_t index, int64_t value, const char *expected) {
    return KVX_OUT_OF_RANGE("%s.%s[%llu] is %lld, expected %s (spec E.22)", name, field,
                            static_cast<ull>(index), static_cast<ll>(value), expected);
  };
  std::vector<bool> seen(call.num_slots);
  uint32_t i = 0;
  for (uint32_t span = 0; span < call.num_spans; ++span) {
    if (call.span_starts[span] != static_cast<int64_t>(i))
      return outside("span_starts", span, call.span_starts[span], "the end of the span before");
    const int32_t end = call.span_starts[span + 1];
    if (end < static_cast<int64_t>(i) || end > static_cast<int64_t>(call.num_tokens))
      return outside("span_starts", span + 1, end,
                     "no less than the one before, num_tokens at most");
    if (end == static_cast<int64_t>(i)) continue;
    const int32_t slot = call.slots[i];
    if (slot >= 0 && static_cast<uint32_t>(slot) < call.num_slots) {
      if (seen[static_cast<uint32_t>(slot)])
        return outside("slots", i, slot, "a slot that no span before has");
      seen[static_cast<uint32_t>(slot)] = true;
    }
    for (; i < static_cast<uint32_t>(end); ++i) {
      if (call.span_of[i] != static_cast<int64_t>(span))
        return outside("span_of", i, call.span_of[i], "the span that its token lies in");
      if (call.slots[i] != slot)
        return outside("slots", i, call.slots[i], "that of its whole span");
    }
  }
  if (i == call.num_tokens) return KVX_STATUS_OK;
  return outside("span_starts", call.num_spans, i, "num_tokens");
}

bool takes_part(const uint8_t *mask, const int32_t *slots, uint64_t i) {
  return (!mask || mask[i]) && (!slots || slots[i] != -1);
}

// Calls take(place) with the place that each row writes, until it returns false: `place_of(i)`, or
// less than 0 for a row that is skipped.
template <class PlaceOf, class Take>
void each_place(uint64_t rows, const PlaceOf &place_of, Take take) {
  for (uint64_t i = 0; i < rows; ++i) {
    const int64_t place = place_of(i);
    if (place >= 0 && !take(static_cast<uint64_t>(place))) return;
  }
}

// No two rows write one place. The numbers have been checked.
template <class PlaceOf>
kvx_status_t check_once(const char *name, uint64_t rows, const PlaceOf &place_of) {
  if (are_different([&](auto take) { each_place(rows, place_of, take); })) return KVX_STATUS_OK;
  Seen seen(rows);
  for (uint64_t i = 0; i < rows; ++i) {
    const int64_t place = place_of(i);
    if (place < 0 || seen.add(static_cast<uint64_t>(place))) continue;
    uint64_t first = 0;
    while (first < i && place_of(first) != place) ++first;
    return KVX_INVALID(
        "%s has one place for rows %llu and %llu, which would overwrite each other; expected a "
        "place for each (spec E.22)",
        name, static_cast<ull>(first), static_cast<ull>(i));
  }
  return KVX_STATUS_OK;
}

}  // namespace

kvx_status_t check_hybrid_data(const kvx_hybrid_append_t &a) {
  for (uint64_t i = 0; i < a.num_tokens; ++i) {
    if (a.slots[i] == -1) continue;
    KVX_TRY(check_number("append.slots", i, a.slots[i], -1, int64_t{a.num_slots} - 1));
    const int64_t position = position_at(a.positions, a.position_bytes, i);
    KVX_TRY(check_number("append.positions", i, position, 0, INT32_MAX));
  }
  return check_spans("append", a);
}

kvx_status_t check_hybrid_data(const kvx_hybrid_tail_t &t) {
  std::vector<int64_t> lens(t.tail_len, t.tail_len + t.num_slots);
  for (uint64_t i = 0; i < t.num_tokens; ++i) {
    const int32_t slot = t.slots[i];
    KVX_TRY(check_number("tail.slots", i, slot, -1, int64_t{t.num_slots} - 1));
    if (slot == -1) continue;
    const auto of = static_cast<uint64_t>(slot);
    KVX_TRY(check_number("tail.tail_len", of, t.tail_len[of], 0, t.ratio));
    if (++lens[of] > t.ratio) {
      return KVX_OUT_OF_RANGE(
          "tail.slots[%llu] is %d, whose tail has no room for this token: it has %u rows; flush it "
          "first (spec E.22)",
          static_cast<ull>(i), slot, t.ratio);
    }
  }
  return check_spans("tail", t);
}

kvx_status_t check_hybrid_data(const kvx_hybrid_compress_t &c) {
  // In bulk a slot says nothing but whether its row is skipped.
  const int64_t most = c.flags & KVX_HYBRID_BULK ? INT32_MAX : int64_t{c.num_slots} - 1;
  for (uint64_t i = 0; i < c.num_rows; ++i) {
    if (!takes_part(c.mask, c.slots, i)) continue;
    if (c.slots) KVX_TRY(check_number("compress.slots", i, c.slots[i], -1, most));
    if (!c.cos_sin) continue;
    const int64_t position = position_at(c.positions, c.position_bytes, i);
    KVX_TRY(check_number("compress.positions", i, position, 0, int64_t{c.num_positions} - 1));
  }
  return KVX_STATUS_OK;
}

kvx_status_t check_hybrid_data(const kvx_hybrid_flush_t &f) {
  const int64_t most = int64_t{f.max_blocks} * f.entries_per_block - 1;
  for (uint64_t i = 0; i < f.num_rows; ++i) {
    if (!takes_part(f.mask, f.slots, i)) continue;
    if (f.slots) KVX_TRY(check_number("flush.slots", i, f.slots[i], -1, INT32_MAX));
    KVX_TRY(check_number("flush.entry_ids", i, f.entry_ids[i], 0, most));
    const uint64_t at =
        i * f.max_blocks + static_cast<uint32_t>(f.entry_ids[i]) / f.entries_per_block;
    KVX_TRY(check_number("flush.block_table", at, f.block_table[at], 0, int64_t{f.num_blocks} - 1));
  }
  return check_once("flush.block_table", f.num_rows, [&](uint64_t i) -> int64_t {
    if (!takes_part(f.mask, f.slots, i)) return -1;
    const int64_t entry = f.entry_ids[i];
    if (entry < 0 || entry > most) return -1;  // another thread has changed it since
    const auto at = i * f.max_blocks + static_cast<uint64_t>(entry) / f.entries_per_block;
    return int64_t{f.block_table[at]} * f.entries_per_block + entry % f.entries_per_block;
  });
}

kvx_status_t check_hybrid_data(const kvx_hybrid_state_t &s) {
  for (uint64_t i = 0; i < s.num_rows; ++i)
    if (takes_part(s.mask, nullptr, i))
      KVX_TRY(check_number("state.slots", i, s.slots[i], -1, int64_t{s.num_slots} - 1));
  return check_once("state.slots", s.num_rows, [&](uint64_t i) -> int64_t {
    return takes_part(s.mask, nullptr, i) ? s.slots[i] : -1;
  });
}

kvx_status_t check_hybrid_data(const kvx_hybrid_pages_t &p, bool writes) {
  const int64_t most = int64_t{p.num_pages} * p.entries_per_page - 1;
  for (uint64_t i = 0; i < p.num_rows; ++i)
    KVX_TRY(check_number("pages.slots", i, p.slots[i], -1, most));
  if (!writes) return KVX_STATUS_OK;
  return check_once("pages.slots", p.num_rows, [&](uint64_t i) { return p.slots[i]; });
}

}  // namespace kvx
