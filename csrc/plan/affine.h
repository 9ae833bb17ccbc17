// Pairs of planes of which one end or both are U8_ZERO or U8_BIAS: a scale and a zero point for
// each unit lie beside the data. Or F4_E2M1: a scale for each group, which is its unit, and perhaps
// one for the tensor. Spec: E.14, E.18
#pragma once

#include <cstdint>

#include "hd.h"
#include "kvx/kvx_abi.h"

namespace kvx {

// Scales or zero points: that of (block, token, head, group) lies at data + block * block_stride +
// ... bytes.
struct GroupNumbers {
  uint8_t *data;
  kvx_dtype_t dtype;
  int64_t block_stride, token_stride, head_stride, group_stride;
  uint32_t quarter;  // a quarter of the groups, if tokens and groups swap places in fours; else 0

  // Of group 0.
  KVX_HD int64_t offset_of(int64_t block, int64_t token, int64_t head) const {
    return block * block_stride + token * token_stride + head * head_stride;
  }
  // Of a group that covers no tokens: a quarter of the groups of four tokens is that of one.
  KVX_HD int64_t offset_of(int64_t block, uint32_t token, int64_t head, uint32_t group) const {
    const uint32_t row = quarter ? token / 4 * 4 + group / quarter : token;
    const uint32_t column = quarter ? group % quarter * 4 + token % 4 : group;
    return offset_of(block, int64_t{row}, head) + column * group_stride;
  }
};

// `group` is 0 at an end of another format.
struct AffineEnd {
  GroupNumbers scales, zeros;  // of F4_E2M1, `zeros` is the scale of the tensor; NULL data: 1
  uint32_t group;              // numbers along dim that share both
  bool covers_tokens;          // so do all tokens of a block
};

struct AffinePair {
  AffineEnd src, dst;
  bool keeps_units;     // those that move whole, and alone into a block, are copied
  bool requantizes;     // tokens of a unit that stay are quantized anew
  uint32_t block_size;  // of the destination
};

}  // namespace kvx
