#include "plan/once.h"

#include <algorithm>
#include <vector>

#include "desc/seen.h"
#include "error.h"
#include "plan/violation.h"
#include "plan/walk.h"

namespace kvx {
namespace {

// The tokens that a row writes into one block, one after the other.
struct Run {
  Place at;
  uint64_t row, token, count;  // the first of them, within the row

  // Of all blocks of both pools.
  uint64_t block() const { return static_cast<uint64_t>(at.block) * 2 + at.secondary; }
  uint64_t end() const { return at.offset + count; }
};

// Calls visit(run) for the runs of a lookup's destination until it returns false.
template <class Visit>
void each_run(const Plan &plan, const LookupPair &lookup, uint32_t plane, uint64_t tokens,
              Visit visit) {
  Run run{};
  uint64_t row_before = UINT64_MAX, token = 0;
  const auto take = [&](uint64_t row, const Place &from, const Place &to, uint64_t count) {
    if (row != row_before) row_before = row, token = 0;
    token += count;
    if (to.block < 0 || (from.block < 0 && !plan.zero_fill)) return KVX_STATUS_OK;
    const Run next = {to, row, token - count, count};
    const bool goes_on = run.count && run.row == row && run.block() == next.block() &&
                         run.end() == to.offset && run.token + run.count == next.token;
    if (goes_on) return run.count += count, KVX_STATUS_OK;
    if (run.count && !visit(run)) return KVX_STATUS_INTERNAL_ERROR;  // stops
    run = next;
    return KVX_STATUS_OK;
  };
  if (walk(plan, lookup, plane, 0, tokens, take) == KVX_STATUS_OK && run.count) visit(run);
}

// Whether all places are certainly different: quick, and true for nearly every call.
bool name_different(const Plan &plan, const LookupPair &lookup, uint32_t plane, uint64_t tokens) {
  const Lookup &dst = lookup.dst;
  if (dst.mode == LookupMode::kSlots) {
    return are_different([&](auto take) {
      for (uint64_t i = 0; i < dst.indices_count; ++i) {
        const int64_t slot = dst.indices[i];
        if (slot < 0 || slot == dst.invalid_slot) continue;
        if (!take(static_cast<uint64_t>(slot))) return;
      }
    });
  }
  return are_different([&](auto take) {
    each_run(plan, lookup, plane, tokens, [&](const Run &run) { return take(run.block()); });
  });
}

[[gnu::cold]] kvx_status_t fail_twice(const Plan &plan, const LookupPair &lookup, const Run &first,
                                      const Run &second) {
  const FieldNames names = field_names(plan, lookup);
  const Lookup &dst = lookup.dst;
  const bool slots = dst.mode == LookupMode::kSlots;
  const char *const table =
      dst.is_own ? slots ? "dst.planes[].slots.slots" : "dst.planes[]" : names.dst_table;
  const uint64_t offset = second.at.offset;
  const uint64_t before = first.token + (offset - first.at.offset);
  if (slots) {
    return KVX_INVALID(
        "%s has slot %llu twice, for tokens %llu and %llu of rows %llu and %llu, which would "
        "overwrite each other; expected a slot for each token, or -1 to skip one (spec 5.2)",
        table, static_cast<ull>(static_cast<uint64_t>(second.at.block) * dst.block_size + offset),
        static_cast<ull>(before), static_cast<ull>(second.token), static_cast<ull>(first.row),
        static_cast<ull>(second.row));
  }
  const bool pointers = dst.mode == LookupMode::kPointers;
  return KVX_INVALID(
      pointers ? "%s names block %#llx for token %llu of row %llu and for token %llu of row %llu, "
                 "which would overwrite each other; expected a block for each (spec 5.1)"
               : "%s names block %llu for token %llu of row %llu and for token %llu of row %llu, "
                 "which would "
                 "overwrite each other; expected a block for each, or starts past what rows share "
                 "(spec 5.1)",
      table,
      static_cast<ull>(static_cast<uint64_t>(second.at.block)
                       << (pointers ? dst.pointer_shift : 0)),
      static_cast<ull>(before), static_cast<ull>(first.row), static_cast<ull>(second.token),
      static_cast<ull>(second.row));
}

// Compares all runs. Rare: only if a block or slot is named again.
[[gnu::noinline]] kvx_status_t check_runs(const Plan &plan, const LookupPair &lookup,
                                          uint32_t plane, uint64_t tokens) {
  std::vector<Run> runs;
  each_run(plan, lookup, plane, tokens, [&](const Run &run) { return runs.push_back(run), true; });
  std::stable_sort(runs.begin(), runs.end(), [](const Run &a, const Run &b) {
    return a.block() != b.block() ? a.block() < b.block() : a.at.offset < b.at.offset;
  });
  for (size_t i = 1; i < runs.size(); ++i) {
    if (runs[i].block() == runs[i - 1].block() && runs[i].at.offset < runs[i - 1].end())
      return fail_twice(plan, lookup, runs[i - 1], runs[i]);
  }
  return KVX_STATUS_OK;
}

kvx_status_t check_lookup(const Plan &plan, const LookupPair &lookup, uint32_t plane,
                          uint64_t tokens) {
  if (name_different(plan, lookup, plane, tokens)) return KVX_STATUS_OK;
  return check_runs(plan, lookup, plane, tokens);
}

}  // namespace

kvx_status_t check_written_once(const Plan &plan, uint64_t tokens) {
  if (tokens < 2 || plan.pairs.size() == 0) return KVX_STATUS_OK;
  for (uint32_t i = 0; i < plan.lookups.size(); ++i) {
    const LookupPair &lookup = plan.lookups[i];
    if (lookup.dst.mode == LookupMode::kDense) continue;
    if (!lookup.differs_by_plane()) {
      KVX_TRY(check_lookup(plan, lookup, 0, tokens));
      continue;
    }
    for (const PlanePair &pair : plan.pairs)
      if (pair.lookup == i) KVX_TRY(check_lookup(plan, lookup, pair.plane, tokens));
  }
  return KVX_STATUS_OK;
}

}  // namespace kvx
