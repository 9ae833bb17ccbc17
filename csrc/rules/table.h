// Rules of kvx_block_table_t, kvx_slot_mapping_t and kvx_seq_lens_t. plan/check.cc checks the
// contents of their arrays.
#pragma once

#include "rules/path.h"

namespace kvx {

// "PACKED"; "no format" for a number that is none.
const char *name_of(kvx_block_table_format_t format);

kvx_status_t check_table(const Path &path, const kvx_block_table_t &table);
// Checks a POINTERS table, which has passed check_table(), for layers that have passed
// check_cache().
kvx_status_t check_pointers(const Path &path, const kvx_block_table_t &table,
                            const kvx_cache_desc_t *const *layers, uint32_t num_layers);
kvx_status_t check_slots(const Path &path, const kvx_slot_mapping_t &slots);
kvx_status_t check_lens(const Path &path, const kvx_seq_lens_t &lens);

}  // namespace kvx
