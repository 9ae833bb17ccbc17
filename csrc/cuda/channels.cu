// Into U8_ZERO and U8_BIAS where a unit covers all tokens of a block: a number of each of them. A
// warp per block, head and 32 channels, a lane per channel. Spec: E.14
#include "cuda/affine.cuh"
#include "cuda/kernels.h"
#include "cuda/lookup.cuh"

namespace kvx::cuda {
namespace {

// The tokens of a row that go into one block of the destination.
struct Block {
  uint32_t row, begin, end;
  Place place;    // of the first of them
  uint8_t *base;  // of its token 0
};

// How tokens of a row are found. Asked for again for every round of tokens, rather than kept in
// registers. For whole warps.
__device__ __forceinline__ Chunk chunk_of_row(const AffineParams &p, const Pair &pair,
                                              uint32_t row) {
  const auto &[src, dst] = p.lookups[pair.lookup];
  Chunk chunk{};
  chunk.row = row;
  chunk.stored = static_cast<uint32_t>(min(p.rows.stored(row), uint64_t{UINT32_MAX}));
  read_row(src, row, &chunk.src);
  read_row(dst, row, &chunk.dst);
  if (src.mode == LookupMode::kSlots && row > 0) chunk.flat = tokens_before(p, row);
  return chunk;
}

// Block `ordinal` of those of a row; false: nothing goes there. A warp of each block `reports`.
__device__ __forceinline__ bool find_block(const AffineParams &p, const Pair &pair, uint32_t row,
                                           uint32_t ordinal, bool reports, Block *block) {
  const KernelLookup &dst = p.lookups[pair.lookup].dst;
  const uint32_t lane = threadIdx.x % kWarp;
  const bool reports_row = reports && lane == 0 && ordinal == 0;
  if (reports_row && pair.reports) report(p, pair.lookup, row, false, 0, 0, 0);
  if (p.rows.length_of(row) < 0) return false;
  Violation found{};
  if (!p.affine.requantizes && is_within_unit(p.rows, dst, row, &found)) {
    if (reports_row && blockIdx.y == 0) report(p, pair.lookup, found);
    return false;
  }
  const Chunk chunk = chunk_of_row(p, pair, row);
  const uint32_t size = p.affine.block_size, within = chunk.dst.start % size;
  const uint64_t begin = ordinal ? uint64_t{ordinal} * size - within : 0;
  const uint64_t end = min(uint64_t{ordinal + 1} * size - within, uint64_t{chunk.stored});
  if (begin >= end) return false;
  block->row = row;
  block->begin = static_cast<uint32_t>(begin);
  block->end = static_cast<uint32_t>(end);
  if (find(dst, chunk.dst, begin, chunk.flat + begin, pair.plane, &block->place) != Fault::kNone ||
      block->place.block < 0) {
    if (reports && pair.reports) {  // what is wrong with its tokens
      KVX_LOOP
      for (uint32_t token = block->begin + lane; token < block->end; token += kWarp)
        token_at(p, pair, chunk, token, true);
    }
    return false;
  }
  Place first = block->place;
  first.offset = 0;
  block->base = address_of(p.shape.dst, pair.bases.dst, pair.bases.dst_secondary, first);
  return true;
}

// Where all tokens of a block come from, if units may be copied: one block, from its first token
// on.
__device__ __forceinline__ bool is_whole(const AffineParams &p, const Pair &pair,
                                         const Block &block, Place *from) {
  if (!p.affine.keeps_units || block.place.offset) return false;
  const Chunk chunk = chunk_of_row(p, pair, block.row);
  const Fault fault = find(p.lookups[pair.lookup].src, chunk.src, block.begin,
                           chunk.flat + block.begin, pair.plane, from);
  return fault == Fault::kNone && from->block >= 0 && from->offset == 0 &&
         from->run >= block.end - block.begin;
}

// Calls visit(at, x) with the numbers of one channel and where their bytes go: of tokens that stay
// in the block, if they are kept, and of those that move. Whole warps come here; `d` may be past
// the last channel, then visit is not called.
template <bool kReports, class Visit>
__device__ __forceinline__ void each_number(const AffineParams &p, const Pair &pair,
                                            const Block &block, uint32_t head, uint32_t d,
                                            Visit visit) {
  const PlanePair &shape = p.shape;
  const auto at = [&](uint32_t offset) {
    return block.base + offset * shape.dst.token_stride + head * shape.dst.head_stride +
           offset_of(shape.dst, d);
  };
  // Its scale and zero point are stored behind the last visit.
  const auto old = [&](const uint8_t *q) {
    const UnitsAt dst = dst_units(p, blockIdx.y);
    return dst.decode(*q, dst.load(block.place, head, d));
  };
  if (p.affine.requantizes && d < shape.head_dim) {
    KVX_LOOP
    for (uint32_t offset = 0; offset < block.place.offset; ++offset)
      visit(at(offset), old(at(offset)));
  }
  const uint32_t lane = threadIdx.x % kWarp;
  KVX_LOOP
  for (uint32_t begin = block.begin; begin < block.end; begin += kWarp) {
    const Chunk chunk = chunk_of_row(p, pair, block.row);
    Token own{};
    if (begin + lane < block.end) own = token_at(p, pair, chunk, begin + lane, false);
    KVX_LOOP
    for (uint32_t i = 0; i < kWarp && begin + i < block.end; ++i) {
      const Token token = token_of_lane<true>(own, i);
      if (d >= shape.head_dim) continue;
      uint8_t *const to = at(block.place.offset + (begin - block.begin) + i);
      if (token.src) {
        const float scale = scale_at(shape.src_scales, pair.bases.src_scales, token.from, head);
        if (!is_usable(scale)) {
          if (kReports && d == 0) report_scale(p, pair, token, head, scale, 1.0f);
          continue;
        }
        visit(to, number_from<false>(shape.src, src_units(p, blockIdx.y),
                                     token.src + head * shape.src.head_stride, token.from, head, d,
                                     scale));
      } else if (token.dst) {  // filled with zeros
        visit(to, 0.0f);
      } else if (p.affine.requantizes) {
        visit(to, old(to));
      }
    }
  }
}

// Whether any token of the block has numbers for it: other blocks are left alone. One warp of a
// block `reports` what is wrong with its tokens.
__device__ __forceinline__ bool any_moves(const AffineParams &p, const Pair &pair,
                                          const Block &block, bool reports) {
  const Chunk chunk = chunk_of_row(p, pair, block.row);
  const uint32_t lane = threadIdx.x % kWarp;
  bool any = false;
  KVX_LOOP
  for (uint32_t begin = block.begin; begin < block.end; begin += kWarp)
    if (begin + lane < block.end)
      any |= token_at(p, pair, chunk, begin + lane, reports).dst != nullptr;
  return __ballot_sync(~0u, any) != 0;
}

__device__ __forceinline__ void copy_units(const AffineParams &p, const Pair &pair,
                                           const Block &block, Place from, uint32_t head,
                                           uint32_t d) {
  const PlanePair &shape = p.shape;
  if (d >= shape.head_dim) return;
  const UnitsAt src = src_units(p, blockIdx.y), dst = dst_units(p, blockIdx.y);
  for (const bool is_zero : {false, true}) {
    const GroupNumbers &of = is_zero ? src.end.zeros : src.end.scales;
    const GroupNumbers &to = is_zero ? dst.end.zeros : dst.end.scales;
    copy_element(number_of(to, is_zero ? dst.zeros : dst.scales, block.place, head, d),
                 number_of(of, is_zero ? src.zeros : src.scales, from, head, d),
                 of.dtype == KVX_DTYPE_F32 ? 4 : 2);
  }
  const uint8_t *q = address_of(shape.src, pair.bases.src, pair.bases.src_secondary, from) +
                     head * shape.src.head_stride + offset_of(shape.src, d);
  uint8_t *at = block.base + head * shape.dst.head_stride + offset_of(shape.dst, d);
  KVX_LOOP
  for (uint32_t left = block.end - block.begin; left > 0; --left) {
    *at = *q;
    q += shape.src.token_stride, at += shape.dst.token_stride;
  }
}

__global__ void __launch_bounds__(kThreads, 4)
    channels_kernel(const __grid_constant__ AffineParams p) {
  const Pair pair = this_pair(p);
  const uint32_t lane = threadIdx.x % kWarp;
  const uint32_t items = p.chunks * p.parts.divisor;
  for (uint32_t item = blockIdx.x * kWarps + threadIdx.x / kWarp; item < items;
       item += gridDim.x * kWarps) {
    const uint32_t index = p.parts.quotient(item), part = item - index * p.parts.divisor;
    const uint32_t in_row = p.num_rows.quotient(index), row = index - in_row * p.num_rows.divisor;
    const uint32_t head = p.units.per_head.quotient(part);
    const uint32_t d = (part - head * p.units.per_head.divisor) * kWarp + lane;
    Block block;
    if (!find_block(p, pair, row, in_row, part == 0, &block)) continue;
    Place from;
    if (is_whole(p, pair, block, &from)) {
      copy_units(p, pair, block, from, head, d);
      continue;
    }
    // One warp of those of the block tells what is wrong with tokens.
    if (!any_moves(p, pair, block, pair.reports && part == 0)) continue;
    const UnitsAt dst = dst_units(p, blockIdx.y);
    Bounds bounds;
    each_number<true>(p, pair, block, head, d, [&](uint8_t *, float x) { bounds.add(x); });
    const ScaleZero found = dst.find(bounds);
    each_number<false>(p, pair, block, head, d,
                       [&](uint8_t *at, float x) { *at = dst.encode(x, found); });
    if (d < p.shape.head_dim) dst.store(block.place, head, d, found);
  }
}

}  // namespace

void launch_channels(const AffineParams &params, dim3 grid, cudaStream_t stream) {
  KVX_LAUNCH((channels_kernel), grid, kThreads, 0, stream, params);
}

}  // namespace kvx::cuda
