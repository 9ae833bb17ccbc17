#include "rules/lookups.h"

#include "desc/span.h"
#include "error.h"
#include "rules/affine.h"
#include "rules/apart.h"
#include "rules/struct.h"
#include "rules/table.h"
#include "rules/validate.h"

namespace kvx {
namespace {

const Path kLookups{nullptr, "lookups"}, kSrc{&kLookups, "src"}, kDst{&kLookups, "dst"};

// Refuses a field that this operation does not use.
kvx_status_t check_unused(const char *field, const void *given, const char *because) {
  if (!given) return KVX_STATUS_OK;
  return KVX_INVALID("lookups.%s is given, expected NULL: %s (spec E.13)", field, because);
}

// Checks that a table is of the kind that the plan was made with, before its size is checked.
kvx_status_t check_kind(const char *end, const kvx_block_table_t *table,
                        const kvx_block_table_t &kept) {
  if (!table || table->size < sizeof *table) return KVX_STATUS_OK;
  if (table->format != kept.format) {
    return KVX_INVALID(
        "lookups.%s.block_table.format is %d, expected %s (%d), as the plan was made with "
        "(spec E.13)",
        end, table->format, name_of(kept.format), kept.format);
  }
  if (names_whole_blocks(*table) != names_whole_blocks(kept)) {
    return KVX_INVALID(
        "lookups.%s.block_table.flags is %#x, expected WHOLE (%#x) %s, as the plan was made with "
        "(spec E.15)",
        end, table->flags, KVX_BLOCK_TABLE_FLAG_WHOLE,
        names_whole_blocks(kept) ? "set" : "not set");
  }
  if (names_whole_blocks(kept) && table->indptr != kept.indptr) {
    return KVX_INVALID(
        "lookups.%s.block_table.indptr is %p, expected %p, the block that the plan's tensors "
        "describe (spec E.15)",
        end, table->indptr, kept.indptr);
  }
  return KVX_STATUS_OK;
}

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
  if (table) KVX_TRY(check_kind(name, lookup.block_table, *table));
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
    KVX_TRY(check_struct(kLookups, lookups));
    KVX_TRY(check_unused("io", lookups->io, "a migration has tokens in caches alone"));
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
  KVX_TRY(check_arrays_apart(other->all));
  return check_zeros_and_arrays(other->all);
}

kvx_status_t replace_lookups(const kvx_cache_desc_t &cache, const kvx_write_desc_t &kept,
                             const kvx_write_options_t *options, const kvx_plan_lookups_t &lookups,
                             kvx_write_desc_t *other) {
  KVX_TRY(check_struct(kLookups, &lookups));
  constexpr char kTakes[] = "a write takes dst.slots and io";
  KVX_TRY(check_unused("seq_lens", lookups.seq_lens, kTakes));
  KVX_TRY(check_unused("src.block_table", lookups.src.block_table, kTakes));
  KVX_TRY(check_unused("src.slots", lookups.src.slots, kTakes));
  KVX_TRY(check_unused("src.starts", lookups.src.starts, kTakes));
  KVX_TRY(check_unused("dst.block_table", lookups.dst.block_table, kTakes));
  KVX_TRY(check_unused("dst.starts", lookups.dst.starts, kTakes));
  if (lookups.max_seq_len) {
    return KVX_INVALID("lookups.max_seq_len is %u, expected 0: %s (spec E.13)", lookups.max_seq_len,
                       kTakes);
  }
  *other = kept;
  if (lookups.dst.slots) {
    KVX_TRY(check_struct({&kDst, "slots"}, lookups.dst.slots));
    other->slots = *lookups.dst.slots;
  }
  if (lookups.io) {
    KVX_TRY(check_struct({&kLookups, "io"}, lookups.io));
    other->io = *lookups.io;
  }
  return validate_write(&cache, other, options);
}

kvx_status_t replace_lookups(const kvx_cache_desc_t &cache, const kvx_gather_desc_t &kept,
                             const kvx_gather_options_t *options, const kvx_plan_lookups_t &lookups,
                             kvx_gather_desc_t *other) {
  KVX_TRY(check_struct(kLookups, &lookups));
  constexpr char kTakes[] = "a gather takes src.block_table, seq_lens, max_seq_len and io";
  KVX_TRY(check_unused("src.slots", lookups.src.slots, kTakes));
  KVX_TRY(check_unused("src.starts", lookups.src.starts, kTakes));
  KVX_TRY(check_unused("dst.block_table", lookups.dst.block_table, kTakes));
  KVX_TRY(check_unused("dst.slots", lookups.dst.slots, kTakes));
  KVX_TRY(check_unused("dst.starts", lookups.dst.starts, kTakes));
  *other = kept;
  if (lookups.max_seq_len) other->max_seq_len = lookups.max_seq_len;
  if (lookups.src.block_table) {
    KVX_TRY(check_struct({&kSrc, "block_table"}, lookups.src.block_table));
    KVX_TRY(check_kind("src", lookups.src.block_table, kept.block_table));
    other->block_table = *lookups.src.block_table;
  }
  if (lookups.seq_lens) {
    KVX_TRY(check_struct({&kLookups, "seq_lens"}, lookups.seq_lens));
    other->seq_lens = *lookups.seq_lens;
  }
  if (lookups.io) {
    KVX_TRY(check_struct({&kLookups, "io"}, lookups.io));
    other->io = *lookups.io;
  }
  return validate_gather(&cache, other, options);
}

}  // namespace kvx
