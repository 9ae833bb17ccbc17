// Violations: values out of range in the data of a call. Every backend detects them; the host
// formats the sentence.
#pragma once

#include "plan/plan.h"

namespace kvx {

// The fields that a Fault needs are set, the others are zero.
struct Violation {
  Fault fault;
  LookupMode mode;
  bool is_v;
  bool is_own;  // in a plane's own table or slots
  bool at_dst;
  uint32_t sub_blocks, sub_block;  // kPoolBlock, kSubBlock
  uint64_t row;
  uint64_t index;         // of the slot, entry, length or start; kScale: the head
  int64_t value;          // the value there; kScale: the block
  uint64_t limit;         // its bound, or the number that there is
  uint64_t first, count;  // kCapacity: the tokens that the row needs; kIndptr: the entry before;
                          // kSlotCount: the tokens that move; kExact: the tokens of the row
  float scale;            // kScale
};

// The fault of the entries of indptr that bound a row of a RAGGED table.
KVX_HD Fault indptr_fault(const Lookup &a, uint64_t row, Violation *found) {
  const int64_t begin = a.indptr[row], end = a.indptr[row + 1];
  const uint64_t index = wrong_indptr(a, row, begin, end);
  if (index == UINT64_MAX) return Fault::kNone;
  found->index = index;
  found->value = index == row ? begin : end;
  found->first = static_cast<uint64_t>(index > row ? begin : index ? a.indptr[index - 1] : 0);
  found->limit = a.indices_count;
  return found->fault = Fault::kIndptr;
}

// The fault of the length of a row, or of its start or its part of a table at one end; if there is
// none, the row's numbers for the lookup, and how many tokens move.
KVX_HD Fault row_fault(const Rows &rows, const Lookup &a, uint64_t row, RowLookup<uint64_t> *at,
                       uint64_t *count) {
  const int64_t length = rows.length_of(row);
  if (length < 0) return Fault::kLength;
  const Fault fault = read_row(a, row, at);
  if (fault != Fault::kNone) return fault;
  if (a.exact && at->start + static_cast<uint64_t>(length) != at->capacity) return Fault::kExact;
  *count = rows.cut(length);
  const bool fits = at->start <= at->capacity && *count <= at->capacity - at->start;
  return fits || *count == 0 || a.mode == LookupMode::kSlots ? Fault::kNone : Fault::kCapacity;
}

// Fills in the numbers of a row_fault.
KVX_HD void describe(Fault fault, const Rows &rows, const Lookup &a, uint64_t row,
                     const RowLookup<uint64_t> &at, Violation *found) {
  const int64_t length = rows.length_of(row);
  found->fault = fault;
  found->row = found->index = row;
  const uint64_t tokens = a.tokens_per_entry ? a.tokens_per_entry : 1;
  found->first = a.starts.data && fault == Fault::kCapacity ? a.starts[row] : at.start * tokens;
  found->limit = held_by(a, at) * tokens;
  found->count = rows.cut(length) * tokens;
  if (fault == Fault::kExact) found->count = at.start + static_cast<uint64_t>(length);
  if (fault == Fault::kStart) found->value = a.starts[row], found->limit = tokens;
  if (fault == Fault::kIndptr) indptr_fault(a, row, found);
  if (fault != Fault::kLength) return;
  found->index = divide(row, rows.rows_per_len).quotient;
  found->value = length;
}

// Whether the tokens of a row begin within a block of a destination.
KVX_HD bool is_within_unit(const Rows &rows, const Lookup &dst, uint64_t row, Violation *found) {
  if (!dst.starts.data || rows.length_of(row) <= 0) return false;
  const int64_t start = dst.starts[row];
  if (start < 0) return false;  // another fault
  if (divide_wide(static_cast<uint64_t>(start), dst.block_size).remainder == 0) return false;
  found->fault = Fault::kUnit;
  found->mode = dst.mode;
  found->is_own = dst.is_own;
  found->at_dst = true;
  found->row = found->index = row;
  found->value = start;
  found->limit = dst.block_size;
  return true;
}

// Formats the sentence for kvx_last_error() and returns its status.
kvx_status_t fail_with(const Violation &violation, const FieldNames &names);

// The names of a call's fields, by the modes of its lookups.
FieldNames field_names(Call call, LookupMode src, LookupMode dst);
inline FieldNames field_names(const Plan &plan, const LookupPair &lookup) {
  return field_names(plan.call, lookup.src.mode, lookup.dst.mode);
}

}  // namespace kvx
