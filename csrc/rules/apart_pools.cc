#include "rules/apart_pools.h"

#include <utility>

#include "desc/plane.h"
#include "desc/secondary.h"
#include "desc/span.h"

namespace kvx {
namespace {

// Checks K or V of one layer against all tensors of the primary pool.
kvx_status_t check_tensor(const Path &layer, const kvx_cache_desc_t &cache,
                          const kvx_tensor_desc_t &tensor, uint32_t secondary_num_blocks,
                          const Extents &primary) {
  Extent extent;
  const bool fits = find_secondary(cache, tensor, secondary_num_blocks, &extent);
  // Calls of v1 do not give the number of blocks: at least one.
  const uint32_t known = secondary_num_blocks ? secondary_num_blocks : 1;
  if (fits) find_secondary(cache, tensor, known, &extent);
  if (fits && !primary.meet(extent)) return KVX_STATUS_OK;
  const Path pool{&layer, "pool"};
  const uint32_t compared = fits ? known : secondary_num_blocks;
  return KVX_INVALID(
      "%s.secondary is %p: its blocks up to %llu %s; expected other memory, or the number of "
      "blocks that it has in secondary_num_blocks (spec %s)",
      KVX_AT(pool), cache.pool.secondary,
      static_cast<ull>(secondary_blocks(cache, tensor, compared) - 1),
      fits ? "meet those of the primary pool" : "reach past the end of memory",
      fits ? "E.8" : "4.2");
}

// Names the first tensor or plane of `dst` that overlaps `from` of the source.
[[gnu::cold]] kvx_status_t fail_ends(const Path &from, const Extent &read, const Path &dst_path,
                                     const kvx_span_t &dst) {
  const auto fail_at = [&](const Path &to) {
    return KVX_INVALID(
        "%s shares memory with %s, but the two spans are not the same pool, so their blocks "
        "cannot be told apart; migrate through other memory (spec E.3)",
        KVX_AT(to), KVX_AT(from));
  };
  for (uint32_t l = 0; l < dst.num_layers; ++l) {
    const Path layer{&dst_path, "layers", l};
    for (const bool is_v : {false, true}) {
      const kvx_tensor_desc_t &tensor = tensor_of(dst, l, is_v);
      if (!is_absent(tensor) && intersect(read, extent_of(tensor)))
        return fail_at({&layer, is_v ? "v" : "k"});
    }
  }
  uint32_t i = 0;
  while (!intersect(read, extent_of(*dst.planes[i]))) ++i;
  return fail_at({&dst_path, "planes", i});
}

// Compares tensor by tensor, in one pool of each end: tensors that interleave may share no byte.
kvx_status_t check_tensors_apart(const Path &src_path, const kvx_span_t &src, bool src_secondary,
                                 const Path &dst_path, const kvx_span_t &dst, bool dst_secondary) {
  Extents written;
  for (uint32_t l = 0; l < dst.num_layers; ++l) {
    for (const bool is_v : {false, true})
      if (!is_absent(tensor_of(dst, l, is_v))) written.add(extent_of(dst, l, is_v, dst_secondary));
  }
  if (!dst_secondary)
    for (uint32_t i = 0; i < dst.num_planes; ++i) written.add(extent_of(*dst.planes[i]));
  written.sort();
  const auto check = [&](const Path &from, const Extent &read) {
    if (!written.meet(read)) return KVX_STATUS_OK;
    if (!src_secondary && !dst_secondary) return fail_ends(from, read, dst_path, dst);
    return KVX_INVALID(
        "dst shares memory with src through a secondary pool, but they are not the same "
        "pool; migrate through other memory (spec E.3)");
  };
  for (uint32_t l = 0; l < src.num_layers; ++l) {
    const Path layer{&src_path, "layers", l};
    for (const bool is_v : {false, true}) {
      if (is_absent(tensor_of(src, l, is_v))) continue;
      KVX_TRY(check({&layer, is_v ? "v" : "k"}, extent_of(src, l, is_v, src_secondary)));
    }
  }
  for (uint32_t i = 0; !src_secondary && i < src.num_planes; ++i)
    KVX_TRY(check({&src_path, "planes", i}, extent_of(*src.planes[i])));
  return KVX_STATUS_OK;
}

}  // namespace

kvx_status_t check_secondary(const Path &path, const kvx_cache_desc_t *const *layers,
                             uint32_t num_layers, uint32_t secondary_num_blocks) {
  if (!layers[0]->pool.secondary) return KVX_STATUS_OK;
  Extents primary;
  for (uint32_t l = 0; l < num_layers; ++l) {
    primary.add(extent_of(layers[l]->k));
    if (!is_absent(layers[l]->v)) primary.add(extent_of(layers[l]->v));
  }
  primary.sort();
  for (uint32_t l = 0; l < num_layers; ++l) {
    const kvx_cache_desc_t &cache = *layers[l];
    Path layer = path;
    if (path.parent) layer.index = l;
    KVX_TRY(check_tensor(layer, cache, cache.k, secondary_num_blocks, primary));
    if (is_absent(cache.v)) continue;
    KVX_TRY(check_tensor(layer, cache, cache.v, secondary_num_blocks, primary));
  }
  return KVX_STATUS_OK;
}

kvx_status_t check_ends_apart(const Path &src_path, const Path &dst_path,
                              const kvx_migrate_desc_t &migrate, const Extent &written) {
  const kvx_span_t &src = *migrate.src, &dst = *migrate.dst;
  for (const auto &[src_secondary, dst_secondary] :
       {std::pair{false, false}, {true, false}, {false, true}, {true, true}}) {
    if ((src_secondary && !has_secondary(src)) || (dst_secondary && !has_secondary(dst))) continue;
    const Extent to = dst_secondary ? extent_of(dst, true) : written;
    if (!intersect(extent_of(src, src_secondary), to)) continue;
    if (are_same_pool(src, dst)) return KVX_STATUS_OK;
    KVX_TRY(check_tensors_apart(src_path, src, src_secondary, dst_path, dst, dst_secondary));
  }
  return KVX_STATUS_OK;
}

}  // namespace kvx
