#include "plan.h"

#include <algorithm>

#include "grown.h"
#include "scale.h"
#if KVX_WITH_CUDA
#include "cuda/run.h"
#endif

namespace kvx {
namespace {

Ints ints(const void *data, kvx_dtype_t dtype) { return {data, dtype == KVX_DTYPE_S64}; }

// Drops the `pack` level where the axis is one stride anyway.
void set_dim(Side *side, int64_t outer, int64_t inner, int64_t pack, int64_t dim) {
  if (pack == 1) pack = dim, inner = outer;
  if (outer == pack * inner) pack = dim;
  side->outer_stride = outer;
  side->inner_stride = inner;
  side->pack = static_cast<uint32_t>(pack);
}

// Bytes from one to the next along an axis. Where there is no next, the descriptor's stride may be
// anything, and `none` stands for it: 0 is what vectors like and what repeats nothing.
template <class Desc>
int64_t step_bytes(const Desc &desc, int axis, int64_t none = 0) {
  return desc.shape[axis] > 1 ? desc.stride[axis] * size_of(desc.dtype) : none;
}

// From here on a part of the plan is filled where it stays: a copy would wait for the stores.
void set_side(Side *side, const kvx_tensor_desc_t &tensor, uint32_t head_start) {
  const Axes axes = axes_of(tensor);
  side->dtype = tensor.dtype;
  side->block_stride = step_bytes(tensor, axes.block);
  side->token_stride = step_bytes(tensor, axes.token);
  side->head_stride = step_bytes(tensor, axes.head);
  side->base = static_cast<uint8_t *>(tensor.data) + head_start * side->head_stride;
  const int64_t size = size_of(tensor.dtype);
  const int64_t inner = step_bytes(tensor, axes.inner, size);
  const int64_t outer = axes.outer < 0 ? inner : step_bytes(tensor, axes.outer, size);
  set_dim(side, outer, inner, axes.outer < 0 ? 1 : tensor.shape[axes.inner], dim_of(tensor));
}

// The secondary pool mirrors the primary: the same place within a block, the same step from block
// to block, which counts even where the primary has one block.
void add_secondary(Side *side, const kvx_tensor_desc_t &tensor, const kvx_pool_desc_t &pool) {
  if (!pool.secondary) return;
  side->block_stride = tensor.stride[axes_of(tensor).block] * size_of(tensor.dtype);
  side->secondary =
      static_cast<uint8_t *>(pool.secondary) + (side->base - static_cast<uint8_t *>(pool.primary));
}

// A dense [rows, tokens, heads, dim] tensor, or the same as [rows * tokens, heads, dim].
void set_io_side(Side *side, const kvx_tensor_desc_t &tensor, uint64_t tokens_per_row) {
  const int head = static_cast<int>(tensor.ndim) - 2;
  side->base = static_cast<uint8_t *>(tensor.data);
  side->dtype = tensor.dtype;
  side->token_stride = step_bytes(tensor, head - 1);
  side->block_stride = tensor.ndim == 4 ? step_bytes(tensor, 0)
                                        : static_cast<int64_t>(tokens_per_row) * side->token_stride;
  side->head_stride = step_bytes(tensor, head);
  const int64_t inner = step_bytes(tensor, head + 1, size_of(tensor.dtype));
  set_dim(side, inner, inner, 1, tensor.shape[head + 1]);
}

void set_scales(Scales *scales, const kvx_scale_desc_t *desc, kvx_dtype_t tensor_dtype,
                uint32_t head_start) {
  if (!desc || !desc->data || !is_fp8(tensor_dtype)) return;
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

// One scale for the whole tensor that is 1, or none.
bool is_unit(const Scales &scales) {
  return !scales.data || (is_one_scale(scales) && read_scale(scales.data, scales.dtype) == 1.0f);
}

void finish(TensorPair *pair, bool scales_readable) {
  if (scales_readable) {
    if (is_unit(pair->src_scales)) pair->src_scales = {};
    if (!pair->find_scales && is_unit(pair->dst_scales)) pair->dst_scales = {};
  }
  const Scales &src = pair->src_scales, &dst = pair->dst_scales;
  const bool same_scale =
      (!src.data && !dst.data) ||
      (src.data && dst.data && is_one_scale(src) && is_one_scale(dst) && scales_readable &&
       !pair->find_scales && read_scale(src.data, src.dtype) == read_scale(dst.data, dst.dtype));
  pair->convert = pair->src.dtype != pair->dst.dtype || !same_scale;
  if (!pair->convert) pair->src_scales = pair->dst_scales = {};
}

void set_flags(Plan *plan, uint32_t flags) {
  plan->zero_fill = flags & KVX_FLAG_ZERO_FILL;
  plan->background = flags & KVX_FLAG_BACKGROUND;
  plan->copy_engine = flags & KVX_FLAG_COPY_ENGINE;
}

bool rows_follow(const Side &k, const Side &v, uint32_t k_dim, uint32_t v_dim) {
  const int64_t size = size_of(k.dtype);
  return k.dtype == v.dtype && k.pack == k_dim && v.pack == v_dim && k.inner_stride == size &&
         v.inner_stride == size && v.base == k.base + k_dim * size && !k.secondary &&
         !v.secondary && k.block_stride == v.block_stride && k.token_stride == v.token_stride &&
         k.head_stride == v.head_stride;
}

// Where V's row follows K's at both ends, as in vLLM's [.., 2 * head_dim] caches, one pair moves
// both.
void merge_kv(TensorPair *k, TensorPair *v) {
  if (k->convert || v->convert || k->num_heads != v->num_heads ||
      !rows_follow(k->src, v->src, k->head_dim, v->head_dim) ||
      !rows_follow(k->dst, v->dst, k->head_dim, v->head_dim)) {
    return;
  }
  k->head_dim += v->head_dim;
  k->src.pack = k->dst.pack = k->head_dim;
  v->num_heads = 0;
}

void set_dense(Address *a, uint64_t rows, uint64_t tokens_per_row) {
  a->mode = Addressing::kDense;
  a->block_size = static_cast<uint32_t>(tokens_per_row);
  a->num_blocks = rows;
  a->null_block = null_block_of(0);
}

void set_slots(Address *a, const kvx_cache_desc_t &cache, const kvx_slot_mapping_t &slots) {
  set_dense(a, cache.num_blocks, cache.block_size);
  a->mode = Addressing::kSlots;
  a->indices = ints(slots.slots, slots.dtype);
  a->indices_count = slots.token_count;
  a->invalid_slot = slots.invalid_slot;
}

// `tensor` is the cache's K (kv 0) or V (kv 1).
void set_table(Address *a, const kvx_cache_desc_t &cache, const kvx_tensor_desc_t &tensor,
               uint8_t kv, const kvx_block_table_t &table, uint64_t null_block_plus_1,
               uint32_t secondary_num_blocks) {
  set_dense(a, cache.num_blocks, cache.block_size);
  a->kv = kv;
  a->null_block = null_block_of(null_block_plus_1);
  a->max_blocks_per_seq = table.max_blocks_per_seq;
  a->indices = ints(table.indices, table.index_dtype);
  a->indices_count = table.indices_count;
  switch (table.format) {
    case KVX_BLOCK_TABLE_PACKED:
      a->mode = Addressing::kPacked;
      break;
    case KVX_BLOCK_TABLE_RAGGED:
      a->mode = Addressing::kRagged;
      a->exact = table.flags & KVX_BLOCK_TABLE_FLAG_EXACT;
      a->indptr = ints(table.indptr, table.indptr_dtype);
      break;
    default: {
      a->mode = Addressing::kKvOffsets;
      const int64_t block_bytes = tensor.stride[axes_of(tensor).block] * size_of(tensor.dtype);
      const auto *k = static_cast<const uint8_t *>(cache.k.data);
      a->sub_blocks = static_cast<uint32_t>(block_bytes / cache.pool.bytes_per_block);
      a->sub_block = static_cast<uint32_t>((static_cast<const uint8_t *>(tensor.data) - k) /
                                           cache.pool.bytes_per_block);
      if (cache.pool.secondary)
        a->secondary_blocks = secondary_num_blocks ? secondary_num_blocks : cache.num_blocks;
    }
  }
}

void set_view(Address *a, const kvx_view_t &view, uint8_t kv) {
  const kvx_cache_desc_t &cache = *view.layers[0];
  const kvx_tensor_desc_t &tensor = kv && !is_absent(cache.v) ? cache.v : cache.k;
  if (view.slots) {
    set_slots(a, cache, *view.slots);
  } else if (view.block_table) {
    set_table(a, cache, tensor, kv, *view.block_table, view.null_block_plus_1,
              view.secondary_num_blocks);
  } else {
    set_dense(a, cache.num_blocks, cache.block_size);
  }
  if (view.starts) a->starts = ints(view.starts->lengths, view.starts->dtype);
}

}  // namespace

bool is_readable(kvx_memory_type_t memory) {
#if KVX_WITH_CUDA
  if (memory == KVX_MEMORY_UNIFIED) return !cuda::has_device();
#endif
  return memory != KVX_MEMORY_DEVICE;
}

uint64_t rows_of(const kvx_migrate_desc_t &migrate) {
  uint64_t beams = 1;
  for (const kvx_view_t *view : {migrate.src, migrate.dst}) {
    const kvx_block_table_t *table = view->block_table;
    if (table && is_kv_offsets(*table) && table->seq_count == migrate.seq_lens->seq_count)
      beams = std::max<uint64_t>(beams, table->beam_width);
  }
  return migrate.seq_lens->seq_count * beams;
}

kvx_scale_desc_t scale_or_pointer(const kvx_scale_desc_t &desc, const void *per_tensor) {
  if (desc.data || !per_tensor) return desc;
  kvx_scale_desc_t scale{};
  scale.size = sizeof scale;
  scale.dtype = KVX_DTYPE_F32;
  scale.granularity = KVX_SCALE_PER_TENSOR;
  scale.data = per_tensor;
  return scale;
}

bool has_secondary(const kvx_view_t &view) {
  return view.block_table && is_kv_offsets(*view.block_table) && view.layers[0]->pool.secondary;
}

bool are_same_pool(const kvx_view_t &src, const kvx_view_t &dst) {
  const auto same_tensor = [](const kvx_tensor_desc_t &x, const kvx_tensor_desc_t &y) {
    if (is_absent(x) || is_absent(y)) return is_absent(x) && is_absent(y);
    Side a{}, b{};
    set_side(&a, x, 0);
    set_side(&b, y, 0);
    return a.base == b.base && size_of(x.dtype) == size_of(y.dtype) && dim_of(x) == dim_of(y) &&
           a.block_stride == b.block_stride && a.token_stride == b.token_stride &&
           a.head_stride == b.head_stride && a.outer_stride == b.outer_stride &&
           a.inner_stride == b.inner_stride && a.pack == b.pack;
  };
  if (has_secondary(src) && has_secondary(dst) &&
      src.layers[0]->pool.secondary != dst.layers[0]->pool.secondary) {
    return false;
  }
  for (uint32_t l = 0; l < src.num_layers; ++l) {
    const kvx_cache_desc_t &x = *src.layers[l], &y = *dst.layers[l];
    if (x.num_blocks != y.num_blocks || x.block_size != y.block_size ||
        x.num_kv_heads != y.num_kv_heads || !same_tensor(x.k, y.k) || !same_tensor(x.v, y.v)) {
      return false;
    }
  }
  return true;
}

void plan_write(const kvx_cache_desc_t &cache, const kvx_write_desc_t &write, uint32_t flags,
                TensorPair *pairs, Plan *plan) {
  const bool has_v = !is_absent(cache.v);
  *plan = {};
  plan->pairs = pairs;
  plan->has_v = has_v;
  plan->num_layers = 1;
  plan->same_places = true;
  plan->rows.count = 1;
  plan->rows.rows_per_len = 1;
  plan->rows.uniform_len = plan->rows.max_len = write.io.num_tokens;
  plan->call = Call::kWrite;
  set_flags(plan, flags);
  for (int kv = 0; kv < 2; ++kv) {
    set_dense(&plan->src[kv], 1, write.io.num_tokens);
    set_slots(&plan->dst[kv], cache, write.slots);
  }
  for (uint8_t kv = 0; kv < (has_v ? 2 : 1); ++kv) {
    const kvx_tensor_desc_t &io = kv ? write.io.value : write.io.key;
    const kvx_tensor_desc_t &tensor = kv ? cache.v : cache.k;
    const kvx_scale_desc_t scale = scale_or_pointer(kv ? write.v_scale_desc : write.k_scale_desc,
                                                    kv ? write.v_scale : write.k_scale);
    TensorPair &pair = pairs[kv];
    pair.kv = kv;
    pair.num_heads = cache.num_kv_heads;
    pair.head_dim = static_cast<uint32_t>(dim_of(tensor));
    set_io_side(&pair.src, io, write.io.num_tokens);
    set_side(&pair.dst, tensor, 0);
    set_scales(&pair.dst_scales, &scale, tensor.dtype, 0);
    pair.find_scales = flags & KVX_FLAG_FIND_SCALES;
    finish(&pair, is_readable(tensor.memory) && is_readable(io.memory));
  }
  if (has_v) merge_kv(&pairs[0], &pairs[1]);
}

void plan_gather(const kvx_cache_desc_t &cache, const kvx_gather_desc_t &gather,
                 const kvx_gather_options_t &options, TensorPair *pairs, Plan *plan) {
  const bool has_v = !is_absent(cache.v);
  *plan = {};
  plan->pairs = pairs;
  plan->has_v = has_v;
  plan->num_layers = 1;
  set_flags(plan, options.flags);
  plan->same_places = !is_kv_offsets(gather.block_table);
  plan->rows.count = rows_of(gather.block_table);
  plan->rows.rows_per_len = is_kv_offsets(gather.block_table) ? gather.block_table.beam_width : 1;
  plan->rows.lens = ints(gather.seq_lens.lengths, gather.seq_lens.dtype);
  plan->rows.max_len = gather.max_seq_len;
  plan->rows.fill_to_max = plan->zero_fill;
  plan->call = Call::kGather;
  for (uint8_t kv = 0; kv < (has_v ? 2 : 1); ++kv) {
    const kvx_tensor_desc_t &io = kv ? gather.io.value : gather.io.key;
    const kvx_tensor_desc_t &tensor = kv ? cache.v : cache.k;
    set_table(&plan->src[kv], cache, tensor, kv, gather.block_table, options.null_block_plus_1,
              options.secondary_num_blocks);
    set_dense(&plan->dst[kv], plan->rows.count, gather.max_seq_len);
    TensorPair &pair = pairs[kv];
    pair.kv = kv;
    pair.num_heads = cache.num_kv_heads;
    pair.head_dim = static_cast<uint32_t>(dim_of(tensor));
    set_side(&pair.src, tensor, 0);
    if (is_kv_offsets(gather.block_table)) add_secondary(&pair.src, tensor, cache.pool);
    set_io_side(&pair.dst, io, gather.max_seq_len);
    set_scales(&pair.src_scales, kv ? options.v_scale : options.k_scale, tensor.dtype, 0);
    finish(&pair, is_readable(tensor.memory) && is_readable(io.memory));
  }
  if (has_v && plan->same_places) merge_kv(&pairs[0], &pairs[1]);
}

void plan_migrate(const kvx_migrate_desc_t &migrate, TensorPair *pairs, Plan *plan) {
  const kvx_view_t &src = *migrate.src, &dst = *migrate.dst;
  *plan = {};
  plan->pairs = pairs;
  plan->num_layers = src.num_layers;
  plan->has_v = !is_absent(src.layers[0]->v);
  set_flags(plan, migrate.flags);
  plan->check_same_pool = are_same_pool(src, dst);
  plan->rows.count = rows_of(migrate);
  const uint32_t sequences = migrate.seq_lens->seq_count;
  plan->rows.rows_per_len = sequences ? static_cast<uint32_t>(plan->rows.count / sequences) : 1;
  plan->rows.lens = ints(migrate.seq_lens->lengths, migrate.seq_lens->dtype);
  plan->rows.max_len = migrate.max_seq_len ? migrate.max_seq_len : UINT64_MAX;
  plan->call = Call::kMigrate;
  plan->same_places = !(src.block_table && is_kv_offsets(*src.block_table)) &&
                      !(dst.block_table && is_kv_offsets(*dst.block_table));
  for (uint8_t kv = 0; kv < 2; ++kv) {
    set_view(&plan->src[kv], src, kv);
    set_view(&plan->dst[kv], dst, kv);
  }
  for (uint32_t l = 0; l < plan->num_layers; ++l) {
    for (uint8_t kv = 0; kv < 2; ++kv) {
      const kvx_cache_desc_t &from = *src.layers[l], &to = *dst.layers[l];
      const kvx_tensor_desc_t &src_tensor = kv ? from.v : from.k;
      const kvx_tensor_desc_t &dst_tensor = kv ? to.v : to.k;
      TensorPair &pair = pairs[l * 2 + kv];
      pair.kv = kv;
      if (is_absent(src_tensor)) continue;
      pair.num_heads = migrate.num_heads ? migrate.num_heads : from.num_kv_heads;
      pair.head_dim = static_cast<uint32_t>(dim_of(src_tensor));
      set_side(&pair.src, src_tensor, src.head_start);
      set_side(&pair.dst, dst_tensor, dst.head_start);
      const auto *src_scale = kv ? src.v_scales : src.k_scales;
      const auto *dst_scale = kv ? dst.v_scales : dst.k_scales;
      set_scales(&pair.src_scales, src_scale ? src_scale[l] : nullptr, src_tensor.dtype,
                 src.head_start);
      set_scales(&pair.dst_scales, dst_scale ? dst_scale[l] : nullptr, dst_tensor.dtype,
                 dst.head_start);
      if (src.block_table && is_kv_offsets(*src.block_table))
        add_secondary(&pair.src, src_tensor, from.pool);
      if (dst.block_table && is_kv_offsets(*dst.block_table))
        add_secondary(&pair.dst, dst_tensor, to.pool);
      pair.find_scales = migrate.flags & KVX_FLAG_FIND_SCALES;
      finish(&pair, is_readable(src_tensor.memory) && is_readable(dst_tensor.memory));
    }
    if (plan->same_places) merge_kv(&pairs[l * 2], &pairs[l * 2 + 1]);
  }
}

}  // namespace kvx
