// The exported functions of kvx_blocks.h.
#include "plan/blocks.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "abi/guarded.h"
#include "error.h"
#include "kvx/kvx_blocks.h"
#include "plan/check.h"
#include "rules/blocks.h"

static_assert(sizeof(kvx_blocks_t) == 56);

namespace kvx {
namespace {

// A table of addresses that the host reads.
struct Addresses {
  const void *const *table;
  uint64_t count;

  // The largest power of two, 16 at most, that divides all.
  uint32_t alignment() const {
    uintptr_t bits = 16;
    for (uint64_t i = 0; i < count; ++i) bits |= reinterpret_cast<uintptr_t>(table[i]);
    return 1u << __builtin_ctzll(bits);
  }
};

kvx_status_t check_distinct(const char *name, const Addresses &written) {
  std::vector<const void *> sorted(written.table, written.table + written.count);
  std::sort(sorted.begin(), sorted.end());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice == sorted.end() || !*twice) return KVX_STATUS_OK;
  return KVX_INVALID(
      "%s has %p twice, expected memory of its own for each: the call writes them "
      "(spec E.15)",
      name, *twice);
}

kvx_status_t check_present(const char *name, const Addresses &addresses) {
  for (uint64_t i = 0; i < addresses.count; ++i) {
    if (!addresses.table[i]) {
      return KVX_INVALID("%s[%llu] is NULL, expected an address (spec E.15)", name,
                         static_cast<ull>(i));
    }
  }
  return KVX_STATUS_OK;
}

using backend::place;

// A copy between two tables: the part that the functions share.
struct Move {
  Chunk chunk;
  uint32_t num_blocks;
  kvx_memory_type_t memory;
  const char *src_name, *dst_name;
  Chunks src, dst;
  const void *const *src_table;
  void *const *dst_table;

  Addresses sources() const { return {src_table, count(src)}; }
  Addresses destinations() const {
    return {const_cast<const void *const *>(dst_table), count(dst)};
  }
  uint64_t count(const Chunks &chunks) const {
    return uint64_t{num_blocks} * (chunks.is_whole ? 1 : chunks.count);
  }

  void plan(uint32_t alignment, Plan *plan) const {
    plan_blocks(chunk, num_blocks, memory, alignment, src, src_table, dst, dst_table, plan);
  }

  // On HOST memory, whose tables the host reads.
  kvx_status_t check_addresses() const {
    KVX_TRY(check_present(src_name, sources()));
    KVX_TRY(check_present(dst_name, destinations()));
    return check_distinct(dst_name, destinations());
  }
  uint32_t host_alignment() const {
    return std::min(sources().alignment(), destinations().alignment());
  }

  kvx_status_t run(uint32_t alignment, bool on_device, void *stream) const {
    if (!on_device) {
      KVX_TRY(check_addresses());
      alignment = host_alignment();
    }
    Plan made;
    plan(alignment, &made);
    return backend::run(made, nullptr, 0, on_device, stream);
  }
};

kvx_status_t universal(const void *universals, const void *blocks, const kvx_blocks_t *sizes,
                       bool to_universal, void *stream) {
  KVX_TRY(check_blocks(sizes));
  bool on_device;
  KVX_TRY(place(sizes->memory, "sizes", &on_device));
  if (!sizes->nb) return KVX_STATUS_OK;
  KVX_TRY(check_pointer_table("universals", universals));
  KVX_TRY(check_pointer_table("blocks", blocks));
  const Chunks stack = stack_chunks(*sizes), whole = universal_chunks(*sizes);
  const void *const from = to_universal ? blocks : universals;
  const void *const to = to_universal ? universals : blocks;
  const Move move = {{sizes->nt, sizes->nh, sizes->hd * sizes->itemsize},
                     sizes->nb,
                     sizes->memory,
                     to_universal ? "blocks" : "universals",
                     to_universal ? "universals" : "blocks",
                     to_universal ? stack : whole,
                     to_universal ? whole : stack,
                     static_cast<const void *const *>(from),
                     static_cast<void *const *>(const_cast<void *>(to))};
  return move.run(sizes->alignment ? sizes->alignment : 16, on_device, stream);
}

// Pairs of addresses of `bytes` bytes each.
struct Pairs {
  std::vector<const void *> srcs;
  std::vector<void *> dsts;
  uint64_t bytes;
};

kvx_status_t check_batches(kvx_memory_type_t memory) {
  if (memory == KVX_MEMORY_HOST) {
    return fail(KVX_STATUS_UNSUPPORTED,
                "the batch is asked for and memory is HOST, where there is no "
                "cudaMemcpyBatchAsync; take another backend or mode (spec E.15)");
  }
  return KVX_STATUS_OK;
}

// Copies pairs one by one or as a batch: KVX_MEMCPY_...
kvx_status_t copy_pairs(const void *const *srcs, void *const *dsts, uint64_t bytes, uint64_t count,
                        bool on_device, kvx_memcpy_mode_t mode, bool *batched, void *stream) {
  *batched = false;
  if (on_device) return backend::copy_pairs(srcs, dsts, bytes, count, mode, batched, stream);
  for (uint64_t i = 0; i < count; ++i) std::memcpy(dsts[i], srcs[i], bytes);
  return KVX_STATUS_OK;
}

// Checks pairs for memcpy on HOST memory by the rules of every call.
kvx_status_t check_host_pairs(const Move &move) {
  KVX_TRY(move.check_addresses());
  Plan plan;
  move.plan(move.host_alignment(), &plan);
  uint64_t tokens;
  return check_data(plan, &tokens);
}

// Pairs of chunks of stacks and operational blocks.
Pairs pairs_of(const void *const *srcs, void *const *dsts, uint32_t num_blocks, uint32_t chunks,
               uint64_t bytes, bool to_operational) {
  Pairs pairs{{}, {}, bytes};
  const uint64_t count = uint64_t{num_blocks} * chunks;
  pairs.srcs.reserve(count);
  pairs.dsts.reserve(count);
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t block = i / chunks, step = i % chunks * bytes;
    pairs.srcs.push_back(to_operational ? srcs[i] : static_cast<const char *>(srcs[block]) + step);
    pairs.dsts.push_back(to_operational ? static_cast<char *>(dsts[block]) + step : dsts[i]);
  }
  return pairs;
}

kvx_status_t check_aligned(const Pairs &pairs) {
  for (size_t i = 0; i < pairs.srcs.size(); ++i) {
    const auto bits = reinterpret_cast<uintptr_t>(pairs.srcs[i]) |
                      reinterpret_cast<uintptr_t>(pairs.dsts[i]) | pairs.bytes;
    if (bits % 8 == 0) continue;
    return KVX_INVALID(
        "pair %zu copies %llu bytes from %p to %p, expected multiples of 8 for VECTORIZED_KERNEL; "
        "take KERNEL_ONLY or AUTO (spec E.15)",
        i, static_cast<ull>(pairs.bytes), pairs.srcs[i], pairs.dsts[i]);
  }
  return KVX_STATUS_OK;
}

kvx_status_t operational(const void *const *blocks_host, void *const *blocks,
                         const void *const *operationals_host, void *const *operationals,
                         const kvx_blocks_t *sizes, kvx_copy_direction_t direction,
                         kvx_copy_backend_t backend, kvx_copy_backend_t *used, void *stream) {
  KVX_TRY(check_blocks(sizes));
  if (direction != KVX_BLOCK_TO_OPERATIONAL && direction != KVX_OPERATIONAL_TO_BLOCK) {
    return KVX_INVALID(
        "direction is %d, expected BLOCK_TO_OPERATIONAL (0) or OPERATIONAL_TO_BLOCK (1) "
        "(spec E.15)",
        direction);
  }
  if (backend < KVX_COPY_AUTO || backend > KVX_COPY_MEMCPY_BATCH) {
    return KVX_INVALID("backend is %d, expected AUTO (0) to MEMCPY_BATCH (4) (spec E.15)", backend);
  }
  bool on_device;
  KVX_TRY(place(sizes->memory, "sizes", &on_device));
  if (backend == KVX_COPY_MEMCPY_BATCH) KVX_TRY(check_batches(sizes->memory));
  if (!sizes->nb) return KVX_STATUS_OK;
  const bool to_operational = direction == KVX_BLOCK_TO_OPERATIONAL;
  const uint64_t bytes = uint64_t{sizes->nt} * sizes->nh * sizes->hd * sizes->itemsize;
  KVX_TRY(check_copy_bytes(bytes));
  const bool runs_kernel = !on_device || backend <= KVX_COPY_KERNEL_ONLY;
  if (runs_kernel) {
    KVX_TRY(check_pointer_table("blocks", blocks));
    KVX_TRY(check_pointer_table("operationals", operationals));
  }
  if (!on_device) {
    blocks_host = const_cast<const void *const *>(blocks);
    operationals_host = const_cast<const void *const *>(operationals);
  } else if (backend != KVX_COPY_KERNEL_ONLY) {
    KVX_TRY(check_pointer_table("blocks_host", blocks_host));
    KVX_TRY(check_pointer_table("operationals_host", operationals_host));
  }
  const Chunk run = run_of(bytes);
  const Chunks stack = run_chunks(sizes->nl * sizes->no, false, run);
  const Chunks whole = run_chunks(sizes->nl * sizes->no, true, run);
  const auto move_of = [&](const void *const *of_blocks, const void *const *of_operationals) {
    return Move{run,
                sizes->nb,
                sizes->memory,
                to_operational ? "blocks" : "operationals",
                to_operational ? "operationals" : "blocks",
                to_operational ? stack : whole,
                to_operational ? whole : stack,
                to_operational ? of_blocks : of_operationals,
                const_cast<void *const *>(to_operational ? of_operationals : of_blocks)};
  };
  const Move move = move_of(const_cast<const void *const *>(blocks),
                            const_cast<const void *const *>(operationals));
  kvx_copy_backend_t taken = backend;
  Pairs pairs{};
  if (backend != KVX_COPY_KERNEL_ONLY) {
    const Move on_host = move_of(blocks_host, operationals_host);
    KVX_TRY(check_present(on_host.src_name, on_host.sources()));
    KVX_TRY(check_present(on_host.dst_name, on_host.destinations()));
    pairs = pairs_of(on_host.src_table, on_host.dst_table, sizes->nb, stack.count, bytes,
                     to_operational);
  }
  if (backend == KVX_COPY_VECTORIZED_KERNEL) KVX_TRY(check_aligned(pairs));
  if (backend == KVX_COPY_AUTO) {
    const Addresses srcs = {pairs.srcs.data(), pairs.srcs.size()};
    const Addresses dsts = {const_cast<const void *const *>(pairs.dsts.data()), pairs.dsts.size()};
    const bool is_aligned = std::min(srcs.alignment(), dsts.alignment()) >= 8 && bytes % 8 == 0;
    taken = is_aligned ? KVX_COPY_VECTORIZED_KERNEL : KVX_COPY_MEMCPY_ASYNC;
  }
  if (taken == KVX_COPY_VECTORIZED_KERNEL || taken == KVX_COPY_KERNEL_ONLY) {
    uint32_t alignment = sizes->alignment ? sizes->alignment : 16;
    if (taken == KVX_COPY_KERNEL_ONLY) alignment = std::min(alignment, sizes->itemsize);
    if (taken == KVX_COPY_VECTORIZED_KERNEL)
      alignment = move_of(blocks_host, operationals_host).host_alignment();
    KVX_TRY(move.run(alignment, on_device, stream));
  } else {
    if (!on_device) KVX_TRY(check_host_pairs(move));
    const kvx_memcpy_mode_t mode = backend == KVX_COPY_AUTO         ? KVX_MEMCPY_BATCH_OR_ASYNC
                                   : taken == KVX_COPY_MEMCPY_BATCH ? KVX_MEMCPY_BATCH
                                                                    : KVX_MEMCPY_ASYNC;
    bool batched;
    KVX_TRY(copy_pairs(pairs.srcs.data(), pairs.dsts.data(), bytes, pairs.srcs.size(), on_device,
                       mode, &batched, stream));
    taken = batched ? KVX_COPY_MEMCPY_BATCH : KVX_COPY_MEMCPY_ASYNC;
  }
  if (used) *used = taken;
  return KVX_STATUS_OK;
}

Move pairs_move(const void *const *srcs, void *const *dsts, uint64_t bytes, uint32_t num_pairs,
                kvx_memory_type_t memory) {
  const Chunk run = run_of(bytes);
  const Chunks chunks = run_chunks(1, false, run);
  return {run, num_pairs, memory, "srcs", "dsts", chunks, chunks, srcs, dsts};
}

kvx_status_t vectorized_copy(const void *const *srcs, void *const *dsts, uint64_t bytes,
                             uint32_t num_pairs, kvx_memory_type_t memory, uint32_t alignment,
                             void *stream) {
  KVX_TRY(check_copy_memory("memory", memory));
  KVX_TRY(check_alignment("alignment", alignment));
  bool on_device;
  KVX_TRY(place(memory, "copy", &on_device));
  if (!num_pairs) return KVX_STATUS_OK;
  KVX_TRY(check_pointer_table("srcs", srcs));
  KVX_TRY(check_pointer_table("dsts", dsts));
  KVX_TRY(check_copy_bytes(bytes));
  if (on_device && !alignment) return backend::copy_each_pair(srcs, dsts, bytes, num_pairs, stream);
  return pairs_move(srcs, dsts, bytes, num_pairs, memory).run(alignment, on_device, stream);
}

kvx_status_t memcpy_batch(const void *const *srcs, void *const *dsts, uint64_t bytes,
                          uint32_t num_pairs, kvx_memory_type_t memory, kvx_memcpy_mode_t mode,
                          void *stream) {
  KVX_TRY(check_copy_memory("memory", memory));
  if (mode < KVX_MEMCPY_BATCH_OR_ASYNC || mode > KVX_MEMCPY_BATCH) {
    return KVX_INVALID(
        "mode is %d, expected BATCH_OR_ASYNC (0), ASYNC (1) or BATCH (2) (spec E.15)", mode);
  }
  bool on_device;
  KVX_TRY(place(memory, "copy", &on_device));
  if (mode == KVX_MEMCPY_BATCH) KVX_TRY(check_batches(memory));
  if (!num_pairs) return KVX_STATUS_OK;
  KVX_TRY(check_pointer_table("srcs", srcs));
  KVX_TRY(check_pointer_table("dsts", dsts));
  KVX_TRY(check_copy_bytes(bytes));
  const Move move = pairs_move(srcs, dsts, bytes, num_pairs, memory);
  KVX_TRY(check_present("srcs", move.sources()));
  KVX_TRY(check_present("dsts", move.destinations()));
  if (!on_device) KVX_TRY(check_host_pairs(move));
  bool batched;
  return copy_pairs(srcs, dsts, bytes, num_pairs, on_device, mode, &batched, stream);
}

}  // namespace
}  // namespace kvx

extern "C" {

kvx_status_t kvx_universal_from_block(void *const *universals, const void *const *blocks,
                                      const kvx_blocks_t *sizes, void *stream) {
  return kvx::guarded([=] { return kvx::universal(universals, blocks, sizes, true, stream); });
}

kvx_status_t kvx_block_from_universal(const void *const *universals, void *const *blocks,
                                      const kvx_blocks_t *sizes, void *stream) {
  return kvx::guarded([=] { return kvx::universal(universals, blocks, sizes, false, stream); });
}

kvx_status_t kvx_operational_copy(const void *const *blocks_host, void *const *blocks,
                                  const void *const *operationals_host, void *const *operationals,
                                  const kvx_blocks_t *sizes, kvx_copy_direction_t direction,
                                  kvx_copy_backend_t backend, kvx_copy_backend_t *used,
                                  void *stream) {
  return kvx::guarded([=] {
    return kvx::operational(blocks_host, blocks, operationals_host, operationals, sizes, direction,
                            backend, used, stream);
  });
}

kvx_status_t kvx_vectorized_copy(const void *const *srcs, void *const *dsts, uint64_t bytes,
                                 uint32_t num_pairs, kvx_memory_type_t memory, uint32_t alignment,
                                 void *stream) {
  return kvx::guarded([=] {
    return kvx::vectorized_copy(srcs, dsts, bytes, num_pairs, memory, alignment, stream);
  });
}

kvx_status_t kvx_memcpy_batch(const void *const *srcs, void *const *dsts, uint64_t bytes,
                              uint32_t num_pairs, kvx_memory_type_t memory, kvx_memcpy_mode_t mode,
                              void *stream) {
  return kvx::guarded(
      [=] { return kvx::memcpy_batch(srcs, dsts, bytes, num_pairs, memory, mode, stream); });
}

bool kvx_has_memcpy_batch_async(void) { return kvx::backend::has_batches(); }

bool kvx_is_stub_build(void) { return !kvx::backend::has_kernels(); }

}  // extern "C"
