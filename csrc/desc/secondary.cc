#include "desc/secondary.h"

#include <algorithm>

#include "desc/plane.h"
#include "desc/span.h"

namespace kvx {

uint64_t secondary_blocks(const kvx_cache_desc_t &cache, const kvx_tensor_desc_t &tensor,
                          uint32_t secondary_num_blocks) {
  const int64_t step = stride_bytes(tensor, axes_of(tensor).block);
  // An index has 31 bits and reaches no further sub-block.
  const auto most =
      static_cast<uint64_t>((int64_t{1} << 31) * cache.pool.bytes_per_block / step + 1);
  return std::min<uint64_t>(secondary_num_blocks ? secondary_num_blocks : cache.num_blocks, most);
}

bool find_secondary(const kvx_cache_desc_t &cache, const kvx_tensor_desc_t &tensor,
                    uint32_t secondary_num_blocks, Extent *extent) {
  const auto step = static_cast<uint64_t>(stride_bytes(tensor, axes_of(tensor).block));
  const uint64_t one_block =
      static_cast<uint64_t>(extent_bytes(tensor)) - (uint64_t{cache.num_blocks} - 1) * step;
  const uint64_t bytes =
      (secondary_blocks(cache, tensor, secondary_num_blocks) - 1) * step + one_block;
  const uintptr_t offset =
      reinterpret_cast<uintptr_t>(tensor.data) - reinterpret_cast<uintptr_t>(cache.pool.primary);
  uintptr_t begin, end;
  if (bytes > uint64_t{1} << 62 ||
      __builtin_add_overflow(reinterpret_cast<uintptr_t>(cache.pool.secondary), offset, &begin) ||
      __builtin_add_overflow(begin, bytes, &end)) {
    return false;
  }
  *extent = {reinterpret_cast<const uint8_t *>(begin), reinterpret_cast<const uint8_t *>(end)};
  return true;
}

Extent extent_of(const kvx_span_t &span, uint32_t l, bool is_v, bool in_secondary) {
  const kvx_tensor_desc_t &tensor = tensor_of(span, l, is_v);
  Extent extent = extent_of(tensor);
  if (in_secondary) find_secondary(*span.layers[l], tensor, span.secondary_num_blocks, &extent);
  return extent;
}

Extent extent_of(const kvx_span_t &span, bool in_secondary) {
  Extent all = {reinterpret_cast<const uint8_t *>(UINTPTR_MAX), nullptr};
  for (uint32_t l = 0; l < span.num_layers; ++l) {
    for (const bool is_v : {false, true}) {
      if (is_absent(tensor_of(span, l, is_v))) continue;
      all = hull(all, extent_of(span, l, is_v, in_secondary));
    }
  }
  for (uint32_t i = 0; !in_secondary && i < span.num_planes; ++i)
    all = hull(all, extent_of(*span.planes[i]));
  return all;
}

}  // namespace kvx
