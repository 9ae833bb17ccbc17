// A strided copy as loops around runs of bytes: which bytes are one run at both ends, and how runs
// repeat.
#pragma once

#include "plan/plan.h"

namespace kvx {

struct Loop {
  int64_t count;
  int64_t src, dst;  // bytes from one to the next
};

// at[0] is the outermost. Loops that transpose end with two that are swapped in memory:
// at[count - 2] follows on run by run in the destination, at[count - 1] in the source.
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

// Of `tokens` tokens that follow each other from token `from` of a source block and token `to` of a
// destination block on: how many of the first lie at even steps within an axis's part, or are whole
// parts, at each end. make_loops takes as many at a time. All, where neither end splits tokens.
int64_t tokens_of_loops(const Plane &src, const Plane &dst, int64_t from, int64_t to,
                        int64_t tokens);
// How many lie within one part at both ends: token_stride leads from one to the next.
int64_t tokens_of_part(const Plane &src, const Plane &dst, int64_t from, int64_t to,
                       int64_t tokens);

// The copy of `tokens` tokens x `heads` heads x `head_dim` elements of `element_bytes`.
void make_loops(const Plane &src, const Plane &dst, int64_t tokens, int64_t heads, int64_t head_dim,
                int64_t element_bytes, Loops *loops);

// Bytes from element 0 to element d of a vector.
inline int64_t element_offset(const Plane &plane, int64_t d) {
  return d / plane.pack * plane.outer_stride + d % plane.pack * plane.inner_stride;
}

// A vector is one run of bytes.
inline bool is_dense_vector(const Plane &plane, int64_t head_dim) {
  return plane.pack == head_dim && plane.inner_stride == size_of(plane.dtype);
}

// A row-major [tokens, heads, head_dim] buffer.
Plane dense_plane(uint8_t *base, kvx_dtype_t dtype, int64_t heads, int64_t head_dim);

}  // namespace kvx
