// Rules of kvx_write_layers: one write for each layer, and one slot mapping for all.
#include <algorithm>
#include <vector>

#include "desc/scale.h"
#include "desc/tensor.h"
#include "rules/apart_scales.h"
#include "rules/cache.h"
#include "rules/validate.h"
#include "rules/write.h"

namespace kvx {
namespace {

bool is_same(const kvx_slot_mapping_t &a, const kvx_slot_mapping_t &b) {
  return a.dtype == b.dtype && a.token_count == b.token_count && a.invalid_slot == b.invalid_slot &&
         a.slots == b.slots;
}

kvx_status_t check_layer(const kvx_cache_desc_t *const *caches,
                         const kvx_write_desc_t *const *writes, uint32_t l, uint32_t flags) {
  const Path cache_path{nullptr, "caches", l}, path{nullptr, "writes", l};
  const kvx_cache_desc_t &first = *caches[0];
  KVX_TRY(l ? check_cache(cache_path, caches[l], first) : check_cache(cache_path, caches[l]));
  const kvx_cache_desc_t &cache = *caches[l];
  if (cache.num_blocks != first.num_blocks || cache.block_size != first.block_size) {
    return KVX_INVALID(
        "%s holds %u blocks of %u tokens, expected %u of %u as caches[0]: one slot mapping serves "
        "all layers; write layers of other blocks in a call of their own (spec E.23)",
        KVX_AT(cache_path), cache.num_blocks, cache.block_size, first.num_blocks, first.block_size);
  }
  KVX_TRY(check_write(cache_path, cache, path, writes[l], "writes[]", flags));
  if (!is_same(writes[l]->slots, writes[0]->slots)) {
    return KVX_INVALID(
        "%s.slots differs from writes[0].slots, expected the same address, dtype, token_count and "
        "invalid_slot: one slot mapping serves all layers; write layers with other slots in a call "
        "of their own (spec E.23)",
        KVX_AT(path));
  }
  return KVX_STATUS_OK;
}

// Checks that no two layers are one cache.
kvx_status_t check_caches_differ(const kvx_cache_desc_t *const *caches, uint32_t num_layers) {
  std::vector<uint32_t> order(num_layers);
  for (uint32_t l = 0; l < num_layers; ++l) order[l] = l;
  std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
    return std::make_pair(caches[a]->k.data, a) < std::make_pair(caches[b]->k.data, b);
  });
  for (uint32_t i = 1; i < num_layers; ++i) {
    if (caches[order[i]]->k.data != caches[order[i - 1]]->k.data) continue;
    return KVX_INVALID(
        "caches[%u].k.data is that of caches[%u], expected layers that share no slot; leave out "
        "layers that share the cache of another (spec E.23)",
        order[i], order[i - 1]);
  }
  return KVX_STATUS_OK;
}

// Checks the scales of a layer's K or V against the caches of all other layers.
kvx_status_t check_scales_apart(const kvx_cache_desc_t *const *caches,
                                const kvx_write_desc_t *const *writes, uint32_t num_layers,
                                uint32_t l, bool is_v, const Extents &gapless) {
  const kvx_write_desc_t &write = *writes[l];
  const kvx_scale_desc_t scales = scales_of(write, is_v);
  if (!scales.data || !gapless.meet(extent_of(scales))) return KVX_STATUS_OK;
  const Path path{nullptr, "writes", l}, name{&path, name_of_scales(write, is_v)};
  for (uint32_t m = 0; m < num_layers; ++m) {
    const Path cache{nullptr, "caches", m};
    KVX_TRY(kvx::check_scales_apart(name, scales, {&cache, "k"}, caches[m]->k));
    KVX_TRY(kvx::check_scales_apart(name, scales, {&cache, "v"}, caches[m]->v));
  }
  return KVX_STATUS_OK;
}

kvx_status_t check_all_scales_apart(const kvx_cache_desc_t *const *caches,
                                    const kvx_write_desc_t *const *writes, uint32_t num_layers) {
  const auto is_scaled = [](const kvx_write_desc_t *write) { return has_scales(*write); };
  if (std::none_of(writes, writes + num_layers, is_scaled)) return KVX_STATUS_OK;
  Extents gapless;
  for (uint32_t l = 0; l < num_layers; ++l) {
    for (const kvx_tensor_desc_t *tensor : {&caches[l]->k, &caches[l]->v})
      if (!is_absent(*tensor) && is_gapless(*tensor)) gapless.add(extent_of(*tensor));
  }
  gapless.sort();
  for (uint32_t l = 0; l < num_layers; ++l) {
    for (const bool is_v : {false, true})
      KVX_TRY(check_scales_apart(caches, writes, num_layers, l, is_v, gapless));
  }
  return KVX_STATUS_OK;
}

}  // namespace

kvx_status_t validate_write_layers(const kvx_cache_desc_t *const *caches,
                                   const kvx_write_desc_t *const *writes, uint32_t num_layers,
                                   const kvx_write_options_t *options) {
  if (!caches) return KVX_INVALID("caches is NULL (spec E.23)");
  if (!writes) return KVX_INVALID("writes is NULL (spec E.23)");
  if (!num_layers) return KVX_INVALID("num_layers is 0, expected at least 1 (spec E.23)");
  uint32_t flags;
  KVX_TRY(check_write_options(options, &flags));
  for (uint32_t l = 0; l < num_layers; ++l) KVX_TRY(check_layer(caches, writes, l, flags));
  if (writes[0]->io.num_tokens == 0) return KVX_STATUS_OK;
  KVX_TRY(check_caches_differ(caches, num_layers));
  return check_all_scales_apart(caches, writes, num_layers);
}

}  // namespace kvx
