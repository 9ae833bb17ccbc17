// Questions about a plane descriptor: what its axes come to, where its bytes lie.
#pragma once

#include "desc/span.h"
#include "desc/tensor.h"

namespace kvx {

struct AxisPart {
  int64_t extent, stride;  // stride in bytes
};

// An axis of a plane. Parts of extent 1 are left out, and parts that continue each other are one.
struct PlaneAxis {
  int64_t extent = 1;  // of all parts together
  int num_parts = 0;
  AxisPart parts[KVX_MAX_PLANE_AXES];  // the outermost first
};
PlaneAxis axis_of(const kvx_plane_t &plane, kvx_axis_t axis);

// Extents of all parts of an axis together.
int64_t extent_of(const kvx_plane_t &plane, kvx_axis_t axis);

// Its blocks, and the tokens of one: an entry stands for several, or a block for a whole sequence.
struct BlockShape {
  uint64_t num_blocks, block_size;
};
BlockShape shape_of(const kvx_plane_t &plane);

// The bytes from its first element to its last, as a tensor of bytes.
kvx_tensor_desc_t bytes_of(const kvx_plane_t &plane);

inline Extent extent_of(const kvx_plane_t &plane) { return extent_of(bytes_of(plane)); }

// No byte of its extent is between its elements.
bool is_gapless(const kvx_plane_t &plane);

// The plane of `span` with this layer and role, or NULL; `guess` is the index where it mostly is.
const kvx_plane_t *find_plane(const kvx_span_t &span, uint32_t layer, uint32_t role,
                              uint32_t guess);

// The same numbers at the same places.
bool are_same(const kvx_plane_t &x, const kvx_plane_t &y);

// Its tokens are found by the span's table or slots, or lie densely as the span's do.
bool uses_lookup_of_span(const kvx_plane_t &plane);

// The blocks that the table of a span counts, of its layers or planes; zeros where none is found by
// the span's table.
BlockShape shape_of(const kvx_span_t &span);

}  // namespace kvx
