#include "rules/affine.h"

#include <initializer_list>

#include "desc/affine.h"
#include "desc/plane.h"
#include "rules/apart_arrays.h"
#include "rules/apart_units.h"
#include "rules/fp4.h"
#include "rules/struct.h"
#include "rules/tensor.h"

namespace kvx {
namespace {

// Checks scales or zero points by themselves.
kvx_status_t check_one(const Path &path, const kvx_scale_desc_t *numbers,
                       const kvx_cache_desc_t &cache, const kvx_tensor_desc_t &tensor,
                       const Path &tensor_path) {
  if (numbers) KVX_TRY(check_struct(path, numbers));
  if (!numbers || !numbers->data) {
    return KVX_INVALID(
        "%s is NULL, but %s.dtype is %s: a number is a byte with a scale and a zero point (spec "
        "E.14)",
        KVX_AT(path), KVX_AT(tensor_path), name_of(tensor.dtype));
  }
  if (!is_scale_type(numbers->dtype)) {
    return KVX_INVALID("%s.dtype is %d (%s), expected %s (spec 6.6)", KVX_AT(path), numbers->dtype,
                       name_of(numbers->dtype), kScaleTypes);
  }
  const int64_t blocks = cache.num_blocks, tokens = cache.block_size, heads = cache.num_kv_heads;
  const int64_t dim = dim_of(tensor);
  const bool has_groups = numbers->granularity == KVX_SCALE_PER_GROUP;
  const bool per_channel = covers_tokens(*numbers);
  if (!has_groups && !per_channel && numbers->granularity != KVX_SCALE_PER_TOKEN_HEAD) {
    return KVX_INVALID(
        "%s.granularity is %d, expected PER_CHANNEL (32), PER_GROUP (33) or PER_TOKEN_HEAD (16) "
        "for %s (spec E.14)",
        KVX_AT(path), numbers->granularity, name_of(tensor.dtype));
  }
  const int64_t groups = has_groups && numbers->ndim == 4 ? numbers->shape[3] : 1;
  const int64_t of_channel[] = {blocks, heads, dim}, of_group[] = {blocks, tokens, heads, groups};
  const int64_t *const expected = per_channel ? of_channel : of_group;
  const uint32_t ndim = has_groups ? 4 : 3;
  if (numbers->ndim != ndim) {
    return KVX_INVALID("%s.ndim is %u, expected %u for granularity %d (spec E.14)", KVX_AT(path),
                       numbers->ndim, ndim, numbers->granularity);
  }
  for (uint32_t axis = 0; axis < ndim; ++axis) {
    if (numbers->shape[axis] == expected[axis]) continue;
    return KVX_INVALID("%s.shape[%u] is %lld, expected %lld for granularity %d (spec E.14)",
                       KVX_AT(path), axis, static_cast<ll>(numbers->shape[axis]),
                       static_cast<ll>(expected[axis]), numbers->granularity);
  }
  if (groups < 1 || dim % groups != 0) {
    return KVX_INVALID(
        "%s.shape[3] is %lld, expected groups of equal size: a divisor of head_dim %lld (spec "
        "E.14)",
        KVX_AT(path), static_cast<ll>(groups), static_cast<ll>(dim));
  }
  int64_t extent;
  KVX_TRY(check_strides(path, ndim, numbers->shape, numbers->stride, numbers->dtype, &extent));
  return check_aligned(path, numbers->data, numbers->dtype);
}

// Checks the lookup of a destination whose units cover all tokens of a block.
kvx_status_t check_in_order(const Path &scale_path, const Path &path,
                            const kvx_slot_mapping_t *slots, const kvx_block_table_t *table) {
  if (!slots && table && table->format == KVX_BLOCK_TABLE_RING) {
    return KVX_INVALID(
        "%s is PER_CHANNEL: a scale covers all tokens of a block, but blocks of %s.block_table, a "
        "RING, hold tokens of two rounds; use a PACKED table, or a dense end (spec E.14)",
        KVX_AT(scale_path), KVX_AT(path));
  }
  if (!slots && !(table && table->format == KVX_BLOCK_TABLE_RAGGED)) return KVX_STATUS_OK;
  return KVX_INVALID(
      "%s is PER_CHANNEL: a scale covers all tokens of a block, but %s.%s names tokens one by one; "
      "use a PACKED table, or a dense end (spec E.14)",
      KVX_AT(scale_path), KVX_AT(path), slots ? "slots" : "block_table");
}

// Scales and zero points of one plane at the destination.
struct Written {
  const Path &scale_path, &zero_path;
  const kvx_scale_desc_t &scales, *zeros;  // NULL: none that the call writes
  kvx_dtype_t dtype;

  // Calls visit(path, numbers) with each.
  template <class Visit>
  kvx_status_t each(Visit visit) const {
    KVX_TRY(visit(scale_path, scales));
    return zeros ? visit(zero_path, *zeros) : KVX_STATUS_OK;
  }
};

// Zero points, but not the scale of a tensor, which is in their place.
const kvx_scale_desc_t *written_zeros(kvx_dtype_t dtype, const kvx_scale_desc_t *zeros) {
  return has_group_scales(dtype) ? nullptr : zeros;
}

kvx_status_t check_written(const Written &w) {
  KVX_TRY(w.each([&](const Path &path, const kvx_scale_desc_t &numbers) {
    if (w.dtype == KVX_DTYPE_U8_ZERO && numbers.dtype != KVX_DTYPE_F32) {
      return KVX_INVALID(
          "%s.dtype is %s, expected F32 at a destination of U8_ZERO, whose zero points count steps "
          "(spec E.14)",
          KVX_AT(path), name_of(numbers.dtype));
    }
    return check_disjoint(path, numbers.ndim, numbers.shape, numbers.stride);
  }));
  if (!w.zeros || w.scales.data != w.zeros->data) return KVX_STATUS_OK;
  return KVX_INVALID("%s.data is %p, that of %s, expected memory of its own (spec E.14)",
                     KVX_AT(w.zero_path), w.zeros->data, KVX_AT(w.scale_path));
}

// Calls visit with the scales and zero points of each affine plane of a span.
template <class Visit>
kvx_status_t each_affine(const Path &path, const kvx_span_t &span, Visit visit) {
  for (uint32_t l = 0; l < span.num_layers; ++l) {
    for (const bool is_v : {false, true}) {
      const kvx_tensor_desc_t &tensor = tensor_of(span, l, is_v);
      if (is_absent(tensor) || !is_affine(tensor.dtype)) continue;
      const Path scale{&path, is_v ? "v_scales" : "k_scales", l};
      const Path zero{&path, is_v ? "v_zeros" : "k_zeros", l};
      KVX_TRY(visit(Written{scale, zero, *scales_of(span, l, is_v),
                            written_zeros(tensor.dtype, zeros_of(span, l, is_v)), tensor.dtype},
                    path, span.slots, span.block_table));
    }
  }
  for (uint32_t i = 0; i < span.num_planes; ++i) {
    const kvx_plane_t &plane = *span.planes[i];
    if (!is_affine(plane.dtype)) continue;
    const Path at{&path, "planes", i}, scale{&at, "scale"}, zero{&at, "zero"};
    const bool is_own = !uses_lookup_of_span(plane);
    KVX_TRY(visit(
        Written{scale, zero, *plane.scale, written_zeros(plane.dtype, plane.zero), plane.dtype},
        is_own ? at : path, is_own ? plane.slots : span.slots,
        is_own ? plane.block_table : span.block_table));
  }
  return KVX_STATUS_OK;
}

bool has_affine(const kvx_span_t &span) {
  if (!span.k_scales && !span.v_scales && !span.num_planes) return false;
  for (uint32_t l = 0; l < span.num_layers; ++l)
    if (is_affine(span.layers[l]->k.dtype) || is_affine(span.layers[l]->v.dtype)) return true;
  for (uint32_t i = 0; i < span.num_planes; ++i)
    if (is_affine(span.planes[i]->dtype)) return true;
  return false;
}

// Checks the arrays of a call against scales or zero points.
kvx_status_t check_units_and_arrays(const kvx_migrate_desc_t &migrate, const Path &path,
                                    const kvx_scale_desc_t &units) {
  const Extent written = extent_of(units);
  return each_array(migrate,
                    [&](const Array &array) { return check_array_apart(array, path, written); });
}

// Adds all memory of the source's numbers, scales and zero points.
void add_source(const kvx_span_t &src, Extents *read) {
  for (uint32_t l = 0; l < src.num_layers; ++l) {
    for (const bool is_v : {false, true}) {
      if (!is_absent(tensor_of(src, l, is_v))) read->add(extent_of(tensor_of(src, l, is_v)));
      for (const kvx_scale_desc_t *of : {scales_of(src, l, is_v), zeros_of(src, l, is_v)})
        if (of && of->data) read->add(extent_of(*of));
    }
  }
  for (uint32_t i = 0; i < src.num_planes; ++i) {
    read->add(extent_of(*src.planes[i]));
    for (const kvx_scale_desc_t *of : {src.planes[i]->scale, src.planes[i]->zero})
      if (of && of->data) read->add(extent_of(*of));
  }
}

}  // namespace

kvx_status_t fail_zeros(const Path &path, kvx_dtype_t dtype) {
  if (has_group_scales(dtype)) {
    return fail(KVX_STATUS_UNSUPPORTED,
                "%s.dtype is %s, whose group scales this call has no fields for; migrate between "
                "two spans (spec E.18)",
                KVX_AT(path), name_of(dtype));
  }
  return fail(KVX_STATUS_UNSUPPORTED,
              "%s.dtype is %s, whose zero points this call has no fields for; migrate between two "
              "spans (spec E.14)",
              KVX_AT(path), name_of(dtype));
}

kvx_status_t check_zeros(const Path &scale_path, const kvx_scale_desc_t *scales,
                         const Path &zero_path, const kvx_scale_desc_t *zeros,
                         const kvx_cache_desc_t &cache, const kvx_tensor_desc_t &tensor,
                         const Path &tensor_path) {
  if (!is_affine(tensor.dtype)) {
    if (!zeros) return KVX_STATUS_OK;
    return KVX_INVALID("%s is given, but %s.dtype is %s, which has no zero points (spec E.14)",
                       KVX_AT(zero_path), KVX_AT(tensor_path), name_of(tensor.dtype));
  }
  if (has_group_scales(tensor.dtype))
    return check_group_scales(scale_path, scales, zero_path, zeros, cache, tensor, tensor_path);
  KVX_TRY(check_one(scale_path, scales, cache, tensor, tensor_path));
  KVX_TRY(check_one(zero_path, zeros, cache, tensor, tensor_path));
  if (zeros->granularity != scales->granularity) {
    return KVX_INVALID("%s.granularity is %d, expected that of %s, %d (spec E.14)",
                       KVX_AT(zero_path), zeros->granularity, KVX_AT(scale_path),
                       scales->granularity);
  }
  if (zeros->granularity != KVX_SCALE_PER_GROUP || zeros->shape[3] == scales->shape[3])
    return KVX_STATUS_OK;
  return KVX_INVALID("%s.shape[3] is %lld, expected that of %s, %lld (spec E.14)",
                     KVX_AT(zero_path), static_cast<ll>(zeros->shape[3]), KVX_AT(scale_path),
                     static_cast<ll>(scales->shape[3]));
}

kvx_status_t check_zeros_written(const kvx_migrate_desc_t &migrate) {
  const kvx_span_t &src = *migrate.src, &dst = *migrate.dst;
  if (!has_affine(dst)) return KVX_STATUS_OK;
  Extents read;
  if (!are_same_pool(src, dst)) add_source(src, &read);
  read.sort();
  KVX_TRY(each_affine(
      {nullptr, "dst"}, dst,
      [&](const Written &w, const Path &lookup, const kvx_slot_mapping_t *slots,
          const kvx_block_table_t *table) {
        KVX_TRY(check_written(w));
        if (covers_tokens(w.scales)) KVX_TRY(check_in_order(w.scale_path, lookup, slots, table));
        return w.each([&](const Path &path, const kvx_scale_desc_t &numbers) {
          const Extent written = extent_of(numbers);
          if (!read.meet(written)) return check_units_and_arrays(migrate, path, numbers);
          return KVX_INVALID(
              "%s.data is %p: it meets memory of src, and the call writes it; expected them apart "
              "(spec E.14)",
              KVX_AT(path), static_cast<const void *>(written.begin));
        });
      }));
  return check_units_apart(migrate);
}

kvx_status_t check_zeros_and_arrays(const kvx_migrate_desc_t &migrate) {
  if (!has_affine(*migrate.dst)) return KVX_STATUS_OK;
  return each_affine(
      {nullptr, "dst"}, *migrate.dst,
      [&](const Written &w, const Path &, const kvx_slot_mapping_t *, const kvx_block_table_t *) {
        return w.each([&](const Path &path, const kvx_scale_desc_t &numbers) {
          return check_units_and_arrays(migrate, path, numbers);
        });
      });
}

}  // namespace kvx
