// Rules of what finds tokens: slots, lengths, block tables.
#pragma once

#include "rules/path.h"

namespace kvx {

kvx_status_t check_slots(const Path &path, const kvx_slot_mapping_t &slots);
kvx_status_t check_table(const Path &path, const kvx_block_table_t &table);

}  // namespace kvx
