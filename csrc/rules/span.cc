#include "rules/span.h"

#include <initializer_list>

#include "desc/affine.h"
#include "rules/affine.h"
#include "rules/apart_pools.h"
#include "rules/cache.h"
#include "rules/plane.h"
#include "rules/pool.h"
#include "rules/scales.h"
#include "rules/struct.h"
#include "rules/table.h"

namespace kvx {
namespace {

kvx_status_t check_layer(const Path &path, const kvx_span_t &span, uint32_t l) {
  const Path layer{&path, "layers", l}, k{&layer, "k"}, v{&layer, "v"};
  const kvx_cache_desc_t *const cache = span.layers[l], *const first = span.layers[0];
  const bool offsets = is_kv_offsets(span);
  KVX_TRY(l ? check_cache(layer, cache, *first) : check_cache(layer, cache));
  if (cache->num_blocks != first->num_blocks || cache->block_size != first->block_size) {
    return KVX_INVALID(
        "%s holds %u blocks of %u tokens, expected %u of %u as layers[0]: one table serves all "
        "layers; move layers of other blocks in a call of their own, with their table (spec E.3)",
        KVX_AT(layer), cache->num_blocks, cache->block_size, first->num_blocks, first->block_size);
  }
  if (offsets) {
    KVX_TRY(check_pool(layer, *cache));
    KVX_TRY(check_same_pool(layer, *cache, *first));
  }
  for (const bool is_v : {false, true}) {
    const kvx_scale_desc_t *const scales = scales_of(span, l, is_v);
    const kvx_tensor_desc_t &tensor = is_v ? cache->v : cache->k;
    const bool affine = is_affine(tensor.dtype);
    if (affine || zeros_of(span, l, is_v)) {
      KVX_TRY(check_zeros({&path, is_v ? "v_scales" : "k_scales", l}, scales,
                          {&path, is_v ? "v_zeros" : "k_zeros", l}, zeros_of(span, l, is_v), *cache,
                          tensor, is_v ? v : k));
    }
    if (!scales) continue;
    const Path scale{&path, is_v ? "v_scales" : "k_scales", l};
    if (!affine) {
      KVX_TRY(check_struct(scale, scales));
      KVX_TRY(check_scales(scale, *scales, *cache, tensor, is_v ? v : k));
    }
    if (offsets) KVX_TRY(check_secondary_scales(scale, *cache, *scales));
    if (is_pointers(span)) KVX_TRY(check_pointer_scales(scale, *scales));
  }
  return KVX_STATUS_OK;
}

}  // namespace

kvx_status_t check_span(const Path &path, const kvx_span_t *span) {
  KVX_TRY(check_struct(path, span));
  KVX_TRY(check_reserved_0(path, span->reserved_0));
  if (span->reserved_1) {
    return KVX_INVALID("%s.reserved_1 is %u, expected 0 (spec E.3)", KVX_AT(path),
                       span->reserved_1);
  }
  if (!span->num_planes) KVX_TRY(check_nonzero(path, "num_layers", span->num_layers));
  if (span->num_layers && !span->layers)
    return KVX_INVALID("%s.layers is NULL (spec E.3)", KVX_AT(path));
  if (span->block_table && span->slots) {
    return KVX_INVALID("%s has a block_table and slots, expected at most one (spec E.3)",
                       KVX_AT(path));
  }
  if (span->block_table) KVX_TRY(check_table({&path, "block_table"}, *span->block_table));
  for (uint32_t l = 0; l < span->num_layers; ++l) KVX_TRY(check_layer(path, *span, l));
  if (is_pointers(*span)) {
    KVX_TRY(
        check_pointers({&path, "block_table"}, *span->block_table, span->layers, span->num_layers));
    if (span->num_planes) {
      return KVX_INVALID(
          "%s.num_planes is %u, expected 0 with a POINTERS table, which names K and V alone "
          "(spec E.12)",
          KVX_AT(path), span->num_planes);
    }
  }
  if (is_kv_offsets(*span) && span->num_layers) {
    KVX_TRY(check_secondary({&path, "layers"}, span->layers, span->num_layers,
                            span->secondary_num_blocks));
  }
  if (span->slots) {
    KVX_TRY(check_slots({&path, "slots"}, *span->slots));
    if (span->starts) {
      return KVX_INVALID(
          "%s has slots and starts, expected starts NULL: slots name every token "
          "(spec E.3)",
          KVX_AT(path));
    }
  }
  if (span->starts) KVX_TRY(check_lens({&path, "starts"}, *span->starts));
  return check_planes(path, *span);
}

kvx_status_t check_rows(const Path &path, const kvx_span_t &span, uint64_t rows) {
  if (span.block_table && rows_of(*span.block_table) != rows) {
    return KVX_INVALID(
        "%s.block_table has %llu rows, expected %llu, as seq_lens has it; give a row for each "
        "sequence (spec E.3)",
        KVX_AT(path), static_cast<ull>(rows_of(*span.block_table)), static_cast<ull>(rows));
  }
  if (!span.block_table && !span.slots && span.num_layers && rows > span.layers[0]->num_blocks) {
    return KVX_INVALID(
        "%s is dense and holds %u sequences (num_blocks), expected at least %llu; move fewer in a "
        "call (spec E.3)",
        KVX_AT(path), span.layers[0]->num_blocks, static_cast<ull>(rows));
  }
  if (span.starts && span.starts->seq_count != rows) {
    return KVX_INVALID("%s.starts.seq_count is %u, expected %llu, one per row (spec E.3)",
                       KVX_AT(path), span.starts->seq_count, static_cast<ull>(rows));
  }
  return check_plane_rows(path, span, rows);
}

kvx_status_t check_heads(const Path &path, const kvx_span_t &span, uint32_t layer,
                         uint32_t num_heads) {
  const uint32_t held = span.layers[layer]->num_kv_heads;
  if (span.head_start <= held && num_heads <= held - span.head_start) return KVX_STATUS_OK;
  return KVX_INVALID(
      "%s.head_start is %u: with num_heads %u it reaches past the %u heads of layers[%u]; move "
      "fewer, or layers of fewer heads in a call of their own (spec E.3)",
      KVX_AT(path), span.head_start, num_heads, held, layer);
}

}  // namespace kvx
