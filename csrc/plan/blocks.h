// Blocks of kvx_blocks.h as the ends of a plan: every chunk is K of a layer, of bytes.
#pragma once

#include <vector>

#include "kvx/kvx_blocks.h"
#include "plan/plan.h"

namespace kvx {

// How the chunks of a block lie, in bytes.
struct Chunks {
  uint32_t count;  // of a block
  bool is_whole;   // the table has an address for each block
  int64_t step;    // from one to the next, where they are whole
  int64_t token_stride, head_stride;
  uint32_t num_heads, head_start;  // held, and the first that moves
};

// The part of a chunk that both ends have.
struct Chunk {
  uint32_t num_tokens, num_heads, head_bytes;
};

// Chunks of stacks, and of universal and operational blocks.
Chunks stack_chunks(const kvx_blocks_t &sizes);
Chunks universal_chunks(const kvx_blocks_t &sizes);

// Runs of `bytes` bytes: tokens of one head, so that threads can share a run.
Chunk run_of(uint64_t bytes);
Chunks run_chunks(uint32_t count, bool is_whole, const Chunk &run);

// Fills a new plan that moves num_blocks blocks. `alignment`: a power of two that divides all
// addresses. The tables are read when it runs.
void plan_blocks(const Chunk &chunk, uint32_t num_blocks, kvx_memory_type_t memory,
                 uint32_t alignment, const Chunks &src, const void *src_table, const Chunks &dst,
                 const void *dst_table, Plan *plan);

}  // namespace kvx
