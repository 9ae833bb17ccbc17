// Breaks a valid call: changes fields one by one, and tells what it then claims to own.
#pragma once

#include <string>
#include <vector>

#include "case.h"
#include "plane_places.h"

namespace fuzz {

struct Field {
  enum Kind { kSize, kCount, kEnum, kExtent, kPointer } kind;
  std::string name;
  void *at;
};

struct Fields {
  std::vector<Field> all;

  template <class T>
  void add(Field::Kind kind, const std::string &name, T *at) {
    all.push_back({kind, name, const_cast<std::remove_const_t<T> *>(at)});
  }
  void tensor(const std::string &name, kvx_tensor_desc_t *t) {
    add(Field::kSize, name + ".size", &t->size);
    add(Field::kEnum, name + ".dtype", &t->dtype);
    add(Field::kEnum, name + ".layout", &t->layout);
    add(Field::kEnum, name + ".memory", &t->memory);
    add(Field::kCount, name + ".ndim", &t->ndim);
    add(Field::kPointer, name + ".data", &t->data);
    for (int axis = 0; axis < KVX_MAX_TENSOR_DIMS; ++axis) {
      add(Field::kExtent, name + ".shape[" + std::to_string(axis) + "]", &t->shape[axis]);
      add(Field::kExtent, name + ".stride[" + std::to_string(axis) + "]", &t->stride[axis]);
    }
  }
  void cache(const std::string &name, kvx_cache_desc_t *c) {
    add(Field::kSize, name + ".size", &c->size);
    add(Field::kCount, name + ".num_blocks", &c->num_blocks);
    add(Field::kCount, name + ".block_size", &c->block_size);
    add(Field::kCount, name + ".num_kv_heads", &c->num_kv_heads);
    add(Field::kCount, name + ".head_dim", &c->head_dim);
    tensor(name + ".k", &c->k);
    tensor(name + ".v", &c->v);
    add(Field::kSize, name + ".pool.size", &c->pool.size);
    add(Field::kEnum, name + ".pool.memory", &c->pool.memory);
    add(Field::kCount, name + ".pool.bytes_per_block", &c->pool.bytes_per_block);
    add(Field::kPointer, name + ".pool.primary", &c->pool.primary);
    add(Field::kPointer, name + ".pool.secondary", &c->pool.secondary);
  }
  void table(const std::string &name, kvx_block_table_t *t) {
    add(Field::kSize, name + ".size", &t->size);
    add(Field::kEnum, name + ".format", &t->format);
    add(Field::kEnum, name + ".index_dtype", &t->index_dtype);
    add(Field::kEnum, name + ".indptr_dtype", &t->indptr_dtype);
    add(Field::kCount, name + ".seq_count", &t->seq_count);
    add(Field::kCount, name + ".beam_width", &t->beam_width);
    add(Field::kCount, name + ".max_blocks_per_seq", &t->max_blocks_per_seq);
    add(Field::kPointer, name + ".indices", &t->indices);
    add(Field::kPointer, name + ".indptr", &t->indptr);
    add(Field::kCount, name + ".indices_count", &t->indices_count);
    add(Field::kCount, name + ".indptr_count", &t->indptr_count);
    add(Field::kCount, name + ".flags", &t->flags);
  }
  void slots(const std::string &name, kvx_slot_mapping_t *s) {
    add(Field::kSize, name + ".size", &s->size);
    add(Field::kEnum, name + ".dtype", &s->dtype);
    add(Field::kCount, name + ".token_count", &s->token_count);
    add(Field::kExtent, name + ".invalid_slot", &s->invalid_slot);
    add(Field::kPointer, name + ".slots", &s->slots);
  }
  void lens(const std::string &name, kvx_seq_lens_t *l) {
    add(Field::kSize, name + ".size", &l->size);
    add(Field::kEnum, name + ".dtype", &l->dtype);
    add(Field::kCount, name + ".seq_count", &l->seq_count);
    add(Field::kPointer, name + ".lengths", &l->lengths);
  }
  void scale(const std::string &name, kvx_scale_desc_t *s) {
    add(Field::kSize, name + ".size", &s->size);
    add(Field::kEnum, name + ".dtype", &s->dtype);
    add(Field::kEnum, name + ".granularity", &s->granularity);
    add(Field::kCount, name + ".ndim", &s->ndim);
    add(Field::kPointer, name + ".data", &s->data);
    for (int axis = 0; axis < KVX_MAX_TENSOR_DIMS; ++axis) {
      add(Field::kExtent, name + ".shape[" + std::to_string(axis) + "]", &s->shape[axis]);
      add(Field::kExtent, name + ".stride[" + std::to_string(axis) + "]", &s->stride[axis]);
    }
  }
  void plane(const std::string &name, PlaneCase *p) {
    kvx_plane_t &d = p->desc;
    add(Field::kSize, name + ".size", &d.size);
    add(Field::kCount, name + ".role", &d.role);
    add(Field::kCount, name + ".layer", &d.layer);
    add(Field::kEnum, name + ".dtype", &d.dtype);
    add(Field::kEnum, name + ".memory", &d.memory);
    add(Field::kCount, name + ".tokens_per_entry", &d.tokens_per_entry);
    add(Field::kCount, name + ".flags", &d.flags);
    add(Field::kCount, name + ".num_axes", &d.num_axes);
    for (int i = 0; i < KVX_MAX_PLANE_AXES; ++i) {
      const std::string axis = name + ".axes[" + std::to_string(i) + "]";
      add(Field::kEnum, axis + ".axis", &d.axes[i].axis);
      add(Field::kCount, axis + ".reserved", &d.axes[i].reserved);
      add(Field::kExtent, axis + ".extent", &d.axes[i].extent);
      add(Field::kExtent, axis + ".stride_bytes", &d.axes[i].stride_bytes);
    }
    add(Field::kPointer, name + ".data", &d.data);
    add(Field::kPointer, name + ".scale", &d.scale);
    add(Field::kPointer, name + ".zero", &d.zero);
    add(Field::kPointer, name + ".block_table", &d.block_table);
    add(Field::kPointer, name + ".slots", &d.slots);
    add(Field::kExtent, name + ".reserved[3]", &d.reserved[3]);
    if (d.scale) scale(name + ".scale", &p->scale);
    if (d.zero) scale(name + ".zero", &p->zero);
    if (d.block_table) table(name + ".block_table", &p->table);
    if (d.slots) slots(name + ".slots", &p->slots);
  }
  void span(const std::string &name, End *end) {
    kvx_span_t &v = end->span;
    add(Field::kSize, name + ".size", &v.size);
    add(Field::kCount, name + ".num_layers", &v.num_layers);
    add(Field::kPointer, name + ".layers", &v.layers);
    add(Field::kPointer, name + ".block_table", &v.block_table);
    add(Field::kPointer, name + ".slots", &v.slots);
    add(Field::kPointer, name + ".starts", &v.starts);
    add(Field::kCount, name + ".head_start", &v.head_start);
    add(Field::kCount, name + ".secondary_num_blocks", &v.secondary_num_blocks);
    add(Field::kExtent, name + ".reserved_0", &v.reserved_0);
    add(Field::kExtent, name + ".null_block_plus_1", &v.null_block_plus_1);
    add(Field::kPointer, name + ".k_scales", &v.k_scales);
    add(Field::kPointer, name + ".v_scales", &v.v_scales);
    add(Field::kPointer, name + ".k_zeros", &v.k_zeros);
    add(Field::kPointer, name + ".v_zeros", &v.v_zeros);
    add(Field::kCount, name + ".num_planes", &v.num_planes);
    add(Field::kPointer, name + ".planes", &v.planes);
    add(Field::kCount, name + ".reserved_1", &v.reserved_1);
    for (size_t i = 0; i < end->planes.size(); ++i)
      plane(name + ".planes[" + std::to_string(i) + "]", &end->planes[i]);
    if (v.block_table) table(name + ".block_table", &end->table);
    if (v.slots) slots(name + ".slots", &end->slots);
    if (v.starts) lens(name + ".starts", &end->starts);
  }
};

inline Fields fields_of(Case *c) {
  Fields f;
  for (auto *end : {&c->src, &c->dst}) {
    const std::string name = end == &c->src ? "src" : "dst";
    const size_t used = c->op == kMigrate ? end->span.num_layers : 1;
    const size_t layers = std::min(used, end->layers.size());
    for (size_t l = 0; l < layers; ++l)
      f.cache(name + ".layers[" + std::to_string(l) + "]", &end->layers[l]);
    for (int kv = 0; kv < 2; ++kv) {
      for (kvx_scale_desc_t &scale : end->scales[kv])
        f.scale(name + (kv ? ".v_scale" : ".k_scale"), &scale);
      for (kvx_scale_desc_t &zero : end->zeros[kv])
        f.scale(name + (kv ? ".v_zero" : ".k_zero"), &zero);
    }
  }
  if (c->op == kWrite || c->op == kGather) {
    f.add(Field::kSize, "io.size", &c->io.size);
    f.tensor("io.key", &c->io.key);
    f.tensor("io.value", &c->io.value);
    f.add(Field::kCount, "io.num_tokens", &c->io.num_tokens);
    f.add(Field::kCount, "io.num_kv_heads", &c->io.num_kv_heads);
    f.add(Field::kCount, "io.head_dim", &c->io.head_dim);
  }
  if (c->op == kWrite) {
    f.add(Field::kSize, "write.size", &c->write.size);
    if (c->with_write_options) {
      f.add(Field::kSize, "options.size", &c->write_options.size);
      f.add(Field::kCount, "options.flags", &c->write_options.flags);
    }
    f.slots("slots", &c->dst.slots);
  } else if (c->op == kGather) {
    f.add(Field::kSize, "gather.size", &c->gather.size);
    f.add(Field::kCount, "gather.max_seq_len", &c->gather.max_seq_len);
    f.table("block_table", &c->src.table);
    f.lens("seq_lens", &c->lens);
    if (c->with_options) {
      f.add(Field::kSize, "options.size", &c->options.size);
      f.add(Field::kCount, "options.flags", &c->options.flags);
      f.add(Field::kExtent, "options.reserved_0", &c->src.span.reserved_0);
      f.add(Field::kExtent, "options.null_block_plus_1", &c->src.span.null_block_plus_1);
      f.add(Field::kCount, "options.secondary_num_blocks", &c->src.span.secondary_num_blocks);
    }
  } else if (c->op == kMigrate) {
    f.add(Field::kSize, "migrate.size", &c->migrate.size);
    f.add(Field::kCount, "migrate.flags", &c->migrate.flags);
    f.add(Field::kCount, "migrate.num_heads", &c->migrate.num_heads);
    f.add(Field::kPointer, "migrate.seq_lens", &c->migrate.seq_lens);
    f.add(Field::kPointer, "migrate.src", &c->migrate.src);
    f.add(Field::kPointer, "migrate.dst", &c->migrate.dst);
    f.lens("seq_lens", &c->lens);
    f.span("src", &c->src);
    f.span("dst", &c->dst);
  }
  return f;
}

template <class T>
T load(const void *at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

inline void mutate(Random &random, Fields &fields, Memory *memory, std::string *story) {
  Field &field = random.pick(fields.all);
  const auto store = [&](auto value) {
    std::memcpy(field.at, &value, sizeof value);
    *story += "  " + field.name + " = " + std::to_string(static_cast<long long>(value)) + "\n";
  };
  if (random.one_in(4)) {  // another field's value, so that two agree where they should not
    const Field &other = random.pick(fields.all);
    if (other.kind == field.kind && field.kind == Field::kExtent)
      return store(load<int64_t>(other.at));
    if (other.kind == field.kind && field.kind != Field::kPointer)
      return store(load<uint32_t>(other.at));
  }
  switch (field.kind) {
    case Field::kSize: {
      const auto was = load<uint32_t>(field.at);
      return store(random.pick<uint32_t>(
          {0, 1, 4, was / 2, was - 8, was - 1, was + 1, was + 64, UINT32_MAX}));
    }
    case Field::kCount: {
      const auto was = load<uint32_t>(field.at);
      return store(random.pick<uint32_t>({0, 1, 2, was - 1, was + 1, was * 2, was / 2, 1u << 16,
                                          INT32_MAX, 1u << 31, UINT32_MAX, random.below(40)}));
    }
    case Field::kEnum:
      return store(random.one_in(4) ? random.pick<int32_t>({-1, 255, INT32_MAX, INT32_MIN})
                                    : static_cast<int32_t>(random.below(18)));
    case Field::kExtent: {
      const auto was = static_cast<uint64_t>(load<int64_t>(field.at));
      return store(static_cast<int64_t>(
          random.pick<uint64_t>({0, 1, 2, was - 1, was + 1, was * 2, was / 2, 0 - was, UINT64_MAX,
                                 1ull << 31, 1ull << 32, 1ull << 61, 1ull << 62, 1ull << 63,
                                 static_cast<uint64_t>(INT64_MAX), random.below(64)})));
    }
    case Field::kPointer: {
      const auto was = load<uintptr_t>(field.at);
      const bool shift = was && memory->find(load<void *>(field.at)) && random.one_in(2);
      return store(shift ? was + 1 : uintptr_t{0});
    }
  }
}

// The size of a struct that the call has, used or not, which is smaller than the smallest struct
// and not 0. Scales and zero points that a case has are not always given to its call.
inline const Field *small_size_of(const Fields &fields) {
  for (const Field &field : fields.all) {
    const bool is_given = field.name.find("_scale.") == std::string::npos &&
                          field.name.find("_zero.") == std::string::npos;
    if (is_given && field.kind == Field::kSize && load<uint32_t>(field.at) - 1u < 7u) return &field;
  }
  return nullptr;
}

inline void mutate(Random &random, Case *c) {
  Fields fields = fields_of(c);
  mutate(random, fields, &c->memory, &c->story);
  c->mutated = true;
}

inline bool tensor_fits(Memory &memory, const kvx_tensor_desc_t &tensor, const uint8_t *data) {
  if (!data) return true;
  Wide elements = 1;
  for (uint32_t axis = 0; axis < std::min<uint32_t>(tensor.ndim, KVX_MAX_TENSOR_DIMS); ++axis) {
    if (tensor.shape[axis] <= 1 || tensor.stride[axis] <= 0) continue;
    const Wide reach = Wide{tensor.shape[axis] - 1} * tensor.stride[axis];
    if (reach > (Wide{1} << 62)) return false;
    elements += reach;
  }
  return memory.holds(data, elements * size_of(tensor.dtype));
}

inline bool end_fits(Memory &memory, const End &end) {
  for (const kvx_cache_desc_t &cache : end.layers) {
    for (const kvx_tensor_desc_t *tensor : {&cache.k, &cache.v}) {
      if (!tensor_fits(memory, *tensor, static_cast<const uint8_t *>(tensor->data))) return false;
      if (end.table.format != KVX_BLOCK_TABLE_KV_OFFSETS || !cache.pool.secondary || !tensor->data)
        continue;
      kvx_tensor_desc_t second = *tensor;
      second.shape[0] =
          end.span.secondary_num_blocks ? end.span.secondary_num_blocks : cache.num_blocks;
      const auto apart = static_cast<const uint8_t *>(tensor->data) -
                         static_cast<const uint8_t *>(cache.pool.primary);
      if (!cache.pool.primary || apart < 0 || apart > (1 << 24)) continue;  // refused
      if (!tensor_fits(memory, second, static_cast<const uint8_t *>(cache.pool.secondary) + apart))
        return false;
    }
  }
  return true;
}

inline bool planes_fit(Memory &memory, const End &end) {
  for (const PlaneCase &plane : end.planes) {
    for (uint32_t i = 0; i < std::min<uint32_t>(plane.desc.num_axes, KVX_MAX_PLANE_AXES); ++i) {
      const kvx_plane_axis_t &part = plane.desc.axes[i];
      if (part.extent <= 1 || part.stride_bytes <= 0) continue;
      if (Wide{part.extent - 1} * part.stride_bytes > (Wide{1} << 62)) return false;
    }
    if (plane.desc.data && !memory.holds(plane.desc.data, bytes_of(plane.desc))) return false;
  }
  return true;
}

// Blocks that a table names by their addresses are there.
inline bool pointers_fit(Memory &memory, const End &end) {
  const kvx_block_table_t &table = end.table;
  if (table.format != KVX_BLOCK_TABLE_POINTERS || !table.indices) return true;
  std::vector<kvx_tensor_desc_t> planes;
  for (const kvx_cache_desc_t &cache : end.layers) {
    planes.push_back(cache.k);
    if (!is_absent(cache.v)) planes.push_back(cache.v);
  }
  if (!memory.holds(table.indices, Wide{8} * table.indices_count)) return true;  // unfair
  for (uint32_t i = 0; i < table.indices_count; ++i) {
    const int64_t block = read_int(table.indices, KVX_DTYPE_U64, i);
    if (block <= 0) continue;
    const bool whole = table.flags & KVX_BLOCK_TABLE_FLAG_WHOLE;
    for (size_t p = 0; p < planes.size(); ++p) {
      if (!whole && p != i % planes.size()) continue;
      const uint64_t apart =
          reinterpret_cast<uintptr_t>(planes[p].data) - reinterpret_cast<uintptr_t>(table.indptr);
      const uint64_t at = static_cast<uint64_t>(block) + (whole ? apart : 0);
      if (!tensor_fits(memory, planes[p], reinterpret_cast<const uint8_t *>(at))) return false;
    }
  }
  return true;
}

inline bool ints_fit(Memory &memory, const void *data, kvx_dtype_t dtype, uint64_t count) {
  if (!data || (dtype != KVX_DTYPE_S32 && dtype != KVX_DTYPE_S64 && dtype != KVX_DTYPE_U64))
    return true;  // refused
  return memory.holds(data, Wide{size_of(dtype)} * static_cast<Wide>(count));
}

inline bool scales_fit(Memory &memory, const End &end) {
  const auto fits = [&memory](const kvx_scale_desc_t &scale) {
    kvx_tensor_desc_t tensor{};
    tensor.dtype = scale.dtype;
    tensor.ndim = scale.granularity == KVX_SCALE_PER_TENSOR ? 0 : scale.ndim;
    std::copy(scale.shape, scale.shape + KVX_MAX_TENSOR_DIMS, tensor.shape);
    std::copy(scale.stride, scale.stride + KVX_MAX_TENSOR_DIMS, tensor.stride);
    return tensor_fits(memory, tensor, static_cast<const uint8_t *>(scale.data));
  };
  for (const int kv : {0, 1}) {
    for (const auto *list : {&end.scales[kv], &end.zeros[kv]})
      for (const kvx_scale_desc_t &scale : *list)
        if (!fits(scale)) return false;
  }
  for (const PlaneCase &plane : end.planes) {
    if (plane.desc.scale && !fits(plane.scale)) return false;
    if (plane.desc.zero && !fits(plane.zero)) return false;
  }
  return true;
}

inline bool table_counts_agree(const kvx_block_table_t &table) {
  if (table.format == KVX_BLOCK_TABLE_RAGGED)
    return table.indptr_count == uint64_t{table.seq_count} + 1;
  if (table.format == KVX_BLOCK_TABLE_POINTERS) return true;
  Wide count = Wide{table.seq_count} * table.max_blocks_per_seq;
  if (table.format == KVX_BLOCK_TABLE_KV_OFFSETS) count *= Wide{2} * table.beam_width;
  return count == table.indices_count;
}

inline bool table_fits(Memory &memory, const kvx_block_table_t &table) {
  const bool ragged = table.format == KVX_BLOCK_TABLE_RAGGED;
  return ints_fit(memory, table.indices, table.index_dtype, table.indices_count) &&
         (!ragged || ints_fit(memory, table.indptr, table.indptr_dtype, table.indptr_count));
}

// How much of a mutated call the library can be asked to judge.
enum class Claims {
  kOwned,     // every byte that the descriptors speak of is there
  kTooLarge,  // a tensor is said to be larger than it is: nobody could tell, so no token may move
  kUnfair,    // the library would be right to read an index that is not there
};

inline Claims claims_of(Case &c) {
  const bool migrate = c.op == kMigrate;
  for (const End *end : {&c.src, &c.dst}) {
    if (!scales_fit(c.memory, *end)) return Claims::kUnfair;
    if (migrate && end->span.num_layers > end->layers.size()) return Claims::kUnfair;
    if (migrate && end->span.slots &&
        !ints_fit(c.memory, end->slots.slots, end->slots.dtype, end->slots.token_count)) {
      return Claims::kUnfair;
    }
    if (migrate && end->span.starts &&
        !ints_fit(c.memory, end->starts.lengths, end->starts.dtype, end->starts.seq_count)) {
      return Claims::kUnfair;
    }
    if (migrate && end->span.num_planes > end->planes.size()) return Claims::kUnfair;
    for (const PlaneCase &plane : end->planes) {
      const kvx_slot_mapping_t &slots = plane.slots;
      if (plane.desc.slots && !ints_fit(c.memory, slots.slots, slots.dtype, slots.token_count))
        return Claims::kUnfair;
      if (plane.desc.block_table && !table_fits(c.memory, plane.table) &&
          table_counts_agree(plane.table)) {
        return Claims::kUnfair;
      }
    }
    const bool has_table =
        migrate ? end->span.block_table != nullptr : c.op == kGather && end == &c.src;
    if (has_table && !table_fits(c.memory, end->table) && table_counts_agree(end->table))
      return Claims::kUnfair;
  }
  if (migrate && !ints_fit(c.memory, c.lens.lengths, c.lens.dtype, c.lens.seq_count))
    return Claims::kUnfair;
  if (c.op == kWrite && c.dst.slots.token_count == c.io.num_tokens &&
      !ints_fit(c.memory, c.dst.slots.slots, c.dst.slots.dtype, c.dst.slots.token_count)) {
    return Claims::kUnfair;
  }
  if (c.op == kGather && c.lens.seq_count == c.src.table.seq_count &&
      !ints_fit(c.memory, c.lens.lengths, c.lens.dtype, c.lens.seq_count)) {
    return Claims::kUnfair;
  }
  const auto io_fits = [&](const kvx_tensor_desc_t &tensor) {
    return tensor_fits(c.memory, tensor, static_cast<const uint8_t *>(tensor.data));
  };
  const bool io = c.op == kWrite || c.op == kGather;
  bool fits = true;
  for (const End *end : {&c.src, &c.dst}) {
    fits = fits && end_fits(c.memory, *end) && planes_fit(c.memory, *end) &&
           pointers_fit(c.memory, *end);
  }
  fits = fits && (!io || (io_fits(c.io.key) && io_fits(c.io.value)));
  return fits ? Claims::kOwned : Claims::kTooLarge;
}

// Leaves the call with nothing to move: null blocks, skipped slots, no tokens, no zero fill.
inline void disarm(Case *c) {
  const auto fill = [&](const void *data, int byte) {
    Block *block = data ? c->memory.find(data) : nullptr;
    if (block) std::memset(block->data.get(), byte, block->size);
  };
  for (End *end : {&c->src, &c->dst}) {
    fill(end->table.indices, 0xff);
    for (const PlaneCase &plane : end->planes)
      fill(plane.table.indices, 0xff), fill(plane.slots.slots, 0xff);
    fill(end->slots.slots, 0xff);
    fill(end->starts.lengths, 0);
  }
  fill(c->lens.lengths, 0);
  c->options.flags &= ~KVX_FLAG_ZERO_FILL;
  c->migrate.flags &= ~KVX_FLAG_ZERO_FILL;
}

}  // namespace fuzz
