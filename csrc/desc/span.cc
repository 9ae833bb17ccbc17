#include "desc/span.h"

#include <algorithm>

#include "desc/plane.h"

namespace kvx {
namespace {

// Whether both are the same numbers at the same addresses. An axis of extent 1 may have any stride.
bool are_same(const kvx_tensor_desc_t &x, const kvx_tensor_desc_t &y) {
  if (is_absent(x) || is_absent(y)) return is_absent(x) && is_absent(y);
  if (x.data != y.data || size_of(x.dtype) != size_of(y.dtype) || dim_of(x) != dim_of(y))
    return false;
  const Axes a = axes_of(x), b = axes_of(y);
  const auto same_step = [&](int i, int j) {
    const int64_t step = x.shape[i] > 1 ? x.stride[i] : 0;
    return step == (y.shape[j] > 1 ? y.stride[j] : 0);
  };
  if (!same_step(a.block, b.block) || !same_step(a.token, b.token) || !same_step(a.head, b.head))
    return false;
  // Element d of dim is (d / pack) * outer + (d % pack) * inner from the vector's first.
  struct Dim {
    int64_t pack, outer, inner;
  };
  const auto dim_axes = [](const kvx_tensor_desc_t &tensor, const Axes &axes) -> Dim {
    const int64_t dim = units_of(tensor), pack = axes.outer < 0 ? dim : tensor.shape[axes.inner];
    const int64_t inner = tensor.stride[axes.inner];
    const int64_t outer = axes.outer < 0 ? dim * inner : tensor.stride[axes.outer];
    if (pack == 1) return {dim, dim * outer, outer};
    return pack == dim || outer == pack * inner ? Dim{dim, dim * inner, inner}
                                                : Dim{pack, outer, inner};
  };
  const Dim p = dim_axes(x, a), q = dim_axes(y, b);
  return units_of(x) == 1 || (p.pack == q.pack && p.outer == q.outer && p.inner == q.inner);
}

}  // namespace

uint64_t rows_of(const kvx_migrate_desc_t &migrate) {
  uint64_t beams = 1;
  for (const kvx_span_t *span : {migrate.src, migrate.dst}) {
    const kvx_block_table_t *table = span->block_table;
    if (table && is_kv_offsets(*table) && table->seq_count == migrate.seq_lens->seq_count)
      beams = std::max<uint64_t>(beams, table->beam_width);
  }
  return migrate.seq_lens->seq_count * beams;
}

bool are_same_pool(const kvx_span_t &src, const kvx_span_t &dst) {
  if (has_secondary(src) && has_secondary(dst) &&
      src.layers[0]->pool.secondary != dst.layers[0]->pool.secondary) {
    return false;
  }
  for (uint32_t l = 0; l < src.num_layers; ++l) {
    const kvx_cache_desc_t &x = *src.layers[l], &y = *dst.layers[l];
    if (x.num_blocks != y.num_blocks || x.block_size != y.block_size ||
        x.num_kv_heads != y.num_kv_heads || !are_same(x.k, y.k) || !are_same(x.v, y.v)) {
      return false;
    }
  }
  for (uint32_t i = 0; i < src.num_planes; ++i) {
    const kvx_plane_t &x = *src.planes[i];
    if (!are_same(x, *find_plane(dst, x.layer, x.role, i))) return false;
  }
  return true;
}

}  // namespace kvx
