// What was found out of range in the data of a call, and the sentence that says so. Every backend
// finds; only the host speaks.
#pragma once

#include "plan.h"

namespace kvx {

// The fields that a Fault needs are set, the others are zero.
struct Finding {
  Fault fault;
  Addressing mode;
  uint8_t kv;
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
kvx_status_t fail_with(const Finding &finding, const Names &names);

// What a call's fields are called. `mode`: how tokens are found at each end.
Names names_of(Call call, Addressing src, Addressing dst);

}  // namespace kvx
