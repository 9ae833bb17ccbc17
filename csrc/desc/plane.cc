#include "desc/plane.h"

#include <algorithm>
#include <initializer_list>

namespace kvx {

PlaneAxis axis_of(const kvx_plane_t &plane, kvx_axis_t axis) {
  PlaneAxis found;
  for (uint32_t i = 0; i < plane.num_axes; ++i) {
    const kvx_plane_axis_t &part = plane.axes[i];
    if (part.axis != axis || part.extent == 1) continue;
    found.extent *= part.extent;
    AxisPart *const outer = found.num_parts ? &found.parts[found.num_parts - 1] : nullptr;
    if (outer && outer->stride == part.extent * part.stride_bytes) {
      *outer = {outer->extent * part.extent, part.stride_bytes};
    } else {
      found.parts[found.num_parts++] = {part.extent, part.stride_bytes};
    }
  }
  return found;
}

int64_t extent_of(const kvx_plane_t &plane, kvx_axis_t axis) {
  int64_t extent = 1;
  for (uint32_t i = 0; i < plane.num_axes; ++i)
    if (plane.axes[i].axis == axis) extent *= plane.axes[i].extent;
  return extent;
}

BlockShape shape_of(const kvx_plane_t &plane) {
  return {static_cast<uint64_t>(extent_of(plane, KVX_AXIS_BLOCK)),
          static_cast<uint64_t>(extent_of(plane, KVX_AXIS_TOKEN)) *
              std::max<uint64_t>(plane.tokens_per_entry, 1)};
}

kvx_tensor_desc_t bytes_of(const kvx_plane_t &plane) {
  kvx_tensor_desc_t bytes{};
  bytes.size = sizeof bytes;
  bytes.dtype = KVX_DTYPE_U8;
  bytes.memory = plane.memory;
  bytes.ndim = 1;
  bytes.shape[0] = size_of(plane.dtype);
  for (uint32_t i = 0; i < plane.num_axes; ++i)
    bytes.shape[0] += (plane.axes[i].extent - 1) * plane.axes[i].stride_bytes;
  bytes.stride[0] = 1;
  bytes.data = plane.data;
  return bytes;
}

bool is_gapless(const kvx_plane_t &plane) {
  int64_t bytes = size_of(plane.dtype);
  for (uint32_t i = 0; i < plane.num_axes; ++i) bytes *= plane.axes[i].extent;
  return bytes == bytes_of(plane).shape[0];
}

const kvx_plane_t *find_plane(const kvx_span_t &span, uint32_t layer, uint32_t role,
                              uint32_t guess) {
  const auto is_it = [&](uint32_t i) {
    return span.planes[i]->layer == layer && span.planes[i]->role == role;
  };
  if (guess < span.num_planes && is_it(guess)) return span.planes[guess];
  for (uint32_t i = 0; i < span.num_planes; ++i)
    if (is_it(i)) return span.planes[i];
  return nullptr;
}

bool are_same(const kvx_plane_t &x, const kvx_plane_t &y) {
  if (x.data != y.data || size_of(x.dtype) != size_of(y.dtype) ||
      x.tokens_per_entry != y.tokens_per_entry) {
    return false;
  }
  for (const kvx_axis_t axis : {KVX_AXIS_BLOCK, KVX_AXIS_TOKEN, KVX_AXIS_HEAD, KVX_AXIS_DIM}) {
    const PlaneAxis a = axis_of(x, axis), b = axis_of(y, axis);
    if (a.num_parts != b.num_parts) return false;
    for (int i = 0; i < a.num_parts; ++i)
      if (a.parts[i].extent != b.parts[i].extent || a.parts[i].stride != b.parts[i].stride)
        return false;
  }
  return true;
}

bool uses_lookup_of_span(const kvx_plane_t &plane) {
  return !plane.block_table && !plane.slots && plane.tokens_per_entry > 0;
}

BlockShape shape_of(const kvx_span_t &span) {
  if (span.num_layers) return {span.layers[0]->num_blocks, span.layers[0]->block_size};
  for (uint32_t i = 0; i < span.num_planes; ++i)
    if (uses_lookup_of_span(*span.planes[i])) return shape_of(*span.planes[i]);
  return {0, 0};
}

}  // namespace kvx
