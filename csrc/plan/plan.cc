#include "plan/plan.h"

#include <initializer_list>

#include "desc/affine.h"
#include "desc/memory.h"
#include "desc/plane.h"
#include "desc/scale.h"
#include "plan/plan_affine.h"
#include "plan/plan_lookups.h"
#include "plan/write_layers.h"

namespace kvx {
namespace {

// Drops the `pack` level if the axis has one stride anyway.
void set_dim(Plane *plane, int64_t outer, int64_t inner, int64_t pack, int64_t dim) {
  if (pack == 1) pack = dim, inner = outer;
  if (outer == pack * inner) pack = dim;
  plane->outer_stride = outer;
  plane->inner_stride = inner;
  plane->pack = static_cast<uint32_t>(pack);
}

// Byte stride of an axis. An axis of extent 1 may have any stride and gets `none`: 0 by default,
// which never breaks alignment.
template <class Desc>
int64_t step_bytes(const Desc &desc, int axis, int64_t none = 0) {
  return desc.shape[axis] > 1 ? desc.stride[axis] * size_of(desc.dtype) : none;
}

// The functions from here on fill a part of the plan in place: copying it would wait for the
// stores.
void set_plane(Plane *plane, const kvx_tensor_desc_t &tensor, uint32_t head_start) {
  const Axes axes = axes_of(tensor);
  plane->dtype = tensor.dtype;
  plane->block_stride = step_bytes(tensor, axes.block);
  plane->token_stride = step_bytes(tensor, axes.token);
  plane->head_stride = step_bytes(tensor, axes.head);
  plane->base = static_cast<uint8_t *>(tensor.data) + head_start * plane->head_stride;
  const int64_t size = size_of(tensor.dtype);
  const int64_t inner = step_bytes(tensor, axes.inner, size);
  const int64_t outer = axes.outer < 0 ? inner : step_bytes(tensor, axes.outer, size);
  set_dim(plane, outer, inner, axes.outer < 0 ? 1 : tensor.shape[axes.inner], units_of(tensor));
}

void set_plane(Plane *plane, const kvx_plane_t &desc, uint32_t head_start) {
  const auto step = [](const PlaneAxis &axis) { return axis.num_parts ? axis.parts[0].stride : 0; };
  plane->dtype = desc.dtype;
  plane->block_stride = step(axis_of(desc, KVX_AXIS_BLOCK));
  plane->head_stride = step(axis_of(desc, KVX_AXIS_HEAD));
  plane->base = static_cast<uint8_t *>(desc.data) + head_start * plane->head_stride;
  const PlaneAxis tokens = axis_of(desc, KVX_AXIS_TOKEN), dim = axis_of(desc, KVX_AXIS_DIM);
  plane->token_stride = step(tokens);
  if (tokens.num_parts == 2) {
    plane->token_outer_stride = tokens.parts[0].stride;
    plane->token_pack = static_cast<uint32_t>(tokens.parts[1].extent);
    plane->token_stride = tokens.parts[1].stride;
  }
  const AxisPart one = {1, size_of(desc.dtype)};
  const AxisPart &outer = dim.num_parts ? dim.parts[0] : one;
  const AxisPart &inner = dim.num_parts == 2 ? dim.parts[1] : outer;
  set_dim(plane, outer.stride, inner.stride, dim.num_parts == 2 ? inner.extent : 1, dim.extent);
}

// The secondary pool mirrors the primary: the same offsets within a block, the same block stride,
// which is needed even if the primary has one block.
void add_secondary(Plane *plane, const kvx_tensor_desc_t &tensor, const kvx_pool_desc_t &pool) {
  if (!pool.secondary) return;
  plane->block_stride = tensor.stride[axes_of(tensor).block] * size_of(tensor.dtype);
  plane->secondary =
      static_cast<uint8_t *>(pool.secondary) + (plane->base - static_cast<uint8_t *>(pool.primary));
}

// A dense [rows, tokens, heads, dim] tensor, or the same as [rows * tokens, heads, dim].
void set_io_plane(Plane *plane, const kvx_tensor_desc_t &tensor, uint64_t tokens_per_row) {
  const int head = static_cast<int>(tensor.ndim) - 2;
  plane->base = static_cast<uint8_t *>(tensor.data);
  plane->dtype = tensor.dtype;
  plane->token_stride = step_bytes(tensor, head - 1);
  plane->block_stride = tensor.ndim == 4
                            ? step_bytes(tensor, 0)
                            : static_cast<int64_t>(tokens_per_row) * plane->token_stride;
  plane->head_stride = step_bytes(tensor, head);
  const int64_t inner = step_bytes(tensor, head + 1, size_of(tensor.dtype));
  set_dim(plane, inner, inner, 1, tensor.shape[head + 1]);
}

void set_scales(Scales *scales, const kvx_scale_desc_t *desc, kvx_dtype_t tensor_dtype,
                uint32_t head_start) {
  if (!desc || !desc->data || !takes_scale(tensor_dtype)) return;
  scales->data = static_cast<const uint8_t *>(desc->data);
  scales->dtype = desc->dtype;
  switch (desc->granularity) {
    case KVX_SCALE_PER_BLOCK:
      scales->block_stride = step_bytes(*desc, 0);
      break;
    case KVX_SCALE_PER_HEAD:
      scales->head_stride = step_bytes(*desc, 0);
      break;
    case KVX_SCALE_PER_BLOCK_HEAD:
      scales->block_stride = step_bytes(*desc, 0);
      scales->head_stride = step_bytes(*desc, 1);
      break;
    case KVX_SCALE_PER_TOKEN_HEAD:
      scales->block_stride = step_bytes(*desc, 0);
      scales->token_stride = step_bytes(*desc, 1);
      scales->head_stride = step_bytes(*desc, 2);
      break;
    default:
      break;
  }
  scales->data += head_start * scales->head_stride;
}

bool is_one_scale(const Scales &scales) {
  return scales.block_stride == 0 && scales.token_stride == 0 && scales.head_stride == 0;
}

// Whether there is no scale, or one for the whole tensor that is 1.
bool is_unit(const Scales &scales) {
  return !scales.data || (is_one_scale(scales) && read_scale(scales.data, scales.dtype) == 1.0f);
}

// Whether both ends have one and the same scale. One that is not usable is for the checks to find.
bool is_same_scale(const Scales &a, const Scales &b) {
  if (!a.data || !b.data || !is_one_scale(a) || !is_one_scale(b)) return false;
  const float scale = read_scale(a.data, a.dtype);
  return is_usable_scale(scale) && scale == read_scale(b.data, b.dtype);
}

void finish(PlanePair *pair, bool scales_readable) {
  if (scales_readable) {
    if (is_unit(pair->src_scales)) pair->src_scales = {};
    if (!pair->find_scales && is_unit(pair->dst_scales)) pair->dst_scales = {};
  }
  const Scales &src = pair->src_scales, &dst = pair->dst_scales;
  const bool same_scale = (!src.data && !dst.data) ||
                          (scales_readable && !pair->find_scales && is_same_scale(src, dst));
  pair->convert = pair->src.dtype != pair->dst.dtype || !same_scale || pair->hadamard;
  if (pair->convert) return;
  pair->src_scales = pair->dst_scales = {};
  pair->head_dim = static_cast<uint32_t>(units_of(pair->src.dtype, pair->head_dim));
}

void set_flags(Plan *plan, uint32_t flags) {
  plan->zero_fill = flags & KVX_FLAG_ZERO_FILL;
  plan->background = flags & KVX_FLAG_BACKGROUND;
  plan->copy_engine = flags & KVX_FLAG_COPY_ENGINE;
  plan->owner = static_cast<int>((flags & KVX_FLAG_OWNER_MASK) >> 24) - 1;
}

// Whether a token's V vector follows its K vector in memory.
bool v_follows(const Plane &k, const Plane &v, uint32_t k_dim, uint32_t v_dim) {
  const int64_t size = size_of(k.dtype);
  const uintptr_t k_base = reinterpret_cast<uintptr_t>(k.base);  // of POINTERS no pointer
  return k.dtype == v.dtype && !k.token_pack && !v.token_pack && k.pack == k_dim &&
         v.pack == v_dim && k.inner_stride == size && v.inner_stride == size &&
         reinterpret_cast<uintptr_t>(v.base) == k_base + static_cast<uint64_t>(k_dim * size) &&
         !k.secondary && !v.secondary && k.block_stride == v.block_stride &&
         k.token_stride == v.token_stride && k.head_stride == v.head_stride;
}

// Ends a layer. If V's vectors follow K's at both ends, as in vLLM's [.., 2 * head_dim] caches, K's
// pair moves both.
void end_layer(Plan *plan) {
  const size_t size = plan->pairs.size(), layers = plan->layers.size();
  const size_t first = layers ? plan->layers[layers - 1] : 0;
  if (size - first == 2) {
    PlanePair &k = plan->pairs[first];
    const PlanePair &v = plan->pairs[first + 1];
    if (!k.convert && !v.convert && k.lookup == v.lookup && k.num_heads == v.num_heads &&
        v_follows(k.src, v.src, k.head_dim, v.head_dim) &&
        v_follows(k.dst, v.dst, k.head_dim, v.head_dim)) {
      k.head_dim += v.head_dim;
      k.src.pack = k.dst.pack = k.head_dim;
      plan->pairs.drop_last();
    }
  }
  plan->layers.push(static_cast<uint32_t>(plan->pairs.size()));
}

// A plane whose blocks lie anywhere: block ids are addresses without the bits that are 0. Its base
// is where it begins from there.
void rebase_to_addresses(Plane *plane, const kvx_tensor_desc_t &tensor,
                         const kvx_block_table_t &table, const Lookup &lookup) {
  const void *const begin = names_whole_blocks(table) ? table.indptr : tensor.data;
  plane->base = reinterpret_cast<uint8_t *>(plane->base - static_cast<const uint8_t *>(begin));
  plane->block_stride = int64_t{1} << lookup.pointer_shift;
}

void set_rows(Plan *plan, const kvx_migrate_desc_t &migrate) {
  plan->call = Call::kMigrate;
  plan->rows.count = rows_of(migrate);
  const uint32_t sequences = migrate.seq_lens->seq_count;
  plan->rows.rows_per_len = sequences ? static_cast<uint32_t>(plan->rows.count / sequences) : 1;
  plan->rows.lens = ints(migrate.seq_lens->lengths, migrate.seq_lens->dtype);
  plan->rows.max_len = migrate.max_seq_len ? migrate.max_seq_len : UINT64_MAX;
}

// Adds the planes beside the layers. Those of one layer that follow each other move together.
void add_planes(Plan *plan, const kvx_migrate_desc_t &migrate) {
  const kvx_span_t &src = *migrate.src, &dst = *migrate.dst;
  for (uint32_t i = 0; i < src.num_planes; ++i) {
    const kvx_plane_t &from = *src.planes[i];
    const kvx_plane_t &to = *find_plane(dst, from.layer, from.role, i);
    const bool cuts_heads = !(from.flags & KVX_PLANE_REPLICATED);
    PlanePair &pair = plan->pairs.add();
    pair.lookup = lookup_of(plan, migrate, from, to);
    pair.num_heads = cuts_heads && migrate.num_heads
                         ? migrate.num_heads
                         : static_cast<uint32_t>(extent_of(from, KVX_AXIS_HEAD));
    pair.head_dim = static_cast<uint32_t>(numbers_of(from.dtype, extent_of(from, KVX_AXIS_DIM)));
    const uint32_t src_start = cuts_heads ? src.head_start : 0;
    const uint32_t dst_start = cuts_heads ? dst.head_start : 0;
    set_plane(&pair.src, from, src_start);
    set_plane(&pair.dst, to, dst_start);
    set_scales(&pair.src_scales, from.scale, from.dtype, src_start);
    set_scales(&pair.dst_scales, to.scale, to.dtype, dst_start);
    finish(&pair, is_readable(from.memory) && is_readable(to.memory));
    if (is_affine(from.dtype) || is_affine(to.dtype)) {
      add_affine(plan, plan->pairs.size() - 1, {from.scale, from.zero, src_start},
                 {to.scale, to.zero, dst_start}, migrate.flags,
                 is_readable(from.memory) && is_readable(to.memory));
    }
    if (i + 1 == src.num_planes || src.planes[i + 1]->layer != from.layer) end_layer(plan);
  }
}

// What the writes of one layer and of several have in common: one row of tokens to slots.
void begin_write(const kvx_cache_desc_t &cache, const kvx_write_desc_t &write, uint32_t flags,
                 Plan *plan) {
  plan->rows.count = 1;
  plan->rows.rows_per_len = 1;
  plan->rows.uniform_len = plan->rows.max_len = write.io.num_tokens;
  plan->call = Call::kWrite;
  set_flags(plan, flags);
  LookupPair &lookup = plan->lookups.add();
  set_dense(&lookup.src, 1, write.io.num_tokens);
  set_slots(&lookup.dst, {cache.num_blocks, cache.block_size}, write.slots);
}

void add_written_layer(const kvx_cache_desc_t &cache, const kvx_write_desc_t &write, uint32_t flags,
                       Plan *plan) {
  for (const bool is_v : {false, true}) {
    const kvx_tensor_desc_t &io = is_v ? write.io.value : write.io.key;
    const kvx_tensor_desc_t &tensor = is_v ? cache.v : cache.k;
    if (is_absent(tensor)) break;
    const kvx_scale_desc_t scale = scales_of(write, is_v);
    PlanePair &pair = plan->pairs.add();
    pair.is_v = is_v;
    pair.num_heads = cache.num_kv_heads;
    pair.head_dim = static_cast<uint32_t>(dim_of(tensor));
    set_io_plane(&pair.src, io, write.io.num_tokens);
    set_plane(&pair.dst, tensor, 0);
    set_scales(&pair.dst_scales, &scale, tensor.dtype, 0);
    pair.find_scales = flags & KVX_FLAG_FIND_SCALES;
    finish(&pair, is_readable(tensor.memory) && is_readable(io.memory));
  }
  end_layer(plan);
}

}  // namespace

void plan_write(const kvx_cache_desc_t &cache, const kvx_write_desc_t &write, uint32_t flags,
                Plan *plan) {
  begin_write(cache, write, flags, plan);
  add_written_layer(cache, write, flags, plan);
}

void plan_write_layers(const kvx_cache_desc_t *const *caches, const kvx_write_desc_t *const *writes,
                       uint32_t num_layers, uint32_t flags, Plan *plan) {
  begin_write(*caches[0], *writes[0], flags, plan);
  plan->pairs.reserve(size_t{2} * num_layers);
  plan->layers.reserve(num_layers);
  for (uint32_t l = 0; l < num_layers; ++l) add_written_layer(*caches[l], *writes[l], flags, plan);
}

void plan_gather(const kvx_cache_desc_t &cache, const kvx_gather_desc_t &gather,
                 const kvx_gather_options_t &options, Plan *plan) {
  const kvx_block_table_t &table = gather.block_table;
  set_flags(plan, options.flags);
  plan->rows.count = rows_of(table);
  plan->rows.rows_per_len = is_kv_offsets(table) ? table.beam_width : 1;
  plan->rows.lens = ints(gather.seq_lens.lengths, gather.seq_lens.dtype);
  plan->rows.max_len = gather.max_seq_len;
  plan->rows.fill_to_max = plan->zero_fill;
  plan->call = Call::kGather;
  for (const bool is_v : {false, true}) {
    const kvx_tensor_desc_t &io = is_v ? gather.io.value : gather.io.key;
    const kvx_tensor_desc_t &tensor = is_v ? cache.v : cache.k;
    if (is_absent(tensor)) break;
    if (!is_v || is_kv_offsets(table)) {  // it has entries of its own for V
      LookupPair &lookup = plan->lookups.add();
      set_table(&lookup.src, cache, tensor, is_v, table, options.null_block_plus_1,
                options.secondary_num_blocks);
      lookup.src.holes |= plan->zero_fill;
      set_dense(&lookup.dst, plan->rows.count, gather.max_seq_len);
    }
    PlanePair &pair = plan->pairs.add();
    pair.lookup = static_cast<uint8_t>(plan->lookups.size() - 1);
    pair.plane = is_v;
    pair.is_v = is_v;
    pair.num_heads = cache.num_kv_heads;
    pair.head_dim = static_cast<uint32_t>(dim_of(tensor));
    set_plane(&pair.src, tensor, 0);
    if (is_kv_offsets(table)) add_secondary(&pair.src, tensor, cache.pool);
    if (is_pointers(table)) {
      Lookup &src = plan->lookups[0].src;
      const kvx_cache_desc_t *const layer = &cache;
      src.pointer_shift = pointer_shift(table, &layer, 1);
      rebase_to_addresses(&pair.src, tensor, table, src);
    }
    set_io_plane(&pair.dst, io, gather.max_seq_len);
    set_scales(&pair.src_scales, is_v ? options.v_scale : options.k_scale, tensor.dtype, 0);
    finish(&pair, is_readable(tensor.memory) && is_readable(io.memory));
  }
  end_layer(plan);
}

void plan_migrate(const kvx_migrate_desc_t &migrate, Plan *plan) {
  const kvx_span_t &src = *migrate.src, &dst = *migrate.dst;
  set_flags(plan, migrate.flags);
  // Blocks with addresses are compared one by one, see apart.cc.
  plan->check_same_pool = are_same_pool(src, dst) && !is_pointers(src) && !is_pointers(dst);
  set_rows(plan, migrate);
  const bool offsets = is_kv_offsets(src) || is_kv_offsets(dst);
  const bool has_v = src.num_layers && !is_absent(src.layers[0]->v);
  plan->lookups.reserve(size_t{2} + src.num_planes);
  for (const bool is_v : {false, true}) {
    if (!src.num_layers || (is_v && !(offsets && has_v))) break;
    LookupPair &lookup = plan->lookups.add();
    set_span(&lookup.src, src, is_v);
    set_span(&lookup.dst, dst, is_v);
    lookup.src.holes |= plan->zero_fill;
  }
  reserve_pairs(plan, src, dst);
  plan->layers.reserve(size_t{src.num_layers} + src.num_planes);
  for (uint32_t l = 0, plane = 0; l < src.num_layers; ++l) {
    const kvx_cache_desc_t &from = *src.layers[l], &to = *dst.layers[l];
    for (const bool is_v : {false, true}) {
      const kvx_tensor_desc_t &src_tensor = is_v ? from.v : from.k;
      const kvx_tensor_desc_t &dst_tensor = is_v ? to.v : to.k;
      if (is_absent(src_tensor)) break;
      PlanePair &pair = plan->pairs.add();
      pair.lookup = is_v && offsets;
      pair.plane = plane++;
      pair.is_v = is_v;
      pair.num_heads = migrate.num_heads ? migrate.num_heads : from.num_kv_heads;
      pair.head_dim = static_cast<uint32_t>(dim_of(src_tensor));
      set_plane(&pair.src, src_tensor, src.head_start);
      set_plane(&pair.dst, dst_tensor, dst.head_start);
      const auto *src_scale = is_v ? src.v_scales : src.k_scales;
      const auto *dst_scale = is_v ? dst.v_scales : dst.k_scales;
      set_scales(&pair.src_scales, src_scale ? src_scale[l] : nullptr, src_tensor.dtype,
                 src.head_start);
      set_scales(&pair.dst_scales, dst_scale ? dst_scale[l] : nullptr, dst_tensor.dtype,
                 dst.head_start);
      if (is_kv_offsets(src)) add_secondary(&pair.src, src_tensor, from.pool);
      if (is_kv_offsets(dst)) add_secondary(&pair.dst, dst_tensor, to.pool);
      if (is_pointers(src))
        rebase_to_addresses(&pair.src, src_tensor, *src.block_table, plan->lookups[0].src);
      if (is_pointers(dst))
        rebase_to_addresses(&pair.dst, dst_tensor, *dst.block_table, plan->lookups[0].dst);
      pair.find_scales = migrate.flags & KVX_FLAG_FIND_SCALES;
      pair.hadamard = hadamard_order(migrate.flags, is_v);
      finish(&pair, is_readable(src_tensor.memory) && is_readable(dst_tensor.memory));
      if (is_affine(src_tensor.dtype) || is_affine(dst_tensor.dtype)) {
        add_affine(plan, plan->pairs.size() - 1,
                   {src_scale ? src_scale[l] : nullptr, zeros_of(src, l, is_v), src.head_start},
                   {dst_scale ? dst_scale[l] : nullptr, zeros_of(dst, l, is_v), dst.head_start},
                   migrate.flags, is_readable(src_tensor.memory) && is_readable(dst_tensor.memory));
      }
    }
    end_layer(plan);
  }
  add_planes(plan, migrate);
}

void plan_find(const kvx_find_desc_t &find, Plan *plan) {
  set_rows(plan, as_source(find));
  LookupPair &lookup = plan->lookups.add();
  if (find.plane_plus_1) {
    set_span(&lookup.src, *find.span, *find.span->planes[find.plane_plus_1 - 1]);
  } else {
    set_span(&lookup.src, *find.span, find.is_v);
  }
  lookup.src.holes = true;  // they are what it reports
  lookup.dst = lookup.src;
}

}  // namespace kvx
