// A strided copy as a loop nest: which bytes are one run on both sides, and how runs repeat.
#pragma once

#include "plan.h"

namespace kvx::cpu {

struct Dim {
  int64_t count;
  int64_t src, dst;  // bytes from one to the next
};

// dims[0] is the outermost loop. A nest that transposes ends with two dims that are swapped in
// memory: dims[num_dims - 2] follows on run by run in the destination, dims[num_dims - 1] in the
// source.
struct Nest {
  static constexpr int kMaxDims = 5;  // token, head and dim in three parts
  int64_t run;                        // bytes
  int num_dims;
  bool transposes;
  Dim dims[kMaxDims];
};

// Whether `dim` splits into the same loops on both sides. If not (packs of 3 and 4, say), it is
// copied element by element: one nest of head_dim 1 each.
bool has_nest(const Side &src, const Side &dst);

// The copy of `tokens` tokens x `heads` heads x `head_dim` elements of `element_bytes`.
void make_nest(const Side &src, const Side &dst, int64_t tokens, int64_t heads, int64_t head_dim,
               int64_t element_bytes, Nest *nest);

// Bytes from element 0 to element d of a row.
inline int64_t element_offset(const Side &side, int64_t d) {
  return d / side.pack * side.outer_stride + d % side.pack * side.inner_stride;
}

// A row is one run of bytes.
inline bool is_dense_row(const Side &side, int64_t head_dim) {
  return side.pack == head_dim && side.inner_stride == size_of(side.dtype);
}

// A row-major [tokens, heads, head_dim] buffer.
Side dense_side(uint8_t *base, kvx_dtype_t dtype, int64_t heads, int64_t head_dim);

}  // namespace kvx::cpu
