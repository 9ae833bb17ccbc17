// What only the data can show: lengths, slots, block ids, scales. Every rule once, before any
// write.
#include "plan/check.h"

#include <algorithm>
#include <vector>

#include "desc/scale.h"
#include "error.h"
#include "plan/violation.h"
#include "plan/walk.h"

namespace kvx {
namespace {

// `*tokens`: what moves, of all rows.
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

// What the rows can have at one end together, as the descriptors say.
uint64_t most_tokens(const Rows &rows, const Lookup &a) {
  if (a.mode == LookupMode::kSlots || a.mode == LookupMode::kRagged) return a.indices_count;
  uint64_t most = rows.count;
  const bool has_columns = a.mode != LookupMode::kDense;
  if (__builtin_mul_overflow(most, a.block_size, &most) ||
      (has_columns && __builtin_mul_overflow(most, a.max_blocks_per_seq, &most))) {
    return UINT64_MAX;
  }
  return most;
}

// One end of a lookup.
class End {
 public:
  End(const Rows &rows, const Lookup &lookup, bool at_dst, const FieldNames &names)
      : rows_(rows), lookup_(lookup), names_(names) {
    found_.mode = lookup_.mode;
    found_.is_v = lookup_.is_v;
    found_.is_own = lookup_.is_own;
    found_.at_dst = at_dst;
    found_.sub_blocks = lookup_.sub_blocks;
    found_.sub_block = lookup_.sub_block;
  }

  // Every table entry or slot that the plan will read at this end.
  kvx_status_t check(uint64_t tokens) {
    const Lookup &a = lookup_;
    if (a.mode == LookupMode::kSlots) {
      if (tokens != a.indices_count) return fail_counts(tokens);
      return check_entries(0, tokens);
    }
    if (a.mode == LookupMode::kRagged) KVX_TRY(check_indptr());
    for (uint64_t row = 0; row < rows_.count; ++row) {
      const int64_t start = a.starts.data ? a.starts[row] : 0;
      if (start < 0) return fail_at(Fault::kStart, row, start, 0);
      const auto first = static_cast<uint64_t>(start);
      KVX_TRY(check_exact(row, first + static_cast<uint64_t>(rows_.length_of(row))));
      const uint64_t count = rows_.stored(row);
      if (count == 0) continue;
      KVX_TRY(check_capacity(row, first, count));
      if (a.mode == LookupMode::kRagged) {
        KVX_TRY(check_entries(static_cast<uint64_t>(a.indptr[row]) + first, count));
      } else if (a.mode != LookupMode::kDense) {
        const uint64_t begin = first / a.block_size, last = (first + count - 1) / a.block_size;
        KVX_TRY(check_entries(table_entry(a, row, begin), last - begin + 1));
      }
    }
    return KVX_STATUS_OK;
  }

 private:
  kvx_status_t fail_at(Fault fault, uint64_t index, int64_t value, uint64_t limit) {
    found_.fault = fault;
    found_.index = index;
    found_.value = value;
    found_.limit = limit;
    return fail_with(found_, names_);
  }

  kvx_status_t fail_counts(uint64_t tokens) {
    found_.count = tokens;
    return fail_at(Fault::kSlotCount, 0, 0, lookup_.indices_count);
  }

  kvx_status_t check_entries(uint64_t begin, uint64_t count) {
    const uint64_t end = std::min<uint64_t>(begin + count, lookup_.indices_count);
    for (uint64_t i = begin; i < end; ++i) {
      const int64_t entry = lookup_.indices[i];
      const Fault fault = fault_of(lookup_, entry);
      if (fault != Fault::kNone) return fail_at(fault, i, entry, limit_of(lookup_, entry));
    }
    return KVX_STATUS_OK;
  }

  // Tokens [first, first + count) of a row are within what the row can address.
  kvx_status_t check_capacity(uint64_t row, uint64_t first, uint64_t count) {
    const uint64_t capacity = capacity_of(lookup_, row);
    if (first <= capacity && count <= capacity - first) return KVX_STATUS_OK;
    found_.row = row;
    found_.first = first;
    found_.count = count;
    return fail_at(Fault::kCapacity, row, 0, capacity);
  }

  // A row whose tokens end before `end` has as many entries, where the table says that it is exact.
  kvx_status_t check_exact(uint64_t row, uint64_t end) {
    if (!is_inexact(lookup_, row, end)) return KVX_STATUS_OK;
    found_.row = row;
    found_.count = end;
    return fail_at(Fault::kExact, row, 0, capacity_of(lookup_, row));
  }

  kvx_status_t check_indptr() {
    const Ints &indptr = lookup_.indptr;
    if (indptr[0] != 0) return fail_at(Fault::kIndptr, 0, indptr[0], 0);
    for (uint64_t row = 0; row < rows_.count; ++row) {
      found_.first = static_cast<uint64_t>(indptr[row]);
      if (indptr[row + 1] < indptr[row])
        return fail_at(Fault::kIndptr, row + 1, indptr[row + 1], 0);
    }
    if (indptr[rows_.count] == lookup_.indices_count) return KVX_STATUS_OK;
    return fail_at(Fault::kIndptr, rows_.count, indptr[rows_.count], lookup_.indices_count);
  }

  const Rows &rows_;
  const Lookup &lookup_;
  const FieldNames &names_;
  Violation found_{};
};

// Blocks of the primary and the secondary pool.
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

// Source and destination blocks of one pool must differ, as far as tokens move.
kvx_status_t check_distinct_blocks(const Plan &plan, uint64_t tokens) {
  for (const LookupPair &lookup : plan.lookups) {
    Blocks sources;
    KVX_TRY(
        walk(plan, lookup, 0, tokens, [&](uint64_t, const Place &from, const Place &to, uint64_t) {
          if (from.block >= 0 && to.block >= 0) sources.add(from);
          return KVX_STATUS_OK;
        }));
    sources.sort();
    KVX_TRY(walk(plan, lookup, 0, tokens,
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

// The scales of `count` tokens from `place` on.
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

// Every scale that a moving token uses, at both ends.
kvx_status_t check_scale_values(const Plan &plan, const PlanePair &pair, uint64_t tokens,
                                const FieldNames &names) {
  if (!pair.src_scales.data && !pair.dst_scales.data) return KVX_STATUS_OK;
  return walk(plan, plan.lookups[pair.lookup], 0, tokens,
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
    KVX_TRY(End(rows, lookup.src, false, of_lookup).check(*tokens));
    KVX_TRY(End(rows, lookup.dst, true, of_lookup).check(*tokens));
  }
  if (rows.fill_to_max) {
    *tokens = rows.count * rows.max_len;
  } else if (rows.lens.data) {  // which may have changed since they were added up
    *tokens = std::min(*tokens, most_tokens(rows, plan.lookups[0].src));
    *tokens = std::min(*tokens, most_tokens(rows, plan.lookups[0].dst));
  }
  if (plan.check_same_pool) KVX_TRY(check_distinct_blocks(plan, *tokens));
  for (const PlanePair &pair : plan.pairs) KVX_TRY(check_scale_values(plan, pair, *tokens, names));
  return KVX_STATUS_OK;
}

}  // namespace kvx
