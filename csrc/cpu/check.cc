// What only the data can show: lengths, slots, block ids, scales. Every rule once, before any
// write.
#include <algorithm>
#include <vector>

#include "cpu/run.h"
#include "cpu/walk.h"
#include "error.h"
#include "scale.h"

namespace kvx::cpu {
namespace {

kvx_status_t check_lengths(const Plan &plan, uint64_t *tokens) {
  const Rows &rows = plan.rows;
  *tokens = 0;
  if (!rows.lens.data) {
    *tokens = rows.count * rows.uniform_len;
    return KVX_STATUS_OK;
  }
  for (uint64_t i = 0; i < rows.count / rows.rows_per_len; ++i) {
    const int64_t len = rows.lens[i];
    if (len < 0) {
      return KVX_OUT_OF_RANGE("%s[%llu] is %lld, expected at least 0 (spec 5.3)", plan.names.lens,
                              static_cast<ull>(i), static_cast<ll>(len));
    }
  }
  for (uint64_t row = 0; row < rows.count; ++row) {
    if (__builtin_add_overflow(*tokens, rows.stored(row), tokens))
      return KVX_OUT_OF_RANGE("%s add up to more than 2^64 (spec 5.3)", plan.names.lens);
  }
  return KVX_STATUS_OK;
}

// One end of the plan, with what its fields are called.
struct End {
  const Address &address;
  const char *table, *starts;
};

// Tokens [first, first + count) of a row are within what the row can address.
kvx_status_t check_capacity(const End &end, uint64_t row, uint64_t first, uint64_t count) {
  const Address &a = end.address;
  uint64_t capacity = a.block_size;
  if (a.mode == Addressing::kPacked || a.mode == Addressing::kKvOffsets) {
    capacity = uint64_t{a.max_blocks_per_seq} * a.block_size;
  } else if (a.mode == Addressing::kRagged) {
    capacity = static_cast<uint64_t>(a.indptr[row + 1] - a.indptr[row]);
  }
  if (first <= capacity && count <= capacity - first) return KVX_STATUS_OK;
  return KVX_OUT_OF_RANGE(
      "row %llu needs tokens [%llu, %llu + %llu), but %s holds %llu per row (spec 5.3)",
      static_cast<ull>(row), static_cast<ull>(first), static_cast<ull>(first),
      static_cast<ull>(count), a.mode == Addressing::kDense ? "a dense end" : end.table,
      static_cast<ull>(capacity));
}

kvx_status_t check_block(const End &end, uint64_t index, int64_t block) {
  const Address &a = end.address;
  const bool null = block < 0 || block == a.null_block;
  if (null || static_cast<uint64_t>(block) < a.num_blocks) return KVX_STATUS_OK;
  return KVX_OUT_OF_RANGE("%s.indices[%llu] is %lld, expected below num_blocks %llu (spec 5.1)",
                          end.table, static_cast<ull>(index), static_cast<ll>(block),
                          static_cast<ull>(a.num_blocks));
}

kvx_status_t check_pool_index(const End &end, uint64_t at, int64_t value) {
  const Address &a = end.address;
  if (value == -1) return KVX_STATUS_OK;
  const auto index = static_cast<uint32_t>(static_cast<int32_t>(value));
  const bool secondary = index & kSecondaryPool;
  const uint32_t id = index & ~kSecondaryPool;
  if (id / a.sub_blocks == a.null_block) return KVX_STATUS_OK;
  const uint64_t blocks = secondary ? a.secondary_blocks : a.num_blocks;
  if (secondary && blocks == 0) {
    return KVX_OUT_OF_RANGE(
        "%s.indices[%llu] is %#x (secondary pool), but pool.secondary is NULL (spec 5.1)",
        end.table, static_cast<ull>(at), index);
  }
  if (id / a.sub_blocks >= blocks) {
    return KVX_OUT_OF_RANGE(
        "%s.indices[%llu] is %u in the %s pool, expected below %llu blocks x %u sub-blocks "
        "(spec E.8)",
        end.table, static_cast<ull>(at), id, secondary ? "secondary" : "primary",
        static_cast<ull>(blocks), a.sub_blocks);
  }
  if (id % a.sub_blocks != a.sub_block) {
    return KVX_OUT_OF_RANGE(
        "%s.indices[%llu] is %u, sub-block %u of its block, expected sub-block %u: that of %s "
        "(spec E.8)",
        end.table, static_cast<ull>(at), id, id % a.sub_blocks, a.sub_block, a.kv ? "V" : "K");
  }
  return KVX_STATUS_OK;
}

kvx_status_t check_indptr(const End &end, uint64_t rows, uint32_t indices_count) {
  const Ints &indptr = end.address.indptr;
  if (indptr[0] != 0) {
    return KVX_INVALID("%s.indptr[0] is %lld, expected 0 (spec 5.1)", end.table,
                       static_cast<ll>(indptr[0]));
  }
  for (uint64_t row = 0; row < rows; ++row) {
    if (indptr[row + 1] < indptr[row]) {
      return KVX_INVALID(
          "%s.indptr[%llu] is %lld, expected at least indptr[%llu] %lld "
          "(spec 5.1)",
          end.table, static_cast<ull>(row + 1), static_cast<ll>(indptr[row + 1]),
          static_cast<ull>(row), static_cast<ll>(indptr[row]));
    }
  }
  if (indptr[rows] != indices_count) {
    return KVX_INVALID("%s.indptr[%llu] is %lld, expected indices_count %u (spec 5.1)", end.table,
                       static_cast<ull>(rows), static_cast<ll>(indptr[rows]), indices_count);
  }
  return KVX_STATUS_OK;
}

kvx_status_t check_slot_values(const End &end, uint64_t tokens) {
  const Address &a = end.address;
  if (tokens != a.indices_count) {
    return KVX_INVALID(
        "%s has %u entries (token_count), expected %llu, the sum of seq_lens (spec E.3)", end.table,
        a.indices_count, static_cast<ull>(tokens));
  }
  const auto limit = static_cast<int64_t>(a.num_blocks * a.block_size);
  for (uint64_t i = 0; i < tokens; ++i) {
    const int64_t slot = a.indices[i];
    if (slot >= limit && slot != a.invalid_slot) {
      return KVX_OUT_OF_RANGE(
          "%s[%llu] is %lld, expected below num_blocks * block_size = %lld (spec 5.2)", end.table,
          static_cast<ull>(i), static_cast<ll>(slot), static_cast<ll>(limit));
    }
  }
  return KVX_STATUS_OK;
}

// Every table entry or slot that the plan will read at this end.
kvx_status_t check_end(const Plan &plan, const End &end, uint64_t tokens) {
  const Address &a = end.address;
  const Rows &rows = plan.rows;
  if (a.mode == Addressing::kSlots) return check_slot_values(end, tokens);
  if (a.mode == Addressing::kRagged) KVX_TRY(check_indptr(end, rows.count, a.indices_count));
  for (uint64_t row = 0; row < rows.count; ++row) {
    uint64_t first = 0;
    if (a.starts.data) {
      const int64_t start = a.starts[row];
      if (start < 0) {
        return KVX_OUT_OF_RANGE("%s[%llu] is %lld, expected at least 0 (spec E.3)", end.starts,
                                static_cast<ull>(row), static_cast<ll>(start));
      }
      first = static_cast<uint64_t>(start);
    }
    const uint64_t count = rows.stored(row);
    if (count == 0) continue;
    KVX_TRY(check_capacity(end, row, first, count));
    if (a.mode == Addressing::kRagged) {
      const auto begin = static_cast<uint64_t>(a.indptr[row]) + first;
      for (uint64_t i = begin; i < begin + count; ++i) KVX_TRY(check_block(end, i, a.indices[i]));
    } else if (a.mode != Addressing::kDense) {
      const uint64_t last = table_entry(a, row, (first + count - 1) / a.block_size);
      for (uint64_t i = table_entry(a, row, first / a.block_size); i <= last; ++i) {
        KVX_TRY(a.mode == Addressing::kPacked ? check_block(end, i, a.indices[i])
                                              : check_pool_index(end, i, a.indices[i]));
      }
    }
  }
  return KVX_STATUS_OK;
}

// Source and destination blocks of one pool must differ, as far as tokens move.
kvx_status_t check_distinct_blocks(const Plan &plan, uint64_t tokens) {
  const auto bit = [](const Address &a, const Place &place) {
    return static_cast<size_t>(place.block) + (place.secondary ? a.num_blocks : 0);
  };
  for (int kv = 0; kv < (plan.has_v ? 2 : 1); ++kv) {
    const Address &src = plan.src[kv], &dst = plan.dst[kv];
    std::vector<bool> is_source(src.num_blocks +
                                std::max(src.secondary_blocks, dst.secondary_blocks));
    KVX_TRY(walk(plan, src, dst, 0, tokens,
                 [&](uint64_t, const Place &from, const Place &to, uint64_t) {
                   if (from.block >= 0 && to.block >= 0) is_source[bit(src, from)] = true;
                   return KVX_STATUS_OK;
                 }));
    KVX_TRY(walk(plan, src, dst, 0, tokens,
                 [&](uint64_t row, const Place &from, const Place &to, uint64_t) {
                   const bool written = to.block >= 0 && (from.block >= 0 || plan.zero_fill);
                   if (!written || !is_source[bit(dst, to)]) return KVX_STATUS_OK;
                   return KVX_INVALID(
                       "block %lld is a destination of row %llu and a source in the same pool, "
                       "expected disjoint blocks (spec E.3)",
                       static_cast<ll>(to.block), static_cast<ull>(row));
                 }));
  }
  return KVX_STATUS_OK;
}

kvx_status_t check_scale_at(const Scales &scales, const uint8_t *at, const char *end, int kv,
                            int64_t block, uint32_t head) {
  const float scale = read_scale(at, scales.dtype);
  if (is_usable_scale(scale)) return KVX_STATUS_OK;
  return KVX_INVALID(
      "%s %c scale of block %lld, head %u is %g, expected a finite scale above 0 (spec E.6)", end,
      kv ? 'V' : 'K', static_cast<ll>(block), head, static_cast<double>(scale));
}

// The scales of `count` tokens from `place` on.
kvx_status_t check_scales_at(const TensorPair &pair, const Scales &scales, const Place &place,
                             uint64_t count, const char *end) {
  if (!scales.data) return KVX_STATUS_OK;
  const uint64_t tokens = scales.token_stride ? count : 1;
  const uint32_t heads = scales.head_stride ? pair.num_heads : 1;
  for (uint64_t t = 0; t < tokens; ++t) {
    for (uint32_t h = 0; h < heads; ++h) {
      const uint8_t *at = scales.data + place.block * scales.block_stride +
                          (place.offset + static_cast<int64_t>(t)) * scales.token_stride +
                          h * scales.head_stride;
      KVX_TRY(check_scale_at(scales, at, end, pair.kv, place.block, h));
    }
  }
  return KVX_STATUS_OK;
}

// Every scale that a moving token uses, at both ends.
kvx_status_t check_scale_values(const Plan &plan, const TensorPair &pair, uint64_t tokens) {
  const Scales &src = pair.src_scales, &dst = pair.dst_scales;
  if (!src.data && !dst.data) return KVX_STATUS_OK;
  return walk(plan, plan.src[pair.kv], plan.dst[pair.kv], 0, tokens,
              [&](uint64_t, const Place &from, const Place &to, uint64_t count) -> kvx_status_t {
                if (from.block < 0 || to.block < 0) return KVX_STATUS_OK;
                KVX_TRY(check_scales_at(pair, src, from, count, "source"));
                return check_scales_at(pair, dst, to, count, "destination");
              });
}

}  // namespace

kvx_status_t check_data(const Plan &plan) {
  uint64_t tokens;
  KVX_TRY(check_lengths(plan, &tokens));
  for (int kv = 0; kv < (plan.has_v && !plan.same_places ? 2 : 1); ++kv) {
    KVX_TRY(check_end(plan, {plan.src[kv], plan.names.src_table, plan.names.src_starts}, tokens));
    KVX_TRY(check_end(plan, {plan.dst[kv], plan.names.dst_table, plan.names.dst_starts}, tokens));
  }
  tokens = count_tokens(plan);
  if (plan.check_same_pool) KVX_TRY(check_distinct_blocks(plan, tokens));
  for (uint32_t i = 0; i < plan.num_layers * 2; ++i)
    if (plan.pairs[i].num_heads) KVX_TRY(check_scale_values(plan, plan.pairs[i], tokens));
  return KVX_STATUS_OK;
}

}  // namespace kvx::cpu
