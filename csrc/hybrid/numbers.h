// The arithmetic of hybrid caches, shared by the CPU and kernels, which give the same bits. Spec:
// E.22
#pragma once

#include "formats/e2m1.h"
#include "formats/scalar.h"
#include "formats/softmax.h"
#include "kvx/kvx_hybrid.h"

namespace kvx::hybrid {

// The inverse scale of a row whose largest magnitude has these bits; NaN is left out of it, and
// infinity counts as the largest finite number.
KVX_HD float inverse_scale(int32_t most) {
  const float scale = float_of(finite(most)) / 448.0f;
  return scale > 0.0f ? scale : 1.0f;
}

// ---- the records of engines' pages ----

constexpr uint32_t kPageNope = 448, kPageRope = 64, kPageDim = kPageNope + kPageRope;
constexpr uint32_t kPageGroup = 64, kPageGroups = kPageNope / kPageGroup;
constexpr uint32_t kPageData = kPageNope + 2 * kPageRope, kPageScales = 8;

// The exponent byte of the scale of a group: the least power of two that is amax / 448 or more,
// with 1e-4 as the least amax.
KVX_HD uint8_t page_exponent(int32_t most) {
  const float largest = float_of(finite(most));
  const float scale = (largest > 1e-4f ? largest : 1e-4f) / 448.0f;
  return static_cast<uint8_t>((bits_of(scale) + 0x7fffffu) >> 23);
}
// 2^(127 - exponent); exponents are those of page_exponent.
KVX_HD float page_inverse(uint8_t exponent) { return float_of((254u - exponent) << 23); }

// ---- entries of tails ----

constexpr uint32_t kLanes = 128;  // sums of squares: lane i adds every 128th number from i on

// Where the streams of an entry lie: token j of a stream is `stride` numbers from token j - 1.
struct Streams {
  const void *ka, *za, *kb, *zb;  // kb, zb NULL: there are no previous tokens
  uint32_t stride;
};

// The streams of row i, whose tail is `slot`.
KVX_HD Streams streams_of(const kvx_hybrid_compress_t &c, uint32_t i, uint32_t slot) {
  const bool is_bulk = c.flags & KVX_HYBRID_BULK;
  const bool overlaps = is_bulk ? !(c.flags & KVX_HYBRID_NO_OVERLAP) : c.kb != nullptr;
  const bool is_wide = overlaps && !(c.flags & KVX_HYBRID_SINGLE_ROW);
  const uint64_t row = is_wide ? 2 * c.head_dim : c.head_dim;
  const uint64_t size = c.state == KVX_DTYPE_F32 ? 4 : 2, tail = row * c.ratio * size;
  const auto at = [](const void *data, uint64_t bytes) -> const void * {
    return static_cast<const uint8_t *>(data) + bytes;
  };
  const uint64_t a = (is_bulk ? i : slot) * tail + (is_wide ? c.head_dim * size : 0);
  Streams found{at(c.ka, a), at(c.za, a), nullptr, nullptr, static_cast<uint32_t>(row)};
  if (!overlaps) return found;
  if (!is_bulk) {
    found.kb = at(c.kb, slot * tail), found.zb = at(c.zb, slot * tail);
  } else if (i > 0) {
    found.kb = at(c.ka, (i - 1) * tail), found.zb = at(c.za, (i - 1) * tail);
  } else {
    found.kb = c.kb, found.zb = c.zb;
  }
  return found;
}

// The rotation of the numbers 2 * pair and 2 * pair + 1 of a vector.
struct Rotated {
  float even, odd;
};
KVX_HD Rotated rotate(float even, float odd, float cosine, float sine) {
  return {even * cosine - odd * sine, odd * cosine + even * sine};
}

KVX_HD int64_t position_of(const void *positions, uint32_t bytes, uint32_t i) {
  return bytes == 4 ? static_cast<const int32_t *>(positions)[i]
                    : static_cast<const int64_t *>(positions)[i];
}

// The tail of a row, -1: the row is skipped.
KVX_HD int64_t tail_of_row(const kvx_hybrid_compress_t &c, uint32_t i) {
  if (c.mask && !c.mask[i]) return -1;
  const bool is_bulk = c.flags & KVX_HYBRID_BULK;
  const int64_t slot = c.slots ? int64_t{c.slots[i]} : int64_t{i};
  if (slot < 0 || (!is_bulk && slot >= c.num_slots)) return -1;
  if (!c.cos_sin) return slot;
  const int64_t position = position_of(c.positions, c.position_bytes, i);
  return position >= 0 && position < c.num_positions ? slot : -1;
}

// ---- indexer keys in E2M1 ----

// The scale of a group, as it is stored: THRESHOLDS has no smaller E8M0 than 2^-13, the power of
// two at or above 1e-4. Source: sglang 0.5.23, kernels/ops/quantization/fp4_indexer_quant.py,
// quantize_fp4_indexer_row
KVX_HD float key_scale(const kvx_hybrid_flush_t &f, float scale) {
  const bool has_least = f.flags & KVX_HYBRID_THRESHOLDS && f.keys == KVX_HYBRID_MXFP4;
  return has_least && scale < 0x1p-13f ? 0x1p-13f : scale;
}

// The nearest code; ties are what the call's flags say.
// Source: sglang 0.5.23, the same file, _fp4_e2m1_code
KVX_HD uint32_t key_code(const kvx_hybrid_flush_t &f, float x) {
  const uint32_t code = E2m1::encode(x), number = code & 7u;
  if (!(f.flags & KVX_HYBRID_THRESHOLDS)) return code;
  // What was a tie and went up goes down. Its code is even, so that it does not become 0.
  const float tie = (E2m1::decode(number - 1) + E2m1::decode(number)) * 0.5f;
  if (number && float_of(bits_of(x) & ~kSign) == tie) return code - 1;
  return number ? code : 0;
}

// The entry of the pool that a row is written to, -1: none.
KVX_HD int64_t entry_of_row(const kvx_hybrid_flush_t &f, uint32_t i) {
  const bool is_masked = f.mask && !f.mask[i], has_none = f.slots && f.slots[i] < 0;
  const int32_t id = f.entry_ids[i];
  if (is_masked | has_none | (id < 0)) return -1;  // all three are on their way together
  const uint32_t column = static_cast<uint32_t>(id) / f.entries_per_block;
  if (column >= f.max_blocks) return -1;
  const int32_t block = f.block_table[uint64_t{i} * f.max_blocks + column];
  if (block < 0 || static_cast<uint32_t>(block) >= f.num_blocks) return -1;
  const uint32_t place = static_cast<uint32_t>(id) - column * f.entries_per_block;
  return int64_t{block} * f.entries_per_block + place;
}

// Where the record of a slot lies; NULL: its row is skipped.
struct Record {
  uint8_t *data, *scales;
};
KVX_HD Record record_of_slot(const kvx_hybrid_pages_t &p, int64_t slot) {
  if (slot < 0 || slot >= int64_t{p.num_pages} * p.entries_per_page) return {nullptr, nullptr};
  const auto number = static_cast<uint64_t>(slot);
  const uint64_t page = number <= UINT32_MAX  // which divide several times faster
                            ? static_cast<uint32_t>(number) / p.entries_per_page
                            : number / p.entries_per_page;
  const uint64_t entry = number - page * p.entries_per_page;
  uint8_t *const begin = static_cast<uint8_t *>(p.pages) + page * p.page_stride;
  return {begin + entry * kPageData,
          begin + uint64_t{p.entries_per_page} * kPageData + entry * kPageScales};
}

}  // namespace kvx::hybrid
