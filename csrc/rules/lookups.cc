#include "rules/lookups.h"

#include "desc/span.h"
#include "error.h"
#include "rules/apart.h"
#include "rules/table.h"
#include "rules/validate.h"

namespace kvx {
namespace {

kvx_status_t replace(const char *name, const kvx_end_lookup_t &lookup, kvx_span_t *span) {
  const kvx_block_table_t *const table = span->block_table;
  if (lookup.block_table && !table) {
    return KVX_INVALID(
        "lookups.%s.block_table is given, expected NULL: the plan was made with %s (spec E.13)",
        name, span->slots ? "slots" : "a dense end");
  }
  if (lookup.slots && !span->slots) {
    return KVX_INVALID(
        "lookups.%s.slots is given, expected NULL: the plan was made with %s (spec E.13)", name,
        table ? "a block_table" : "a dense end");
  }
  if (lookup.block_table && lookup.block_table->size >= sizeof *table &&
      lookup.block_table->format != table->format) {
    return KVX_INVALID(
        "lookups.%s.block_table.format is %d, expected %s (%d), as the plan was made with "
        "(spec E.13)",
        name, lookup.block_table->format, name_of(table->format), table->format);
  }
  if (lookup.block_table && lookup.block_table->size >= sizeof *table &&
      names_whole_blocks(*lookup.block_table) != names_whole_blocks(*table)) {
    return KVX_INVALID(
        "lookups.%s.block_table.flags is %#x, expected WHOLE (%#x) %s, as the plan was made with "
        "(spec E.15)",
        name, lookup.block_table->flags, KVX_BLOCK_TABLE_FLAG_WHOLE,
        names_whole_blocks(*table) ? "set" : "not set");
  }
  if (lookup.block_table && names_whole_blocks(*table) &&
      lookup.block_table->indptr != table->indptr) {
    return KVX_INVALID(
        "lookups.%s.block_table.indptr is %p, expected %p, the block that the plan's tensors "
        "describe (spec E.15)",
        name, lookup.block_table->indptr, table->indptr);
  }
  if (lookup.block_table) span->block_table = lookup.block_table;
  if (lookup.slots) span->slots = lookup.slots;
  if (lookup.starts) span->starts = lookup.starts;
  return KVX_STATUS_OK;
}

// Keeps one layer, unless the span has planes, which may have lookups of their own, or a table of
// pointers, which has entries for each layer.
void take_first_layer(OtherLookups *other) {
  other->first_src = other->src;
  other->first_dst = other->dst;
  if (!other->src.num_planes && !is_pointers(other->src) && !is_pointers(other->dst))
    other->first_src.num_layers = other->first_dst.num_layers = 1;
  other->first = other->all;
  other->first.src = &other->first_src;
  other->first.dst = &other->first_dst;
}

}  // namespace

kvx_status_t replace_lookups(const kvx_migrate_desc_t &kept, const kvx_plan_lookups_t *lookups,
                             OtherLookups *other) {
  other->src = *kept.src;
  other->dst = *kept.dst;
  other->all = kept;
  other->all.src = &other->src;
  other->all.dst = &other->dst;
  if (lookups) {
    if (lookups->size < sizeof *lookups) {
      return KVX_INVALID("lookups.size is %u, expected at least %zu (spec 6)", lookups->size,
                         sizeof *lookups);
    }
    KVX_TRY(replace("src", lookups->src, &other->src));
    KVX_TRY(replace("dst", lookups->dst, &other->dst));
    if (lookups->seq_lens) other->all.seq_lens = lookups->seq_lens;
    if (lookups->max_seq_len) other->all.max_seq_len = lookups->max_seq_len;
  }
  take_first_layer(other);
  if (!lookups) return KVX_STATUS_OK;
  // One layer shows all rules that lookups can break, since all layers share them; but their arrays
  // must overlap no layer's memory.
  KVX_TRY(validate_migrate(&other->first));
  return check_arrays_apart(other->all);
}

}  // namespace kvx
