// Turns a strided copy into loops around runs of bytes that are contiguous at both ends.
#pragma once

#include "plan/plan.h"

namespace kvx {

struct Loop {
  int64_t count;
  int64_t src, dst;  // bytes from one to the next
};

// at[0] is the outermost. A transpose ends with two loops: runs are contiguous along at[count - 2]
// in the destination, and along at[count - 1] in the source.
struct Loops {
  static constexpr int kMost = 7;  // head, token and dim in three parts each
  int64_t run;                     // bytes
  int count;
  bool transposes;
  Loop at[kMost];
};

// Whether `dim` splits into the same loops at both ends. If not (packs of 3 and 4, say), it is
// copied element by element: loops of head_dim 1 for each.
bool can_loop(const Plane &src, const Plane &dst);

// The tokens that make_loops takes at a time, of `tokens` tokens from token `from` of a source
// block to token `to` of a destination block on: those within one part of the token axis, or whole
// parts, at each end. All if neither end splits tokens.
int64_t tokens_of_loops(const Plane &src, const Plane &dst, int64_t from, int64_t to,
                        int64_t tokens);
// The tokens within one part at both ends: each is a token_stride after the one before.
int64_t tokens_of_part(const Plane &src, const Plane &dst, int64_t from, int64_t to,
                       int64_t tokens);

// Makes the loops of a copy of `tokens` tokens x `heads` heads x `head_dim` elements of
// `element_bytes`.
void make_loops(const Plane &src, const Plane &dst, int64_t tokens, int64_t heads, int64_t head_dim,
                int64_t element_bytes, Loops *loops);

// Bytes from element 0 to element d of a vector.
inline int64_t element_offset(const Plane &plane, int64_t d) {
  return d / plane.pack * plane.outer_stride + d % plane.pack * plane.inner_stride;
}

// Whether a vector is one run of bytes.
inline bool is_dense_vector(const Plane &plane, int64_t head_dim) {
  return plane.pack == head_dim && plane.inner_stride == size_of(plane.dtype);
}

// A row-major [tokens, heads, head_dim] buffer.
Plane dense_plane(uint8_t *base, kvx_dtype_t dtype, int64_t heads, int64_t head_dim);

}  // namespace kvx
