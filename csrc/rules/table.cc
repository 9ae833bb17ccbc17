#include "rules/table.h"

#include <iterator>

#include "desc/span.h"
#include "rules/struct.h"
#include "rules/tensor.h"

namespace kvx {
namespace {

constexpr const char *kTableFormats[] = {nullptr,      "PACKED",   "RAGGED",
                                         "KV_OFFSETS", "POINTERS", "RING"};

bool is_format(kvx_block_table_format_t format) {
  return format > KVX_BLOCK_TABLE_INVALID && static_cast<size_t>(format) < std::size(kTableFormats);
}

kvx_status_t check_index_type(const Path &path, const char *field, kvx_dtype_t dtype,
                              const char *section) {
  if (is_index_type(dtype)) return KVX_STATUS_OK;
  return KVX_INVALID("%s.%s is %d (%s), expected %s (spec %s)", KVX_AT(path), field, dtype,
                     name_of(dtype), kIndexTypes, section);
}

kvx_status_t check_array(const Path &path, const char *field, const void *data, kvx_dtype_t dtype) {
  if (!data) return KVX_INVALID("%s.%s is NULL", KVX_AT(path), field);
  if (is_aligned(data, dtype)) return KVX_STATUS_OK;
  return KVX_INVALID("%s.%s is %p, expected a multiple of %lld bytes (%s)", KVX_AT(path), field,
                     data, static_cast<ll>(alignment_of(dtype)), name_of(dtype));
}

kvx_status_t check_count(const Path &path, const char *field, uint32_t found, uint64_t expected,
                         const char *meaning) {
  if (found == expected) return KVX_STATUS_OK;
  return KVX_INVALID("%s.%s is %u, expected %s = %llu (spec 5.1)", KVX_AT(path), field, found,
                     meaning, static_cast<ull>(expected));
}

kvx_status_t check_ragged(const Path &path, const kvx_block_table_t &table) {
  KVX_TRY(check_index_type(path, "indptr_dtype", table.indptr_dtype, "5.1"));
  KVX_TRY(check_count(path, "indptr_count", table.indptr_count, uint64_t{table.seq_count} + 1,
                      "seq_count + 1"));
  return check_array(path, "indptr", table.indptr, table.indptr_dtype);
}

// Checks the size of a rectangle of indices.
kvx_status_t check_rectangle(const Path &path, const kvx_block_table_t &table) {
  if (table.seq_count) KVX_TRY(check_nonzero(path, "max_blocks_per_seq", table.max_blocks_per_seq));
  KVX_TRY(check_count(path, "indptr_count", table.indptr_count, 0, "none"));
  if (names_whole_blocks(table)) {
    if (table.indptr) return KVX_STATUS_OK;
    return KVX_INVALID(
        "%s.indptr is NULL, expected the block that the tensors describe (spec E.15)",
        KVX_AT(path));
  }
  if (table.indptr) {
    return KVX_INVALID("%s.indptr is %p, expected NULL unless RAGGED (spec 5.1)", KVX_AT(path),
                       table.indptr);
  }
  if (is_pointers(table))
    return KVX_STATUS_OK;  // check_pointers() checks its count, which depends on planes
  const bool offsets = is_kv_offsets(table);
  uint64_t expected = table.max_blocks_per_seq;  // grows to at most 2^97: checked
  if (__builtin_mul_overflow(expected, uint64_t{table.seq_count}, &expected) ||
      (offsets && __builtin_mul_overflow(expected, uint64_t{2} * table.beam_width, &expected))) {
    expected = UINT64_MAX;
  }
  return check_count(path, "indices_count", table.indices_count, expected,
                     offsets ? "seq_count * beam_width * 2 * max_blocks_per_seq"
                             : "seq_count * max_blocks_per_seq");
}

}  // namespace

const char *name_of(kvx_block_table_format_t format) {
  return is_format(format) ? kTableFormats[format] : "no format";
}

kvx_status_t check_table(const Path &path, const kvx_block_table_t &table) {
  KVX_TRY(check_struct(path, &table));
  const bool offsets = is_kv_offsets(table), ragged = table.format == KVX_BLOCK_TABLE_RAGGED;
  const bool pointers = is_pointers(table);
  if (!is_format(table.format)) {
    return KVX_INVALID(
        "%s.format is %d, expected PACKED (1), RAGGED (2), KV_OFFSETS (3), POINTERS (4) or "
        "RING (5) (spec 5.1)",
        KVX_AT(path), table.format);
  }
  if (pointers && table.index_dtype != KVX_DTYPE_U64) {
    return KVX_INVALID("%s.index_dtype is %d (%s), expected U64 for POINTERS (spec E.12)",
                       KVX_AT(path), table.index_dtype, name_of(table.index_dtype));
  }
  if (!pointers && (table.flags & KVX_BLOCK_TABLE_FLAG_WHOLE)) {
    return KVX_INVALID("%s.flags is %#x, expected WHOLE (%#x) with POINTERS alone (spec E.15)",
                       KVX_AT(path), table.flags, KVX_BLOCK_TABLE_FLAG_WHOLE);
  }
  if (offsets && table.index_dtype != KVX_DTYPE_S32) {
    return KVX_INVALID("%s.index_dtype is %d (%s), expected S32 for KV_OFFSETS (spec 5.1)",
                       KVX_AT(path), table.index_dtype, name_of(table.index_dtype));
  }
  if (!pointers) KVX_TRY(check_index_type(path, "index_dtype", table.index_dtype, "7.1"));
  if (offsets) {
    KVX_TRY(check_nonzero(path, "beam_width", table.beam_width));
    if (!(table.flags & KVX_BLOCK_TABLE_FLAG_KVCACHEINDEX)) {
      return KVX_INVALID("%s.flags is %#x, expected KVCACHEINDEX set for KV_OFFSETS (spec 5.1)",
                         KVX_AT(path), table.flags);
    }
  } else if (table.beam_width > 1) {
    return KVX_INVALID("%s.beam_width is %u, expected 1 unless KV_OFFSETS (spec 5.1)", KVX_AT(path),
                       table.beam_width);
  }
  KVX_TRY(ragged ? check_ragged(path, table) : check_rectangle(path, table));
  if (table.indices_count == 0) return KVX_STATUS_OK;
  return check_array(path, "indices", table.indices, table.index_dtype);
}

kvx_status_t check_pointers(const Path &path, const kvx_block_table_t &table,
                            const kvx_cache_desc_t *const *layers, uint32_t num_layers) {
  uint64_t planes = 0;
  for (uint32_t l = 0; l < num_layers; ++l) {
    planes += is_absent(layers[l]->v) ? 1 : 2;
    if (layers[l]->num_blocks != 1) {
      return KVX_INVALID(
          "%s is POINTERS, but num_blocks of layer %u is %u, expected 1: it names blocks by their "
          "addresses; describe one block of each layer (spec E.12)",
          KVX_AT(path), l, layers[l]->num_blocks);
    }
  }
  uint64_t expected = uint64_t{table.seq_count} * table.max_blocks_per_seq;
  const bool whole = names_whole_blocks(table);
  if (__builtin_mul_overflow(expected, whole ? 1 : planes, &expected)) expected = UINT64_MAX;
  return check_count(
      path, "indices_count", table.indices_count, expected,
      whole ? "seq_count * max_blocks_per_seq" : "seq_count * max_blocks_per_seq * planes");
}

kvx_status_t check_slots(const Path &path, const kvx_slot_mapping_t &slots) {
  KVX_TRY(check_struct(path, &slots));
  KVX_TRY(check_index_type(path, "dtype", slots.dtype, "5.2"));
  return slots.token_count ? check_array(path, "slots", slots.slots, slots.dtype) : KVX_STATUS_OK;
}

kvx_status_t check_lens(const Path &path, const kvx_seq_lens_t &lens) {
  KVX_TRY(check_struct(path, &lens));
  KVX_TRY(check_index_type(path, "dtype", lens.dtype, "5.3"));
  return lens.seq_count ? check_array(path, "lengths", lens.lengths, lens.dtype) : KVX_STATUS_OK;
}

}  // namespace kvx
