// Pairs of planes of which one end or both are U8_ZERO or U8_BIAS: a scale and a zero point for
// each unit lie beside the data. Spec: E.14
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

  // Of group 0.
  KVX_HD int64_t offset_of(int64_t block, int64_t token, int64_t head) const {
    return block * block_stride + token * token_stride + head * head_stride;
  }
};

// `group` is 0 at an end of another format.
struct AffineEnd {
  GroupNumbers scales, zeros;
  uint32_t group;      // numbers along dim that share both
  bool covers_tokens;  // so do all tokens of a block
};

struct AffinePair {
  AffineEnd src, dst;
  bool keeps_units;     // those that move whole, and alone into a block, are copied
  bool requantizes;     // tokens of a unit that stay are quantized anew
  uint32_t block_size;  // of the destination
};

}  // namespace kvx
