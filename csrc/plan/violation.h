// What was found out of range in the data of a call, and the sentence that says so. Every backend
// finds; only the host speaks.
#pragma once

#include "plan/plan.h"

namespace kvx {

// The fields that a Fault needs are set, the others are zero.
struct Violation {
  Fault fault;
  LookupMode mode;
  bool is_v;
  bool is_own;  // of a plane's own table or slots
  bool at_dst;
  uint32_t sub_blocks, sub_block;  // kPoolBlock, kSubBlock
  uint64_t row;
  uint64_t index;         // of the slot, entry, length or start; kScale: the head
  int64_t value;          // what stands there; kScale: the block
  uint64_t limit;         // what it had to stay below, or what there is
  uint64_t first, count;  // kCapacity: the tokens that the row needs; kIndptr: the entry before;
                          // kSlotCount: the tokens that move; kExact: the tokens of the row
  float scale;            // kScale
};

// Leaves the sentence and returns its status.
kvx_status_t fail_with(const Violation &violation, const FieldNames &names);

// What a call's fields are called, as the lookups' modes have it.
FieldNames field_names(Call call, LookupMode src, LookupMode dst);
inline FieldNames field_names(const Plan &plan, const LookupPair &lookup) {
  return field_names(plan.call, lookup.src.mode, lookup.dst.mode);
}

}  // namespace kvx
