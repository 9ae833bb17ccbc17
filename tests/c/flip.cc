// Calls whose indices, lengths and scales another thread changes while they run: valid most of the
// time, wild for a moment. Tensors end at a page that cannot be touched, and what lies before them
// is compared, so that a byte read or written elsewhere is seen. Spec: 7
//
//   flip [seconds [kind]]    "write to slots", say; all of them for as long each if not given
//
// Prints how many calls were accepted and refused. A call that never returns is for the caller's
// time limit.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <thread>
#include <vector>

#include "kvx/kvx_ext.h"

namespace {

constexpr uint32_t kHeads = 2, kDim = 16, kBlockSize = 4, kBlocks = 256, kRows = 8;
constexpr uint32_t kColumns = 32, kTokens = kBlockSize * kColumns;  // of a row
constexpr uint8_t kCanary = 0xa5;
constexpr uint64_t kEnough = 10;  // calls that were accepted, and that were refused
constexpr double kMostSeconds = 60;

// Memory that ends where a page does; the next one cannot be touched.
class Guarded {
 public:
  explicit Guarded(size_t bytes) {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t size = (bytes + page - 1) / page * page;
    auto *pages = static_cast<uint8_t *>(
        mmap(nullptr, size + 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (pages == MAP_FAILED) std::abort();
    mprotect(pages, page, PROT_NONE);
    mprotect(pages + page + size, page, PROT_NONE);
    begin_ = pages + page;
    data_ = begin_ + size - bytes;
    std::memset(begin_, kCanary, size - bytes);
  }
  uint8_t *data() const { return data_; }
  bool is_intact() const {
    for (const uint8_t *at = begin_; at < data_; ++at)
      if (*at != kCanary) return false;
    return true;
  }

 private:
  uint8_t *begin_, *data_;
};

// Numbers that another thread changes.
struct Target {
  uint8_t *data;
  size_t count, size;
  std::vector<int64_t> wild;  // what they become for a moment
};

struct Calls {
  std::vector<Guarded> memory;
  std::vector<Target> targets;
  std::function<kvx_status_t()> run;

  uint8_t *allocate(size_t bytes) { return memory.emplace_back(bytes).data(); }

  template <class Int>
  Int *ints(const std::vector<Int> &values, std::initializer_list<int64_t> wild) {
    auto *data = reinterpret_cast<Int *>(allocate(values.size() * sizeof(Int)));
    std::memcpy(data, values.data(), values.size() * sizeof(Int));
    targets.push_back({reinterpret_cast<uint8_t *>(data), values.size(), sizeof(Int), wild});
    return data;
  }

  kvx_tensor_desc_t tensor(kvx_dtype_t dtype, std::initializer_list<int64_t> shape) {
    kvx_tensor_desc_t made{};
    made.size = sizeof made;
    made.dtype = dtype;
    made.layout = KVX_LAYOUT_BLOCK_NHD;
    made.memory = KVX_MEMORY_HOST;
    made.ndim = static_cast<uint32_t>(shape.size());
    int64_t stride = 1;
    for (uint32_t axis = made.ndim; axis-- > 0; stride *= made.shape[axis]) {
      made.shape[axis] = shape.begin()[axis];
      made.stride[axis] = stride;
    }
    made.data = allocate(static_cast<size_t>(stride) * (dtype == KVX_DTYPE_F8_E4M3 ? 1 : 2));
    return made;
  }

  kvx_cache_desc_t cache(kvx_dtype_t dtype = KVX_DTYPE_BF16) {
    kvx_cache_desc_t made{};
    made.size = sizeof made;
    made.num_blocks = kBlocks;
    made.block_size = kBlockSize;
    made.num_kv_heads = kHeads;
    made.head_dim = kDim;
    made.k = tensor(dtype, {kBlocks, kBlockSize, kHeads, kDim});
    made.v = tensor(dtype, {kBlocks, kBlockSize, kHeads, kDim});
    return made;
  }
};

const std::initializer_list<int64_t> kWild = {
    -1,        kBlocks - 1,        kBlocks,   kBlocks * kBlockSize, INT32_MAX, INT32_MIN,
    INT64_MAX, int64_t{1} << 40,   INT64_MIN, int64_t{1} << 61,     0,         kTokens + 1,
    1 << 20,   -(int64_t{1} << 40)};

std::vector<int64_t> numbers(size_t count, int64_t first, int64_t step) {
  std::vector<int64_t> made;
  for (size_t i = 0; i < count; ++i) made.push_back(first + static_cast<int64_t>(i) * step);
  return made;
}

kvx_seq_lens_t lens(Calls *c, int64_t length, uint32_t rows = kRows) {
  kvx_seq_lens_t made{};
  made.size = sizeof made;
  made.dtype = KVX_DTYPE_S64;
  made.seq_count = rows;
  made.lengths = c->ints(numbers(rows, length, 0), kWild);
  return made;
}

kvx_slot_mapping_t slots(Calls *c, uint32_t count) {
  kvx_slot_mapping_t made{};
  made.size = sizeof made;
  made.dtype = KVX_DTYPE_S64;
  made.token_count = count;
  made.invalid_slot = -1;
  std::vector<int64_t> all = numbers(count, 0, 1);
  for (size_t i = count; i > 1; --i) std::swap(all[i - 1], all[(i * 7919) % i]);
  made.slots = c->ints(all, kWild);
  return made;
}

// Blocks from `first` on, row after row.
kvx_block_table_t packed(Calls *c, int64_t first, uint32_t rows, uint32_t columns) {
  kvx_block_table_t made{};
  made.size = sizeof made;
  made.format = KVX_BLOCK_TABLE_PACKED;
  made.index_dtype = KVX_DTYPE_S64;
  made.seq_count = rows;
  made.max_blocks_per_seq = columns;
  made.indices_count = rows * columns;
  made.indices = c->ints(numbers(made.indices_count, first, 1), kWild);
  return made;
}

kvx_block_table_t ragged(Calls *c) {
  kvx_block_table_t made{};
  made.size = sizeof made;
  made.format = KVX_BLOCK_TABLE_RAGGED;
  made.index_dtype = made.indptr_dtype = KVX_DTYPE_S64;
  made.seq_count = kRows;
  std::vector<int64_t> blocks;
  for (uint32_t i = 0; i < kRows * kTokens; ++i) blocks.push_back(i / kBlockSize);
  made.indices_count = kRows * kTokens;
  made.indptr_count = kRows + 1;
  made.indices = c->ints(blocks, kWild);
  made.indptr = c->ints(numbers(kRows + 1, 0, kTokens), kWild);
  return made;
}

// A pool whose blocks are a K and a V sub-block.
kvx_cache_desc_t pool(Calls *c) {
  kvx_cache_desc_t made = c->cache();
  constexpr uint32_t kUnit = kBlockSize * kHeads * kDim * 2;
  made.pool.size = sizeof made.pool;
  made.pool.memory = KVX_MEMORY_HOST;
  made.pool.bytes_per_block = kUnit;
  made.pool.primary = c->allocate(size_t{2} * kUnit * kBlocks);
  made.pool.secondary = c->allocate(size_t{2} * kUnit * kBlocks / 2);
  made.k.data = made.pool.primary;
  made.v.data = static_cast<uint8_t *>(made.pool.primary) + kUnit;
  made.k.stride[0] = made.v.stride[0] = kUnit;  // elements of 2 bytes: two sub-blocks
  return made;
}

kvx_block_table_t offsets(Calls *c) {
  kvx_block_table_t made{};
  made.size = sizeof made;
  made.format = KVX_BLOCK_TABLE_KV_OFFSETS;
  made.flags = KVX_BLOCK_TABLE_FLAG_KVCACHEINDEX;
  made.index_dtype = KVX_DTYPE_S32;
  made.seq_count = kRows;
  made.beam_width = 1;
  made.max_blocks_per_seq = kColumns;
  made.indices_count = kRows * 2 * kColumns;
  std::vector<int32_t> all;
  for (uint32_t row = 0; row < kRows; ++row) {
    for (const int32_t kv : {0, 1}) {
      for (uint32_t i = 0; i < kColumns; ++i) {
        const auto block = static_cast<int32_t>(row * kColumns + i);
        all.push_back(block % 2 ? block * 2 + kv : INT32_MIN + block / 2 * 2 + kv);
      }
    }
  }
  made.indices = c->ints(all, {-1, INT32_MAX, -2, INT32_MIN, kBlocks * 2, INT32_MIN + kBlocks, 1,
                               INT32_MIN + 1, 1 << 24});
  return made;
}

kvx_span_t span(const kvx_cache_desc_t *const *layers) {
  kvx_span_t made{};
  made.size = sizeof made;
  made.num_layers = 1;
  made.layers = layers;
  return made;
}

// A migration and everything that it points to.
struct Migration {
  kvx_cache_desc_t caches[2];
  const kvx_cache_desc_t *layers[2] = {&caches[0], &caches[1]};
  kvx_block_table_t tables[2];
  kvx_slot_mapping_t slots;
  kvx_seq_lens_t lens, starts;
  kvx_scale_desc_t scale;
  const kvx_scale_desc_t *scales = &scale;
  kvx_span_t src, dst;
  kvx_migrate_desc_t desc{};

  void connect(Calls *c) {
    desc.size = sizeof desc;
    desc.seq_lens = &lens;
    desc.src = &src;
    desc.dst = &dst;
    c->run = [this] { return kvx_migrate_kv(&desc, nullptr); };
  }
};

void make_write(Calls *c) {
  static kvx_cache_desc_t cache;
  static kvx_write_desc_t write;
  constexpr uint32_t kCount = kBlocks * kBlockSize;
  cache = c->cache();
  write = {};
  write.size = sizeof write;
  write.io.size = sizeof write.io;
  write.io.key = c->tensor(KVX_DTYPE_BF16, {kCount, kHeads, kDim});
  write.io.value = c->tensor(KVX_DTYPE_BF16, {kCount, kHeads, kDim});
  write.io.num_tokens = kCount;
  write.io.num_kv_heads = kHeads;
  write.io.head_dim = kDim;
  write.slots = slots(c, kCount);
  c->run = [] { return kvx_write_kv(&cache, &write, nullptr); };
}

void make_gather(Calls *c) {
  static kvx_cache_desc_t cache;
  static kvx_gather_desc_t gather;
  static kvx_gather_options_t options;
  cache = c->cache();
  gather = {};
  gather.size = sizeof gather;
  gather.io.size = sizeof gather.io;
  gather.io.key = c->tensor(KVX_DTYPE_BF16, {kRows, kTokens, kHeads, kDim});
  gather.io.value = c->tensor(KVX_DTYPE_BF16, {kRows, kTokens, kHeads, kDim});
  gather.io.num_tokens = kRows * kTokens;
  gather.io.num_kv_heads = kHeads;
  gather.io.head_dim = kDim;
  gather.block_table = packed(c, 0, kRows, kColumns);
  gather.seq_lens = lens(c, kTokens - 3);
  gather.max_seq_len = kTokens;
  options = {};
  options.size = sizeof options;
  options.flags = KVX_FLAG_ZERO_FILL;
  c->run = [] { return kvx_gather_kv_ext(&cache, &gather, &options, nullptr); };
}

void make_ragged_to_slots(Calls *c) {
  static Migration m;
  for (kvx_cache_desc_t &cache : m.caches) cache = c->cache();
  m.src = span(&m.layers[0]);
  m.dst = span(&m.layers[1]);
  m.tables[0] = ragged(c);
  m.src.block_table = &m.tables[0];
  m.slots = slots(c, kRows * (kTokens - 8));
  m.dst.slots = &m.slots;
  m.lens = lens(c, kTokens - 8);
  m.starts = lens(c, 4);
  m.src.starts = &m.starts;
  m.connect(c);
}

void make_offsets_to_packed(Calls *c) {
  static Migration m;
  m.caches[0] = pool(c);
  m.caches[1] = c->cache();
  m.src = span(&m.layers[0]);
  m.dst = span(&m.layers[1]);
  m.src.secondary_num_blocks = kBlocks / 2;
  m.tables[0] = offsets(c);
  m.tables[1] = packed(c, 0, kRows, kColumns);
  m.src.block_table = &m.tables[0];
  m.dst.block_table = &m.tables[1];
  m.lens = lens(c, kTokens - 4);
  m.starts = lens(c, 3);
  m.dst.starts = &m.starts;
  m.connect(c);
}

void make_same_pool(Calls *c) {
  static Migration m;
  m.caches[0] = m.caches[1] = c->cache();
  m.src = span(&m.layers[0]);
  m.dst = span(&m.layers[1]);
  for (const int end : {0, 1}) m.tables[end] = packed(c, end * (kBlocks / 2), 4, kColumns);
  m.src.block_table = &m.tables[0];
  m.dst.block_table = &m.tables[1];
  m.lens = lens(c, kTokens - 1, 4);
  m.connect(c);
}

kvx_plane_t plane(Calls *c, uint32_t role, uint32_t tokens_per_entry,
                  std::initializer_list<kvx_plane_axis_t> axes) {
  kvx_plane_t made{};
  made.size = sizeof made;
  made.role = role;
  made.dtype = KVX_DTYPE_BF16;
  made.memory = KVX_MEMORY_HOST;
  made.tokens_per_entry = tokens_per_entry;
  int64_t bytes = 2;
  for (const kvx_plane_axis_t &axis : axes) {
    made.axes[made.num_axes++] = axis;
    bytes += (axis.extent - 1) * axis.stride_bytes;
  }
  made.data = c->allocate(static_cast<size_t>(bytes));
  return made;
}

// Keys by a table of their own, one entry for 4 tokens by the span's, and a state by slots.
void make_planes(Calls *c) {
  static Migration m;
  static kvx_plane_t planes[2][3];
  static const kvx_plane_t *lists[2][3];
  static kvx_block_table_t own[2];
  static kvx_slot_mapping_t states[2];
  for (const int end : {0, 1}) {
    m.caches[end] = c->cache();
    kvx_span_t &made = end ? m.dst : m.src;
    made = span(&m.layers[end]);
    m.tables[end] = packed(c, 0, kRows, kColumns);
    made.block_table = &m.tables[end];
    planes[end][0] = plane(c, 0, 1,
                           {{KVX_AXIS_BLOCK, 0, kBlocks, 256},
                            {KVX_AXIS_TOKEN, 0, 2, 128},
                            {KVX_AXIS_DIM, 0, kDim, 4},
                            {KVX_AXIS_TOKEN, 0, 2, 2}});
    own[end] = packed(c, 0, kRows, kColumns);
    planes[end][0].block_table = &own[end];
    planes[end][1] =
        plane(c, 1, 4, {{KVX_AXIS_BLOCK, 0, kBlocks, kDim * 2}, {KVX_AXIS_DIM, 0, kDim, 2}});
    planes[end][2] =
        plane(c, 2, 0, {{KVX_AXIS_BLOCK, 0, kRows, kDim * 2}, {KVX_AXIS_DIM, 0, kDim, 2}});
    states[end] = slots(c, kRows);
    planes[end][2].slots = &states[end];
    for (const int i : {0, 1, 2}) lists[end][i] = &planes[end][i];
    made.planes = lists[end];
    made.num_planes = 3;
  }
  m.lens = lens(c, kTokens - 4);
  m.starts = lens(c, 4);
  m.src.starts = &m.starts;
  m.connect(c);
}

// Addresses that lead nowhere are the caller's: what is wild is no address.
kvx_block_table_t pointers(Calls *c, const kvx_cache_desc_t &cache) {
  kvx_block_table_t made{};
  made.size = sizeof made;
  made.format = KVX_BLOCK_TABLE_POINTERS;
  made.index_dtype = KVX_DTYPE_U64;
  made.seq_count = kRows;
  made.max_blocks_per_seq = kColumns;
  made.indices_count = kRows * kColumns * 2;
  constexpr size_t kBytes = size_t{kBlockSize} * kHeads * kDim * 2;
  std::vector<int64_t> addresses;
  for (uint32_t i = 0; i < kRows * kColumns; ++i) {
    for (const void *data : {cache.k.data, cache.v.data})
      addresses.push_back(reinterpret_cast<int64_t>(data) + static_cast<int64_t>(i * kBytes));
  }
  made.indices = c->ints(addresses, {0, -1, INT64_MIN, 1, (int64_t{1} << 62) + 2});
  return made;
}

kvx_cache_desc_t one_block(kvx_cache_desc_t cache) {
  cache.num_blocks = 1;
  cache.k.shape[0] = cache.v.shape[0] = 1;
  return cache;
}

void make_pointers(Calls *c) {
  static Migration m;
  for (const int end : {0, 1}) {
    const kvx_cache_desc_t whole = c->cache();
    m.caches[end] = one_block(whole);
    kvx_span_t &made = end ? m.dst : m.src;
    made = span(&m.layers[end]);
    m.tables[end] = pointers(c, whole);
    made.block_table = &m.tables[end];
  }
  m.lens = lens(c, kTokens - 4);
  m.starts = lens(c, 3);
  m.dst.starts = &m.starts;
  m.connect(c);
}

// What a plan keeps is copied; the indices, which it reads anew, are flipped.
void make_plan(Calls *c) {
  static kvx_plan_t *plan = nullptr;
  Migration m;
  for (kvx_cache_desc_t &cache : m.caches) cache = c->cache();
  m.src = span(&m.layers[0]);
  m.dst = span(&m.layers[1]);
  for (const int end : {0, 1}) m.tables[end] = packed(c, 0, kRows, kColumns);
  m.src.block_table = &m.tables[0];
  m.dst.block_table = &m.tables[1];
  m.lens = lens(c, kTokens - 1);
  m.connect(c);
  if (kvx_plan_create(&m.desc, &plan) != KVX_STATUS_OK) std::abort();
  c->run = [] { return kvx_plan_run(plan, nullptr, nullptr); };
}

void make_scaled(Calls *c) {
  static Migration m;
  m.caches[0] = c->cache(KVX_DTYPE_F8_E4M3);
  m.caches[1] = c->cache();
  m.src = span(&m.layers[0]);
  m.dst = span(&m.layers[1]);
  m.tables[0] = packed(c, 0, kRows, kColumns);
  m.src.block_table = &m.tables[0];
  m.slots = slots(c, kRows * kTokens);
  m.dst.slots = &m.slots;
  m.lens = lens(c, kTokens);
  m.scale.size = sizeof m.scale;
  m.scale.dtype = KVX_DTYPE_F32;
  m.scale.granularity = KVX_SCALE_PER_BLOCK_HEAD;
  m.scale.ndim = 2;
  m.scale.shape[0] = kBlocks, m.scale.stride[0] = kHeads;
  m.scale.shape[1] = kHeads, m.scale.stride[1] = 1;
  m.scale.data = c->ints(std::vector<int32_t>(kBlocks * kHeads, 0x3f000000),
                         {0, 0x7f800000, 0x7fc00000, -1, 0x00000001});
  m.src.k_scales = m.src.v_scales = &m.scales;
  m.connect(c);
}

// Makes one number after the other wild for a moment.
void flip(const std::vector<Target> &targets, const std::atomic<bool> &done) {
  uint64_t random = 1;
  const auto below = [&](size_t n) {
    random = random * 6364136223846793005u + 1442695040888963407u;
    return static_cast<size_t>((random >> 33) % n);
  };
  const auto store = [](const Target &target, size_t i, int64_t value) {
    if (target.size == 8) {
      __atomic_store_n(reinterpret_cast<int64_t *>(target.data) + i, value, __ATOMIC_RELAXED);
    } else {
      __atomic_store_n(reinterpret_cast<int32_t *>(target.data) + i, static_cast<int32_t>(value),
                       __ATOMIC_RELAXED);
    }
  };
  while (!done) {
    const Target &target = targets[below(targets.size())];
    const size_t i = below(4) ? below(target.count) : below(2) * (target.count - 1);
    const int64_t was = target.size == 8 ? reinterpret_cast<int64_t *>(target.data)[i]
                                         : reinterpret_cast<int32_t *>(target.data)[i];
    store(target, i, target.wild[below(target.wild.size())]);
    for (volatile size_t spin = below(3000); spin > 0; spin = spin - 1) continue;
    store(target, i, was);
    for (volatile size_t spin = below(6000); spin > 0; spin = spin - 1) continue;
  }
}

bool run(const char *name, void (*make)(Calls *), double seconds) {
  Calls calls;
  make(&calls);
  if (calls.run() != KVX_STATUS_OK) {
    std::printf("FAILED: %s before anything changes: %s\n", name, kvx_last_error());
    return false;
  }
  std::atomic<bool> done{false};
  std::thread other([&] { flip(calls.targets, done); });
  uint64_t accepted = 0, refused = 0;
  const auto start = std::chrono::steady_clock::now();
  const auto passed = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  // On a machine that is busy the two threads may not meet for a while.
  while (passed() < seconds || (std::min(accepted, refused) < kEnough && passed() < kMostSeconds))
    ++(calls.run() == KVX_STATUS_OK ? accepted : refused);
  done = true;
  other.join();
  std::printf("%s: %llu accepted, %llu refused\n", name, static_cast<unsigned long long>(accepted),
              static_cast<unsigned long long>(refused));
  std::fflush(stdout);
  if (std::min(accepted, refused) < kEnough) {
    std::printf("FAILED: the other thread has met no call\n");
    return false;
  }
  for (const Guarded &memory : calls.memory) {
    if (memory.is_intact()) continue;
    std::printf("FAILED: %s has written before a buffer\n", name);
    return false;
  }
  return true;
}

}  // namespace

int main(int argc, char **argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 0.5;
  const struct {
    const char *name;
    void (*make)(Calls *);
  } kinds[] = {
      {"write to slots", make_write},
      {"gather from a table", make_gather},
      {"ragged to slots", make_ragged_to_slots},
      {"offsets to a table", make_offsets_to_packed},
      {"within a pool", make_same_pool},
      {"with scales", make_scaled},
      {"planes", make_planes},
      {"pointers", make_pointers},
      {"a kept plan", make_plan},
  };
  for (const auto &kind : kinds) {
    if (argc > 2 && std::strcmp(argv[2], kind.name) != 0) continue;
    if (!run(kind.name, kind.make, seconds)) return EXIT_FAILURE;
  }
  return EXIT_SUCCESS;
}
