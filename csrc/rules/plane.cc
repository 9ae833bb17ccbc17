#include "rules/plane.h"

#include <initializer_list>

#include "desc/affine.h"
#include "desc/plane.h"
#include "error.h"
#include "rules/affine.h"
#include "rules/io.h"
#include "rules/scales.h"
#include "rules/struct.h"
#include "rules/table.h"
#include "rules/tensor.h"

namespace kvx {
namespace {

constexpr kvx_axis_t kAxes[] = {KVX_AXIS_BLOCK, KVX_AXIS_TOKEN, KVX_AXIS_HEAD, KVX_AXIS_DIM};

const char *axis_name(kvx_axis_t axis) {
  constexpr const char *kNames[] = {"BLOCK", "TOKEN", "HEAD", "DIM"};
  return kNames[axis];
}

// Checks the lookup of entries that are not one per token: an entry of several tokens is where its
// first token is, an entry of a sequence has its own slot.
kvx_status_t check_entries(const Path &path, const kvx_span_t &span, const kvx_plane_t &plane) {
  if (plane.tokens_per_entry == 1) return KVX_STATUS_OK;
  const auto entries = static_cast<uint64_t>(extent_of(plane, KVX_AXIS_TOKEN));
  if (plane.tokens_per_entry == 0) {
    if (entries != 1) {
      return KVX_INVALID(
          "%s has %llu entries per block (TOKEN), expected 1: with tokens_per_entry 0 a block is "
          "the "
          "entry of a sequence (spec E.11)",
          KVX_AT(path), static_cast<ull>(entries));
    }
    if (!plane.block_table) return KVX_STATUS_OK;
    return KVX_INVALID(
        "%s.block_table is given, expected slots, one per sequence, with tokens_per_entry 0 (spec "
        "E.11)",
        KVX_AT(path));
  }
  if (entries * plane.tokens_per_entry > UINT32_MAX) {
    return KVX_INVALID(
        "%s.tokens_per_entry is %u: with %llu entries per block (TOKEN) a block has 2^32 tokens or "
        "more (spec E.11)",
        KVX_AT(path), plane.tokens_per_entry, static_cast<ull>(entries));
  }
  const bool is_own = plane.block_table || plane.slots;
  const kvx_block_table_t *const table = is_own ? plane.block_table : span.block_table;
  const bool names_tokens = is_own ? plane.slots != nullptr : span.slots != nullptr;
  if (!names_tokens && (!table || table->format != KVX_BLOCK_TABLE_RAGGED)) return KVX_STATUS_OK;
  return KVX_INVALID(
      "%s.tokens_per_entry is %u, but %s name tokens one by one; give the plane a PACKED table of "
      "its own (spec E.11)",
      KVX_AT(path), plane.tokens_per_entry, names_tokens ? "slots" : "entries of a RAGGED table");
}

// Checks the axes' names and extents.
kvx_status_t check_axes(const Path &path, const kvx_plane_t &plane) {
  if (plane.num_axes < 1 || plane.num_axes > KVX_MAX_PLANE_AXES) {
    return KVX_INVALID("%s.num_axes is %u, expected 1 to %d (spec E.11)", KVX_AT(path),
                       plane.num_axes, KVX_MAX_PLANE_AXES);
  }
  int64_t extents[] = {1, 1, 1, 1};
  for (uint32_t i = 0; i < plane.num_axes; ++i) {
    const kvx_plane_axis_t &part = plane.axes[i];
    const Path at{&path, "axes", i};
    if (static_cast<uint32_t>(part.axis) > KVX_AXIS_DIM) {
      return KVX_INVALID(
          "%s.axis is %d, expected BLOCK (0), TOKEN (1), HEAD (2) or DIM (3) (spec E.11)",
          KVX_AT(at), part.axis);
    }
    if (part.reserved != 0) {
      return KVX_INVALID("%s.reserved is %u, expected 0 (spec E.11)", KVX_AT(at), part.reserved);
    }
    if (part.extent < 1) {
      return KVX_INVALID("%s.extent is %lld, expected at least 1 (spec E.11)", KVX_AT(at),
                         static_cast<ll>(part.extent));
    }
    int64_t &extent = extents[part.axis];
    const int64_t most = part.axis == KVX_AXIS_DIM ? units_of(plane.dtype, INT32_MAX) : INT32_MAX;
    if (__builtin_mul_overflow(extent, part.extent, &extent) || extent > most) {
      return KVX_INVALID("%s.extent is %lld: all of %s together reach past 2^31 (spec E.11)",
                         KVX_AT(at), static_cast<ll>(part.extent), axis_name(part.axis));
    }
  }
  return KVX_STATUS_OK;
}

// Checks that strides are aligned for the format and not negative, and that the last element is
// within 2^62 bytes of the first.
kvx_status_t check_axis_strides(const Path &path, const kvx_plane_t &plane) {
  int64_t bytes = size_of(plane.dtype);
  for (uint32_t i = 0; i < plane.num_axes; ++i) {
    const auto &[axis, reserved, extent, stride] = plane.axes[i];
    const Path at{&path, "axes", i};
    if (extent == 1) continue;
    if (stride < 0 || stride % alignment_of(plane.dtype) != 0) {
      return KVX_INVALID(
          "%s.stride_bytes is %lld, expected a multiple of %lld (%s) that is not negative "
          "(spec E.11)",
          KVX_AT(at), static_cast<ll>(stride), static_cast<ll>(alignment_of(plane.dtype)),
          name_of(plane.dtype));
    }
    int64_t reach;
    if (__builtin_mul_overflow(extent - 1, stride, &reach) ||
        __builtin_add_overflow(bytes, reach, &bytes) || bytes > int64_t{1} << 62) {
      return KVX_INVALID(
          "%s.stride_bytes is %lld: with extent %lld the plane reaches past 2^62 bytes (spec E.11)",
          KVX_AT(at), static_cast<ll>(stride), static_cast<ll>(extent));
    }
  }
  return KVX_STATUS_OK;
}

// Checks that no two elements share memory: from the smallest stride up, each exceeds the extent of
// all axes below. Parts of a split axis count as axes: they may interleave with other axes, and
// each index of an axis has one place.
kvx_status_t check_axes_disjoint(const Path &path, const kvx_plane_t &plane) {
  uint32_t order[KVX_MAX_PLANE_AXES], n = 0;
  for (uint32_t i = plane.num_axes; i-- > 0;) {
    if (plane.axes[i].extent == 1) continue;
    uint32_t at = n++;
    for (; at > 0 && plane.axes[order[at - 1]].stride_bytes >= plane.axes[i].stride_bytes; --at)
      order[at] = order[at - 1];
    order[at] = i;
  }
  int64_t below = size_of(plane.dtype);
  for (uint32_t i = 0; i < n; ++i) {
    const kvx_plane_axis_t &part = plane.axes[order[i]];
    if (part.stride_bytes < below) {
      return KVX_INVALID(
          "%s.stride_bytes is %lld, expected at least %lld: elements overlap (spec E.11)",
          KVX_AT((Path{&path, "axes", order[i]})), static_cast<ll>(part.stride_bytes),
          static_cast<ll>(below));
    }
    below += (part.extent - 1) * part.stride_bytes;
  }
  return KVX_STATUS_OK;
}

// Refuses splits that this library does not move: TOKEN and DIM may have two parts, the others one.
kvx_status_t check_splits(const Path &path, const kvx_plane_t &plane) {
  for (const kvx_axis_t axis : kAxes) {
    const int most = axis == KVX_AXIS_TOKEN || axis == KVX_AXIS_DIM ? 2 : 1;
    const int parts = axis_of(plane, axis).num_parts;
    if (parts <= most) continue;
    return fail(KVX_STATUS_UNSUPPORTED,
                "%s.axes splits %s into %d parts that do not continue each other, expected at most "
                "%d; describe each index of the outermost as a plane of its own (spec E.11)",
                KVX_AT(path), axis_name(axis), parts, most);
  }
  return KVX_STATUS_OK;
}

kvx_status_t check_memory_of(const Path &path, const kvx_plane_t &plane) {
  if (!plane.data) return KVX_INVALID("%s.data is NULL (spec E.11)", KVX_AT(path));
  const auto bytes = static_cast<uintptr_t>(bytes_of(plane).shape[0]);
  if (reinterpret_cast<uintptr_t>(plane.data) > UINTPTR_MAX - bytes) {
    return KVX_INVALID("%s.data is %p: its %llu bytes reach past the end of memory (spec E.11)",
                       KVX_AT(path), plane.data, static_cast<ull>(bytes));
  }
  return check_aligned(path, plane.data, plane.dtype);
}

// Checks scales and zero points like those of a cache with as many blocks, entries of a block, and
// heads.
kvx_status_t check_scale(const Path &path, const kvx_plane_t &plane) {
  if (!plane.scale && !plane.zero && !is_affine(plane.dtype)) return KVX_STATUS_OK;
  const Path scale{&path, "scale"}, zero{&path, "zero"};
  kvx_cache_desc_t cache{};
  cache.num_blocks = static_cast<uint32_t>(extent_of(plane, KVX_AXIS_BLOCK));
  cache.block_size = static_cast<uint32_t>(extent_of(plane, KVX_AXIS_TOKEN));
  cache.num_kv_heads = static_cast<uint32_t>(extent_of(plane, KVX_AXIS_HEAD));
  kvx_tensor_desc_t tensor = bytes_of(plane);
  tensor.dtype = plane.dtype;
  if (plane.zero || is_affine(plane.dtype)) {
    tensor.ndim = 4;
    tensor.layout = KVX_LAYOUT_BLOCK_NHD;
    tensor.shape[3] = extent_of(plane, KVX_AXIS_DIM);
    KVX_TRY(check_zeros(scale, plane.scale, zero, plane.zero, cache, tensor, path));
    if (!covers_tokens(*plane.scale) || plane.tokens_per_entry == 1) return KVX_STATUS_OK;
    return KVX_INVALID(
        "%s.granularity is PER_CHANNEL (32), but tokens_per_entry of the plane is %u, expected 1 "
        "(spec E.14)",
        KVX_AT(scale), plane.tokens_per_entry);
  }
  KVX_TRY(check_struct(scale, plane.scale));
  return check_scales(scale, *plane.scale, cache, tensor, path);
}

// Checks the plane's own table or slots, or else that its blocks fit the span's.
kvx_status_t check_lookup(const Path &path, const Path &span_path, const kvx_span_t &span,
                          const kvx_plane_t &plane) {
  if (plane.block_table && plane.slots) {
    return KVX_INVALID("%s has a block_table and slots, expected at most one (spec E.11)",
                       KVX_AT(path));
  }
  if (plane.slots) return check_slots({&path, "slots"}, *plane.slots);
  if (plane.tokens_per_entry == 0) return KVX_STATUS_OK;
  if (plane.block_table) {
    const Path table{&path, "block_table"};
    KVX_TRY(check_table(table, *plane.block_table));
    if (!is_kv_offsets(*plane.block_table) && !is_pointers(*plane.block_table))
      return KVX_STATUS_OK;
    return KVX_INVALID(
        "%s.format is %s, expected block ids, such as PACKED, for a plane (spec E.11)",
        KVX_AT(table), name_of(plane.block_table->format));
  }
  if (is_kv_offsets(span)) {
    return KVX_INVALID(
        "%s.block_table is NULL, but that of %s is KV_OFFSETS, whose indices name K and V; give "
        "the plane a table of its own (spec E.11)",
        KVX_AT(path), KVX_AT(span_path));
  }
  const BlockShape own = shape_of(plane), shared = shape_of(span);
  if (own.num_blocks == shared.num_blocks && own.block_size == shared.block_size)
    return KVX_STATUS_OK;
  return KVX_INVALID(
      "%s holds %llu blocks of %llu tokens, expected %llu of %llu as the table of %s counts them; "
      "give the plane a table of its own (spec E.11)",
      KVX_AT(path), static_cast<ull>(own.num_blocks), static_cast<ull>(own.block_size),
      static_cast<ull>(shared.num_blocks), static_cast<ull>(shared.block_size), KVX_AT(span_path));
}

kvx_status_t check_plane(const Path &path, const kvx_plane_t *plane) {
  KVX_TRY(check_struct(path, plane));
  if (plane->role > INT32_MAX) {
    return KVX_INVALID("%s.role is %u, expected below 2^31 (spec E.11)", KVX_AT(path), plane->role);
  }
  KVX_TRY(check_element_type(path, plane->dtype));
  KVX_TRY(check_memory(path, plane->memory));
  if (plane->flags & ~KVX_PLANE_REPLICATED) {
    return KVX_INVALID("%s.flags is %#x, expected no bits but those of REPLICATED (1) (spec E.11)",
                       KVX_AT(path), plane->flags);
  }
  for (const uint64_t reserved : plane->reserved) {
    if (reserved == 0) continue;
    return KVX_INVALID("%s.reserved holds %llu, expected zeros (spec E.11)", KVX_AT(path),
                       static_cast<ull>(reserved));
  }
  KVX_TRY(check_axes(path, *plane));
  KVX_TRY(check_axis_strides(path, *plane));
  KVX_TRY(check_axes_disjoint(path, *plane));
  KVX_TRY(check_splits(path, *plane));
  KVX_TRY(check_memory_of(path, *plane));
  return check_scale(path, *plane);
}

bool is_before(const kvx_plane_t &a, const kvx_plane_t &b) {
  return a.layer != b.layer ? a.layer < b.layer : a.role < b.role;
}

// Checks that no two planes of a span have the same layer and role. Planes in order, the usual
// case, are compared only with the one before.
kvx_status_t check_distinct(const Path &path, const kvx_span_t &span) {
  bool is_sorted = true;
  for (uint32_t i = 1; i < span.num_planes && is_sorted; ++i)
    is_sorted = is_before(*span.planes[i - 1], *span.planes[i]);
  for (uint32_t i = 1; i < span.num_planes && !is_sorted; ++i) {
    const kvx_plane_t &plane = *span.planes[i];
    for (uint32_t j = 0; j < i; ++j) {
      if (is_before(*span.planes[j], plane) || is_before(plane, *span.planes[j])) continue;
      return KVX_INVALID(
          "%s has layer %u and role %u, as planes[%u] has; give each a layer or a role of its own "
          "(spec E.11)",
          KVX_AT((Path{&path, "planes", i})), plane.layer, plane.role, j);
    }
  }
  return KVX_STATUS_OK;
}

uint32_t heads_of(const kvx_plane_t &plane) {
  return static_cast<uint32_t>(extent_of(plane, KVX_AXIS_HEAD));
}

bool is_replicated(const kvx_plane_t &plane) { return plane.flags & KVX_PLANE_REPLICATED; }

kvx_status_t check_heads(const Path &path, const Path &span_path, const kvx_span_t &span,
                         const kvx_plane_t &plane, uint32_t num_heads) {
  const uint32_t held = heads_of(plane);
  if (span.head_start <= held && num_heads <= held - span.head_start) return KVX_STATUS_OK;
  return KVX_INVALID(
      "%s.head_start is %u: with num_heads %u it reaches past the %u heads of %s; a plane that "
      "every rank holds whole has the flag REPLICATED (spec E.11)",
      KVX_AT(span_path), span.head_start, num_heads, held, KVX_AT(path));
}

struct NamedPlane {
  const Path &path;
  const kvx_plane_t &plane;
};

kvx_status_t check_pair(const Path &src_path, const Path &dst_path,
                        const kvx_migrate_desc_t &migrate, const NamedPlane &src,
                        const NamedPlane &dst) {
  const auto differs = [&](const char *field, int64_t found, int64_t expected) {
    return KVX_INVALID(
        "%s.%s is %lld, expected that of %s, %lld; describe both alike, or leave the plane out at "
        "both ends (spec E.11)",
        KVX_AT(dst.path), field, static_cast<ll>(found), KVX_AT(src.path),
        static_cast<ll>(expected));
  };
  const kvx_plane_t &from = src.plane, &to = dst.plane;
  if (from.tokens_per_entry != to.tokens_per_entry)
    return differs("tokens_per_entry", to.tokens_per_entry, from.tokens_per_entry);
  if (from.flags != to.flags) return differs("flags", to.flags, from.flags);
  const int64_t dim = numbers_of(to.dtype, extent_of(to, KVX_AXIS_DIM));
  const int64_t expected = numbers_of(from.dtype, extent_of(from, KVX_AXIS_DIM));
  if (dim != expected) {
    return KVX_INVALID(
        "%s has %lld numbers per head (DIM), expected those of %s, %lld; describe both alike, or "
        "leave the plane out at both ends (spec E.11)",
        KVX_AT(dst.path), static_cast<ll>(dim), KVX_AT(src.path), static_cast<ll>(expected));
  }
  if (migrate.num_heads && !is_replicated(from)) {
    KVX_TRY(check_heads(src.path, src_path, *migrate.src, from, migrate.num_heads));
    KVX_TRY(check_heads(dst.path, dst_path, *migrate.dst, to, migrate.num_heads));
  } else if (heads_of(from) != heads_of(to)) {
    return KVX_INVALID(
        "%s has %u heads, expected those of %s, %u; give num_heads to move a range (spec E.11)",
        KVX_AT(dst.path), heads_of(to), KVX_AT(src.path), heads_of(from));
  }
  return check_convertible(dst.path, to.dtype, src.path, from.dtype);
}

// Refuses a plane of `span` without a counterpart in `other`.
kvx_status_t check_counterparts(const Path &path, const kvx_span_t &span, const Path &other_path,
                                const kvx_span_t &other) {
  for (uint32_t i = 0; i < span.num_planes; ++i) {
    const kvx_plane_t &plane = *span.planes[i];
    if (find_plane(other, plane.layer, plane.role, i)) continue;
    return KVX_INVALID(
        "%s has layer %u and role %u, but no plane of %s has; leave it out, or give both "
        "(spec E.11)",
        KVX_AT((Path{&path, "planes", i})), plane.layer, plane.role, KVX_AT(other_path));
  }
  return KVX_STATUS_OK;
}

}  // namespace

kvx_status_t check_planes(const Path &path, const kvx_span_t &span) {
  if (span.num_planes == 0) return KVX_STATUS_OK;
  if (!span.planes) return KVX_INVALID("%s.planes is NULL (spec E.11)", KVX_AT(path));
  for (uint32_t i = 0; i < span.num_planes; ++i)
    KVX_TRY(check_plane({&path, "planes", i}, span.planes[i]));
  for (uint32_t i = 0; i < span.num_planes; ++i)
    KVX_TRY(check_lookup({&path, "planes", i}, path, span, *span.planes[i]));
  for (uint32_t i = 0; i < span.num_planes; ++i)
    KVX_TRY(check_entries({&path, "planes", i}, span, *span.planes[i]));
  return check_distinct(path, span);
}

kvx_status_t check_plane_pairs(const Path &src_path, const Path &dst_path,
                               const kvx_migrate_desc_t &migrate) {
  const kvx_span_t &src = *migrate.src, &dst = *migrate.dst;
  KVX_TRY(check_counterparts(src_path, src, dst_path, dst));
  KVX_TRY(check_counterparts(dst_path, dst, src_path, src));
  for (uint32_t i = 0; i < src.num_planes; ++i) {
    const kvx_plane_t &from = *src.planes[i], &to = *find_plane(dst, from.layer, from.role, i);
    uint32_t j = 0;
    while (dst.planes[j] != &to) ++j;
    const Path from_path{&src_path, "planes", i}, to_path{&dst_path, "planes", j};
    KVX_TRY(check_pair(src_path, dst_path, migrate, {from_path, from}, {to_path, to}));
  }
  if (src.num_planes && migrate.flags & KVX_FLAG_FIND_SCALES) {
    return KVX_INVALID(
        "migrate.flags has FIND_SCALES, but the spans have planes, whose scales are given; migrate "
        "them in a call of their own (spec E.11)");
  }
  return KVX_STATUS_OK;
}

kvx_status_t check_plane_rows(const Path &path, const kvx_span_t &span, uint64_t rows) {
  for (uint32_t i = 0; i < span.num_planes; ++i) {
    const kvx_plane_t &plane = *span.planes[i];
    const Path at{&path, "planes", i};
    if (plane.block_table && plane.block_table->seq_count != rows) {
      return KVX_INVALID(
          "%s.block_table has %u rows, expected %llu, as seq_lens has it; give a row for each "
          "sequence (spec E.11)",
          KVX_AT(at), plane.block_table->seq_count, static_cast<ull>(rows));
    }
    if (plane.tokens_per_entry == 0 && plane.slots && plane.slots->token_count != rows) {
      return KVX_INVALID("%s.slots.token_count is %u, expected %llu, one per sequence (spec E.11)",
                         KVX_AT(at), plane.slots->token_count, static_cast<ull>(rows));
    }
    const bool is_dense = plane.tokens_per_entry == 0
                              ? !plane.slots
                              : uses_lookup_of_span(plane) && !span.block_table && !span.slots;
    if (is_dense && rows > shape_of(plane).num_blocks) {
      return KVX_INVALID(
          "%s is dense and holds %llu sequences (BLOCK), expected at least %llu; move fewer in a "
          "call (spec E.11)",
          KVX_AT(at), static_cast<ull>(shape_of(plane).num_blocks), static_cast<ull>(rows));
    }
  }
  return KVX_STATUS_OK;
}

kvx_status_t check_planes_for_device(const kvx_migrate_desc_t &migrate) {
  for (const bool is_dst : {false, true}) {
    const kvx_span_t &span = is_dst ? *migrate.dst : *migrate.src;
    const Path path{nullptr, is_dst ? "dst" : "src"};
    for (uint32_t i = 0; i < span.num_planes; ++i) {
      const PlaneAxis tokens = axis_of(*span.planes[i], KVX_AXIS_TOKEN);
      if (tokens.num_parts <= 1) continue;
      return fail(KVX_STATUS_UNSUPPORTED,
                  "%s.axes splits TOKEN into parts of %lld, which calls on DEVICE memory do not "
                  "move; migrate in HOST memory (spec E.11)",
                  KVX_AT((Path{&path, "planes", i})), static_cast<ll>(tokens.parts[1].extent));
    }
  }
  return KVX_STATUS_OK;
}

}  // namespace kvx
