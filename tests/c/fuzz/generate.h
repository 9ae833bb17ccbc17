// Valid calls: odd sizes, any strides, every layout, dtype, table and scale. On request with one
// hostile index or with unusable scales, everything else being right.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "case.h"

namespace fuzz {

struct Geometry {
  uint32_t blocks, block_size, heads, dim[2];  // dim of K and V
  bool has_v;
  uint32_t no_v;  // bit per layer that is without V although others have it

  int64_t room() const { return int64_t{blocks} * block_size; }  // tokens
  bool power_of_two() const { return (block_size & (block_size - 1)) == 0; }
};

// Elements from the first to the last.
inline int64_t span_of(uint32_t ndim, const int64_t *shape, const int64_t *stride) {
  int64_t span = 1;
  for (uint32_t axis = 0; axis < ndim; ++axis) {
    if (shape[axis] > 1) span += (shape[axis] - 1) * stride[axis];
  }
  return span;
}

class Generator {
 public:
  Generator(Random &random, Op op, bool hostile, bool big, Case *out, bool device = false)
      : random(random), c(*out), memory(out->memory), big(big), device(device) {
    c.op = op;
    bad_scales = hostile && random.one_in(4);
    bad_indices = hostile && !bad_scales;
    opaque = random.one_in(10);
    in_units = !opaque && random.one_in(5);
    in_large = in_units && random.one_in(3);
    g = random_geometry();
    random_dtypes(dtypes);
    if (random.one_in(2)) dtypes[1] = dtypes[0];
    pool = g.power_of_two() && random.one_in(4);
    if (op == kValidate) make_end(g, dtypes, 1, pool, &c.dst);
    if (op == kWrite) make_write();
    if (op == kGather) make_gather();
    if (op == kMigrate) make_migrate();
  }

 private:
  using Dtypes = kvx_dtype_t[2];

  Random &random;
  Case &c;
  Memory &memory;
  const bool big, device;
  bool bad_scales, bad_indices, opaque, pool;
  bool in_units;    // tensors may be of formats whose units are 32 numbers
  bool in_large{};  // and of those with 128 or 256
  Geometry g{};
  Dtypes dtypes;

  uint8_t *allocate(int64_t bytes) { return memory.allocate(random, static_cast<size_t>(bytes)); }
  int64_t below(int64_t n) { return random.below(static_cast<uint64_t>(n)); }

  // ---- sizes, dtypes, strides ----

  Geometry random_geometry() {
    Geometry made{};
    made.blocks = 1 + random.below(6);
    made.block_size = random.pick<uint32_t>({1, 2, 3, 4, 7, 8, 16});
    made.heads = 1 + random.below(4);
    for (uint32_t &dim : made.dim) dim = random.pick<uint32_t>({1, 2, 3, 5, 8, 12, 16, 20, 33});
    if (in_units)
      for (uint32_t &dim : made.dim) dim = in_large ? 256 : 32 * (1 + random.below(3));
    if (random.one_in(2)) made.dim[1] = made.dim[0];
    made.has_v = !random.one_in(6);
    if (big) {  // enough for the library to use its threads
      made.blocks = 64 + random.below(8);
      made.block_size = 32;
      made.heads = 4;
      made.dim[0] = made.dim[1] = random.pick<uint32_t>({64, 80});
      if (in_units) made.dim[0] = made.dim[1] = in_large ? 256 : 64;
    }
    return made;
  }

  void random_dtypes(Dtypes &made) {
    for (kvx_dtype_t &dtype : made) dtype = random_dtype(in_units);
  }

  kvx_dtype_t random_dtype(bool units) {
    if (opaque) return KVX_DTYPE_U8;
    if (units && in_large && random.one_in(2))
      return random.pick({KVX_DTYPE_Q4_K, KVX_DTYPE_Q5_K, KVX_DTYPE_Q6_K, KVX_DTYPE_TQ2,
                          KVX_DTYPE_TQ3, KVX_DTYPE_TQ4});
    if (units && random.one_in(2))
      return random.pick({KVX_DTYPE_Q8_0, KVX_DTYPE_Q4_0, KVX_DTYPE_Q4_1, KVX_DTYPE_IQ4_NL,
                          KVX_DTYPE_Q5_0, KVX_DTYPE_Q5_1, KVX_DTYPE_MXFP4});
    return random.pick({KVX_DTYPE_F16, KVX_DTYPE_BF16, KVX_DTYPE_F32, KVX_DTYPE_F8_E4M3,
                        KVX_DTYPE_F8_E5M2, KVX_DTYPE_F8_E4M3FNUZ, KVX_DTYPE_S8});
  }

  kvx_dtype_t int_dtype() { return random.pick({KVX_DTYPE_S32, KVX_DTYPE_S64}); }

  // Strides for `shape`: row-major, or any order of axes with gaps. Where an axis has no second
  // element its stride may be anything.
  void random_strides(uint32_t ndim, const int64_t *shape, int64_t *stride) {
    uint32_t order[KVX_MAX_TENSOR_DIMS] = {0, 1, 2, 3, 4};
    const bool row_major = random.one_in(2);
    for (uint32_t i = 0; i < ndim && !row_major; ++i)
      std::swap(order[i], order[random.below(ndim)]);
    int64_t next = 1;
    for (uint32_t i = ndim; i-- > 0;) {
      const uint32_t axis = order[i];
      const bool gap = !row_major && random.one_in(2);
      stride[axis] = next + (gap ? below(4) : 0);
      if (shape[axis] > 1) {
        next += (shape[axis] - 1) * stride[axis];
      } else if (random.one_in(4)) {
        stride[axis] = random.pick<int64_t>({0, 1, 77, int64_t{1} << 40, INT64_MAX});
      }
    }
  }

  // ---- caches ----

  kvx_tensor_desc_t tensor_of(kvx_dtype_t dtype) {
    kvx_tensor_desc_t tensor{};
    tensor.size = sizeof tensor;
    tensor.dtype = dtype;
    tensor.layout = random.pick({KVX_LAYOUT_BLOCK_NHD, KVX_LAYOUT_BLOCK_HND,
                                 KVX_LAYOUT_BLOCK_HND_PACKED, KVX_LAYOUT_BLOCK_CUSTOM});
    tensor.memory = KVX_MEMORY_HOST;
    return tensor;
  }

  void set_shape(const Geometry &of, int kv, kvx_tensor_desc_t *tensor) {
    const int64_t dim = of.dim[kv] / numbers_of(tensor->dtype);
    const bool custom_packed = tensor->layout == KVX_LAYOUT_BLOCK_CUSTOM && random.one_in(2);
    if (tensor->layout == KVX_LAYOUT_BLOCK_HND_PACKED || custom_packed) {
      int64_t pack = 1 + below(dim);
      while (dim % pack) --pack;
      const int64_t shape[] = {of.blocks, of.heads, dim / pack, of.block_size, pack};
      tensor->ndim = 5;
      std::copy(shape, shape + 5, tensor->shape);
    } else {
      const bool nhd = tensor->layout == KVX_LAYOUT_BLOCK_NHD;
      const int64_t shape[] = {of.blocks, nhd ? of.block_size : of.heads,
                               nhd ? of.heads : of.block_size, dim};
      tensor->ndim = 4;
      std::copy(shape, shape + 4, tensor->shape);
    }
    if (tensor->layout != KVX_LAYOUT_BLOCK_CUSTOM || has_distinct_extents(*tensor)) return;
    tensor->layout = tensor->ndim == 5 ? KVX_LAYOUT_BLOCK_HND_PACKED : KVX_LAYOUT_BLOCK_HND;
  }

  kvx_cache_desc_t cache_of(const Geometry &of) {
    kvx_cache_desc_t cache{};
    cache.size = sizeof cache;
    cache.num_blocks = of.blocks;
    cache.block_size = of.block_size;
    cache.num_kv_heads = of.heads;
    cache.head_dim = of.dim[0];
    cache.v.size = sizeof cache.v;
    return cache;
  }

  kvx_tensor_desc_t cache_tensor(const Geometry &of, int kv, kvx_dtype_t dtype) {
    kvx_tensor_desc_t tensor = tensor_of(dtype);
    set_shape(of, kv, &tensor);
    random_strides(tensor.ndim, tensor.shape, tensor.stride);
    const int64_t span = span_of(tensor.ndim, tensor.shape, tensor.stride);
    const int64_t lead = below(3), size = size_of(dtype);
    tensor.data = allocate((lead + span) * size) + lead * size;
    return tensor;
  }

  void make_layers(const Geometry &of, const Dtypes &types, uint32_t num_layers, End *end) {
    for (uint32_t l = 0; l < num_layers; ++l) {
      kvx_cache_desc_t cache = cache_of(of);
      cache.k = cache_tensor(of, 0, types[0]);
      if (of.has_v && !(of.no_v >> l & 1)) cache.v = cache_tensor(of, 1, types[1]);
      end->layers.push_back(cache);
    }
  }

  // The layers of a TensorRT-LLM pool: [num_blocks, layer, K or V, bytes_per_block]. Spec: E.8
  void make_pool(const Geometry &of, const Dtypes &types, uint32_t num_layers, End *end) {
    const uint32_t kv_factor = of.has_v ? 2 : 1;
    kvx_tensor_desc_t tensors[2]{};
    int64_t bytes_per_block = 0, step_of_sizes = 4;  // a multiple of both elements' sizes
    for (uint32_t kv = 0; kv < kv_factor; ++kv) {
      kvx_tensor_desc_t &tensor = tensors[kv] = tensor_of(types[kv]);
      step_of_sizes = std::lcm(step_of_sizes, size_of(tensor.dtype));
      set_shape(of, static_cast<int>(kv), &tensor);
      random_strides(tensor.ndim - 1, tensor.shape + 1, tensor.stride + 1);
      const int64_t span = span_of(tensor.ndim - 1, tensor.shape + 1, tensor.stride + 1);
      bytes_per_block = std::max(bytes_per_block, span * size_of(tensor.dtype));
    }
    bytes_per_block =
        ((bytes_per_block + step_of_sizes - 1) / step_of_sizes + below(3)) * step_of_sizes;
    const int64_t step = bytes_per_block * num_layers * kv_factor;
    const uint32_t second_blocks = random.pick<uint32_t>({0, 1, 3});
    end->span.secondary_num_blocks = second_blocks;
    uint8_t *primary = allocate(step * of.blocks), *secondary = nullptr;
    if (random.one_in(2)) secondary = allocate(step * (second_blocks ? second_blocks : of.blocks));
    for (uint32_t l = 0; l < num_layers; ++l) {
      kvx_cache_desc_t cache = cache_of(of);
      const int64_t layer_bytes = l * kv_factor * bytes_per_block;
      cache.pool.size = sizeof cache.pool;
      cache.pool.memory = KVX_MEMORY_HOST;
      cache.pool.bytes_per_block = static_cast<uint32_t>(bytes_per_block);
      cache.pool.primary = primary + layer_bytes;
      cache.pool.secondary = secondary ? secondary + layer_bytes : nullptr;
      for (uint32_t kv = 0; kv < kv_factor; ++kv) {
        kvx_tensor_desc_t tensor = tensors[kv];
        tensor.stride[0] = step / size_of(tensor.dtype);
        tensor.data = primary + layer_bytes + kv * bytes_per_block;
        (kv ? cache.v : cache.k) = tensor;
      }
      end->layers.push_back(cache);
    }
    end->from_pool = true;
  }

  void make_end(const Geometry &of, const Dtypes &types, uint32_t num_layers, bool as_pool,
                End *end) {
    as_pool ? make_pool(of, types, num_layers, end) : make_layers(of, types, num_layers, end);
  }

  // One block of all layers, [head, layer, K or V, the rest]: planes lie between each other's
  // heads. Spec: E.15
  void make_universal(const Geometry &one, const Dtypes &types, uint32_t num_layers, End *end) {
    const uint32_t kv_factor = one.has_v ? 2 : 1, planes = num_layers * kv_factor;
    kvx_tensor_desc_t tensors[2]{};
    uint32_t head_axis[2];
    int64_t chunk = 0, step_of_sizes = 4;  // as in a pool
    for (uint32_t kv = 0; kv < kv_factor; ++kv) {
      kvx_tensor_desc_t &tensor = tensors[kv] = tensor_of(types[kv]);
      step_of_sizes = std::lcm(step_of_sizes, size_of(tensor.dtype));
      set_shape(one, static_cast<int>(kv), &tensor);
      head_axis[kv] = tensor.layout == KVX_LAYOUT_BLOCK_NHD ? 2 : 1;
      tensor.shape[head_axis[kv]] = 1;
      random_strides(tensor.ndim, tensor.shape, tensor.stride);
      const int64_t span = span_of(tensor.ndim, tensor.shape, tensor.stride);
      chunk = std::max(chunk, span * size_of(tensor.dtype));
    }
    chunk = ((chunk + step_of_sizes - 1) / step_of_sizes + below(2)) * step_of_sizes;
    uint8_t *const first = allocate(one.heads * planes * chunk);
    for (uint32_t l = 0; l < num_layers; ++l) {
      kvx_cache_desc_t cache = cache_of(one);
      for (uint32_t kv = 0; kv < kv_factor; ++kv) {
        kvx_tensor_desc_t tensor = tensors[kv];
        tensor.shape[head_axis[kv]] = one.heads;
        tensor.stride[head_axis[kv]] = planes * chunk / size_of(tensor.dtype);
        tensor.data = first + (l * kv_factor + kv) * chunk;
        (kv ? cache.v : cache.k) = tensor;
      }
      end->layers.push_back(cache);
    }
  }

  // Layers whose blocks lie anywhere: each in a buffer of its own. Spec: E.12
  void make_stacks(const Geometry &of, const Dtypes &types, uint32_t num_layers, End *end) {
    Geometry one = of;
    one.blocks = 1;
    if (!of.no_v && random.one_in(2)) {  // each of all planes, as a pool's is or interleaved
      const bool as_pool = of.power_of_two() && random.one_in(2);
      as_pool ? make_pool(one, types, num_layers, end)
              : make_universal(one, types, num_layers, end);
      auto *const first = static_cast<uint8_t *>(end->layers[0].k.data);
      const auto bytes = static_cast<int64_t>(memory.find(first)->size);
      end->blocks.push_back({first});
      while (end->blocks[0].size() < of.blocks) end->blocks[0].push_back(allocate(bytes));
      end->table.flags = KVX_BLOCK_TABLE_FLAG_WHOLE;
      end->table.indptr = first;
      end->from_pool = false;
      end->span.secondary_num_blocks = 0;
      for (kvx_cache_desc_t &cache : end->layers) cache.pool = {};
      return;
    }
    make_layers(one, types, num_layers, end);
    for (const kvx_cache_desc_t &cache : end->layers) {
      for (const kvx_tensor_desc_t *tensor : {&cache.k, &cache.v}) {
        if (is_absent(*tensor)) continue;
        auto *const first = static_cast<uint8_t *>(tensor->data);
        const Block *const block = memory.find(first);
        const int64_t lead = first - block->data.get(), bytes = static_cast<int64_t>(block->size);
        end->blocks.push_back({first});
        while (end->blocks.back().size() < of.blocks)
          end->blocks.back().push_back(allocate(bytes) + lead);
      }
    }
  }

  // ---- scales ----

  // A number around 1 in the scale's dtype, or one that no scale may be.
  void write_scale(kvx_dtype_t dtype, bool bad, uint8_t *at) {
    const uint32_t f32 = bad ? random.pick({0u, 0x7f800000u, 0x7fc00000u, 0xbf800000u})
                             : 0x3f000000u + random.below(0x1000000);
    const auto bf16 = static_cast<uint16_t>(f32 >> 16);
    const auto f16 = bad ? random.pick<uint16_t>({0, 0x7c00, 0x7e00, 0xbc00})
                         : static_cast<uint16_t>(0x3800u + random.below(0x800));
    if (dtype == KVX_DTYPE_F32) std::memcpy(at, &f32, sizeof f32);
    if (dtype == KVX_DTYPE_F16) std::memcpy(at, &f16, sizeof f16);
    if (dtype == KVX_DTYPE_BF16) std::memcpy(at, &bf16, sizeof bf16);
  }

  kvx_scale_desc_t make_scale(const Geometry &of) {
    return make_scale(of,
                      random.pick({KVX_SCALE_PER_TENSOR, KVX_SCALE_PER_BLOCK, KVX_SCALE_PER_HEAD,
                                   KVX_SCALE_PER_BLOCK_HEAD, KVX_SCALE_PER_TOKEN_HEAD}));
  }
  kvx_scale_desc_t make_scale(const Geometry &of, kvx_scale_granularity_t granularity) {
    return make_scale(of, granularity, random.pick({KVX_DTYPE_F32, KVX_DTYPE_F16, KVX_DTYPE_BF16}));
  }
  kvx_scale_desc_t make_scale(const Geometry &of, kvx_scale_granularity_t granularity,
                              kvx_dtype_t dtype) {
    kvx_scale_desc_t scale{};
    scale.size = sizeof scale;
    scale.dtype = dtype;
    scale.granularity = granularity;
    const auto set = [&](std::initializer_list<int64_t> shape) {
      scale.ndim = static_cast<uint32_t>(shape.size());
      std::copy(shape.begin(), shape.end(), scale.shape);
    };
    if (scale.granularity == KVX_SCALE_PER_TENSOR) random.one_in(2) ? set({}) : set({1, 1});
    if (scale.granularity == KVX_SCALE_PER_BLOCK) set({of.blocks});
    if (scale.granularity == KVX_SCALE_PER_HEAD) set({of.heads});
    if (scale.granularity == KVX_SCALE_PER_BLOCK_HEAD) set({of.blocks, of.heads});
    if (scale.granularity == KVX_SCALE_PER_TOKEN_HEAD) set({of.blocks, of.block_size, of.heads});
    random_strides(scale.ndim, scale.shape, scale.stride);
    const int64_t span = span_of(scale.ndim, scale.shape, scale.stride);
    uint8_t *data = allocate(span * size_of(scale.dtype));
    for (int64_t i = 0; i < span; ++i) {
      write_scale(scale.dtype, bad_scales && random.one_in(4), data + i * size_of(scale.dtype));
    }
    scale.data = data;
    return scale;
  }

  // For the FP8 tensors of an end, some of the time.
  void make_scales(const Geometry &of, End *end) {
    for (int kv = 0; kv < 2; ++kv) {
      const kvx_tensor_desc_t &first = kv ? end->layers[0].v : end->layers[0].k;
      if (is_absent(first) || !takes_scale(first.dtype) || random.one_in(3)) continue;
      for (const kvx_cache_desc_t &cache : end->layers) {
        kvx_scale_desc_t scale = make_scale(of);
        const bool by_block =
            scale.granularity != KVX_SCALE_PER_TENSOR && scale.granularity != KVX_SCALE_PER_HEAD;
        if ((by_block && (cache.pool.secondary || !end->blocks.empty())) ||
            is_absent(kv ? cache.v : cache.k)) {
          scale.data = nullptr;
        }
        end->scales[kv].push_back(scale);
      }
    }
  }

  // Of a destination whose scales the call finds: they may hold anything. Spec: E.9
  void make_room_for_scales(const Geometry &of, End *end) {
    for (int kv = 0; kv < (of.has_v ? 2 : 1); ++kv)
      for (size_t l = 0; l < end->layers.size(); ++l)
        end->scales[kv].push_back(make_scale(of, KVX_SCALE_PER_TOKEN_HEAD));
  }

  kvx_dtype_t scaled_dtype() {
    return random.pick({KVX_DTYPE_F8_E4M3, KVX_DTYPE_F8_E5M2, KVX_DTYPE_F8_E4M3FNUZ, KVX_DTYPE_S8});
  }

  // What numbers with a zero point share a scale: those of a token and head, of `groups` of each,
  // or a channel's of all tokens of a block. Spec: E.14
  struct Unit {
    kvx_scale_granularity_t granularity;
    int64_t groups;
  };
  Unit random_unit(int64_t dim, bool may_cover_tokens) {
    if (may_cover_tokens && random.one_in(2)) return {KVX_SCALE_PER_CHANNEL, 1};
    if (random.one_in(2)) return {KVX_SCALE_PER_TOKEN_HEAD, 1};
    int64_t groups = 1 + below(dim);
    while (dim % groups) --groups;
    return {KVX_SCALE_PER_GROUP, groups};
  }

  // Scales or zero points of any value.
  kvx_scale_desc_t make_affine(const Geometry &of, int64_t dim, const Unit &unit,
                               kvx_dtype_t dtype) {
    kvx_scale_desc_t made{};
    made.size = sizeof made;
    made.dtype = random.pick({KVX_DTYPE_F32, KVX_DTYPE_F16, KVX_DTYPE_BF16});
    if (dtype == KVX_DTYPE_U8_ZERO) made.dtype = KVX_DTYPE_F32;
    made.granularity = unit.granularity;
    const int64_t of_token[] = {of.blocks, of.block_size, of.heads, unit.groups};
    const int64_t of_channel[] = {of.blocks, of.heads, dim};
    const bool covers = unit.granularity == KVX_SCALE_PER_CHANNEL;
    made.ndim = unit.granularity == KVX_SCALE_PER_GROUP ? 4 : 3;
    std::copy_n(covers ? of_channel : of_token, made.ndim, made.shape);
    random_strides(made.ndim, made.shape, made.stride);
    made.data = allocate(span_of(made.ndim, made.shape, made.stride) * size_of(made.dtype));
    return made;
  }

  // The scales of E2M1's groups, of any value, and the one that multiplies them. Spec: E.18
  void make_group_scales(const Geometry &of, End *end) {
    for (int kv = 0; kv < 2; ++kv) {
      const kvx_tensor_desc_t &first = kv ? end->layers[0].v : end->layers[0].k;
      if (is_absent(first) || first.dtype != KVX_DTYPE_F4_E2M1) continue;
      const bool mx = random.one_in(3);
      const int64_t groups = of.dim[kv] / (mx ? 32 : 16);
      const bool fours = of.block_size % 4 == 0 && groups % 4 == 0 && random.one_in(2);
      kvx_scale_desc_t zero{};
      zero.size = sizeof zero;
      if (!mx && random.one_in(2)) {
        zero = make_scale(of, KVX_SCALE_PER_TENSOR, KVX_DTYPE_F32);
        write_scale(zero.dtype, false,
                    const_cast<uint8_t *>(static_cast<const uint8_t *>(zero.data)));
      }
      for (size_t l = 0; l < end->layers.size(); ++l) {
        kvx_scale_desc_t made{};
        made.size = sizeof made;
        made.dtype = mx ? KVX_DTYPE_F8_E8M0 : KVX_DTYPE_F8_E4M3;
        made.granularity = fours ? KVX_SCALE_PER_GROUP_4X4 : KVX_SCALE_PER_GROUP;
        made.ndim = 4;
        const int64_t shape[] = {of.blocks, of.block_size, of.heads, groups};
        std::copy_n(shape, made.ndim, made.shape);
        random_strides(made.ndim, made.shape, made.stride);
        made.data = allocate(span_of(made.ndim, made.shape, made.stride));
        end->scales[kv].push_back(made);
        end->zeros[kv].push_back(zero);
      }
    }
  }

  void make_affine(const Geometry &of, bool may_cover_tokens, End *end) {
    for (int kv = 0; kv < 2; ++kv) {
      const kvx_tensor_desc_t &first = kv ? end->layers[0].v : end->layers[0].k;
      if (is_absent(first) || !is_affine(first.dtype)) continue;
      const Unit unit = random_unit(of.dim[kv], may_cover_tokens);
      for (size_t l = 0; l < end->layers.size(); ++l) {
        end->scales[kv].push_back(make_affine(of, of.dim[kv], unit, first.dtype));
        end->zeros[kv].push_back(make_affine(of, of.dim[kv], unit, first.dtype));
      }
    }
  }

  // ---- indices ----

  const void *make_ints(const std::vector<int64_t> &values, kvx_dtype_t dtype) {
    const int64_t size = size_of(dtype);
    uint8_t *data = allocate(static_cast<int64_t>(values.size()) * size);
    for (size_t i = 0; i < values.size(); ++i) {
      const auto narrow = static_cast<int32_t>(values[i]);
      const void *value = size == 8 ? static_cast<const void *>(&values[i]) : &narrow;
      std::memcpy(data + static_cast<int64_t>(i) * size, value, static_cast<size_t>(size));
    }
    return data;
  }

  // One value becomes hostile: just past the bound, or something that overflows further on.
  void poison(std::vector<int64_t> *values, int64_t bound) {
    if (values->empty()) return;
    random.pick(*values) =
        random.one_in(3)
            ? bound + below(2)
            : random.pick<int64_t>({-1, -2, -7, 0, 1, 5, 1000, INT32_MAX, INT32_MIN,
                                    int64_t{1} << 31, int64_t{1} << 32, INT64_MAX, INT64_MIN});
  }

  // No address, or none of a block: others lead somewhere, and are the caller's.
  void poison_pointer(int64_t *pointer) {
    *pointer = random.pick<int64_t>({-1, INT64_MIN, *pointer | INT64_MIN});
  }

  kvx_seq_lens_t make_lens(const std::vector<int64_t> &lengths) {
    kvx_seq_lens_t lens{};
    lens.size = sizeof lens;
    lens.dtype = int_dtype();
    lens.seq_count = static_cast<uint32_t>(lengths.size());
    lens.lengths = make_ints(lengths, lens.dtype);
    return lens;
  }

  // Slots in blocks [low, high), each once as long as there are enough, in random order.
  kvx_slot_mapping_t make_slots(const Geometry &of, int64_t tokens, uint32_t low, uint32_t high,
                                bool hostile) {
    kvx_slot_mapping_t mapping{};
    mapping.size = sizeof mapping;
    mapping.dtype = int_dtype();
    mapping.token_count = static_cast<uint32_t>(tokens);
    mapping.invalid_slot = random.pick<int64_t>({-1, -1, 2, INT64_MAX, INT64_MIN});
    std::vector<int64_t> slots;
    for (int64_t t = 0; t < tokens; ++t) {
      slots.push_back(low * int64_t{of.block_size} + t % (int64_t{high - low} * of.block_size));
    }
    for (size_t i = slots.size(); i > 1; --i) std::swap(slots[i - 1], slots[random.below(i)]);
    const int64_t skipped = mapping.invalid_slot == 2 ? 2 : -3;
    for (int64_t &slot : slots) {
      if (random.one_in(6)) slot = random.pick<int64_t>({-1, -9, skipped});
    }
    if (hostile) poison(&slots, of.room());
    mapping.slots = make_ints(slots, mapping.dtype);
    return mapping;
  }

  // A table over blocks [low, high) for rows that need `needs[r]` tokens.
  void make_table(const Geometry &of, uint32_t seq_count, uint32_t beams,
                  const std::vector<int64_t> &needs, uint32_t low, uint32_t high, bool hostile,
                  End *end) {
    kvx_block_table_t &table = end->table;
    table.size = sizeof table;
    table.seq_count = seq_count;
    table.beam_width = beams;
    if (beams > 1 || (end->from_pool && random.one_in(2))) {
      table.format = KVX_BLOCK_TABLE_KV_OFFSETS;
    } else if (!end->blocks.empty()) {
      table.format = KVX_BLOCK_TABLE_POINTERS;
      table.beam_width = random.below(2);
    } else {
      table.format =
          random.pick({KVX_BLOCK_TABLE_PACKED, KVX_BLOCK_TABLE_RAGGED, KVX_BLOCK_TABLE_RING});
      table.beam_width = random.below(2);
    }
    if (!random.one_in(4)) table.flags |= KVX_BLOCK_TABLE_FLAG_HOLES;
    if (random.one_in(3)) end->span.null_block_plus_1 = KVX_NULL_BLOCK(random.below(of.blocks));
    uint32_t next = random.below(high - low);
    const auto block = [&]() -> int64_t {
      if (random.one_in(8))
        return random.one_in(2) ? -1 : static_cast<int64_t>(end->span.null_block_plus_1) - 1;
      return low + next++ % (high - low);
    };
    table.index_dtype = int_dtype();
    std::vector<int64_t> indices;
    int64_t bound = of.blocks;
    if (table.format == KVX_BLOCK_TABLE_RAGGED) {
      std::vector<int64_t> indptr{0};
      const bool exact = random.one_in(3);
      if (exact) table.flags |= KVX_BLOCK_TABLE_FLAG_EXACT;
      for (const int64_t need : needs) {
        const int64_t held = exact ? need : need + below(3);
        int64_t id = -1;
        for (int64_t t = 0; t < held; ++t) {
          if (t % of.block_size == 0) id = block();
          indices.push_back(t < need ? id : 999);
        }
        indptr.push_back(indptr.back() + held);
      }
      if (hostile && random.one_in(2)) poison(&indptr, indptr.back()), hostile = false;
      table.indptr_dtype = int_dtype();
      table.indptr_count = static_cast<uint32_t>(indptr.size());
      table.indptr = make_ints(indptr, table.indptr_dtype);
    } else {
      int64_t columns = 1;
      for (const int64_t need : needs) {
        columns = std::max(columns, (need + of.block_size - 1) / of.block_size);
      }
      columns += below(2);
      const bool ring = table.format == KVX_BLOCK_TABLE_RING;
      if (ring && random.one_in(2)) columns -= below(columns);  // so that it goes round
      table.max_blocks_per_seq = static_cast<uint32_t>(columns);
      const bool offsets = table.format == KVX_BLOCK_TABLE_KV_OFFSETS;
      const int64_t sub_blocks = static_cast<int64_t>(end->layers.size()) * (of.has_v ? 2 : 1);
      if (offsets) {
        table.index_dtype = KVX_DTYPE_S32;
        table.flags |= KVX_BLOCK_TABLE_FLAG_KVCACHEINDEX;
        bound *= sub_blocks;
      }
      const bool pointers = table.format == KVX_BLOCK_TABLE_POINTERS;
      if (pointers) table.index_dtype = KVX_DTYPE_U64;
      for (const int64_t need : needs) {
        std::vector<int64_t> row;
        for (int64_t i = 0; i < columns; ++i)
          row.push_back(ring || i * of.block_size < need ? block() : 998);
        if (!offsets && !pointers) indices.insert(indices.end(), row.begin(), row.end());
        for (const int64_t id : row) {
          for (size_t plane = 0; pointers && plane < end->blocks.size(); ++plane) {
            const bool null = id < 0 || (id != 998 && random.one_in(10));
            indices.push_back(null        ? 0
                              : id == 998 ? -1  // which no call may follow
                                          : reinterpret_cast<int64_t>(
                                                end->blocks[plane][static_cast<size_t>(id)]));
          }
        }
        for (int kv = 0; offsets && kv < 2; ++kv) {
          for (const int64_t id : row) {
            indices.push_back(id < 0 || id == 998 ? id : pool_index(*end, id, sub_blocks, kv));
          }
        }
      }
    }
    if (hostile && table.format == KVX_BLOCK_TABLE_POINTERS) {
      if (!indices.empty()) poison_pointer(&random.pick(indices));
    } else if (hostile) {
      poison(&indices, bound);
    }
    table.indices_count = static_cast<uint32_t>(indices.size());
    table.indices = make_ints(indices, table.index_dtype);
  }

  // The KVCacheIndex of a block, sometimes of one in the secondary pool instead.
  int64_t pool_index(const End &end, int64_t block, int64_t sub_blocks, int kv) {
    const bool secondary = end.layers[0].pool.secondary && random.one_in(3);
    if (secondary && end.span.secondary_num_blocks) block = below(end.span.secondary_num_blocks);
    const int64_t index =
        block * sub_blocks + (sub_blocks > 1 && !is_absent(end.layers[0].v) ? kv : 0);
    return secondary ? index - (int64_t{1} << 31) : index;
  }

  // ---- the calls ----

  kvx_tensor_desc_t io_tensor(kvx_dtype_t dtype, std::initializer_list<int64_t> shape) {
    kvx_tensor_desc_t tensor = tensor_of(dtype);
    tensor.ndim = static_cast<uint32_t>(shape.size());
    std::copy(shape.begin(), shape.end(), tensor.shape);
    random_strides(tensor.ndim, tensor.shape, tensor.stride);
    const bool empty = std::find(shape.begin(), shape.end(), 0) != shape.end();
    const int64_t span = empty ? 0 : span_of(tensor.ndim, tensor.shape, tensor.stride);
    tensor.data = allocate(span * size_of(dtype));
    return tensor;
  }

  // For a write rows is 0: key and value are 3-D. For a gather they may be 4-D.
  void make_io(const kvx_cache_desc_t &cache, int64_t num_tokens, uint32_t rows, uint32_t max_len,
               bool scalars = false) {
    kvx_kv_io_desc_t &io = c.io;
    io.size = sizeof io;
    io.num_tokens = static_cast<uint32_t>(num_tokens);
    io.num_kv_heads = g.heads;
    io.head_dim = g.dim[0];
    io.value.size = sizeof io.value;
    Dtypes types;
    for (kvx_dtype_t &dtype : types) dtype = random_dtype(in_units && !scalars);
    const bool same = random.one_in(2);  // so that bytes are copied
    for (int kv = 0; kv < (g.has_v ? 2 : 1); ++kv) {
      const kvx_dtype_t dtype = same ? (kv ? cache.v : cache.k).dtype : types[kv];
      kvx_tensor_desc_t &tensor = kv ? io.value : io.key;
      const int64_t heads = g.heads, dim = g.dim[kv] / numbers_of(dtype);
      if (c.op == kWrite) {
        tensor = io_tensor(dtype, {num_tokens + below(3), heads, dim});
        if (random.one_in(8)) tensor.stride[1] = 0;  // one head for all: input may be expanded
      } else if (random.one_in(2)) {
        tensor = io_tensor(dtype, {rows, max_len, heads, dim});
      } else {
        tensor = io_tensor(dtype, {num_tokens, heads, dim});
      }
    }
  }

  void random_way() {
    if (random.one_in(3)) c.way = random.pick({kPlan, kPlanOfOthers, device ? kPlan : kPlanRanges});
    if (c.op == kWrite && c.way == kCall && random.one_in(4)) c.way = kLayers;
  }

  void make_write() {
    const bool finds = !opaque && !pool && random.one_in(5);
    if (finds)
      for (kvx_dtype_t &dtype : dtypes) dtype = scaled_dtype();
    make_end(g, dtypes, 1, pool, &c.dst);
    const int64_t tokens = big ? g.room() : below(g.room() + 1);
    c.dst.slots = make_slots(g, tokens, 0, g.blocks, bad_indices);
    finds ? make_room_for_scales(g, &c.dst) : make_scales(g, &c.dst);
    make_io(c.dst.layers[0], tokens, 0, 0, /*scalars=*/device && finds);
    c.write.size = sizeof c.write;
    c.write_options.size = sizeof c.write_options;
    c.write_options.flags = finds ? KVX_FLAG_FIND_SCALES : 0;
    c.with_write_options = finds || random.one_in(3);
    random_way();
  }

  void make_gather() {
    const uint32_t layers = pool ? 1 + random.below(3) : 1;
    if (!pool && random.one_in(5)) {
      make_stacks(g, dtypes, 1, &c.src);
    } else {
      make_end(g, dtypes, layers, pool, &c.src);
    }
    std::swap(c.src.layers[0], random.pick(c.src.layers));
    const uint32_t seqs = random.below(4), beams = pool ? 1 + random.below(2) : 1;
    const int64_t max_len = big ? g.room() / 2 : below(g.room() + 2);
    std::vector<int64_t> lengths, needs;
    for (uint32_t s = 0; s < seqs; ++s) {
      lengths.push_back(big ? max_len : below(g.room() + 1));
      needs.insert(needs.end(), beams, lengths.back());
    }
    const bool bad_lens = bad_indices && random.one_in(3);
    make_table(g, seqs, beams, needs, 0, g.blocks, bad_indices && !bad_lens, &c.src);
    if (bad_lens) poison(&lengths, g.room() + 1);
    c.lens = make_lens(lengths);
    make_scales(g, &c.src);
    make_io(c.src.layers[0], seqs * beams * max_len, seqs * beams, static_cast<uint32_t>(max_len));
    c.gather.size = sizeof c.gather;
    c.gather.max_seq_len = static_cast<uint32_t>(max_len);
    c.options.size = sizeof c.options;
    c.with_options = random.one_in(2);
    if (c.with_options) {
      c.options.flags = random.one_in(2) ? KVX_FLAG_ZERO_FILL : 0;
    } else {
      c.src.span.null_block_plus_1 = 0;
      c.src.span.secondary_num_blocks = 0;
      for (auto &scales : c.src.scales) scales.clear();
    }
    random_way();
  }

  enum Lookup { kDense, kSlots, kTable };

  // Rotates K, V or both in groups that divide their dims. Spec: E.17
  void rotate() {
    const auto log2 = [&](uint32_t dim) {
      return random.below(static_cast<uint64_t>(__builtin_ctz(dim)) + 1);
    };
    c.migrate.flags |= KVX_FLAG_HADAMARD_K(log2(g.dim[0])) | KVX_FLAG_HADAMARD_V(log2(g.dim[1]));
  }

  void make_migrate() {
    const bool same_pool = g.blocks > 1 && random.one_in(8);
    Geometry other = g;
    if (!same_pool && random.one_in(2)) {
      other.block_size = random.pick<uint32_t>({1, 2, 3, 4, 8, 16});
    }
    if (!same_pool && random.one_in(2)) other.blocks = 1 + random.below(8);
    if (!same_pool && random.one_in(4)) other.heads += random.below(3);
    const bool other_pool = other.power_of_two() && random.one_in(4);
    if (!pool && !other_pool && random.one_in(6)) g.no_v = other.no_v = random.below(8);
    const uint32_t layers = 1 + random.below(3);
    const bool affine =
        !device && !opaque && !in_units && !pool && !other_pool && !g.no_v && random.one_in(5);
    const auto make_dtypes_affine = [&](Dtypes *made) {
      for (kvx_dtype_t &dtype : *made) dtype = random.pick({KVX_DTYPE_U8_ZERO, KVX_DTYPE_U8_BIAS});
    };
    if (affine && (same_pool || random.one_in(2))) make_dtypes_affine(&dtypes);
    const bool fp4 = !device && in_units && !pool && !other_pool && !g.no_v && random.one_in(3);
    if (fp4 && (same_pool || random.one_in(2))) dtypes[0] = dtypes[1] = KVX_DTYPE_F4_E2M1;
    const bool finds = !affine && !fp4 && !opaque && !(device && in_units) && !pool &&
                       !other_pool && !g.no_v && random.one_in(6);
    if (finds && same_pool)
      for (kvx_dtype_t &dtype : dtypes) dtype = scaled_dtype();
    const bool stacks[2] = {!pool && !affine && !fp4 && !(finds && same_pool) && random.one_in(5),
                            !other_pool && !affine && !fp4 && !finds && random.one_in(5)};
    if (stacks[0]) {
      make_stacks(g, dtypes, layers, &c.src);
    } else {
      make_end(g, dtypes, layers, pool, &c.src);
    }
    if (same_pool) {
      c.dst = c.src;
    } else {
      Dtypes types;
      random_dtypes(types);
      if (affine && random.one_in(2)) make_dtypes_affine(&types);
      if (fp4 && random.one_in(2)) types[0] = types[1] = KVX_DTYPE_F4_E2M1;
      if (random.one_in(2)) std::copy(dtypes, dtypes + 2, types);
      if (finds)
        for (kvx_dtype_t &dtype : types) dtype = scaled_dtype();
      if (stacks[1]) {
        make_stacks(other, types, layers, &c.dst);
      } else {
        make_end(other, types, layers, other_pool, &c.dst);
      }
    }
    c.migrate.size = sizeof c.migrate;
    c.migrate.flags = random.one_in(3) ? KVX_FLAG_ZERO_FILL : 0;
    if (finds) c.migrate.flags |= KVX_FLAG_FIND_SCALES;
    if (!finds && !affine && !fp4 && !opaque && random.one_in(6)) rotate();
    // Units over tokens at the destination: rows have blocks of their own, in order.
    const bool covers = affine && random.one_in(2);
    const bool requantizes = covers && random.one_in(2);
    if (requantizes || random.one_in(10)) c.migrate.flags |= KVX_FLAG_REQUANTIZE;
    if (g.heads != other.heads || random.one_in(3)) {
      c.migrate.num_heads = 1 + random.below(std::min(g.heads, other.heads));
      c.src.span.head_start = random.below(g.heads - c.migrate.num_heads + 1);
      c.dst.span.head_start = random.below(other.heads - c.migrate.num_heads + 1);
    }

    // How each end is addressed; beams need tables of a pool at both ends, or a dense end.
    const Geometry *geometry[2] = {&g, &other};
    End *ends[2] = {&c.src, &c.dst};
    Lookup way[2];
    uint32_t seqs = random.below(4), beams = 1 + random.below(2);
    for (int e = 0; e < 2; ++e) {
      way[e] = same_pool ? random.pick({kSlots, kTable}) : random.pick({kDense, kSlots, kTable});
      if (covers && e == 1) way[e] = same_pool ? kTable : random.pick({kDense, kTable});
      if (!ends[e]->blocks.empty()) way[e] = kTable;
      if (way[e] == kDense) seqs = std::min(seqs, geometry[e]->blocks);
    }
    if (way[0] != kTable && way[1] != kTable) beams = 1;
    for (int e = 0; e < 2; ++e) {
      if (way[e] == kSlots || (way[e] == kTable && !ends[e]->from_pool)) beams = 1;
      if (way[e] == kDense && seqs * beams > geometry[e]->blocks) beams = 1;
    }
    const bool with_starts[2] = {way[0] != kSlots && random.one_in(2),
                                 way[1] != kSlots && random.one_in(2)};
    std::vector<int64_t> lengths, needs[2], starts[2];
    int64_t moved = 0, most = INT64_MAX;
    for (int e = 0; e < 2; ++e) {
      const int64_t held = way[e] == kDense ? geometry[e]->block_size : geometry[e]->room();
      most = std::min(most, same_pool ? held / 2 : held);
      if (covers && e == 1 && way[e] == kTable && seqs && random.one_in(2))
        most =
            std::min(most, held / (same_pool ? 2 : 1) / seqs / other.block_size * other.block_size);
    }
    for (uint32_t s = 0; s < seqs; ++s) {
      const int64_t length = big ? most : below(most + 1);
      lengths.push_back(length);
      moved += length * beams;
      for (uint32_t row = 0; row < 2 * beams; ++row) {
        const int e = row % 2;
        const int64_t last_start = way[e] == kDense ? geometry[e]->block_size - length : 3;
        int64_t start = with_starts[e] ? below(last_start + 1) : 0;
        if (covers && e == 1 && !requantizes && !random.one_in(8))
          start -= start % other.block_size;
        starts[e].push_back(start);
        needs[e].push_back(starts[e].back() + length);
      }
    }

    const uint32_t half = g.blocks / 2;
    const int hostile = bad_indices ? static_cast<int>(random.below(5)) : -1;
    for (int e = 0; e < 2; ++e) {
      End &end = *ends[e];
      kvx_span_t &span = end.span;
      const uint32_t low = same_pool && e == 1 ? half : 0;
      const uint32_t high = same_pool && e == 0 ? half : geometry[e]->blocks;
      span.size = sizeof span;
      span.num_layers = layers;
      give(&span.layers);
      if (way[e] == kTable) {
        const kvx_block_table_t made = end.table;  // what blocks anywhere ask for
        do {
          end.table = made;
          make_table(*geometry[e], seqs, beams, needs[e], low, high, hostile == e, &end);
        } while (covers && e == 1 && end.table.format != KVX_BLOCK_TABLE_PACKED);
        give(&span.block_table);
      } else if (way[e] == kSlots) {
        end.slots = make_slots(*geometry[e], moved, low, high, hostile == e);
        give(&span.slots);
      }
      if (with_starts[e]) {
        if (hostile == 2 + e) poison(&starts[e], geometry[e]->room());
        end.starts = make_lens(starts[e]);
        give(&span.starts);
      }
      finds &&e == 1 ? make_room_for_scales(*geometry[e], &end) : make_scales(*geometry[e], &end);
      make_affine(*geometry[e], e == 0 || covers, &end);
      make_group_scales(*geometry[e], &end);
      if (!end.zeros[0].empty()) give(&span.k_zeros);
      if (!end.zeros[1].empty()) give(&span.v_zeros);
      if (!end.scales[0].empty()) give(&span.k_scales);
      if (!end.scales[1].empty()) give(&span.v_scales);
    }
    const bool any_stacks = !c.src.blocks.empty() || !c.dst.blocks.empty();
    if (!any_stacks && !finds && !big && random.one_in(3)) {
      make_planes(geometry, way, same_pool, beams, lengths, needs);
    }
    bool own = false;  // a table that stays with the plan
    for (const End *end : {&c.src, &c.dst})
      for (const PlaneCase &plane : end->planes) own |= plane.desc.block_table || plane.desc.slots;
    if (random.one_in(3)) {
      c.way = random.pick({kPlan, own ? kPlan : kPlanOfOthers, device ? kPlan : kPlanRanges});
    }
    if (hostile == 4) poison(&lengths, g.room() + 1);
    c.lens = make_lens(lengths);
    give(&c.migrate.seq_lens);
    give(&c.migrate.src);
    give(&c.migrate.dst);
  }

  // ---- planes beside the layers. Spec: E.11 ----

  // What the planes of a pair share.
  struct PairShape {
    uint32_t tokens_per_entry, flags, heads;
    bool units, affine;
    int64_t dim;  // numbers
  };

  PairShape random_pair() {
    PairShape pair{};
    pair.tokens_per_entry = random.pick<uint32_t>({1, 1, 1, 0, 2, 3});
    pair.flags = random.one_in(4) ? KVX_PLANE_REPLICATED : 0;
    pair.heads = 1 + random.below(3);
    pair.units = in_units && random.one_in(2);
    pair.affine = !device && !opaque && !pair.units && random.one_in(4);
    pair.dim = pair.units ? (in_large ? 256 : 32) * (1 + below(2))
                          : random.pick<int64_t>({1, 2, 6, 16, 33});
    return pair;
  }

  // Axes in any order with any strides, TOKEN and DIM split some of the time. `dim`: elements.
  void make_axes(const Geometry &of, int64_t dim, kvx_plane_t *plane) {
    const auto add = [&](kvx_axis_t axis, int64_t extent, bool may_split) {
      int64_t inner = 1 + below(extent);
      while (extent % inner) --inner;
      const bool splits = may_split && random.one_in(3);
      if (splits) plane->axes[plane->num_axes++] = {axis, 0, extent / inner, 0};
      if (splits) extent = inner;
      if (extent > 1 || random.one_in(2)) plane->axes[plane->num_axes++] = {axis, 0, extent, 0};
    };
    add(KVX_AXIS_DIM, dim, true);
    add(KVX_AXIS_TOKEN, of.block_size, !device);
    add(KVX_AXIS_HEAD, of.heads, false);
    add(KVX_AXIS_BLOCK, of.blocks, false);
    if (plane->num_axes == 0) plane->axes[plane->num_axes++] = {KVX_AXIS_DIM, 0, 1, 0};
    uint32_t order[KVX_MAX_PLANE_AXES];
    for (uint32_t i = 0; i < plane->num_axes; ++i) order[i] = i;
    for (uint32_t i = plane->num_axes; i > 1; --i) std::swap(order[i - 1], order[random.below(i)]);
    const int64_t size = size_of(plane->dtype), lead = below(3) * size;
    int64_t next = size;
    for (uint32_t i = 0; i < plane->num_axes; ++i) {
      kvx_plane_axis_t &part = plane->axes[order[i]];
      if (part.extent == 1) {
        part.stride_bytes = random.pick<int64_t>({0, 1, -7, INT64_MAX});
        continue;
      }
      part.stride_bytes = next + size * (random.one_in(2) ? below(4) : 0);
      next += (part.extent - 1) * part.stride_bytes;
    }
    plane->data = allocate(lead + next) + lead;
  }

  // The same memory: that of the other end of a pool, or of another plane.
  static void share(const kvx_plane_t &its, Geometry *of, kvx_plane_t *plane) {
    plane->dtype = its.dtype;
    plane->data = its.data;
    plane->num_axes = its.num_axes;
    std::copy(its.axes, its.axes + its.num_axes, plane->axes);
    uint32_t *const extents[] = {&of->blocks, &of->block_size, &of->heads};
    for (uint32_t *extent : extents) *extent = 1;
    for (uint32_t i = 0; i < its.num_axes; ++i) {
      if (its.axes[i].axis != KVX_AXIS_DIM)
        *extents[its.axes[i].axis] *= static_cast<uint32_t>(its.axes[i].extent);
    }
  }

  // A table or slots of a plane's own, over blocks [low, high), for rows of `lengths`.
  void make_own(const Geometry &of, const std::vector<int64_t> &lengths,
                const std::vector<int64_t> &needs, uint32_t low, uint32_t high, bool hostile,
                PlaneCase *plane) {
    const uint32_t tokens = plane->desc.tokens_per_entry;
    if (tokens == 0 || (tokens == 1 && random.one_in(3))) {
      int64_t count = 0;
      for (const int64_t length : lengths) count += tokens ? length : 1;
      plane->slots = make_slots(of, count, low, high, hostile);
      give(&plane->desc.slots);
      return;
    }
    Geometry in_tokens = of;
    in_tokens.block_size *= tokens;
    End own;
    do {
      own = End{};
      make_table(in_tokens, static_cast<uint32_t>(needs.size()), 1, needs, low, high, hostile,
                 &own);
    } while (tokens > 1 && own.table.format == KVX_BLOCK_TABLE_RAGGED);
    plane->table = own.table;
    give(&plane->desc.block_table);
  }

  // The plane of a pair at an end. `needs`: tokens of each row, from its first.
  void make_plane(const PairShape &pair, uint32_t number, int e, const Geometry &of_span,
                  Lookup way, bool same_pool, bool alias, const std::vector<int64_t> &lengths,
                  const std::vector<int64_t> &needs, bool hostile) {
    End &end = e ? c.dst : c.src;
    PlaneCase made;
    kvx_plane_t &plane = made.desc;
    plane.size = sizeof plane;
    plane.layer = number / 2;
    plane.role = number;
    plane.memory = KVX_MEMORY_HOST;
    plane.flags = pair.flags;
    plane.tokens_per_entry = pair.tokens_per_entry;
    const auto tokens = std::max(pair.tokens_per_entry, 1u);
    const auto format = way == kTable ? end.table.format : KVX_BLOCK_TABLE_PACKED;
    const bool names_tokens = way == kSlots || format == KVX_BLOCK_TABLE_RAGGED;
    bool own = format == KVX_BLOCK_TABLE_KV_OFFSETS || random.one_in(3) ||
               (tokens > 1 && (names_tokens || of_span.block_size % tokens != 0));
    Geometry of{};
    of.blocks = own ? 2 + random.below(5) : of_span.blocks;
    of.block_size = own ? random.pick<uint32_t>({1, 2, 3, 4, 8}) : of_span.block_size / tokens;
    of.heads = pair.heads;
    if (c.migrate.num_heads && !pair.flags) {
      of.heads = std::max(c.src.span.head_start, c.dst.span.head_start) + c.migrate.num_heads +
                 random.below(2);
    }
    if (pair.tokens_per_entry == 0) {
      own = random.one_in(2);
      of.blocks = 2 + static_cast<uint32_t>(lengths.size()) + random.below(2);
      of.block_size = 1;
    }
    plane.dtype = random_dtype(pair.units);
    if (pair.affine && random.one_in(2))
      plane.dtype = random.pick({KVX_DTYPE_U8_ZERO, KVX_DTYPE_U8_BIAS});
    if (e == 1 && random.one_in(2)) plane.dtype = c.src.planes.back().desc.dtype;
    if (alias && !(same_pool && e == 1)) share(end.planes.back().desc, &of, &plane);
    if (same_pool && e == 1) share(c.src.planes.back().desc, &of, &plane);
    if (!plane.data) make_axes(of, pair.dim / numbers_of(plane.dtype), &plane);
    const bool fits = of.blocks == of_span.blocks && of.block_size * tokens == of_span.block_size;
    own |= pair.tokens_per_entry > 0 && !fits;
    if (takes_scale(plane.dtype) && random.one_in(2)) {
      made.scale = make_scale(of);
      give(&plane.scale);
    }
    if (is_affine(plane.dtype)) {
      Unit unit = random_unit(pair.dim, e == 0 && pair.tokens_per_entry == 1);
      const kvx_scale_desc_t &other = c.src.planes.empty() ? made.scale : c.src.planes.back().scale;
      if (e == 1 && other.data && other.granularity != KVX_SCALE_PER_CHANNEL &&
          is_affine(c.src.planes.back().desc.dtype) && random.one_in(2)) {
        unit = {other.granularity, other.ndim == 4 ? other.shape[3] : 1};
      }
      made.scale = make_affine(of, pair.dim, unit, plane.dtype);
      made.zero = make_affine(of, pair.dim, unit, plane.dtype);
      give(&plane.scale);
      give(&plane.zero);
    }
    const uint32_t half = of.blocks / 2;
    if (own) {
      make_own(of, lengths, needs, same_pool && e == 1 ? half : 0,
               same_pool && e == 0 && half ? half : of.blocks, hostile, &made);
    }
    end.planes.push_back(made);
  }

  void make_planes(const Geometry *const (&geometry)[2], const Lookup (&way)[2], bool same_pool,
                   uint32_t beams, const std::vector<int64_t> &lengths,
                   const std::vector<int64_t> (&needs)[2]) {
    std::vector<int64_t> of_rows;
    for (const int64_t length : lengths) of_rows.insert(of_rows.end(), beams, length);
    const uint32_t count = 1 + random.below(3);
    PairShape pair{};
    for (uint32_t i = 0; i < count; ++i) {
      const bool alias = i > 0 && random.one_in(3);  // at one end or both
      if (!alias) pair = random_pair();
      const uint32_t poisoned = bad_indices ? random.below(4) : 4;
      for (int e = 0; e < 2; ++e) {
        make_plane(pair, i, e, *geometry[e], way[e], same_pool, alias && !random.one_in(3), of_rows,
                   needs[e], poisoned == static_cast<uint32_t>(e));
      }
    }
    const bool alone = random.one_in(4) && c.src.table.format != KVX_BLOCK_TABLE_KV_OFFSETS &&
                       c.dst.table.format != KVX_BLOCK_TABLE_KV_OFFSETS;
    for (End *end : {&c.src, &c.dst}) {
      end->span.num_planes = count;
      give(&end->span.planes);
      if (!alone) continue;
      end->span.num_layers = 0;
      end->span.k_scales = end->span.v_scales = nullptr;
      end->span.k_zeros = end->span.v_zeros = nullptr;
    }
  }

  template <class T>
  static void give(const T **pointer) {
    *pointer = static_cast<const T *>(kGiven);
  }
};

}  // namespace fuzz
