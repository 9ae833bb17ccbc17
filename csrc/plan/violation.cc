#include "plan/violation.h"

#include "error.h"

namespace kvx {

FieldNames field_names(Call call, LookupMode src, LookupMode dst) {
  switch (call) {
    case Call::kWrite:
      return {"", "write.slots.slots", "", "", ""};
    case Call::kGather:
      return {"gather.block_table", "", "", "", "gather.seq_lens.lengths"};
    default:
      return {src == LookupMode::kSlots ? "src.slots.slots" : "src.block_table",
              dst == LookupMode::kSlots ? "dst.slots.slots" : "dst.block_table",
              "src.starts.lengths", "dst.starts.lengths", "migrate.seq_lens.lengths"};
  }
}

namespace {

const char *table_of(const Violation &f, const FieldNames &names) {
  if (!f.is_own) return f.at_dst ? names.dst_table : names.src_table;
  if (f.mode == LookupMode::kSlots)
    return f.at_dst ? "dst.planes[].slots.slots" : "src.planes[].slots.slots";
  return f.at_dst ? "dst.planes[].block_table" : "src.planes[].block_table";
}

}  // namespace

kvx_status_t fail_with(const Violation &f, const FieldNames &names) {
  const char *const table = table_of(f, names);
  const char *const starts = f.at_dst ? names.dst_starts : names.src_starts;
  const auto pool_index = static_cast<uint32_t>(static_cast<int32_t>(f.value));
  const uint32_t id = pool_index & ~kSecondaryPool;
  switch (f.fault) {
    case Fault::kSlot:
      return KVX_OUT_OF_RANGE(
          "%s[%llu] is %lld, expected below num_blocks * block_size = %lld (spec 5.2)", table,
          static_cast<ull>(f.index), static_cast<ll>(f.value), static_cast<ll>(f.limit));
    case Fault::kBlock:
      return KVX_OUT_OF_RANGE("%s.indices[%llu] is %lld, expected below num_blocks %llu (spec 5.1)",
                              table, static_cast<ull>(f.index), static_cast<ll>(f.value),
                              static_cast<ull>(f.limit));
    case Fault::kNoSecondary:
      return KVX_OUT_OF_RANGE(
          "%s.indices[%llu] is %#x (secondary pool), but pool.secondary is NULL (spec 5.1)", table,
          static_cast<ull>(f.index), pool_index);
    case Fault::kPoolBlock:
      return KVX_OUT_OF_RANGE(
          "%s.indices[%llu] is %u in the %s pool, expected below %llu blocks x %u sub-blocks "
          "(spec E.8)",
          table, static_cast<ull>(f.index), id, pool_index == id ? "primary" : "secondary",
          static_cast<ull>(f.limit), f.sub_blocks);
    case Fault::kSubBlock:
      return KVX_OUT_OF_RANGE(
          "%s.indices[%llu] is %u, sub-block %u of its block, expected sub-block %u: that of %s "
          "(spec E.8)",
          table, static_cast<ull>(f.index), id, id % f.sub_blocks, f.sub_block, f.is_v ? "V" : "K");
    case Fault::kLength:
      return KVX_OUT_OF_RANGE("%s[%llu] is %lld, expected at least 0 (spec 5.3)", names.lens,
                              static_cast<ull>(f.index), static_cast<ll>(f.value));
    case Fault::kStart:
      if (f.value >= 0 && f.limit > 1) {
        return KVX_OUT_OF_RANGE(
            "%s[%llu] is %lld, expected a multiple of %llu, the tokens_per_entry of a plane (spec "
            "E.11)",
            starts, static_cast<ull>(f.index), static_cast<ll>(f.value), static_cast<ull>(f.limit));
      }
      return KVX_OUT_OF_RANGE("%s[%llu] is %lld, expected at least 0 (spec E.3)", starts,
                              static_cast<ull>(f.index), static_cast<ll>(f.value));
    case Fault::kCapacity:
      return KVX_OUT_OF_RANGE(
          "row %llu needs tokens [%llu, %llu + %llu), but %s holds %llu %s (spec 5.3)",
          static_cast<ull>(f.row), static_cast<ull>(f.first), static_cast<ull>(f.first),
          static_cast<ull>(f.count), f.mode == LookupMode::kDense ? "a dense end" : table,
          static_cast<ull>(f.limit),
          f.mode == LookupMode::kRagged
              ? "of this row: a RAGGED table has a block id per token, not per block"
              : "per row");
    case Fault::kHole:
      return KVX_OUT_OF_RANGE(
          "%s.indices[%llu] is %lld, a null block, and tokens of the call are there: they would be "
          "left out; expected a block, or HOLES in the flags of the table "
          "(BlockTable.with_holes()) "
          "(spec 5.1)",
          table, static_cast<ull>(f.index), static_cast<ll>(f.value));
    case Fault::kPointer:
      return KVX_OUT_OF_RANGE(
          "%s.indices[%llu] is %#llx, expected NULL or an address that is a multiple of %llu "
          "bytes, "
          "as the data of its tensors (spec E.12)",
          table, static_cast<ull>(f.index), static_cast<ull>(f.value), static_cast<ull>(f.limit));
    case Fault::kExact:
      return KVX_OUT_OF_RANGE(
          "row %llu has %llu entries in %s, expected %llu, one per token: a RAGGED table with "
          "EXACT "
          "has a block id per token, not per block, and none to spare; use PACKED for a list of "
          "blocks (spec 5.1)",
          static_cast<ull>(f.row), static_cast<ull>(f.limit), table, static_cast<ull>(f.count));
    case Fault::kIndptr:
      if (f.index == 0) {
        return KVX_INVALID("%s.indptr[0] is %lld, expected 0 (spec 5.1)", table,
                           static_cast<ll>(f.value));
      }
      if (f.value < static_cast<int64_t>(f.first)) {
        return KVX_INVALID(
            "%s.indptr[%llu] is %lld, expected at least indptr[%llu] %lld (spec 5.1)", table,
            static_cast<ull>(f.index), static_cast<ll>(f.value), static_cast<ull>(f.index - 1),
            static_cast<ll>(f.first));
      }
      return KVX_INVALID("%s.indptr[%llu] is %lld, expected indices_count %llu (spec 5.1)", table,
                         static_cast<ull>(f.index), static_cast<ll>(f.value),
                         static_cast<ull>(f.limit));
    case Fault::kSlotCount:
      if (f.count == 0) {  // or not known: kernels do not compute it
        return KVX_INVALID(
            "%s has %llu entries (token_count), expected as many as seq_lens add up to (spec E.3)",
            table, static_cast<ull>(f.limit));
      }
      return KVX_INVALID(
          "%s has %llu entries (token_count), expected %llu, the sum of seq_lens (spec E.3)", table,
          static_cast<ull>(f.limit), static_cast<ull>(f.count));
    case Fault::kScale:
      return KVX_INVALID(
          "%s %c scale of block %lld, head %llu is %g, expected a finite scale above 0 (spec E.6)",
          f.at_dst ? "destination" : "source", f.is_v ? 'V' : 'K', static_cast<ll>(f.value),
          static_cast<ull>(f.index), static_cast<double>(f.scale));
    case Fault::kUnit:
      return KVX_OUT_OF_RANGE(
          "%s[%llu] is %lld, expected a multiple of block_size %llu: a scale of the destination "
          "covers all tokens of a block (PER_CHANNEL); begin at a block, or give REQUANTIZE (spec "
          "E.14)",
          starts, static_cast<ull>(f.index), static_cast<ll>(f.value), static_cast<ull>(f.limit));
    case Fault::kNone:
      break;
  }
  return KVX_STATUS_OK;
}

}  // namespace kvx
