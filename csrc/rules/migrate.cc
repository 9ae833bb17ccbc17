// Rules of kvx_migrate_desc_t: two spans that fit each other.
#include <initializer_list>

#include "desc/seen.h"
#include "desc/span.h"
#include "kvx/kvx_encode.h"
#include "rules/affine.h"
#include "rules/apart.h"
#include "rules/apart_units.h"
#include "rules/io.h"
#include "rules/plane.h"
#include "rules/scales.h"
#include "rules/span.h"
#include "rules/struct.h"
#include "rules/table.h"
#include "rules/validate.h"

namespace kvx {
namespace {

kvx_status_t check_all_heads(const Path &path, const kvx_span_t &span) {
  if (span.head_start == 0) return KVX_STATUS_OK;
  return KVX_INVALID(
      "%s.head_start is %u, expected 0 when num_heads is 0 (all); give num_heads (spec E.3)",
      KVX_AT(path), span.head_start);
}

// Checks the numbers of K or V that are rotated on their way.
kvx_status_t check_rotation(const Path &path, const kvx_tensor_desc_t &tensor, uint32_t order) {
  if (!is_number(tensor.dtype) || is_affine(tensor.dtype)) {
    return KVX_INVALID(
        "%s.dtype is %s, whose numbers are not rotated on their way (HADAMARD); rotate by way of "
        "F32 (spec E.17)",
        KVX_AT(path), name_of(tensor.dtype));
  }
  if (dim_of(tensor) % order) {
    return KVX_INVALID(
        "%s has head_dim %lld, expected a multiple of %u, which HADAMARD rotates "
        "together (spec E.17)",
        KVX_AT(path), static_cast<ll>(dim_of(tensor)), order);
  }
  return KVX_STATUS_OK;
}

kvx_status_t check_rotation_flags(const Path &path, uint32_t flags) {
  if (!(flags & KVX_FLAG_HADAMARD_MASK)) return KVX_STATUS_OK;
  for (const bool is_v : {false, true}) {
    if (hadamard_order(flags, is_v) <= KVX_HADAMARD_MAX_ORDER) continue;
    return KVX_INVALID(
        "%s.flags rotates groups of %u numbers of %s, expected at most %u (spec E.17)",
        KVX_AT(path), hadamard_order(flags, is_v), is_v ? "V" : "K", KVX_HADAMARD_MAX_ORDER);
  }
  if (flags & KVX_FLAG_FIND_SCALES) {
    return KVX_INVALID(
        "%s.flags is %#x, expected HADAMARD or FIND_SCALES, not both: give scales "
        "(spec E.17)",
        KVX_AT(path), flags);
  }
  return KVX_STATUS_OK;
}

// Checks one layer of the source against that of the destination.
kvx_status_t check_layer_pair(const Path &src_path, const Path &dst_path,
                              const kvx_migrate_desc_t &migrate, uint32_t l) {
  const kvx_cache_desc_t &src = *migrate.src->layers[l], &dst = *migrate.dst->layers[l];
  const Path src_layer{&src_path, "layers", l}, dst_layer{&dst_path, "layers", l};
  if (migrate.num_heads == 0) {
    if (src.num_kv_heads != dst.num_kv_heads) {
      int64_t from, to;
      const bool holds_all = !__builtin_mul_overflow(dim_of(src.k), src.num_kv_heads, &from) &&
                             !__builtin_mul_overflow(dim_of(dst.k), dst.num_kv_heads, &to) &&
                             from == to;
      return KVX_INVALID(
          "%s.num_kv_heads is %u, expected that of %s, %u; %s", KVX_AT(dst_layer), dst.num_kv_heads,
          KVX_AT(src_layer), src.num_kv_heads,
          holds_all
              ? "where the heads of a token follow each other, describe heads and dim of both "
                "as one axis (spec E.10)"
              : "give num_heads to move a range (spec E.3)");
    }
  } else {
    KVX_TRY(check_heads(src_path, *migrate.src, l, migrate.num_heads));
    KVX_TRY(check_heads(dst_path, *migrate.dst, l, migrate.num_heads));
  }
  if (is_absent(src.v) != is_absent(dst.v)) {
    return KVX_INVALID(
        "%s has %s V, expected as %s; describe V at both ends, or at neither (spec E.1)",
        KVX_AT(dst_layer), is_absent(dst.v) ? "no" : "a", KVX_AT(src_layer));
  }
  for (const bool is_v : {false, true}) {
    const kvx_tensor_desc_t &from = is_v ? src.v : src.k, &to = is_v ? dst.v : dst.k;
    if (is_absent(from)) continue;
    const Path from_path{&src_layer, is_v ? "v" : "k"}, to_path{&dst_layer, is_v ? "v" : "k"};
    if (dim_of(from) != dim_of(to)) {
      return KVX_INVALID(
          "%s has head_dim %lld, expected that of %s, %lld; describe a head without padding, and K "
          "and V of one tensor apart (spec E.3)",
          KVX_AT(to_path), static_cast<ll>(dim_of(to)), KVX_AT(from_path),
          static_cast<ll>(dim_of(from)));
    }
    KVX_TRY(check_convertible(to_path, to.dtype, from_path, from.dtype));
    if (const uint32_t order = hadamard_order(migrate.flags, is_v)) {
      KVX_TRY(check_rotation(from_path, from, order));
      KVX_TRY(check_rotation(to_path, to, order));
    }
  }
  return KVX_STATUS_OK;
}

// Checks that no two layers of the destination are one. POINTERS name blocks, which are compared.
kvx_status_t check_layers_differ(const Path &path, const kvx_span_t &dst) {
  if (dst.num_layers < 2 || is_pointers(dst)) return KVX_STATUS_OK;
  const auto data = [&](uint32_t l) { return dst.layers[l]->k.data; };
  Seen seen(dst.num_layers);
  for (uint32_t l = 0; l < dst.num_layers; ++l) {
    if (seen.add(reinterpret_cast<uintptr_t>(data(l)))) continue;
    uint32_t first = 0;
    while (data(first) != data(l)) ++first;
    return KVX_INVALID(
        "%s.layers[%u].k.data is that of layers[%u], expected layers of their own: tokens of both "
        "would go to one place; leave out layers that share the cache of another, at both ends "
        "(spec E.3)",
        KVX_AT(path), l, first);
  }
  return KVX_STATUS_OK;
}

// Checks that one layer of the destination has room for the scales that the call finds.
kvx_status_t check_layer_finds(const Path &path, const kvx_span_t &dst, uint32_t l) {
  const Path layer{&path, "layers", l};
  for (const bool is_v : {false, true}) {
    KVX_TRY(check_found_scales({&path, is_v ? "v_scales" : "k_scales", l}, scales_of(dst, l, is_v),
                               {&layer, is_v ? "v" : "k"},
                               is_v ? dst.layers[l]->v : dst.layers[l]->k));
  }
  return KVX_STATUS_OK;
}

}  // namespace

kvx_status_t validate_migrate(const kvx_migrate_desc_t *migrate) {
  const Path path{nullptr, "migrate"}, src{nullptr, "src"}, dst{nullptr, "dst"};
  KVX_TRY(check_struct(path, migrate));
  KVX_TRY(check_flags(path, migrate->flags,
                      KVX_FLAG_ZERO_FILL | KVX_FLAG_BACKGROUND | KVX_FLAG_COPY_ENGINE |
                          KVX_FLAG_FIND_SCALES | KVX_FLAG_REQUANTIZE | KVX_FLAG_HADAMARD_MASK));
  KVX_TRY(check_rotation_flags(path, migrate->flags));
  const Path lens{&path, "seq_lens"};
  if (!migrate->seq_lens) return KVX_INVALID("%s is NULL", KVX_AT(lens));
  KVX_TRY(check_lens(lens, *migrate->seq_lens));
  KVX_TRY(check_span(src, migrate->src));
  KVX_TRY(check_span(dst, migrate->dst));
  const uint32_t num_layers = migrate->src->num_layers;
  if (num_layers != migrate->dst->num_layers) {
    return KVX_INVALID(
        "dst.num_layers is %u, expected src.num_layers %u; describe at each end the layers that "
        "both hold (spec E.3)",
        migrate->dst->num_layers, num_layers);
  }
  if (migrate->num_heads == 0) {
    KVX_TRY(check_all_heads(src, *migrate->src));
    KVX_TRY(check_all_heads(dst, *migrate->dst));
  }
  for (uint32_t l = 0; l < num_layers; ++l) KVX_TRY(check_layer_pair(src, dst, *migrate, l));
  KVX_TRY(check_plane_pairs(src, dst, *migrate));
  if (migrate->flags & KVX_FLAG_FIND_SCALES)
    for (uint32_t l = 0; l < num_layers; ++l) KVX_TRY(check_layer_finds(dst, *migrate->dst, l));
  const uint64_t rows = rows_of(*migrate);
  KVX_TRY(check_rows(src, *migrate->src, rows));
  KVX_TRY(check_rows(dst, *migrate->dst, rows));
  KVX_TRY(check_apart(*migrate));
  if (migrate->seq_lens->seq_count) KVX_TRY(check_layers_differ(dst, *migrate->dst));
  if ((migrate->flags & KVX_FLAG_FIND_SCALES) && migrate->seq_lens->seq_count)
    KVX_TRY(check_units_apart(*migrate));
  return check_zeros_written(*migrate);
}

}  // namespace kvx
