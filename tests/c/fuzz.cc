// Throws calls at libkvx: valid ones of odd sizes, ones with hostile indices, and ones whose
// descriptors have been mutated field by field. Built with sanitizers, over buffers of the exact
// size, so that one byte read or written too far ends the run.
//
// After each call:
//   refused   every byte is what it was, and there is a sentence
//   accepted  only the elements of the named tokens have changed, they hold the source's bytes
//   where
//             nothing was converted, and the call was one that the spec allows
//   a valid call without hostile indices must not be refused, one with them must be
//
// The addresses are worked out here from docs/spec.md, one element at a time.
//
//   fuzz [seconds [seed [first iteration [iterations]]]]
//   fuzz threads [seconds [seed]]     valid calls from several threads at once, for ThreadSanitizer
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "kvx/kvx_abi.h"
#include "kvx/kvx_ext.h"

namespace {

using Wide = __int128;

// ---- randomness ----

struct Random {
  uint64_t state;

  uint64_t next() {  // splitmix64
    uint64_t z = (state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  uint32_t below(uint64_t n) { return static_cast<uint32_t>(next() % n); }
  bool one_in(uint32_t n) { return below(n) == 0; }
  template <class T>
  T pick(std::initializer_list<T> values) {
    return values.begin()[below(values.size())];
  }
  template <class T>
  T &pick(std::vector<T> &values) {
    return values[below(values.size())];
  }
};

// ---- memory whose every byte is accounted for ----

struct Block {
  std::unique_ptr<uint8_t[]> data;
  size_t size = 0;
  std::vector<uint8_t> before;
  std::vector<uint8_t> writes;    // how often an accepted call may write this byte: 0, 1, 2 (many)
  std::vector<uint8_t> expected;  // what one write stores, where that is known
  std::vector<uint8_t> known;
};

struct Memory {
  std::vector<std::unique_ptr<Block>> blocks;

  uint8_t *allocate(Random &random, size_t size) {
    auto block = std::make_unique<Block>();
    block->size = std::max<size_t>(size, 1);
    block->data.reset(new uint8_t[block->size]);
    for (size_t i = 0; i < block->size; ++i) block->data[i] = static_cast<uint8_t>(random.next());
    blocks.push_back(std::move(block));
    return blocks.back()->data.get();
  }
  Block *find(const void *pointer) {
    const auto *p = static_cast<const uint8_t *>(pointer);
    for (auto &block : blocks) {
      if (p >= block->data.get() && p <= block->data.get() + block->size) return block.get();
    }
    return nullptr;
  }
  bool holds(const void *pointer, Wide bytes) {
    const Block *block = find(pointer);
    if (!block) return false;
    return bytes <= block->data.get() + block->size - static_cast<const uint8_t *>(pointer);
  }
  void snapshot() {
    for (auto &block : blocks)
      block->before.assign(block->data.get(), block->data.get() + block->size);
  }
  bool unchanged() const {
    for (const auto &block : blocks) {
      if (std::memcmp(block->data.get(), block->before.data(), block->size) != 0) return false;
    }
    return true;
  }
};

int64_t size_of(kvx_dtype_t dtype) {
  switch (dtype) {
    case KVX_DTYPE_F16:
    case KVX_DTYPE_BF16:
      return 2;
    case KVX_DTYPE_F32:
    case KVX_DTYPE_S32:
    case KVX_DTYPE_U32:
      return 4;
    case KVX_DTYPE_S64:
    case KVX_DTYPE_U64:
      return 8;
    default:
      return 1;
  }
}

bool is_fp8(kvx_dtype_t dtype) { return dtype == KVX_DTYPE_F8_E4M3 || dtype == KVX_DTYPE_F8_E5M2; }

bool is_absent(const kvx_tensor_desc_t &tensor) { return !tensor.data && tensor.ndim == 0; }

int64_t read_int(const void *data, kvx_dtype_t dtype, uint64_t i) {
  if (dtype == KVX_DTYPE_S64) return static_cast<const int64_t *>(data)[i];
  return static_cast<const int32_t *>(data)[i];
}

float read_scale(const void *data, kvx_dtype_t dtype) {
  uint32_t bits = 0;
  float value;
  if (dtype == KVX_DTYPE_F16) {
    uint16_t half;
    std::memcpy(&half, data, sizeof half);
    const int exponent = (half >> 10) & 31, mantissa = half & 1023;
    value = exponent == 31 ? (mantissa ? NAN : INFINITY)
            : exponent     ? std::ldexp(1024.0f + static_cast<float>(mantissa), exponent - 25)
                           : std::ldexp(static_cast<float>(mantissa), -24);
    return half & 0x8000 ? -value : value;
  }
  if (dtype == KVX_DTYPE_BF16) {
    std::memcpy(reinterpret_cast<uint8_t *>(&bits) + 2, data, 2);
  } else {
    std::memcpy(&bits, data, sizeof bits);
  }
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// ---- a call and everything it points to ----

enum Op { kValidate, kWrite, kGather, kMigrate, kOps };

// One end of a call: the layers of a cache and how tokens are found in them. A write has a
// destination with slots, a gather a source with a table, a migration both ends.
struct End {
  std::vector<kvx_cache_desc_t> layers;
  bool from_pool = false;
  kvx_block_table_t table{};
  kvx_slot_mapping_t slots{};
  kvx_seq_lens_t starts{};
  std::vector<kvx_scale_desc_t> scales[2];  // K, V: per layer, or empty
  kvx_view_t view{};                        // its pointers say only whether they are given
};

struct Case {
  Op op;
  Memory memory;
  End src, dst;
  kvx_kv_io_desc_t io{};
  kvx_write_desc_t write{};
  kvx_gather_desc_t gather{};
  kvx_gather_options_t options{};
  bool with_options = false;
  kvx_seq_lens_t lens{};
  kvx_migrate_desc_t migrate{};
  bool mutated = false;
  std::string story;  // what was mutated

  kvx_cache_desc_t &cache() { return op == kGather ? src.layers[0] : dst.layers[0]; }
};

const void *const kGiven = &kGiven;  // a pointer that is set when the call is put together

// ---- valid calls ----

struct Geometry {
  uint32_t blocks, block_size, heads, dim[2];
  bool has_v;
  uint32_t no_v;  // bit per layer that is without V although others have it
};

constexpr kvx_dtype_t kFloats[] = {KVX_DTYPE_F16, KVX_DTYPE_BF16, KVX_DTYPE_F32, KVX_DTYPE_F8_E4M3,
                                   KVX_DTYPE_F8_E5M2};

// Strides for `shape`: row-major, or any order of axes with gaps. Where an axis has no second
// element its stride may be anything.
void random_strides(Random &random, uint32_t ndim, const int64_t *shape, int64_t *stride) {
  uint32_t order[KVX_MAX_TENSOR_DIMS] = {0, 1, 2, 3, 4};
  const bool row_major = random.one_in(2);
  for (uint32_t i = 0; i < ndim && !row_major; ++i) std::swap(order[i], order[random.below(ndim)]);
  int64_t next = 1;
  for (uint32_t i = ndim; i-- > 0;) {
    const uint32_t axis = order[i];
    stride[axis] = row_major ? next : next + random.below(8) / 4 * random.below(4);
    if (shape[axis] > 1) {
      next += (shape[axis] - 1) * stride[axis];
    } else if (random.one_in(4)) {
      stride[axis] = random.pick<int64_t>({0, 1, 77, int64_t{1} << 40, INT64_MAX});
    }
  }
}

// Elements from the first to the last.
int64_t span_of(uint32_t ndim, const int64_t *shape, const int64_t *stride) {
  int64_t span = 1;
  for (uint32_t axis = 0; axis < ndim; ++axis) {
    if (shape[axis] > 1) span += (shape[axis] - 1) * stride[axis];
  }
  return span;
}

kvx_tensor_desc_t tensor_of(kvx_dtype_t dtype, kvx_layout_t layout) {
  kvx_tensor_desc_t tensor{};
  tensor.size = sizeof tensor;
  tensor.dtype = dtype;
  tensor.layout = layout;
  tensor.memory = KVX_MEMORY_HOST;
  return tensor;
}

void set_shape(Random &random, kvx_tensor_desc_t *tensor, const Geometry &g, int kv) {
  const int64_t dim = g.dim[kv];
  if (tensor->layout == KVX_LAYOUT_BLOCK_HND_PACKED ||
      (tensor->layout == KVX_LAYOUT_BLOCK_CUSTOM && random.one_in(2))) {
    int64_t pack = 1 + random.below(static_cast<uint32_t>(dim));
    while (dim % pack) --pack;
    const int64_t shape[] = {g.blocks, g.heads, dim / pack, g.block_size, pack};
    tensor->ndim = 5;
    std::copy(shape, shape + 5, tensor->shape);
  } else {
    const bool nhd = tensor->layout == KVX_LAYOUT_BLOCK_NHD;
    const int64_t shape[] = {g.blocks, nhd ? g.block_size : g.heads, nhd ? g.heads : g.block_size,
                             dim};
    tensor->ndim = 4;
    std::copy(shape, shape + 4, tensor->shape);
  }
}

kvx_layout_t random_layout(Random &random) {
  return random.pick({KVX_LAYOUT_BLOCK_NHD, KVX_LAYOUT_BLOCK_HND, KVX_LAYOUT_BLOCK_HND_PACKED,
                      KVX_LAYOUT_BLOCK_CUSTOM});
}

kvx_tensor_desc_t cache_tensor(Random &random, Memory &memory, const Geometry &g, int kv,
                               kvx_dtype_t dtype) {
  kvx_tensor_desc_t tensor = tensor_of(dtype, random_layout(random));
  set_shape(random, &tensor, g, kv);
  random_strides(random, tensor.ndim, tensor.shape, tensor.stride);
  const int64_t span = span_of(tensor.ndim, tensor.shape, tensor.stride);
  const int64_t lead = random.below(3);
  tensor.data = memory.allocate(random, static_cast<size_t>((lead + span) * size_of(dtype))) +
                lead * size_of(dtype);
  return tensor;
}

kvx_cache_desc_t cache_of(const Geometry &g) {
  kvx_cache_desc_t cache{};
  cache.size = sizeof cache;
  cache.num_blocks = g.blocks;
  cache.block_size = g.block_size;
  cache.num_kv_heads = g.heads;
  cache.head_dim = g.dim[0];
  cache.v.size = sizeof cache.v;
  return cache;
}

using Dtypes = kvx_dtype_t[2];

void make_layers(Random &random, Memory &memory, const Geometry &g, const Dtypes &dtypes,
                 uint32_t num_layers, End *end) {
  for (uint32_t l = 0; l < num_layers; ++l) {
    kvx_cache_desc_t cache = cache_of(g);
    cache.k = cache_tensor(random, memory, g, 0, dtypes[0]);
    if (g.has_v && !(g.no_v >> l & 1)) cache.v = cache_tensor(random, memory, g, 1, dtypes[1]);
    end->layers.push_back(cache);
  }
}

// The layers of a TensorRT-LLM pool: [num_blocks, layer, K or V, bytes_per_block]. Spec: E.8
void make_pool(Random &random, Memory &memory, const Geometry &g, const Dtypes &dtypes,
               uint32_t num_layers, End *end) {
  const uint32_t kv_factor = g.has_v ? 2 : 1, sub_blocks = num_layers * kv_factor;
  kvx_tensor_desc_t tensors[2]{};
  int64_t bytes_per_block = 0;
  for (uint32_t kv = 0; kv < kv_factor; ++kv) {
    kvx_tensor_desc_t &tensor = tensors[kv] = tensor_of(dtypes[kv], random_layout(random));
    set_shape(random, &tensor, g, static_cast<int>(kv));
    random_strides(random, tensor.ndim - 1, tensor.shape + 1, tensor.stride + 1);
    const int64_t span = span_of(tensor.ndim - 1, tensor.shape + 1, tensor.stride + 1);
    bytes_per_block = std::max(bytes_per_block, span * size_of(tensor.dtype));
  }
  bytes_per_block = (bytes_per_block + 3) / 4 * 4 + 4 * random.below(3);
  const int64_t step = bytes_per_block * sub_blocks;
  uint8_t *primary = memory.allocate(random, static_cast<size_t>(step * g.blocks));
  uint8_t *secondary = nullptr;
  end->view.secondary_num_blocks = random.pick<uint32_t>({0, 1, 3});
  if (random.one_in(2)) {
    const uint32_t n = end->view.secondary_num_blocks;
    secondary = memory.allocate(random, static_cast<size_t>(step * (n ? n : g.blocks)));
  }
  for (uint32_t l = 0; l < num_layers; ++l) {
    kvx_cache_desc_t cache = cache_of(g);
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

const void *make_ints(Random &random, Memory &memory, const std::vector<int64_t> &values,
                      kvx_dtype_t dtype) {
  uint8_t *data = memory.allocate(random, values.size() * static_cast<size_t>(size_of(dtype)));
  for (size_t i = 0; i < values.size(); ++i) {
    const auto narrow = static_cast<int32_t>(values[i]);
    if (dtype == KVX_DTYPE_S64) {
      std::memcpy(data + i * 8, &values[i], 8);
    } else {
      std::memcpy(data + i * 4, &narrow, 4);
    }
  }
  return data;
}

kvx_dtype_t int_dtype(Random &random) { return random.pick({KVX_DTYPE_S32, KVX_DTYPE_S64}); }

constexpr int64_t kHostile[] = {-1,
                                -2,
                                -7,
                                0,
                                1,
                                5,
                                1000,
                                INT32_MAX,
                                INT32_MIN,
                                int64_t{1} << 31,
                                int64_t{1} << 32,
                                INT64_MAX,
                                INT64_MIN};

void poison(Random &random, std::vector<int64_t> *values, int64_t bound) {
  if (values->empty()) return;
  random.pick(*values) =
      random.one_in(3) ? bound + random.below(2) : kHostile[random.below(std::size(kHostile))];
}

kvx_seq_lens_t make_lens(Random &random, Memory &memory, const std::vector<int64_t> &lengths) {
  kvx_seq_lens_t lens{};
  lens.size = sizeof lens;
  lens.dtype = int_dtype(random);
  lens.seq_count = static_cast<uint32_t>(lengths.size());
  lens.lengths = make_ints(random, memory, lengths, lens.dtype);
  return lens;
}

kvx_slot_mapping_t make_slots(Random &random, Memory &memory, const Geometry &g, uint64_t tokens,
                              bool hostile, uint32_t low, uint32_t high) {
  std::vector<int64_t> slots;
  for (uint64_t t = 0; t < tokens; ++t) {
    const uint32_t block = low + static_cast<uint32_t>(t / g.block_size) % (high - low);
    slots.push_back(int64_t{block} * g.block_size + static_cast<int64_t>(t % g.block_size));
  }
  for (size_t i = slots.size(); i > 1; --i) std::swap(slots[i - 1], slots[random.below(i)]);
  kvx_slot_mapping_t mapping{};
  mapping.invalid_slot = random.pick<int64_t>({-1, -1, 2, INT64_MAX, INT64_MIN});
  for (int64_t &slot : slots) {
    if (random.one_in(6)) slot = random.pick<int64_t>({-1, -9, mapping.invalid_slot == 2 ? 2 : -3});
  }
  if (hostile) poison(random, &slots, int64_t{g.blocks} * g.block_size);
  mapping.size = sizeof mapping;
  mapping.dtype = int_dtype(random);
  mapping.token_count = static_cast<uint32_t>(tokens);
  mapping.slots = make_ints(random, memory, slots, mapping.dtype);
  return mapping;
}

// A table for rows that need `needs[r]` tokens, over blocks [low, high).
void make_table(Random &random, Memory &memory, const Geometry &g, uint32_t seq_count,
                uint32_t beams, const std::vector<int64_t> &needs, bool hostile, uint32_t low,
                uint32_t high, End *end) {
  kvx_block_table_t &table = end->table;
  table.size = sizeof table;
  table.seq_count = seq_count;
  table.beam_width = beams;
  const bool power_of_two = (g.block_size & (g.block_size - 1)) == 0;
  if (beams > 1) {
    table.format = KVX_BLOCK_TABLE_KV_OFFSETS;
  } else if (end->from_pool && power_of_two && random.one_in(2)) {
    table.format = KVX_BLOCK_TABLE_KV_OFFSETS;
  } else {
    table.format = random.pick({KVX_BLOCK_TABLE_PACKED, KVX_BLOCK_TABLE_RAGGED});
    table.beam_width = random.below(2);
  }
  if (random.one_in(3)) end->view.null_block_id = random.below(g.blocks);

  std::vector<int64_t> indices, indptr{0};
  uint32_t next = random.below(high - low);
  const auto block = [&]() -> int64_t {
    if (random.one_in(8)) return random.one_in(2) ? -1 : end->view.null_block_id;
    return low + (next++ % (high - low));
  };
  if (table.format == KVX_BLOCK_TABLE_RAGGED) {
    for (const int64_t need : needs) {
      const int64_t held = need + random.below(3);
      int64_t id = -1;
      for (int64_t t = 0; t < held; ++t) {
        if (t % g.block_size == 0) id = block();
        indices.push_back(t < need ? id : 999);
      }
      indptr.push_back(indptr.back() + held);
    }
    if (hostile && random.one_in(2)) {
      poison(random, &indptr, indptr.back());
    } else if (hostile) {
      poison(random, &indices, g.blocks);
    }
    table.index_dtype = int_dtype(random);
    table.indptr_dtype = int_dtype(random);
    table.indptr_count = static_cast<uint32_t>(indptr.size());
    table.indptr = make_ints(random, memory, indptr, table.indptr_dtype);
  } else {
    int64_t columns = 1;
    for (const int64_t need : needs)
      columns = std::max(columns, (need + g.block_size - 1) / g.block_size);
    columns += random.below(2);
    table.max_blocks_per_seq = static_cast<uint32_t>(columns);
    const bool offsets = table.format == KVX_BLOCK_TABLE_KV_OFFSETS;
    const auto sub_blocks = static_cast<int64_t>(end->layers.size()) * (g.has_v ? 2 : 1);
    const uint32_t n2 = end->view.secondary_num_blocks;
    for (const int64_t need : needs) {
      std::vector<int64_t> row;
      for (int64_t c = 0; c < columns; ++c) row.push_back(c * g.block_size < need ? block() : 998);
      for (int kv = 0; kv < (offsets ? 2 : 1); ++kv) {
        for (int64_t c = 0; c < columns; ++c) {
          int64_t id = row[static_cast<size_t>(c)];
          if (offsets && id >= 0 && c * g.block_size < need) {
            const bool second = end->layers[0].pool.secondary && random.one_in(3);
            if (second) id = n2 ? random.below(n2) : id;
            id = id * sub_blocks + (g.has_v ? kv : 0);
            if (second) id -= int64_t{1} << 31;
          }
          indices.push_back(id);
        }
      }
    }
    if (hostile) poison(random, &indices, offsets ? g.blocks * sub_blocks : g.blocks);
    table.index_dtype = offsets ? KVX_DTYPE_S32 : int_dtype(random);
    table.flags = offsets ? uint32_t{KVX_BLOCK_TABLE_FLAG_KVCACHEINDEX} : 0;
  }
  table.indices_count = static_cast<uint32_t>(indices.size());
  table.indices = make_ints(random, memory, indices, table.index_dtype);
}

// Scales for an FP8 tensor, finite and positive unless hostile.
kvx_scale_desc_t make_scale(Random &random, Memory &memory, const Geometry &g, bool hostile) {
  kvx_scale_desc_t scale{};
  scale.size = sizeof scale;
  scale.dtype = random.pick({KVX_DTYPE_F32, KVX_DTYPE_F16, KVX_DTYPE_BF16});
  scale.granularity = random.pick({KVX_SCALE_PER_TENSOR, KVX_SCALE_PER_BLOCK, KVX_SCALE_PER_HEAD,
                                   KVX_SCALE_PER_BLOCK_HEAD, KVX_SCALE_PER_TOKEN_HEAD});
  switch (scale.granularity) {
    case KVX_SCALE_PER_BLOCK:
      scale.ndim = 1, scale.shape[0] = g.blocks;
      break;
    case KVX_SCALE_PER_HEAD:
      scale.ndim = 1, scale.shape[0] = g.heads;
      break;
    case KVX_SCALE_PER_BLOCK_HEAD:
      scale.ndim = 2, scale.shape[0] = g.blocks, scale.shape[1] = g.heads;
      break;
    case KVX_SCALE_PER_TOKEN_HEAD:
      scale.ndim = 3, scale.shape[0] = g.blocks, scale.shape[1] = g.block_size;
      scale.shape[2] = g.heads;
      break;
    default:
      scale.ndim = random.below(3), scale.shape[0] = scale.shape[1] = 1;
  }
  random_strides(random, scale.ndim, scale.shape, scale.stride);
  const int64_t span = span_of(scale.ndim, scale.shape, scale.stride);
  const int64_t size = size_of(scale.dtype);
  uint8_t *data = memory.allocate(random, static_cast<size_t>(span * size));
  for (int64_t i = 0; i < span; ++i) {
    // Around 1 in each of the three formats.
    const uint32_t f32 = 0x3f000000u + random.below(0x1000000);
    const auto f16 = static_cast<uint16_t>(0x3800u + random.below(0x800));
    const auto bf16 = static_cast<uint16_t>(f32 >> 16);
    const uint32_t bad32 = random.pick({0u, 0x7f800000u, 0x7fc00000u, 0xbf800000u});
    const bool bad = hostile && random.one_in(4);
    const auto bad16 = static_cast<uint16_t>(bad32 >> 16);
    const uint16_t bad_half = random.pick<uint16_t>({0, 0x7c00, 0x7e00, 0xbc00});
    const uint32_t word = bad ? bad32 : f32;
    const uint16_t half =
        scale.dtype == KVX_DTYPE_F16 ? (bad ? bad_half : f16) : (bad ? bad16 : bf16);
    std::memcpy(data + i * size, size == 4 ? static_cast<const void *>(&word) : &half,
                static_cast<size_t>(size));
  }
  scale.data = data;
  return scale;
}

void make_scales(Random &random, Memory &memory, const Geometry &g, bool hostile, End *end) {
  for (int kv = 0; kv < 2; ++kv) {
    const kvx_tensor_desc_t &first = kv ? end->layers[0].v : end->layers[0].k;
    if (is_absent(first) || !is_fp8(first.dtype) || random.one_in(3)) continue;
    for (size_t l = 0; l < end->layers.size(); ++l) {
      kvx_scale_desc_t scale = make_scale(random, memory, g, hostile);
      const bool varies =
          scale.granularity != KVX_SCALE_PER_TENSOR && scale.granularity != KVX_SCALE_PER_HEAD;
      if (varies && end->layers[0].pool.secondary) scale.data = nullptr;
      if (kv && is_absent(end->layers[l].v)) scale.data = nullptr;
      end->scales[kv].push_back(scale);
    }
  }
}

Geometry random_geometry(Random &random, bool big) {
  Geometry g{};
  g.blocks = 1 + random.below(6);
  g.block_size = random.pick<uint32_t>({1, 2, 3, 4, 7, 8, 16});
  g.heads = 1 + random.below(4);
  for (uint32_t &dim : g.dim) dim = random.pick<uint32_t>({1, 2, 3, 5, 8, 12, 16, 20, 33});
  if (random.one_in(2)) g.dim[1] = g.dim[0];
  g.has_v = !random.one_in(6);
  if (big) {
    g.blocks = 40 + random.below(40);
    g.block_size = random.pick<uint32_t>({16, 32, 48});
    g.heads = 4;
    g.dim[0] = g.dim[1] = random.pick<uint32_t>({64, 80});
  }
  return g;
}

Geometry other_end(Random &random, const Geometry &g) {
  Geometry other = g;
  if (random.one_in(2)) other.block_size = random.pick<uint32_t>({1, 2, 3, 4, 8, 16});
  if (random.one_in(2)) other.blocks = 1 + random.below(8);
  return other;
}

void random_dtypes(Random &random, bool opaque, Dtypes *dtypes) {
  for (kvx_dtype_t &dtype : *dtypes) {
    dtype = opaque ? KVX_DTYPE_U8 : kFloats[random.below(std::size(kFloats))];
  }
}

void make_cache_end(Random &random, Memory &memory, const Geometry &g, const Dtypes &dtypes,
                    uint32_t num_layers, bool pool, End *end) {
  end->view.null_block_id = KVX_NO_NULL_BLOCK;
  if (pool) {
    make_pool(random, memory, g, dtypes, num_layers, end);
  } else {
    make_layers(random, memory, g, dtypes, num_layers, end);
  }
}

kvx_tensor_desc_t io_tensor(Random &random, Memory &memory, kvx_dtype_t dtype,
                            std::initializer_list<int64_t> shape) {
  kvx_tensor_desc_t tensor = tensor_of(dtype, random_layout(random));
  tensor.ndim = static_cast<uint32_t>(shape.size());
  std::copy(shape.begin(), shape.end(), tensor.shape);
  random_strides(random, tensor.ndim, tensor.shape, tensor.stride);
  const bool empty = std::find(shape.begin(), shape.end(), 0) != shape.end();
  const int64_t span = empty ? 0 : span_of(tensor.ndim, tensor.shape, tensor.stride);
  tensor.data = memory.allocate(random, static_cast<size_t>(span * size_of(dtype)));
  return tensor;
}

void make_io(Random &random, Case *c, const Geometry &g, bool opaque, uint64_t num_tokens,
             uint32_t rows, uint32_t max_len) {
  kvx_kv_io_desc_t &io = c->io;
  io.size = sizeof io;
  io.num_tokens = static_cast<uint32_t>(num_tokens);
  io.num_kv_heads = g.heads;
  io.head_dim = g.dim[0];
  io.value.size = sizeof io.value;
  Dtypes dtypes;
  random_dtypes(random, opaque, &dtypes);
  if (!opaque && random.one_in(2)) {  // the cache's own, so that bytes are copied
    dtypes[0] = c->cache().k.dtype;
    if (g.has_v) dtypes[1] = c->cache().v.dtype;
  }
  for (int kv = 0; kv < (g.has_v ? 2 : 1); ++kv) {
    kvx_tensor_desc_t &tensor = kv ? io.value : io.key;
    const int64_t heads = g.heads, dim = g.dim[kv];
    if (c->op == kWrite) {
      const int64_t padded = static_cast<int64_t>(num_tokens) + random.below(3);
      tensor = io_tensor(random, c->memory, dtypes[kv], {padded, heads, dim});
      // Input may be expanded: the same memory for every head.
      if (random.one_in(8)) tensor.stride[1] = 0;
    } else if (random.one_in(2)) {
      tensor = io_tensor(random, c->memory, dtypes[kv], {rows, max_len, heads, dim});
    } else {
      tensor =
          io_tensor(random, c->memory, dtypes[kv], {static_cast<int64_t>(num_tokens), heads, dim});
    }
  }
}

void make_case(Random &random, Op op, bool hostile, bool big, Case *c) {
  c->op = op;
  Geometry g = random_geometry(random, big);
  const bool opaque = random.one_in(10), power_of_two = (g.block_size & (g.block_size - 1)) == 0;
  Dtypes dtypes;
  random_dtypes(random, opaque, &dtypes);
  if (random.one_in(2)) dtypes[1] = dtypes[0];
  const bool pool = power_of_two && random.one_in(4);
  const bool bad_scales = hostile && random.one_in(4), bad_indices = hostile && !bad_scales;
  const int64_t room = int64_t{g.blocks} * g.block_size;

  if (op == kValidate) {
    make_cache_end(random, c->memory, g, dtypes, 1, pool, &c->dst);
  } else if (op == kWrite) {
    make_cache_end(random, c->memory, g, dtypes, 1, pool, &c->dst);
    const uint64_t tokens =
        big ? static_cast<uint64_t>(room) : random.below(2 * static_cast<uint64_t>(room) + 1) / 2;
    c->dst.slots = make_slots(random, c->memory, g, tokens, bad_indices, 0, g.blocks);
    make_scales(random, c->memory, g, bad_scales, &c->dst);
    make_io(random, c, g, opaque, tokens, 1, 0);
    c->write.size = sizeof c->write;
  } else if (op == kGather) {
    const uint32_t layers = pool ? 1 + random.below(3) : 1;
    make_cache_end(random, c->memory, g, dtypes, layers, pool, &c->src);
    std::swap(c->src.layers[0], c->src.layers[random.below(layers)]);
    const uint32_t seqs = random.below(4), beams = pool ? 1 + random.below(2) : 1;
    const auto max_len =
        static_cast<uint32_t>(big ? room / 2 : random.below(static_cast<uint64_t>(room) + 2));
    std::vector<int64_t> lengths, needs;
    for (uint32_t s = 0; s < seqs; ++s) {
      lengths.push_back(big ? max_len : random.below(static_cast<uint64_t>(room) + 1));
      for (uint32_t b = 0; b < beams; ++b) needs.push_back(lengths.back());
    }
    const bool bad_lens = bad_indices && random.one_in(3);
    make_table(random, c->memory, g, seqs, beams, needs, bad_indices && !bad_lens, 0, g.blocks,
               &c->src);
    if (bad_lens) poison(random, &lengths, room + 1);
    c->lens = make_lens(random, c->memory, lengths);
    make_scales(random, c->memory, g, bad_scales, &c->src);
    make_io(random, c, g, opaque, uint64_t{seqs} * beams * max_len, seqs * beams, max_len);
    c->gather.size = sizeof c->gather;
    c->gather.max_seq_len = max_len;
    c->with_options = random.one_in(2);
    if (!c->with_options) {
      c->src.view.null_block_id = KVX_NO_NULL_BLOCK;
      c->src.view.secondary_num_blocks = 0;
      c->src.scales[0].clear();
      c->src.scales[1].clear();
    }
    c->options.size = sizeof c->options;
    c->options.flags = c->with_options && random.one_in(2) ? KVX_FLAG_ZERO_FILL : 0;
  } else {
    const bool same_pool = g.blocks > 1 && random.one_in(8);
    Geometry other = same_pool ? g : other_end(random, g);
    const uint32_t layers = 1 + random.below(3);
    make_cache_end(random, c->memory, g, dtypes, layers, pool, &c->src);
    if (same_pool) {
      c->dst = c->src;
    } else {
      Dtypes other_dtypes;
      random_dtypes(random, opaque, &other_dtypes);
      if (random.one_in(2)) std::copy(dtypes, dtypes + 2, other_dtypes);
      if (random.one_in(4)) other.heads += random.below(3);
      const bool other_pool = (other.block_size & (other.block_size - 1)) == 0 && random.one_in(4);
      make_cache_end(random, c->memory, other, other_dtypes, layers, other_pool, &c->dst);
    }
    c->migrate.size = sizeof c->migrate;
    c->migrate.flags = random.one_in(3) ? KVX_FLAG_ZERO_FILL : 0;
    if (g.heads != other.heads || random.one_in(3)) {
      c->migrate.num_heads = 1 + random.below(std::min(g.heads, other.heads));
      c->src.view.head_start = random.below(g.heads - c->migrate.num_heads + 1);
      c->dst.view.head_start = random.below(other.heads - c->migrate.num_heads + 1);
    }
    // Which way each end is addressed: 0 dense, 1 slots, 2 table.
    const Geometry *geometry[2] = {&g, &other};
    End *ends[2] = {&c->src, &c->dst};
    uint32_t ways[2], seqs = random.below(4);
    for (int e = 0; e < 2; ++e) {
      ways[e] = same_pool ? 1 + random.below(2) : random.below(3);
      if (ways[e] == 0) seqs = std::min(seqs, geometry[e]->blocks);
    }
    // Beams: every table has them.
    const bool can_beam = ways[0] != 1 && ways[1] != 1 && (ways[0] == 2 || ways[1] == 2);
    uint32_t beams = can_beam ? 1 + random.below(2) : 1;
    for (int e = 0; e < 2; ++e) {
      if (ways[e] == 2 && !ends[e]->from_pool) beams = 1;
      if (ways[e] == 0 && seqs * beams > geometry[e]->blocks) beams = 1;
    }
    std::vector<int64_t> lengths, needs[2], starts[2];
    uint64_t moved = 0;
    const bool with_starts[2] = {ways[0] != 1 && random.one_in(2),
                                 ways[1] != 1 && random.one_in(2)};
    for (uint32_t s = 0; s < seqs; ++s) {
      int64_t most = INT64_MAX;
      for (int e = 0; e < 2; ++e) {
        const int64_t held = ways[e] == 0 ? geometry[e]->block_size
                                          : int64_t{geometry[e]->blocks} * geometry[e]->block_size /
                                                (same_pool ? 2 : 1);
        most = std::min(most, held);
      }
      lengths.push_back(big ? most : random.below(static_cast<uint64_t>(most) + 1));
      for (uint32_t b = 0; b < beams; ++b) {
        moved += static_cast<uint64_t>(lengths.back());
        for (int e = 0; e < 2; ++e) {
          const int64_t room_here = ways[e] == 0 ? geometry[e]->block_size : lengths.back() + 3;
          const int64_t start =
              with_starts[e] ? random.below(static_cast<uint64_t>(room_here - lengths.back()) + 1)
                             : 0;
          starts[e].push_back(start);
          needs[e].push_back(start + lengths.back());
        }
      }
    }
    const uint32_t half = g.blocks / 2, where = random.below(5);
    for (int e = 0; e < 2; ++e) {
      const bool bad = bad_indices && where == static_cast<uint32_t>(e);
      const uint32_t low = same_pool && e == 1 ? half : 0;
      const uint32_t high = same_pool && e == 0 ? half : geometry[e]->blocks;
      ends[e]->view.size = sizeof ends[e]->view;
      ends[e]->view.num_layers = layers;
      ends[e]->view.layers = static_cast<const kvx_cache_desc_t *const *>(kGiven);
      if (ways[e] == 2) {
        make_table(random, c->memory, *geometry[e], seqs, beams, needs[e], bad, low, high, ends[e]);
        ends[e]->view.block_table = static_cast<const kvx_block_table_t *>(kGiven);
      } else if (ways[e] == 1) {
        ends[e]->slots = make_slots(random, c->memory, *geometry[e], moved, bad, low, high);
        ends[e]->view.slots = static_cast<const kvx_slot_mapping_t *>(kGiven);
      }
      if (with_starts[e]) {
        if (bad_indices && where == 2 + static_cast<uint32_t>(e)) poison(random, &starts[e], room);
        ends[e]->starts = make_lens(random, c->memory, starts[e]);
        ends[e]->view.starts = static_cast<const kvx_seq_lens_t *>(kGiven);
      }
      make_scales(random, c->memory, *geometry[e], bad_scales, ends[e]);
      using Scales = const kvx_scale_desc_t *const *;
      if (!ends[e]->scales[0].empty()) ends[e]->view.k_scales = static_cast<Scales>(kGiven);
      if (!ends[e]->scales[1].empty()) ends[e]->view.v_scales = static_cast<Scales>(kGiven);
    }
    if (bad_indices && where == 4) poison(random, &lengths, room + 1);
    c->lens = make_lens(random, c->memory, lengths);
    c->migrate.seq_lens = static_cast<const kvx_seq_lens_t *>(kGiven);
    c->migrate.src = static_cast<const kvx_view_t *>(kGiven);
    c->migrate.dst = static_cast<const kvx_view_t *>(kGiven);
  }
}

// ---- mutations ----

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
  void view(const std::string &name, End *end) {
    kvx_view_t &v = end->view;
    add(Field::kSize, name + ".size", &v.size);
    add(Field::kCount, name + ".num_layers", &v.num_layers);
    add(Field::kPointer, name + ".layers", &v.layers);
    add(Field::kPointer, name + ".block_table", &v.block_table);
    add(Field::kPointer, name + ".slots", &v.slots);
    add(Field::kPointer, name + ".starts", &v.starts);
    add(Field::kCount, name + ".head_start", &v.head_start);
    add(Field::kCount, name + ".secondary_num_blocks", &v.secondary_num_blocks);
    add(Field::kExtent, name + ".null_block_id", &v.null_block_id);
    add(Field::kPointer, name + ".k_scales", &v.k_scales);
    add(Field::kPointer, name + ".v_scales", &v.v_scales);
    if (v.block_table) table(name + ".block_table", &end->table);
    if (v.slots) slots(name + ".slots", &end->slots);
    if (v.starts) lens(name + ".starts", &end->starts);
  }
};

Fields fields_of(Case *c) {
  Fields f;
  for (auto *end : {&c->src, &c->dst}) {
    const std::string name = end == &c->src ? "src" : "dst";
    const size_t layers =
        c->op == kMigrate ? end->layers.size() : std::min<size_t>(1, end->layers.size());
    for (size_t l = 0; l < layers; ++l)
      f.cache(name + ".layers[" + std::to_string(l) + "]", &end->layers[l]);
    for (int kv = 0; kv < 2; ++kv) {
      for (kvx_scale_desc_t &scale : end->scales[kv])
        f.scale(name + (kv ? ".v_scale" : ".k_scale"), &scale);
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
    f.slots("slots", &c->dst.slots);
  } else if (c->op == kGather) {
    f.add(Field::kSize, "gather.size", &c->gather.size);
    f.add(Field::kCount, "gather.max_seq_len", &c->gather.max_seq_len);
    f.table("block_table", &c->src.table);
    f.lens("seq_lens", &c->lens);
    if (c->with_options) {
      f.add(Field::kSize, "options.size", &c->options.size);
      f.add(Field::kCount, "options.flags", &c->options.flags);
      f.add(Field::kExtent, "options.null_block_id", &c->src.view.null_block_id);
      f.add(Field::kCount, "options.secondary_num_blocks", &c->src.view.secondary_num_blocks);
    }
  } else if (c->op == kMigrate) {
    f.add(Field::kSize, "migrate.size", &c->migrate.size);
    f.add(Field::kCount, "migrate.flags", &c->migrate.flags);
    f.add(Field::kCount, "migrate.num_heads", &c->migrate.num_heads);
    f.add(Field::kPointer, "migrate.seq_lens", &c->migrate.seq_lens);
    f.add(Field::kPointer, "migrate.src", &c->migrate.src);
    f.add(Field::kPointer, "migrate.dst", &c->migrate.dst);
    f.lens("seq_lens", &c->lens);
    f.view("src", &c->src);
    f.view("dst", &c->dst);
  }
  return f;
}

template <class T>
T load(const void *at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

void mutate(Random &random, Case *c) {
  Fields fields = fields_of(c);
  Field &field = random.pick(fields.all);
  const auto store = [&](auto value) {
    std::memcpy(field.at, &value, sizeof value);
    c->story += "  " + field.name + " = " + std::to_string(static_cast<long long>(value)) + "\n";
  };
  c->mutated = true;
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
      const bool shift = was && c->memory.find(load<void *>(field.at)) && random.one_in(2);
      return store(shift ? was + 1 : uintptr_t{0});
    }
  }
}

// ---- what a call claims to own, against what it was given ----

bool tensor_fits(Memory &memory, const kvx_tensor_desc_t &tensor, const uint8_t *data) {
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

bool end_fits(Memory &memory, const End &end) {
  for (const kvx_cache_desc_t &cache : end.layers) {
    for (const kvx_tensor_desc_t *tensor : {&cache.k, &cache.v}) {
      if (!tensor_fits(memory, *tensor, static_cast<const uint8_t *>(tensor->data))) return false;
      if (end.table.format != KVX_BLOCK_TABLE_KV_OFFSETS || !cache.pool.secondary || !tensor->data)
        continue;
      kvx_tensor_desc_t second = *tensor;
      second.shape[0] =
          end.view.secondary_num_blocks ? end.view.secondary_num_blocks : cache.num_blocks;
      const auto apart = static_cast<const uint8_t *>(tensor->data) -
                         static_cast<const uint8_t *>(cache.pool.primary);
      if (!cache.pool.primary || apart < 0 || apart > (1 << 24)) continue;  // refused
      if (!tensor_fits(memory, second, static_cast<const uint8_t *>(cache.pool.secondary) + apart))
        return false;
    }
  }
  return true;
}

bool ints_fit(Memory &memory, const void *data, kvx_dtype_t dtype, uint64_t count) {
  if (!data || (dtype != KVX_DTYPE_S32 && dtype != KVX_DTYPE_S64)) return true;  // refused
  return memory.holds(data, Wide{size_of(dtype)} * static_cast<Wide>(count));
}

bool scales_fit(Memory &memory, const End &end) {
  for (const auto &scales : end.scales) {
    for (const kvx_scale_desc_t &scale : scales) {
      kvx_tensor_desc_t tensor{};
      tensor.dtype = scale.dtype;
      tensor.ndim = scale.granularity == KVX_SCALE_PER_TENSOR ? 0 : scale.ndim;
      std::copy(scale.shape, scale.shape + KVX_MAX_TENSOR_DIMS, tensor.shape);
      std::copy(scale.stride, scale.stride + KVX_MAX_TENSOR_DIMS, tensor.stride);
      if (!tensor_fits(memory, tensor, static_cast<const uint8_t *>(scale.data))) return false;
    }
  }
  return true;
}

bool table_counts_agree(const kvx_block_table_t &table) {
  if (table.format == KVX_BLOCK_TABLE_RAGGED)
    return table.indptr_count == uint64_t{table.seq_count} + 1;
  Wide count = Wide{table.seq_count} * table.max_blocks_per_seq;
  if (table.format == KVX_BLOCK_TABLE_KV_OFFSETS) count *= Wide{2} * table.beam_width;
  return count == table.indices_count;
}

bool table_fits(Memory &memory, const kvx_block_table_t &table) {
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

Claims claims_of(Case &c) {
  const bool migrate = c.op == kMigrate;
  for (const End *end : {&c.src, &c.dst}) {
    if (!scales_fit(c.memory, *end)) return Claims::kUnfair;
    if (migrate && end->view.num_layers > end->layers.size()) return Claims::kUnfair;
    if (migrate && end->view.slots &&
        !ints_fit(c.memory, end->slots.slots, end->slots.dtype, end->slots.token_count)) {
      return Claims::kUnfair;
    }
    if (migrate && end->view.starts &&
        !ints_fit(c.memory, end->starts.lengths, end->starts.dtype, end->starts.seq_count)) {
      return Claims::kUnfair;
    }
    const bool has_table =
        migrate ? end->view.block_table != nullptr : c.op == kGather && end == &c.src;
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
  const bool fits = end_fits(c.memory, c.src) && end_fits(c.memory, c.dst) &&
                    (!io || (io_fits(c.io.key) && io_fits(c.io.value)));
  return fits ? Claims::kOwned : Claims::kTooLarge;
}

// Leaves the call with nothing to move: null blocks, skipped slots, no tokens, no zero fill.
void disarm(Case *c) {
  const auto fill = [&](const void *data, int byte) {
    Block *block = data ? c->memory.find(data) : nullptr;
    if (block) std::memset(block->data.get(), byte, block->size);
  };
  for (End *end : {&c->src, &c->dst}) {
    fill(end->table.indices, 0xff);
    fill(end->slots.slots, 0xff);
    fill(end->starts.lengths, 0);
  }
  fill(c->lens.lengths, 0);
  c->options.flags &= ~KVX_FLAG_ZERO_FILL;
  c->migrate.flags &= ~KVX_FLAG_ZERO_FILL;
}

// ---- the call, from structs that are exactly as long as they say ----

struct Placed {
  std::vector<std::unique_ptr<uint8_t[]>> memory;

  template <class T>
  T *put(const T &value) {
    const size_t bytes = std::min<size_t>(std::max<size_t>(value.size, 4), sizeof(T));
    memory.emplace_back(new uint8_t[bytes]);
    std::memcpy(memory.back().get(), &value, bytes);
    return reinterpret_cast<T *>(memory.back().get());
  }
  template <class T>
  const T *const *list(const std::vector<T> &values, size_t count) {
    memory.emplace_back(new uint8_t[std::max<size_t>(count, 1) * sizeof(T *)]);
    auto **pointers = reinterpret_cast<const T **>(memory.back().get());
    for (size_t i = 0; i < count; ++i) pointers[i] = put(values[i]);
    return pointers;
  }
  const kvx_view_t *view(const End &end) {
    kvx_view_t v = end.view;
    if (v.layers) v.layers = list(end.layers, std::min<size_t>(v.num_layers, end.layers.size()));
    if (v.block_table) v.block_table = put(end.table);
    if (v.slots) v.slots = put(end.slots);
    if (v.starts) v.starts = put(end.starts);
    if (v.k_scales) v.k_scales = list(end.scales[0], end.scales[0].size());
    if (v.v_scales) v.v_scales = list(end.scales[1], end.scales[1].size());
    return put(v);
  }
};

kvx_status_t call(const Case &c) {
  Placed placed;
  if (c.op == kValidate) return kvx_validate_cache_desc(placed.put(c.dst.layers[0]));
  if (c.op == kWrite) {
    kvx_write_desc_t write = c.write;
    write.io = c.io;
    write.slots = c.dst.slots;
    if (!c.dst.scales[0].empty()) write.k_scale_desc = c.dst.scales[0][0];
    if (!c.dst.scales[1].empty()) write.v_scale_desc = c.dst.scales[1][0];
    return kvx_write_kv(placed.put(c.dst.layers[0]), placed.put(write), nullptr);
  }
  if (c.op == kGather) {
    kvx_gather_desc_t gather = c.gather;
    gather.io = c.io;
    gather.block_table = c.src.table;
    gather.seq_lens = c.lens;
    const kvx_cache_desc_t *cache = placed.put(c.src.layers[0]);
    if (!c.with_options) return kvx_gather_kv(cache, placed.put(gather), nullptr);
    kvx_gather_options_t options = c.options;
    options.null_block_id = c.src.view.null_block_id;
    options.secondary_num_blocks = c.src.view.secondary_num_blocks;
    if (!c.src.scales[0].empty()) options.k_scale = placed.put(c.src.scales[0][0]);
    if (!c.src.scales[1].empty()) options.v_scale = placed.put(c.src.scales[1][0]);
    return kvx_gather_kv_ext(cache, placed.put(gather), placed.put(options), nullptr);
  }
  kvx_migrate_desc_t migrate = c.migrate;
  if (migrate.seq_lens) migrate.seq_lens = placed.put(c.lens);
  if (migrate.src) migrate.src = placed.view(c.src);
  if (migrate.dst) migrate.dst = placed.view(c.dst);
  return kvx_migrate_kv(placed.put(migrate), nullptr);
}

// ---- what the spec says the call does ----

struct Place {
  int64_t block = -1;  // -1: null
  int64_t offset = 0;
  bool secondary = false;
  bool unsure = false;  // null, and otherwise out of range: either answer is right
};

// Spec: 5.1, 5.2, E.3, E.8. False: the index is out of range.
bool find_place(const End &end, const kvx_cache_desc_t &cache, bool slots, bool table, int kv,
                uint64_t row, Wide token, uint64_t flat, Place *place) {
  const int64_t block_size = cache.block_size;
  *place = Place{};
  if (slots) {
    const int64_t slot = read_int(end.slots.slots, end.slots.dtype, flat);
    if (slot < 0 || slot == end.slots.invalid_slot) return true;
    if (slot >= int64_t{cache.num_blocks} * block_size) return false;
    place->block = slot / block_size;
    place->offset = slot % block_size;
    return true;
  }
  place->offset = static_cast<int64_t>(token % block_size);
  if (!table) {
    place->block = static_cast<int64_t>(row);
    return row < cache.num_blocks && token < block_size;
  }
  const kvx_block_table_t &t = end.table;
  const int64_t null_block = end.view.null_block_id;
  int64_t id;
  if (t.format == KVX_BLOCK_TABLE_RAGGED) {
    id = read_int(t.indices, t.index_dtype,
                  static_cast<uint64_t>(read_int(t.indptr, t.indptr_dtype, row) + token));
  } else if (t.format == KVX_BLOCK_TABLE_PACKED) {
    id = read_int(t.indices, t.index_dtype,
                  static_cast<uint64_t>(row * Wide{t.max_blocks_per_seq} + token / block_size));
  } else {
    const uint64_t at =
        static_cast<uint64_t>((row * Wide{2} + kv) * t.max_blocks_per_seq + token / block_size);
    const auto index = static_cast<int32_t>(read_int(t.indices, t.index_dtype, at));
    if (index == -1) return true;
    const kvx_tensor_desc_t &tensor = kv ? cache.v : cache.k;
    const int64_t unit = cache.pool.bytes_per_block;
    const int64_t n = tensor.stride[0] * size_of(tensor.dtype) / unit;
    const int64_t i = index & INT32_MAX;
    const int64_t mine =
        (static_cast<const uint8_t *>(tensor.data) - static_cast<const uint8_t *>(cache.k.data)) /
        unit;
    place->secondary = index < 0;
    place->block = i / n;
    int64_t blocks = cache.num_blocks;
    if (place->secondary && end.view.secondary_num_blocks) blocks = end.view.secondary_num_blocks;
    if (place->secondary && !cache.pool.secondary) blocks = 0;
    const bool good = i % n == mine && place->block < blocks;
    if (place->block != null_block) return good;
    place->block = -1;
    place->unsure = !good;
    return true;
  }
  if (id < 0 || id == null_block) return true;
  place->block = id;
  return id < cache.num_blocks;
}

uint8_t *element_of(const kvx_cache_desc_t &cache, int kv, const Place &place, int64_t head,
                    int64_t d) {
  const kvx_tensor_desc_t &t = kv ? cache.v : cache.k;
  Wide at;
  if (t.ndim == 5) {
    const int64_t pack = t.shape[4];
    at = Wide{place.block} * t.stride[0] + Wide{head} * t.stride[1] + Wide{d / pack} * t.stride[2] +
         Wide{place.offset} * t.stride[3] + Wide{d % pack} * t.stride[4];
  } else {
    const bool nhd = t.layout == KVX_LAYOUT_BLOCK_NHD;
    at = Wide{place.block} * t.stride[0] + Wide{place.offset} * t.stride[nhd ? 1 : 2] +
         Wide{head} * t.stride[nhd ? 2 : 1] + Wide{d} * t.stride[3];
  }
  auto *base = static_cast<uint8_t *>(t.data);
  if (place.secondary) {
    base = static_cast<uint8_t *>(cache.pool.secondary) +
           (base - static_cast<uint8_t *>(cache.pool.primary));
  }
  return base + static_cast<int64_t>(at * size_of(t.dtype));
}

uint8_t *io_element(const kvx_tensor_desc_t &t, uint64_t row, uint64_t token,
                    uint64_t tokens_per_row, int64_t head, int64_t d) {
  Wide at = Wide{head} * t.stride[t.ndim - 2] + Wide{d} * t.stride[t.ndim - 1];
  if (t.ndim == 4) {
    at += static_cast<Wide>(row) * t.stride[0] + static_cast<Wide>(token) * t.stride[1];
  } else {
    at += static_cast<Wide>(row * tokens_per_row + token) * t.stride[0];
  }
  return static_cast<uint8_t *>(t.data) + static_cast<int64_t>(at * size_of(t.dtype));
}

int64_t dim_of(const kvx_tensor_desc_t &t) {
  return t.ndim == 5 ? t.shape[2] * t.shape[4] : t.shape[3];
}

struct Oracle {
  Case &c;
  const char *bad_index = nullptr;  // what the spec wants refused: the first index out of range
  bool scales_good = true;          // those that are used
  bool unsure = false;              // a bad scale that no token uses: either answer is right
  std::string complaint{};

  void allow() { unsure = true; }
  void refuse(const char *what) {
    if (!bad_index) bad_index = what;
  }

  void mark(uint8_t *dst, int64_t size, const uint8_t *src, bool same_bytes) {
    Block *block = c.memory.find(dst);
    if (!block || dst + size > block->data.get() + block->size) {
      complaint = "the call names an element outside its memory";
      return;
    }
    const Block *from = src ? c.memory.find(src) : nullptr;
    if (src && (!from || src + size_of(KVX_DTYPE_U8) > from->data.get() + from->size)) {
      complaint = "the call reads an element outside its memory";
      return;
    }
    const auto at = static_cast<size_t>(dst - block->data.get());
    for (size_t i = at; i < at + static_cast<size_t>(size); ++i) {
      if (block->writes[i] < 2) ++block->writes[i];
      block->known[i] = !src || same_bytes;
      block->expected[i] = !src ? 0
                           : same_bytes
                               ? from->before[static_cast<size_t>(src - from->data.get()) + i - at]
                               : 0;
    }
  }

  // The scale of an element must be usable.
  void use_scale(const End &end, int kv, size_t layer, const Place &place, int64_t head) {
    if (!scaled(end, kv, layer) || place.block < 0) return;
    const kvx_scale_desc_t &s = end.scales[kv][layer];
    int64_t at = 0;
    switch (s.granularity) {
      case KVX_SCALE_PER_BLOCK:
        at = place.block * s.stride[0];
        break;
      case KVX_SCALE_PER_HEAD:
        at = head * s.stride[0];
        break;
      case KVX_SCALE_PER_BLOCK_HEAD:
        at = place.block * s.stride[0] + head * s.stride[1];
        break;
      case KVX_SCALE_PER_TOKEN_HEAD:
        at = place.block * s.stride[0] + place.offset * s.stride[1] + head * s.stride[2];
        break;
      default:
        break;
    }
    const float value =
        read_scale(static_cast<const uint8_t *>(s.data) + at * size_of(s.dtype), s.dtype);
    if (!(value > 0 && std::isfinite(value))) scales_good = false;
  }

  bool scaled(const End &end, int kv, size_t layer) const {
    if (c.op == kMigrate && !(kv ? end.view.v_scales : end.view.k_scales)) return false;
    return !end.scales[kv].empty() && end.scales[kv][layer].data;
  }

  // Every scale, used or not.
  void look_at_scales(const End &end) {
    for (const auto &scales : end.scales) {
      for (const kvx_scale_desc_t &s : scales) {
        Block *block = s.data ? c.memory.find(s.data) : nullptr;
        if (!block) continue;
        for (size_t at = 0; at + static_cast<size_t>(size_of(s.dtype)) <= block->size;
             at += static_cast<size_t>(size_of(s.dtype))) {
          const float value = read_scale(block->data.get() + at, s.dtype);
          if (!(value > 0 && std::isfinite(value))) unsure = true;
        }
      }
    }
  }

  // What a row holds at an end; -1: the table itself is wrong.
  Wide held(const End &end, const kvx_cache_desc_t &cache, bool table, uint64_t row) {
    if (!table) return cache.block_size;
    const kvx_block_table_t &t = end.table;
    if (t.format != KVX_BLOCK_TABLE_RAGGED) return Wide{t.max_blocks_per_seq} * cache.block_size;
    return Wide{read_int(t.indptr, t.indptr_dtype, row + 1)} -
           read_int(t.indptr, t.indptr_dtype, row);
  }

  void check_indptr(const kvx_block_table_t &t) {
    if (t.format != KVX_BLOCK_TABLE_RAGGED) return;
    int64_t last = 0;
    for (uint32_t i = 0; i <= t.seq_count; ++i) {
      const int64_t value = read_int(t.indptr, t.indptr_dtype, i);
      if ((i == 0 && value != 0) || value < last) refuse("indptr");
      last = value;
    }
    if (last != t.indices_count) refuse("the end of indptr");
  }

  void write() {
    const kvx_cache_desc_t &cache = c.dst.layers[0];
    for (int kv = 0; kv < (is_absent(cache.v) ? 1 : 2); ++kv) {
      const kvx_tensor_desc_t &io = kv ? c.io.value : c.io.key, &to = kv ? cache.v : cache.k;
      const bool same = io.dtype == to.dtype && !scaled(c.dst, kv, 0);
      for (uint64_t t = 0; t < c.io.num_tokens; ++t) {
        Place place;
        if (!find_place(c.dst, cache, true, false, kv, 0, 0, t, &place)) refuse("a slot");
        if (bad_index) return;
        if (place.block < 0) continue;
        for (int64_t h = 0; h < cache.num_kv_heads; ++h) {
          use_scale(c.dst, kv, 0, place, h);
          for (int64_t d = 0; d < dim_of(to); ++d) {
            mark(element_of(cache, kv, place, h, d), size_of(to.dtype),
                 io_element(io, 0, t, 0, h, d), same);
          }
        }
      }
    }
  }

  void gather() {
    const kvx_cache_desc_t &cache = c.src.layers[0];
    const kvx_block_table_t &table = c.src.table;
    const bool zero_fill = c.with_options && (c.options.flags & KVX_FLAG_ZERO_FILL);
    const uint32_t beams = table.format == KVX_BLOCK_TABLE_KV_OFFSETS ? table.beam_width : 1;
    check_indptr(table);
    for (uint64_t row = 0; !bad_index && row < uint64_t{table.seq_count} * beams; ++row) {
      const int64_t length = read_int(c.lens.lengths, c.lens.dtype, row / beams);
      const Wide most = held(c.src, cache, true, row);
      if (length < 0 || length > most) {
        std::min<Wide>(length, c.gather.max_seq_len) <= most &&length > 0 ? allow()
                                                                          : refuse("a length");
      }
      for (int kv = 0; !bad_index && kv < (is_absent(cache.v) ? 1 : 2); ++kv) {
        const kvx_tensor_desc_t &io = kv ? c.io.value : c.io.key, &from = kv ? cache.v : cache.k;
        const bool same = io.dtype == from.dtype && !scaled(c.src, kv, 0);
        for (uint64_t t = 0; t < c.gather.max_seq_len; ++t) {
          Place place;
          const bool stored = t < static_cast<uint64_t>(length);
          if (stored && !find_place(c.src, cache, false, true, kv, row, t, 0, &place))
            refuse("a table entry");
          if (bad_index) return;
          if (place.unsure) allow();
          if (place.block < 0 && !zero_fill) continue;
          for (int64_t h = 0; h < cache.num_kv_heads; ++h) {
            use_scale(c.src, kv, 0, place, h);
            for (int64_t d = 0; d < dim_of(from); ++d) {
              uint8_t *to = io_element(io, row, t, c.gather.max_seq_len, h, d);
              const uint8_t *src = place.block < 0 ? nullptr : element_of(cache, kv, place, h, d);
              mark(to, size_of(io.dtype), src, same);
            }
          }
        }
      }
    }
  }

  void migrate() {
    const End *ends[2] = {&c.src, &c.dst};
    uint64_t rows = c.lens.seq_count;
    for (const End *end : ends) {
      if (!end->view.block_table) continue;
      check_indptr(end->table);
      rows = std::max(rows, uint64_t{end->table.seq_count} * std::max(end->table.beam_width, 1u));
    }
    if (rows == 0) return;
    const uint64_t per_length = rows / c.lens.seq_count;
    const bool zero_fill = c.migrate.flags & KVX_FLAG_ZERO_FILL;
    Wide total = 0;
    for (uint64_t row = 0; row < rows; ++row) {
      const int64_t length = read_int(c.lens.lengths, c.lens.dtype, row / per_length);
      if (length < 0) refuse("a length");
      total += length;
      for (const End *end : ends) {
        if (end->view.slots) continue;
        const int64_t start =
            end->view.starts ? read_int(end->starts.lengths, end->starts.dtype, row) : 0;
        const Wide beyond =
            Wide{start} + length - held(*end, end->layers[0], end->view.block_table, row);
        if (start < 0 || beyond > 0)
          length == 0 && start >= 0 ? allow() : refuse("a start or a length");
      }
    }
    for (const End *end : ends) {
      if (end->view.slots && total != end->slots.token_count) refuse("token_count");
    }
    // Blocks of tokens that move, and of tokens whose other end is null: K or V, pool, id.
    std::set<std::tuple<int, bool, int64_t>> used[2], touched[2];
    uint64_t flat = 0;
    for (uint64_t row = 0; !bad_index && row < rows; ++row) {
      const int64_t length = read_int(c.lens.lengths, c.lens.dtype, row / per_length);
      for (int64_t t = 0; !bad_index && t < length; ++t, ++flat) {
        for (size_t l = 0; l < c.src.view.num_layers; ++l) {
          const kvx_cache_desc_t *caches[2] = {&c.src.layers[l], &c.dst.layers[l]};
          for (int kv = 0; kv < (is_absent(caches[0]->v) ? 1 : 2); ++kv) {
            Place place[2];
            for (int e = 0; e < 2; ++e) {
              const kvx_view_t &view = ends[e]->view;
              const int64_t start =
                  view.starts ? read_int(ends[e]->starts.lengths, ends[e]->starts.dtype, row) : 0;
              if (!find_place(*ends[e], *caches[e], view.slots, view.block_table, kv, row,
                              Wide{start} + t, flat, &place[e])) {
                refuse("a table entry or slot");
              }
            }
            if (bad_index) return;
            for (int e = 0; e < 2; ++e) {
              if (place[e].unsure) allow();
              const bool moves = place[0].block >= 0 && place[1].block >= 0;
              if (place[e].block >= 0)
                (moves ? used : touched)[e].insert({kv, place[e].secondary, place[e].block});
            }
            if (place[1].block < 0 || (place[0].block < 0 && !zero_fill)) continue;
            const kvx_tensor_desc_t &from = kv ? caches[0]->v : caches[0]->k,
                                    &to = kv ? caches[1]->v : caches[1]->k;
            const bool same =
                from.dtype == to.dtype && !scaled(c.src, kv, l) && !scaled(c.dst, kv, l);
            const int64_t heads =
                c.migrate.num_heads ? c.migrate.num_heads : caches[0]->num_kv_heads;
            for (int64_t h = 0; h < heads; ++h) {
              const int64_t src_head = c.src.view.head_start + h,
                            dst_head = c.dst.view.head_start + h;
              if (place[0].block >= 0) {
                use_scale(c.src, kv, l, place[0], src_head);
                use_scale(c.dst, kv, l, place[1], dst_head);
              }
              for (int64_t d = 0; d < dim_of(from); ++d) {
                const uint8_t *src = place[0].block < 0
                                         ? nullptr
                                         : element_of(*caches[0], kv, place[0], src_head, d);
                mark(element_of(*caches[1], kv, place[1], dst_head, d), size_of(to.dtype), src,
                     same);
              }
            }
          }
        }
      }
    }
    if (c.src.layers[0].k.data != c.dst.layers[0].k.data) return;  // not the same pool
    for (const auto &block : used[1]) {
      if (used[0].count(block)) refuse("a block of the same pool is read and written");
    }
    for (int e = 0; e < 2; ++e) {
      for (const auto &[kv, secondary, id] : touched[e]) {
        for (const int any : {0, 1}) {
          if (used[1 - e].count({any, secondary, id}) || touched[1 - e].count({any, secondary, id}))
            allow();
        }
      }
    }
  }

  void run() {
    for (auto &block : c.memory.blocks) {
      block->writes.assign(block->size, 0);
      block->known.assign(block->size, 0);
      block->expected.assign(block->size, 0);
    }
    if (!c.mutated) look_at_scales(c.src), look_at_scales(c.dst);
    if (c.op == kWrite) write();
    if (c.op == kGather) gather();
    if (c.op == kMigrate) migrate();
  }

  // Compares memory with what an accepted call may have done to it.
  void compare() {
    for (size_t b = 0; b < c.memory.blocks.size() && complaint.empty(); ++b) {
      const Block &block = *c.memory.blocks[b];
      for (size_t i = 0; i < block.size; ++i) {
        const uint8_t now = block.data[i];
        const bool right = block.writes[i] == 0
                               ? now == block.before[i]
                               : block.writes[i] > 1 || !block.known[i] || now == block.expected[i];
        if (right) continue;
        complaint = "byte " + std::to_string(i) + " of buffer " + std::to_string(b) + " is " +
                    std::to_string(now) + ", expected " +
                    std::to_string(block.writes[i] ? block.expected[i] : block.before[i]) +
                    (block.writes[i] ? " (a token's)" : " (untouched)");
        break;
      }
    }
  }
};

// ---- running ----

struct Counts {
  uint64_t calls[kOps]{}, accepted[kOps]{}, refused[kOps]{}, out_of_range[kOps]{}, unfair = 0;
};

constexpr const char *kOpNames[] = {"validate", "write", "gather", "migrate"};

std::string g_where = "before the first call";  // for the report of a sanitizer

void print_where() { std::fprintf(stderr, "while running: %s\n", g_where.c_str()); }

bool fail(const Case &c, const std::string &what) {
  std::printf("FAILED: %s\n%s: %s\n%slast error: %s\n", g_where.c_str(), kOpNames[c.op],
              what.c_str(), c.story.c_str(), kvx_last_error());
  return false;
}

bool run_one(Random random, Counts *counts, bool valid_only, bool big) {
  const bool validate = !valid_only && random.one_in(8);
  const Op op = validate ? kValidate : random.pick({kWrite, kGather, kMigrate});
  const bool hostile = !valid_only && random.one_in(3);
  Case c;
  make_case(random, op, hostile, big, &c);
  if (!valid_only && !random.one_in(4)) {
    const uint32_t mutations = 1 + random.below(3);
    for (uint32_t i = 0; i < mutations; ++i) mutate(random, &c);
  }
  Claims claims = Claims::kOwned;
  if (c.mutated) {
    claims = claims_of(c);
    if (claims == Claims::kUnfair) return ++counts->unfair, true;
    if (claims == Claims::kTooLarge) disarm(&c);
  }
  c.memory.snapshot();
  const kvx_status_t status = call(c);
  ++counts->calls[op];
  if (status != KVX_STATUS_OK) {
    ++counts->refused[op];
    if (status == KVX_STATUS_OUT_OF_RANGE) ++counts->out_of_range[op];
    if (status < 0 || status > KVX_STATUS_OUT_OF_RANGE)
      return fail(c, "status " + std::to_string(status));
    if (!c.memory.unchanged()) return fail(c, "a refused call has changed memory");
    const std::string sentence = kvx_last_error();
    if (sentence.empty() || sentence.size() > 400) return fail(c, "no readable sentence");
    for (const char letter : sentence) {
      if (letter < ' ' || letter > '~') return fail(c, "the sentence is not text");
    }
    if (c.mutated) return true;
    Oracle oracle{c};
    oracle.run();
    if (!oracle.bad_index && oracle.scales_good && !oracle.unsure)
      return fail(c, "a valid call was refused");
    return true;
  }
  ++counts->accepted[op];
  if (claims == Claims::kTooLarge) {
    return c.memory.unchanged() ? true : fail(c, "a call without tokens has changed memory");
  }
  Oracle oracle{c};
  oracle.run();
  if (oracle.bad_index) return fail(c, std::string("accepted out of range: ") + oracle.bad_index);
  if (!oracle.scales_good) return fail(c, "a scale that is not finite and positive was accepted");
  if (oracle.complaint.empty()) oracle.compare();
  return oracle.complaint.empty() ? true : fail(c, oracle.complaint);
}

uint64_t argument(int argc, char **argv, int i, uint64_t otherwise) {
  return argc > i ? std::strtoull(argv[i], nullptr, 10) : otherwise;
}

using Clock = std::chrono::steady_clock;

int fuzz(double seconds, uint64_t seed, uint64_t first, uint64_t iterations) {
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  Counts counts;
  uint64_t i = first;
  for (; i < first + iterations && (seconds == 0 || Clock::now() < end); ++i) {
    g_where = "fuzz 0 " + std::to_string(seed) + " " + std::to_string(i) + " 1";
    Random random{seed * 0x2545f4914f6cdd1du + i};
    random.next();
    if (!run_one(random, &counts, false, i % 4096 == 4095)) return EXIT_FAILURE;
  }
  for (int op = 0; op < kOps; ++op) {
    std::printf("%s: %llu calls, %llu accepted, %llu refused, %llu of them out of range\n",
                kOpNames[op], static_cast<unsigned long long>(counts.calls[op]),
                static_cast<unsigned long long>(counts.accepted[op]),
                static_cast<unsigned long long>(counts.refused[op]),
                static_cast<unsigned long long>(counts.out_of_range[op]));
  }
  std::printf("%llu iterations, %llu not called: they claim indices that are not there\n",
              static_cast<unsigned long long>(i - first),
              static_cast<unsigned long long>(counts.unfair));
  return EXIT_SUCCESS;
}

// Large calls share the library's threads, small ones run beside them.
int threads(double seconds, uint64_t seed) {
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  std::atomic<bool> ok{true};
  std::atomic<uint64_t> calls{0};
  std::vector<std::thread> all;
  for (uint64_t thread = 0; thread < 4; ++thread) {
    all.emplace_back([&, thread] {
      Counts counts;
      for (uint64_t i = 0; ok && Clock::now() < end; ++i) {
        Random random{seed + thread * 0x100000000u + i};
        random.next();
        if (thread == 0) kvx_set_num_threads(1 + static_cast<uint32_t>(i % 4));
        if (!run_one(random, &counts, true, i % 4 == thread)) ok = false;
        ++calls;
      }
    });
  }
  for (std::thread &thread : all) thread.join();
  std::printf("%llu calls from 4 threads\n", static_cast<unsigned long long>(calls.load()));
  return ok ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
extern "C" void __sanitizer_set_death_callback(void (*callback)());
extern "C" void __ubsan_on_report() { print_where(); }
#endif

int main(int argc, char **argv) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  __sanitizer_set_death_callback(print_where);
#endif
  if (argc > 1 && std::strcmp(argv[1], "threads") == 0) {
    g_where = "threads";
    return threads(static_cast<double>(argument(argc, argv, 2, 5)), argument(argc, argv, 3, 1));
  }
  return fuzz(static_cast<double>(argument(argc, argv, 1, 10)), argument(argc, argv, 2, 1),
              argument(argc, argv, 3, 0), argument(argc, argv, 4, UINT64_MAX >> 1));
}
