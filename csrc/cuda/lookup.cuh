// The work of a launch: chunks of a row's tokens, and the lookup of each token at both ends.
#pragma once

#include "cuda/params.h"
#include "cuda/platform.h"

namespace kvx::cuda {

// The pair of planes that a thread block works on, and whether it reports faults: of the pairs that
// share a lookup, one reports.
struct Pair {
  Bases bases;
  uint8_t lookup;
  bool is_v;
  bool reports;
  uint32_t plane;
};

template <class P>
__device__ __forceinline__ Pair this_pair(const P &p) {
  const uint32_t index = blockIdx.y;
  const uint8_t lookup = p.lookup[index];
  // Where each plane has entries of its own, each pair reports.
  const bool reports = index == p.reporter[lookup] || p.lookups[lookup].differs_by_plane();
  return {p.bases_of(index), lookup, p.is_v[index], reports, p.plane_of(index)};
}

__device__ __forceinline__ void report(const Common &p, uint8_t lookup,
                                       const Violation &violation) {
  atomicAdd(&p.status->count, 1ull);
  if (atomicCAS(&p.status->claimed, 0u, 1u) != 0) return;
  p.status->call = p.call;
  p.status->src = p.lookups[lookup].src.mode;
  p.status->dst = p.lookups[lookup].dst.mode;
  p.status->first = violation;
  __threadfence();
  atomicExch(&p.status->ready, 1u);
}

// Tokens [begin, end) of a row, of which those from `stored` on have no source. `flat` is the
// number of tokens in all rows before, where slots need it.
struct Chunk {
  uint32_t row, begin, end, stored;
  uint64_t flat;
  RowLookup<uint32_t> src, dst;
};

// The fault of a token's entry, if its row holds one.
__device__ __forceinline__ Fault token_fault(const KernelLookup &a, uint64_t row, uint64_t token,
                                             uint64_t flat, uint32_t plane, Violation *found) {
  RowLookup<uint32_t> at;
  uint32_t offset;
  read_row(a, row, &at);
  if (a.mode == LookupMode::kDense || !entry_of(a, at, token, flat, &found->index, &offset))
    return Fault::kNone;
  found->index = index_of(a, found->index, plane);
  found->limit = a.indices_count;
  if (found->index >= a.indices_count) return Fault::kSlotCount;
  Place place;
  found->value = a.indices[found->index];
  found->limit = limit_of(a, found->value);
  return place_of(a, found->value, offset, &place);
}

// Reports the fault of a row or, if `of_token`, of the entry of one of its tokens, whose row has
// been reported elsewhere. Rare, so it looks everything up again.
__device__ __forceinline__ void report(const Common &p, uint8_t lookup, uint64_t row, bool of_token,
                                       uint64_t token, uint64_t flat, uint32_t plane) {
#pragma unroll 1
  for (uint32_t i = 0; i < 2; ++i) {
    const KernelLookup &a = i ? p.lookups[lookup].dst : p.lookups[lookup].src;
    Violation found{};
    if (!of_token) {
      RowLookup<uint64_t> at{};
      uint64_t count;
      const Fault fault = row_fault(p.rows, a, row, &at, &count);
      if (fault != Fault::kNone) describe(fault, p.rows, a, row, at, &found);
    } else {
      found.fault = token_fault(a, row, token, flat, plane, &found);
    }
    if (found.fault == Fault::kNone) continue;
    found.mode = a.mode;
    found.is_v = a.is_v;
    found.is_own = a.is_own;
    found.at_dst = i != 0;
    found.row = row;
    found.sub_blocks = a.sub_blocks;
    found.sub_block = a.sub_block;
    return report(p, lookup, found);
  }
}

// The tokens of all rows before `row`; the lanes of a warp share the rows.
__device__ __forceinline__ uint64_t tokens_before(const Common &p, uint32_t row) {
  uint64_t tokens = 0;
  for (uint32_t before = threadIdx.x % kWarp; before < row; before += kWarp)
    if (p.rows.length_of(before) > 0) tokens += p.rows.stored(before);
  for (uint32_t step = kWarp / 2; step > 0; step /= 2) tokens += __shfl_xor_sync(~0u, tokens, step);
  return tokens;
}

// Chunk `index` of the launch from its token `skipped` on, for whole warps. If `reports`, the first
// chunk of a row reports for the row. Kernels call it for every round of tokens, to keep no chunk
// in registers while they move bytes.
__device__ __forceinline__ Chunk chunk_of(const Common &p, uint8_t lookup, uint32_t index,
                                          uint32_t skipped, bool reports) {
  const auto &[src, dst] = p.lookups[lookup];
  Chunk s{};
  const uint32_t chunk = p.num_rows.quotient(index);
  s.row = index - chunk * p.num_rows.divisor;
  if (reports && chunk == 0 && skipped == 0) report(p, lookup, s.row, false, 0, 0, 0);
  const int64_t length = p.rows.length_of(s.row);
  if (length < 0) return s;  // nothing of the row moves, zeros neither
  s.stored = static_cast<uint32_t>(min(p.rows.stored(s.row), uint64_t{UINT32_MAX}));
  const uint64_t first = uint64_t{chunk} * p.tokens_per_chunk, begin = first + skipped;
  const uint64_t end =
      min(first + p.tokens_per_chunk, p.rows.fill_to_max ? p.rows.max_len : s.stored);
  if (begin >= end) return s;
  s.begin = static_cast<uint32_t>(begin);
  s.end = static_cast<uint32_t>(end);
  read_row(src, s.row, &s.src);
  read_row(dst, s.row, &s.dst);
  const bool has_slots = src.mode == LookupMode::kSlots || dst.mode == LookupMode::kSlots;
  if (has_slots && s.row > 0) s.flat = tokens_before(p, s.row);
  return s;
}

// Whether no row has tokens in this chunk, and so in none after it. For whole warps that have found
// a chunk empty: tables may have room for far more tokens than their rows have.
__device__ __forceinline__ bool is_past_rows(const Common &p, uint32_t index) {
  if (!p.measures_rows) return false;
  const uint64_t first = uint64_t{p.num_rows.quotient(index)} * p.tokens_per_chunk;
  bool is_longer = first == 0;  // faults are reported with a row's first chunk
  for (uint32_t row = threadIdx.x % kWarp; row < p.num_rows.divisor; row += kWarp) {
    const int64_t length = p.rows.length_of(row);
    is_longer = is_longer || (length > 0 && p.rows.cut(length) > first);
  }
  return !__any_sync(~0u, is_longer);
}

// A token at both ends. `dst` NULL: store nothing; `src` NULL: store zeros.
struct Token {
  const uint8_t *src;
  uint8_t *dst;
  Place from, to;
};

// Finds token `token` of a chunk. Of all threads that find the same token, exactly one `reports`;
// if kReportsLast, when fewer numbers are in registers.
template <bool kReportsLast = false>
__device__ __forceinline__ Token token_at(const Common &p, const Pair &pair, const Chunk &chunk,
                                          uint64_t token, bool reports) {
  Token t{nullptr, nullptr, {-1, 0, UINT32_MAX, false}, {}};
  const uint64_t flat = chunk.flat + token;
  const auto &[src, dst] = p.lookups[pair.lookup];
  bool wrong = false;
  if (token < chunk.stored)
    wrong = find(src, chunk.src, token, flat, pair.plane, &t.from) != Fault::kNone;
  if (find(dst, chunk.dst, token, flat, pair.plane, &t.to) != Fault::kNone) wrong = true;
  if (!kReportsLast && wrong && reports)
    report(p, pair.lookup, chunk.row, true, token, flat, pair.plane);
  // A token that is out of range at one end is skipped at both, zero fill or not.
  if (!wrong && t.to.block >= 0 && (t.from.block >= 0 || p.zero_fill)) {
    t.dst = address_of(p.shape.dst, pair.bases.dst, pair.bases.dst_secondary, t.to);
    if (t.from.block >= 0)
      t.src = address_of(p.shape.src, pair.bases.src, pair.bases.src_secondary, t.from);
  }
  if (kReportsLast && wrong && reports)
    report(p, pair.lookup, chunk.row, true, token, flat, pair.plane);
  return t;
}

// Gives the whole warp the token of `lane`; its places only if kPlaces.
template <bool kPlaces>
__device__ __forceinline__ Token token_of_lane(const Token &own, uint32_t lane) {
  const auto of_lane = [lane](auto value) { return __shfl_sync(~0u, value, lane); };
  Token token{};
  token.src = reinterpret_cast<const uint8_t *>(of_lane(reinterpret_cast<uintptr_t>(own.src)));
  token.dst = reinterpret_cast<uint8_t *>(of_lane(reinterpret_cast<uintptr_t>(own.dst)));
  if constexpr (kPlaces) {
    token.from.block = of_lane(own.from.block);
    token.from.offset = of_lane(own.from.offset);
    token.to.block = of_lane(own.to.block);
    token.to.offset = of_lane(own.to.offset);
  }
  return token;
}

// Calls take(own, first, last) for up to 32 tokens at a time, of which this warp moves units
// [first, last). The lanes find the tokens in parallel, one each: `own`, of which a lane may have
// none.
template <class P, class Take>
__device__ __forceinline__ void each_round_of_warp(const P &p, const Pair &pair, Take take) {
  const uint32_t lane = threadIdx.x % kWarp;
  const uint32_t items = p.chunks * p.parts.divisor;
  for (uint32_t item = blockIdx.x * kWarps + threadIdx.x / kWarp; item < items;
       item += gridDim.x * kWarps) {
    const uint32_t index = p.parts.quotient(item), part = item - index * p.parts.divisor;
    const bool reports = pair.reports && part == 0;
    const uint32_t first = part * p.units_per_part;
    const uint32_t last = min(first + p.units_per_part, p.units.per_token.divisor);
    for (uint32_t skipped = 0; skipped < p.tokens_per_chunk; skipped += kWarp) {
      const Chunk chunk = chunk_of(p, pair.lookup, index, skipped, reports && lane == 0);
      if (chunk.begin >= chunk.end) {
        if (is_past_rows(p, index)) return;
        break;
      }
      Token own{};
      if (lane < chunk.end - chunk.begin)
        own = token_at(p, pair, chunk, chunk.begin + lane, reports);
      take(own, first, last);
    }
  }
}

// Calls move(token, first, last) for every token of which this warp moves units [first, last).
// kPlaces: move needs the token's places.
template <bool kPlaces, class P, class Move>
__device__ __forceinline__ void each_token_of_warp(const P &p, const Pair &pair, Move move) {
  each_round_of_warp(p, pair, [&](const Token &own, uint32_t first, uint32_t last) {
    for (uint32_t left = __ballot_sync(~0u, own.dst != nullptr); left; left &= left - 1)
      move(token_of_lane<kPlaces>(own, __ffs(static_cast<int>(left)) - 1), first, last);
  });
}

// Bytes from a token's first element to unit `unit` of head `head`.
__device__ __forceinline__ int64_t unit_offset(const Plane &shape, const FastDiv &per_pack,
                                               int64_t unit_bytes, uint32_t head, uint32_t unit) {
  const uint32_t pack = per_pack.quotient(unit);
  const uint32_t within = unit - pack * per_pack.divisor;
  return head * shape.head_stride + pack * shape.outer_stride + within * unit_bytes;
}

}  // namespace kvx::cuda
