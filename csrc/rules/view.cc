#include "rules/view.h"

#include <initializer_list>

#include "desc/view.h"
#include "rules/apart_pools.h"
#include "rules/cache.h"
#include "rules/plane.h"
#include "rules/pool.h"
#include "rules/scales.h"
#include "rules/struct.h"
#include "rules/table.h"

namespace kvx {
namespace {

kvx_status_t check_layer(const Path &path, const kvx_view_t &view, uint32_t l) {
  const Path layer{&path, "layers", l}, k{&layer, "k"}, v{&layer, "v"};
  const kvx_cache_desc_t *const cache = view.layers[l], *const first = view.layers[0];
  const bool offsets = is_kv_offsets(view);
  KVX_TRY(check_cache(layer, cache));
  if (cache->num_blocks != first->num_blocks || cache->block_size != first->block_size) {
    return KVX_INVALID(
        "%s holds %u blocks of %u tokens, expected %u of %u as layers[0]: one table serves all "
        "layers (spec E.3)",
        KVX_AT(layer), cache->num_blocks, cache->block_size, first->num_blocks, first->block_size);
  }
  if (offsets) {
    KVX_TRY(check_pool(layer, *cache));
    KVX_TRY(check_same_pool(layer, *cache, *first));
  }
  for (const bool is_v : {false, true}) {
    const kvx_scale_desc_t *const scales = scales_of(view, l, is_v);
    if (!scales) continue;
    const Path scale{&path, is_v ? "v_scales" : "k_scales", l};
    KVX_TRY(check_struct(scale, scales));
    KVX_TRY(check_scales(scale, *scales, *cache, is_v ? cache->v : cache->k, is_v ? v : k));
    if (offsets) KVX_TRY(check_secondary_scales(scale, *cache, *scales));
    if (is_pointers(view)) KVX_TRY(check_pointer_scales(scale, *scales));
  }
  return KVX_STATUS_OK;
}

}  // namespace

kvx_status_t check_view(const Path &path, const kvx_view_t *view) {
  KVX_TRY(check_struct(path, view));
  KVX_TRY(check_reserved_0(path, view->reserved_0));
  if (view->reserved_1) {
    return KVX_INVALID("%s.reserved_1 is %u, expected 0 (spec E.3)", KVX_AT(path),
                       view->reserved_1);
  }
  if (view->k_zeros || view->v_zeros) {
    return fail(KVX_STATUS_UNSUPPORTED,
                "%s.%s is given, expected NULL: no format of this version has zero points "
                "(spec E.10)",
                KVX_AT(path), view->k_zeros ? "k_zeros" : "v_zeros");
  }
  if (!view->num_planes) KVX_TRY(check_nonzero(path, "num_layers", view->num_layers));
  if (view->num_layers && !view->layers)
    return KVX_INVALID("%s.layers is NULL (spec E.3)", KVX_AT(path));
  if (view->block_table && view->slots) {
    return KVX_INVALID("%s has a block_table and slots, expected at most one (spec E.3)",
                       KVX_AT(path));
  }
  if (view->block_table) KVX_TRY(check_table({&path, "block_table"}, *view->block_table));
  for (uint32_t l = 0; l < view->num_layers; ++l) KVX_TRY(check_layer(path, *view, l));
  if (is_pointers(*view)) {
    KVX_TRY(
        check_pointers({&path, "block_table"}, *view->block_table, view->layers, view->num_layers));
    if (view->num_planes) {
      return KVX_INVALID(
          "%s.num_planes is %u, expected 0 with a POINTERS table, which names K and V alone "
          "(spec E.12)",
          KVX_AT(path), view->num_planes);
    }
  }
  if (is_kv_offsets(*view) && view->num_layers) {
    KVX_TRY(check_secondary({&path, "layers"}, view->layers, view->num_layers,
                            view->secondary_num_blocks));
  }
  if (view->slots) {
    KVX_TRY(check_slots({&path, "slots"}, *view->slots));
    if (view->starts) {
      return KVX_INVALID(
          "%s has slots and starts, expected starts NULL: slots name every token "
          "(spec E.3)",
          KVX_AT(path));
    }
  }
  if (view->starts) KVX_TRY(check_lens({&path, "starts"}, *view->starts));
  return check_planes(path, *view);
}

kvx_status_t check_rows(const Path &path, const kvx_view_t &view, uint64_t rows) {
  if (view.block_table && rows_of(*view.block_table) != rows) {
    return KVX_INVALID("%s.block_table has %llu rows, expected %llu, as seq_lens has it (spec E.3)",
                       KVX_AT(path), static_cast<ull>(rows_of(*view.block_table)),
                       static_cast<ull>(rows));
  }
  if (!view.block_table && !view.slots && view.num_layers && rows > view.layers[0]->num_blocks) {
    return KVX_INVALID(
        "%s is dense and holds %u sequences (num_blocks), expected at least %llu (spec E.3)",
        KVX_AT(path), view.layers[0]->num_blocks, static_cast<ull>(rows));
  }
  if (view.starts && view.starts->seq_count != rows) {
    return KVX_INVALID("%s.starts.seq_count is %u, expected %llu, one per row (spec E.3)",
                       KVX_AT(path), view.starts->seq_count, static_cast<ull>(rows));
  }
  return check_plane_rows(path, view, rows);
}

kvx_status_t check_heads(const Path &path, const kvx_view_t &view, uint32_t layer,
                         uint32_t num_heads) {
  const uint32_t held = view.layers[layer]->num_kv_heads;
  if (view.head_start <= held && num_heads <= held - view.head_start) return KVX_STATUS_OK;
  return KVX_INVALID(
      "%s.head_start is %u: with num_heads %u it reaches past the %u heads of layers[%u] (spec "
      "E.3)",
      KVX_AT(path), view.head_start, num_heads, held, layer);
}

}  // namespace kvx
