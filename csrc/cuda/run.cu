#include <algorithm>

#include "cuda/copy_engine.h"
#include "cuda/kernels.h"
#include "cuda/run.h"
#include "cuda/runtime.h"
#include "cuda/status.h"
#include "error.h"
#include "finding.h"

namespace kvx::cuda {
namespace {

constexpr uint64_t kBlocksPerSm = 32;  // about four waves: enough to balance, few enough to start
constexpr uint64_t kBackgroundBlocks = 16;  // of a launch: as many multiprocessors at most

uint32_t num_pairs(const Plan &plan) { return 2 * plan.num_layers; }

// Pairs are of one kind if they differ in their pointers alone.
TensorPair without_pointers(TensorPair pair) {
  for (Side *side : {&pair.src, &pair.dst}) side->base = side->secondary = nullptr;
  pair.src_scales.data = pair.dst_scales.data = nullptr;
  pair.kv = 0;
  return pair;
}

bool is_same(const Side &a, const Side &b) {
  return a.block_stride == b.block_stride && a.token_stride == b.token_stride &&
         a.head_stride == b.head_stride && a.outer_stride == b.outer_stride &&
         a.inner_stride == b.inner_stride && a.pack == b.pack && a.dtype == b.dtype;
}

bool is_same(const Scales &a, const Scales &b) {
  return a.dtype == b.dtype && a.block_stride == b.block_stride &&
         a.token_stride == b.token_stride && a.head_stride == b.head_stride;
}

bool is_same(const TensorPair &a, const TensorPair &b) {
  return is_same(a.src, b.src) && is_same(a.dst, b.dst) && is_same(a.src_scales, b.src_scales) &&
         is_same(a.dst_scales, b.dst_scales) && a.num_heads == b.num_heads &&
         a.head_dim == b.head_dim && a.convert == b.convert && a.find_scales == b.find_scales;
}

kvx_status_t too_large(const char *what, const char *unit) {
  return fail(
      KVX_STATUS_UNSUPPORTED,
      "%s has 2^32 %s or more, which calls on DEVICE memory do not count to; split the call "
      "(spec 4.3)",
      what, unit);
}

// What a row can have at most, as far as the host knows: lengths are in device memory.
uint64_t row_bound(const Plan &plan) {
  if (!plan.rows.lens.data) return plan.rows.uniform_len;
  if (plan.rows.fill_to_max) return plan.rows.max_len;
  // One more than there are slots, so that a kernel meets the token that has none. Not 0, so that
  // every row is looked at.
  const auto bound = [](const Address &a) -> uint64_t {
    if (a.mode == Addressing::kDense) return a.block_size;
    if (a.mode == Addressing::kSlots) return uint64_t{a.indices_count} + 1;
    return a.mode == Addressing::kRagged ? a.indices_count
                                         : uint64_t{a.max_blocks_per_seq} * a.block_size;
  };
  const uint64_t most = std::min({plan.rows.max_len, bound(plan.src[0]), bound(plan.dst[0])});
  return std::max<uint64_t>(most, plan.rows.max_len ? 1 : 0);
}

// Kernels count tokens, slots and rows with 32 bits.
kvx_status_t check_narrow(const Plan &plan, uint64_t bound) {
  constexpr uint64_t kLimit = UINT32_MAX;
  uint64_t heads = 1;
  for (uint32_t i = 0; i < num_pairs(plan); ++i) {
    const TensorPair &pair = plan.pairs[i];
    heads = std::max<uint64_t>(heads, pair.num_heads);
    if (uint64_t{pair.num_heads} * pair.head_dim >= kLimit) return too_large("a token", "elements");
  }
  for (const Address *a : {&plan.src[0], &plan.src[1], &plan.dst[0], &plan.dst[1]}) {
    const bool columns = a->mode == Addressing::kPacked || a->mode == Addressing::kKvOffsets;
    if (columns && uint64_t{a->max_blocks_per_seq} * a->block_size >= kLimit)
      return too_large("a row of a block table", "tokens");
    if (a->num_blocks * a->block_size >= kLimit) return too_large("a cache", "slots");
  }
  if (plan.rows.count * heads >= kMostItems || bound >= kLimit)
    return too_large("rows times heads", "items");
  return KVX_STATUS_OK;
}

// Besides the tensors, kernels read indices, lengths and scales, and reach into secondary pools.
kvx_status_t check_indices(const Plan &plan) {
  const auto check = [](const char *name, const void *data, const char *field = "") {
    return data ? check_reachable(name, field, data) : KVX_STATUS_OK;
  };
  const Names names = names_of(plan.call, plan.src[0].mode, plan.dst[0].mode);
  KVX_TRY(check(names.lens, plan.rows.lens.data));
  for (const bool at_dst : {false, true}) {
    const Address &a = at_dst ? plan.dst[0] : plan.src[0];
    const char *const table = at_dst ? names.dst_table : names.src_table;
    KVX_TRY(check(table, a.indices.data, a.mode == Addressing::kSlots ? "" : ".indices"));
    KVX_TRY(check(table, a.indptr.data, ".indptr"));
    KVX_TRY(check(at_dst ? names.dst_starts : names.src_starts, a.starts.data));
  }
  for (uint32_t i = 0; i < num_pairs(plan); ++i) {
    const TensorPair &pair = plan.pairs[i];
    KVX_TRY(check("pool.secondary of the source", pair.src.secondary));
    KVX_TRY(check("pool.secondary of the destination", pair.dst.secondary));
    KVX_TRY(check("a scale of the source", pair.src_scales.data));
    KVX_TRY(check("a scale of the destination", pair.dst_scales.data));
  }
  return KVX_STATUS_OK;
}

// One launch: pairs of one kind.
template <class P>
kvx_status_t launch(const Common &common, const Choice &choice, const TensorPair *const *pairs,
                    uint64_t most_blocks, cudaStream_t stream) {
  P params;
  static_cast<Common &>(params) = common;
  for (uint32_t i = 0; i < common.num_pairs; ++i) {
    const TensorPair &pair = *pairs[i];
    params.bases[i] = {pair.src.base,        pair.src.secondary,
                       pair.dst.base,        pair.dst.secondary,
                       pair.src_scales.data, const_cast<uint8_t *>(pair.dst_scales.data)};
    params.kv[i] = pair.kv;
  }
  const uint32_t items = common.spans * common.parts.divisor;
  const uint64_t blocks = (items - 1) / items_per_block(choice.family) + 1;
  const uint64_t most = std::max<uint64_t>(most_blocks / common.num_pairs, 1);
  const dim3 grid(static_cast<uint32_t>(std::min(blocks, most)), common.num_pairs);
  switch (choice.family) {
    case Family::kBlocks:
      launch_blocks(params, choice, grid, stream);
      break;
    case Family::kBulk:
      launch_bulk(params, choice, grid, stream);
      break;
    case Family::kRows:
      launch_rows(params, choice, grid, stream);
      break;
    case Family::kRemap:
      launch_remap(params, choice, grid, stream);
      break;
    case Family::kTile:
      launch_tile(params, choice, grid, stream);
      break;
    case Family::kConvert:
      launch_convert(params, choice, grid, stream);
      break;
    case Family::kQuantize:
      launch_quantize(params, choice, grid, stream);
      break;
    case Family::kGeneric:
      launch_generic(params, choice, grid, stream);
  }
  return check(cudaPeekAtLastError(), "kernel launch");
}

// The first pair from `from` on that is of the kind of pair `first`; num_pairs: none.
uint32_t next_of_kind(const Plan &plan, uint32_t first, uint32_t from) {
  while (from < num_pairs(plan) && !is_same(plan.pairs[from], plan.pairs[first])) ++from;
  return from;
}

uint64_t alignment_of(const Plan &plan, uint32_t first) {
  uint64_t bits = 4096;
  for (uint32_t i = first; i < num_pairs(plan); i = next_of_kind(plan, first, i + 1)) {
    const TensorPair &pair = plan.pairs[i];
    for (const uint8_t *at : {pair.src.base, pair.src.secondary, pair.dst.base, pair.dst.secondary})
      bits |= reinterpret_cast<uintptr_t>(at);
  }
  return bits & (~bits + 1);
}

// Tokens of a block, if it has as many at both ends.
uint32_t block_tokens(const Plan &plan) {
  return plan.src[0].block_size == plan.dst[0].block_size ? plan.src[0].block_size : 0;
}

// All pairs of the kind of pair `first`, in as few launches as their pointers, or blocks in the
// background, fit into.
kvx_status_t run_kind(const Plan &plan, uint32_t first, bool reports[2], Common common,
                      uint32_t sms, cudaStream_t stream) {
  const Choice choice = choose(without_pointers(plan.pairs[first]), alignment_of(plan, first),
                               block_tokens(plan), plan.background);
  const uint64_t most_blocks = plan.background ? kBackgroundBlocks : sms * kBlocksPerSm;
  const uint32_t most_pairs = plan.background ? kBackgroundBlocks : 2 * kMaxLayers;
  common.shape = choice.shape;
  common.units = choice.units;
  for (uint32_t next = first; next < num_pairs(plan);) {
    const TensorPair *pairs[2 * kMaxLayers];
    common.num_pairs = 0;
    // Each place is reported by the first pair that looks at it.
    common.reporter[0] = common.reporter[1] = UINT32_MAX;
    for (; next < num_pairs(plan) && common.num_pairs < most_pairs;
         next = next_of_kind(plan, first, next + 1)) {
      const TensorPair &pair = plan.pairs[next];
      const uint8_t kv = plan.same_places ? 0 : pair.kv;
      if (reports[kv]) common.reporter[pair.kv] = common.num_pairs;
      reports[kv] = false;
      pairs[common.num_pairs++] = &pair;
    }
    cut(choice, &common);
    KVX_TRY(common.num_pairs <= 2 ? launch<Small>(common, choice, pairs, most_blocks, stream)
                                  : launch<Large>(common, choice, pairs, most_blocks, stream));
  }
  return KVX_STATUS_OK;
}

}  // namespace

kvx_status_t run(const Plan &plan, void *stream) {
  if (plan.copy_engine) return run_copies(plan, stream);
  Common common{};
  common.rows = plan.rows;
  for (int kv = 0; kv < 2; ++kv) {
    common.src[kv] = plan.src[kv];
    common.dst[kv] = plan.dst[kv];
  }
  common.row_bound = row_bound(plan);
  if (common.row_bound == 0 || plan.rows.count == 0) return KVX_STATUS_OK;
  KVX_TRY(check_narrow(plan, common.row_bound));
  KVX_TRY(check_indices(plan));
  common.zero_fill = plan.zero_fill;
  common.call = plan.call;
  uint32_t sms = 0;
  KVX_TRY(count_sms(&sms));
  KVX_TRY(device_status(&common.status));

  bool reports[2] = {true, true};
  for (uint32_t i = 0; i < num_pairs(plan); ++i) {
    if (plan.pairs[i].num_heads && next_of_kind(plan, i, 0) == i)
      KVX_TRY(run_kind(plan, i, reports, common, sms, static_cast<cudaStream_t>(stream)));
  }
  return KVX_STATUS_OK;
}

}  // namespace kvx::cuda
