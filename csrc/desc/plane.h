// Questions about a plane descriptor: extents of its axes, memory of its bytes.
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

// The extent of an axis, all its parts together.
int64_t extent_of(const kvx_plane_t &plane, kvx_axis_t axis);

// The number of blocks, and the tokens of one: an entry may stand for several tokens, a block for a
// whole sequence.
struct BlockShape {
  uint64_t num_blocks, block_size;
};
BlockShape shape_of(const kvx_plane_t &plane);

// A tensor of bytes that covers the plane from its first element to its last.
kvx_tensor_desc_t bytes_of(const kvx_plane_t &plane);

inline Extent extent_of(const kvx_plane_t &plane) { return extent_of(bytes_of(plane)); }

// Whether no byte of its extent lies between its elements.
bool is_gapless(const kvx_plane_t &plane);

// The plane of `span` with this layer and role, or NULL; `guess` is its usual index.
const kvx_plane_t *find_plane(const kvx_span_t &span, uint32_t layer, uint32_t role,
                              uint32_t guess);

// Whether both are the same numbers at the same addresses.
bool are_same(const kvx_plane_t &x, const kvx_plane_t &y);

// Whether it uses the table or slots of its span, or is dense as the span is.
bool uses_lookup_of_span(const kvx_plane_t &plane);

// The blocks that the span's table counts, from its layers or planes; zeros if none of them uses
// it.
BlockShape shape_of(const kvx_span_t &span);

}  // namespace kvx
