// Sizes of kvx_blocks.h and what its tables have to be.
#pragma once

#include "kvx/kvx_blocks.h"
#include "rules/path.h"

namespace kvx {

kvx_status_t check_blocks(const kvx_blocks_t *sizes);

// `alignment` of a call: a power of two, 16 at most; 0 stands for 16.
kvx_status_t check_alignment(const char *name, uint32_t alignment);

kvx_status_t check_copy_memory(const char *name, kvx_memory_type_t memory);

kvx_status_t check_copy_bytes(uint64_t bytes);

kvx_status_t check_pointer_table(const char *name, const void *table);

}  // namespace kvx
