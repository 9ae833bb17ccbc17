// Checks what only the data shows: lengths, slots, block ids, scales. Every rule once, before any
// write.
#include "plan/check.h"

#include <algorithm>

#include "desc/scale.h"
#include "error.h"
#include "plan/apart.h"
#include "plan/once.h"
#include "plan/plan_affine.h"
#include "plan/violation.h"
#include "plan/walk.h"

namespace kvx {
namespace {

// `*tokens`: the tokens of all rows that move.
kvx_status_t check_lengths(const Plan &plan, const FieldNames &names, uint64_t *tokens) {
  const Rows &rows = plan.rows;
  *tokens = 0;
  if (!rows.lens.data) {
    *tokens = rows.count * rows.uniform_len;
    return KVX_STATUS_OK;
  }
  Violation found{};
  found.fault = Fault::kLength;
  for (uint64_t i = 0; i < rows.count / rows.rows_per_len; ++i) {
    found.index = i;
    found.value = rows.lens[i];
    if (found.value < 0) return fail_with(found, names);
    uint64_t of_beams;
    if (__builtin_mul_overflow(rows.cut(found.value), rows.rows_per_len, &of_beams) ||
        __builtin_add_overflow(*tokens, of_beams, tokens)) {
      return KVX_OUT_OF_RANGE("%s add up to more than 2^64 (spec 5.3)", names.lens);
    }
  }
  return KVX_STATUS_OK;
}

// The most tokens of all rows together at one end, by the descriptors.
uint64_t most_tokens(const Rows &rows, const Lookup &a) {
  uint64_t most = most_tokens_of_row(a);
  if (!share_entries(a) && __builtin_mul_overflow(most, rows.count, &most)) return UINT64_MAX;
  return most;
}

// One end of a lookup.
class End {
 public:
  End(const Rows &rows, const Lookup &lookup, bool at_dst, const FieldNames &names)
      : rows_(rows), lookup_(lookup), at_dst_(at_dst), names_(names) {}

  // Checks every table entry or slot that the plan will read at this end.
  kvx_status_t check(uint64_t tokens) const {
    const Lookup &a = lookup_;
    if (a.mode == LookupMode::kSlots) {
      return tokens == a.indices_count ? check_entries(0, tokens) : fail_counts(tokens);
    }
    if (a.mode == LookupMode::kRagged) KVX_TRY(check_indptr());
    for (uint64_t row = 0; row < rows_.count; ++row) {
      RowLookup<uint64_t> at{};
      uint64_t count, first, last;
      const Fault fault = row_fault(rows_, a, row, &at, &count);
      if (fault != Fault::kNone) return fail_row(fault, row, at);
      if (count == 0 || a.mode == LookupMode::kDense) continue;
      entries_of_row(a, at, count, &first, &last);
      if (goes_round(a, at, count)) {
        KVX_TRY(check_entries(first, at.entry + a.max_blocks_per_seq - first));
        first = at.entry;
      }
      KVX_TRY(check_entries(first, last - first + 1));
    }
    return KVX_STATUS_OK;
  }

 private:
  kvx_status_t check_entries(uint64_t begin, uint64_t count) const {
    const uint64_t end =
        std::min<uint64_t>(index_of(lookup_, begin + count, 0), lookup_.indices_count);
    for (uint64_t i = index_of(lookup_, begin, 0); i < end; ++i) {
      const int64_t entry = lookup_.indices[i];
      Place place;
      const Fault fault = place_of(lookup_, entry, 0, &place);
      if (fault != Fault::kNone) return fail_entry(fault, i, entry);
    }
    return KVX_STATUS_OK;
  }

  kvx_status_t check_indptr() const {
    for (uint64_t row = 0; row < rows_.count; ++row) {
      Violation found{};
      if (indptr_fault(lookup_, row, &found) == Fault::kNone) continue;
      // If indptr passes indices_count before its end, the entry that falls back is wrong.
      const bool passes = row + 1 < rows_.count && found.index > row &&
                          found.value >= static_cast<int64_t>(found.first);
      if (!passes) return fail(&found);
    }
    return KVX_STATUS_OK;
  }

  [[gnu::cold]] kvx_status_t fail(Violation *found) const {
    found->mode = lookup_.mode;
    found->is_v = lookup_.is_v;
    found->is_own = lookup_.is_own;
    found->at_dst = at_dst_;
    found->sub_blocks = lookup_.sub_blocks;
    found->sub_block = lookup_.sub_block;
    return fail_with(*found, names_);
  }

  [[gnu::cold]] kvx_status_t fail_counts(uint64_t tokens) const {
    Violation found{};
    found.fault = Fault::kSlotCount;
    found.count = tokens;
    found.limit = lookup_.indices_count;
    return fail(&found);
  }

  [[gnu::cold]] kvx_status_t fail_row(Fault fault, uint64_t row,
                                      const RowLookup<uint64_t> &at) const {
    Violation found{};
    describe(fault, rows_, lookup_, row, at, &found);
    return fail(&found);
  }

  [[gnu::cold]] kvx_status_t fail_entry(Fault fault, uint64_t index, int64_t entry) const {
    Violation found{};
    found.fault = fault;
    found.index = index;
    found.value = entry;
    found.limit = limit_of(lookup_, entry);
    return fail(&found);
  }

  const Rows &rows_;
  const Lookup &lookup_;
  const bool at_dst_;
  const FieldNames &names_;
};

// Checks the scales of `count` tokens from `place` on.
kvx_status_t check_scales_at(const PlanePair &pair, bool at_dst, const Place &place, uint64_t count,
                             const FieldNames &names) {
  const Scales &scales = at_dst ? pair.dst_scales : pair.src_scales;
  if (!scales.data || (at_dst && pair.find_scales)) return KVX_STATUS_OK;
  const uint64_t tokens = scales.token_stride ? count : 1;
  const uint32_t heads = scales.head_stride ? pair.num_heads : 1;
  for (uint64_t t = 0; t < tokens; ++t) {
    for (uint32_t h = 0; h < heads; ++h) {
      const uint8_t *at = scales.data + place.block * scales.block_stride +
                          (place.offset + static_cast<int64_t>(t)) * scales.token_stride +
                          h * scales.head_stride;
      const float scale = read_scale(at, scales.dtype);
      if (is_usable_scale(scale)) continue;
      Violation found{};
      found.fault = Fault::kScale;
      found.is_v = pair.is_v;
      found.at_dst = at_dst;
      found.value = place.block;
      found.index = h;
      found.scale = scale;
      return fail_with(found, names);
    }
  }
  return KVX_STATUS_OK;
}

// Checks every scale that a moving token uses, at both ends.
kvx_status_t check_scale_values(const Plan &plan, const PlanePair &pair, uint64_t tokens,
                                const FieldNames &names) {
  if (!pair.src_scales.data && !pair.dst_scales.data) return KVX_STATUS_OK;
  return walk(plan, pair, 0, tokens,
              [&](uint64_t, const Place &from, const Place &to, uint64_t count) -> kvx_status_t {
                if (from.block < 0 || to.block < 0) return KVX_STATUS_OK;
                KVX_TRY(check_scales_at(pair, false, from, count, names));
                return check_scales_at(pair, true, to, count, names);
              });
}

}  // namespace

kvx_status_t check_data(const Plan &plan, uint64_t *tokens) {
  const FieldNames names = field_names(plan, plan.lookups[0]);
  KVX_TRY(check_lengths(plan, names, tokens));
  const Rows &rows = plan.rows;
  for (const LookupPair &lookup : plan.lookups) {
    const FieldNames of_lookup = field_names(plan, lookup);
    const Rows found = plan.rows_of(lookup);
    KVX_TRY(End(found, lookup.src, false, of_lookup).check(*tokens));
    KVX_TRY(End(found, lookup.dst, true, of_lookup).check(*tokens));
  }
  if (rows.fill_to_max) {
    *tokens = rows.count * rows.max_len;
  } else if (rows.lens.data && plan.lookups[0].src.tokens_per_entry ==
                                   1) {  // lengths may have changed since they were added up
    *tokens = std::min(*tokens, most_tokens(rows, plan.lookups[0].src));
    *tokens = std::min(*tokens, most_tokens(rows, plan.lookups[0].dst));
  }
  KVX_TRY(check_blocks_apart(plan, *tokens));
  if (plan.affine.size()) {
    KVX_TRY(check_unit_starts(plan));
    KVX_TRY(check_unit_blocks(plan, *tokens));
  }
  KVX_TRY(check_written_once(plan, *tokens));
  for (const PlanePair &pair : plan.pairs) KVX_TRY(check_scale_values(plan, pair, *tokens, names));
  return KVX_STATUS_OK;
}

}  // namespace kvx
