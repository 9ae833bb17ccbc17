#include <algorithm>
#include <tuple>

#include "cuda/columns.h"
#include "cuda/copy_engine.h"
#include "cuda/kernels.h"
#include "cuda/run.h"
#include "cuda/runtime.h"
#include "cuda/status.h"
#include "error.h"
#include "plan/violation.h"

namespace kvx::cuda {
namespace {

constexpr uint64_t kBlocksPerSm = 32;  // about four waves: enough to balance, few enough to start
constexpr uint32_t kBackgroundBlocks = 16;  // of a launch: as many multiprocessors at most

// Pairs are of one kind if they differ only in their pointers. Two lookups fit into a launch.
PlanePair without_pointers(PlanePair pair) {
  for (Plane *plane : {&pair.src, &pair.dst}) plane->base = plane->secondary = nullptr;
  pair.src_scales.data = pair.dst_scales.data = nullptr;
  pair.lookup = 0;
  pair.is_v = false;
  return pair;
}

// What pairs of one kind have in common: all fields but those in the first line of each. A new
// field does not compile before it is in one of the lists.
auto kind(const Plane &plane) {
  const auto &[base, secondary,  //
               block, token, head, outer, inner, token_outer, pack, token_pack, dtype] = plane;
  return std::tie(block, token, head, outer, inner, token_outer, pack, token_pack, dtype);
}

auto kind(const Scales &scales) {
  const auto &[data,  //
               dtype, block, token, head] = scales;
  return std::tie(dtype, block, token, head);
}

auto kind(const GroupNumbers &numbers) {
  const auto &[data,  //
               dtype, block, token, head, group, quarter] = numbers;
  return std::tie(dtype, block, token, head, group, quarter);
}

auto kind(const AffineEnd &end) {
  const auto &[scales, zeros, group, covers_tokens] = end;
  return std::tuple_cat(kind(scales), kind(zeros), std::tie(group, covers_tokens));
}

auto kind(const AffinePair &pair) {
  const auto &[src, dst, keeps_units, requantizes, block_size] = pair;
  return std::tuple_cat(kind(src), kind(dst), std::tie(keeps_units, requantizes, block_size));
}

auto kind(const PlanePair &pair) {
  const auto &[src, dst, src_scales, dst_scales, num_heads, head_dim, lookup, plane, is_v, convert,
               find_scales, beside, hadamard, affine] = pair;
  return std::tuple_cat(kind(src), kind(dst), kind(src_scales), kind(dst_scales),
                        std::tie(num_heads, head_dim, convert, find_scales, hadamard),
                        std::tuple(lookup / 2));
}

bool are_of_one_kind(const AffinePair *a, const AffinePair *b) {
  return a && b ? kind(*a) == kind(*b) : a == b;
}

kvx_status_t too_large(const char *what, const char *unit) {
  return fail(
      KVX_STATUS_UNSUPPORTED,
      "%s has 2^32 %s or more, which calls on DEVICE memory do not count to; split the call "
      "(spec 4.3)",
      what, unit);
}

// The most entries of a row, as far as the host knows: lengths are in device memory. Lookups of the
// launch with another number of tokens per entry do not count.
uint64_t row_bound(const Plan &plan, size_t of) {
  if (!plan.rows.lens.data) return plan.rows.uniform_len;
  if (plan.rows.fill_to_max) return plan.rows.max_len;
  // One more than there are slots, so that a kernel reports the token that has none. Never 0, so
  // that a kernel checks every row.
  const auto bound = [](const Lookup &a) {
    return most_tokens_of_row(a) + (a.mode == LookupMode::kSlots ? 1 : 0);
  };
  uint64_t most = plan.rows_of(plan.lookups[of]).cut(-1);  // of any length
  for (size_t i = of / 2 * 2; i < of / 2 * 2 + 2 && i < plan.lookups.size(); ++i) {
    const auto &[src, dst] = plan.lookups[i];
    if (src.tokens_per_entry == plan.lookups[of].src.tokens_per_entry)
      most = std::min({most, bound(src), bound(dst)});
  }
  return std::max<uint64_t>(most, plan.rows.max_len ? 1 : 0);
}

// Kernels count tokens, slots and rows with 32 bits.
kvx_status_t check_narrow(const Plan &plan, uint64_t bound) {
  constexpr uint64_t kLimit = UINT32_MAX;
  uint64_t heads = 1;
  for (const PlanePair &pair : plan.pairs) {
    heads = std::max<uint64_t>(heads, pair.num_heads);
    if (uint64_t{pair.num_heads} * pair.head_dim >= kLimit) return too_large("a token", "elements");
  }
  for (const LookupPair &lookup : plan.lookups) {
    for (const Lookup *a : {&lookup.src, &lookup.dst}) {
      if (!share_entries(*a) && most_tokens_of_row(*a) >= kLimit)
        return too_large("a row of a block table", "tokens");
      if (a->num_blocks * a->block_size >= kLimit) return too_large("a cache", "slots");
    }
  }
  if (plan.rows.count * heads >= kMostItems || bound >= kLimit)
    return too_large("rows times heads", "items");
  return KVX_STATUS_OK;
}

// Kernels that find scales read numbers, not units of them.
kvx_status_t check_found_scales(const Plan &plan) {
  for (const PlanePair &pair : plan.pairs) {
    if (!pair.find_scales || (is_scalar(pair.src.dtype) && !pair.affine)) continue;
    return fail(
        KVX_STATUS_UNSUPPORTED,
        "FIND_SCALES is set and the source is %s, from which calls on DEVICE memory find no "
        "scales: give scales, or migrate by way of F16 (spec E.9)",
        kvx::name_of(pair.src.dtype));
  }
  return KVX_STATUS_OK;
}

// Kernels that find scales beside the data read numbers one by one, and one of TurboQuant's takes
// all of its unit.
kvx_status_t check_turboquant(const Plan &plan) {
  for (const PlanePair &pair : plan.pairs) {
    if (!is_turboquant(pair.src.dtype) || !is_affine(pair.dst.dtype)) continue;
    return fail(KVX_STATUS_UNSUPPORTED,
                "%s goes from %s to %s, whose scales calls on DEVICE memory do not find for %s; "
                "migrate by way of F16 (spec E.20)",
                pair.is_v ? "V" : "K", kvx::name_of(pair.src.dtype), kvx::name_of(pair.dst.dtype),
                kvx::name_of(pair.src.dtype));
  }
  return KVX_STATUS_OK;
}

// Groups of numbers lie in a warp's part of the shared memory while they are rotated.
kvx_status_t check_rotations(const Plan &plan) {
  for (const PlanePair &pair : plan.pairs) {
    if (pair.hadamard <= kMostRotated) continue;
    return fail(KVX_STATUS_UNSUPPORTED,
                "%s is rotated in groups of %u numbers, and calls on DEVICE memory rotate %u at "
                "most; migrate in HOST memory (spec E.17)",
                pair.is_v ? "V" : "K", pair.hadamard, kMostRotated);
  }
  return KVX_STATUS_OK;
}

// Kernels that copy know tokens whose steps are all the same.
kvx_status_t check_split_tokens(const Plan &plan) {
  for (const PlanePair &pair : plan.pairs) {
    if (!pair.src.token_pack && !pair.dst.token_pack) continue;
    return fail(KVX_STATUS_UNSUPPORTED,
                "%s is F4_E2M1 at both ends, and scales that are PER_GROUP_4X4 are not copied by "
                "calls on DEVICE memory; migrate in HOST memory (spec E.18)",
                pair.is_v ? "V" : "K");
  }
  return KVX_STATUS_OK;
}

// The kernel that fills units over tokens does not read F4_E2M1.
kvx_status_t check_groups_to_channels(const Plan &plan) {
  for (const PlanePair &pair : plan.pairs) {
    const AffinePair *const affine = affine_of(plan, pair);
    if (!affine || !affine->dst.covers_tokens || !has_group_scales(pair.src.dtype)) continue;
    return fail(
        KVX_STATUS_UNSUPPORTED,
        "%s goes from F4_E2M1 to %s with scales that are PER_CHANNEL, which calls on DEVICE "
        "memory do not convert; migrate by way of F16 (spec E.18)",
        pair.is_v ? "V" : "K", kvx::name_of(pair.dst.dtype));
  }
  return KVX_STATUS_OK;
}

// The host does not read scales on a device, and numbers that are encoded again may become others.
kvx_status_t check_tensor_scales(const Plan &plan) {
  for (const PlanePair &pair : plan.pairs) {
    const AffinePair *const affine = affine_of(plan, pair);
    if (!affine || !has_group_scales(pair.src.dtype) || pair.src.dtype != pair.dst.dtype ||
        affine->src.scales.dtype != affine->dst.scales.dtype) {
      continue;
    }
    return fail(KVX_STATUS_UNSUPPORTED,
                "%s is F4_E2M1 at both ends, whose scales of the tensor cannot be compared on a "
                "DEVICE; pass one array for both, or migrate by way of F16 (spec E.18)",
                pair.is_v ? "V" : "K");
  }
  return KVX_STATUS_OK;
}

// Kernels count the parts of blocks with 32 bits, too.
kvx_status_t check_narrow_blocks(const Plan &plan, const PlanePair &pair, uint64_t bound) {
  const AffinePair &affine = plan.affine[pair.affine - 1];
  if (!affine.dst.covers_tokens) return KVX_STATUS_OK;
  const uint64_t parts = uint64_t{pair.num_heads} * ((pair.head_dim - 1) / kWarp + 1);
  const uint64_t blocks = plan.rows.count * (bound / affine.block_size + 2);
  return blocks >= kMostItems / parts ? too_large("rows times heads", "items") : KVX_STATUS_OK;
}

// Besides the tensors, kernels read indices, lengths and scales, and reach into secondary pools.
kvx_status_t check_indices(const Plan &plan, Reach *reach) {
  const auto check = [&](const char *name, const void *data, const char *field = "") {
    return data ? reach->check(name, field, data) : KVX_STATUS_OK;
  };
  for (const LookupPair &lookup : plan.lookups) {
    const FieldNames names = field_names(plan, lookup);
    KVX_TRY(check(names.lens, plan.rows.lens.data));
    for (const bool at_dst : {false, true}) {
      const Lookup &a = at_dst ? lookup.dst : lookup.src;
      const char *const table = at_dst ? names.dst_table : names.src_table;
      KVX_TRY(check(table, a.indices.data, a.mode == LookupMode::kSlots ? "" : ".indices"));
      KVX_TRY(check(table, a.indptr.data, ".indptr"));
      KVX_TRY(check(at_dst ? names.dst_starts : names.src_starts, a.starts.data));
    }
  }
  if (reach->is_kept()) return KVX_STATUS_OK;
  for (const PlanePair &pair : plan.pairs) {
    KVX_TRY(check("pool.secondary of the source", pair.src.secondary));
    KVX_TRY(check("pool.secondary of the destination", pair.dst.secondary));
    KVX_TRY(check("a scale of the source", pair.src_scales.data));
    KVX_TRY(check("a scale of the destination", pair.dst_scales.data));
    const AffinePair *const affine = affine_of(plan, pair);
    if (!affine) continue;
    KVX_TRY(check("a scale of the source", affine->src.scales.data));
    KVX_TRY(check("a zero point of the source", affine->src.zeros.data));
    KVX_TRY(check("a scale of the destination", affine->dst.scales.data));
    KVX_TRY(check("a zero point of the destination", affine->dst.zeros.data));
  }
  reach->keep();
  return KVX_STATUS_OK;
}

void run_kernel(const AffineParams &params, const Choice &choice, dim3 grid, cudaStream_t stream) {
  if (choice.kernel == Kernel::kChannels) return launch_channels(params, grid, stream);
  if (choice.kernel == Kernel::kFp4) return launch_fp4(params, grid, stream);
  launch_affine(params, grid, stream);
}

template <class P>
void run_kernel(const P &params, const Choice &choice, dim3 grid, cudaStream_t stream) {
  switch (choice.kernel) {
    case Kernel::kSlots:
      launch_slots(params, choice, grid, stream);
      break;
    case Kernel::kBlocks:
      launch_blocks(params, choice, grid, stream);
      break;
    case Kernel::kBulk:
      launch_bulk(params, choice, grid, stream);
      break;
    case Kernel::kVectors:
      launch_vectors(params, choice, grid, stream);
      break;
    case Kernel::kRemap:
      launch_remap(params, choice, grid, stream);
      break;
    case Kernel::kTile:
      launch_tile(params, choice, grid, stream);
      break;
    case Kernel::kConvert:
      launch_convert(params, choice, grid, stream);
      break;
    case Kernel::kQuantize:
      launch_quantize(params, choice, grid, stream);
      break;
    case Kernel::kUnits:
      launch_units(params, choice, grid, stream);
      break;
    default:
      launch_generic(params, choice, grid, stream);
  }
}

// One launch: pairs of one kind.
template <class P>
kvx_status_t launch(const Plan &plan, const Common &common, const Choice &choice,
                    const Columns &columns, const PlanePair *const *pairs, uint64_t most_blocks,
                    cudaStream_t stream) {
  P params;
  static_cast<Common &>(params) = common;
  set_columns(columns, &params);
  for (uint32_t i = 0; i < common.num_pairs; ++i) {
    const PlanePair &pair = *pairs[i];
    set_numbers(columns, numbers_of(plan, pair), i, &params);
    params.lookup[i] = pair.lookup % 2;
    params.is_v[i] = pair.is_v;
  }
  if constexpr (std::is_same_v<P, AffineParams>) params.affine = *affine_of(plan, *pairs[0]);
  const uint32_t items = common.chunks * common.parts.divisor;
  const uint64_t blocks = (items - 1) / items_per_block(choice.kernel) + 1;
  const uint64_t most = std::max<uint64_t>(most_blocks / common.num_pairs, 1);
  const dim3 grid(static_cast<uint32_t>(std::min(blocks, most)), common.num_pairs);
  // Where a thread block has one item at most, there is little to leave out.
  params.measures_rows = plan.rows.lens.data && !plan.rows.fill_to_max && blocks > most &&
                         common.chunks > plan.rows.count;
  run_kernel(params, choice, grid, stream);
  return check(cudaPeekAtLastError(), "kernel launch");
}

// The first pair, from `from` on, of the same kind as pair `first`; num_pairs: none.
uint32_t next_of_kind(const Plan &plan, uint32_t first, uint32_t from) {
  const auto entries = [&](uint32_t i) {
    return plan.lookups[plan.pairs[i].lookup].src.tokens_per_entry;
  };
  const AffinePair *const affine = affine_of(plan, plan.pairs[first]);
  while (from < plan.pairs.size() &&
         !(kind(plan.pairs[from]) == kind(plan.pairs[first]) && entries(from) == entries(first) &&
           are_of_one_kind(affine_of(plan, plan.pairs[from]), affine))) {
    ++from;
  }
  return from;
}

// The pairs of the same kind as pair `first`, together.
struct AlikePairs {
  uint64_t alignment;  // the largest power of two that divides all addresses of data
  Columns columns;
  uint32_t most_pairs;  // of a launch
};

AlikePairs kind_of(const Plan &plan, uint32_t first) {
  AlikePairs kind{};
  uint64_t bits = 4096;
  for (uint32_t i = first; i < plan.pairs.size(); i = next_of_kind(plan, first, i + 1)) {
    const Numbers numbers = numbers_of(plan, plan.pairs[i]);
    kind.columns.add(numbers);
    if (plan.lookups[plan.pairs[i].lookup].differs_by_plane()) kind.columns.require(kPlane);
    for (uint32_t column = kSrc; column <= kDstSecondary; ++column) bits |= numbers[column];
  }
  kind.alignment = bits & (~bits + 1);
  const uint32_t columns = kind.columns.count();
  kind.most_pairs =
      plan.pairs[first].affine ? AffineParams::most_pairs(columns) : Large::most_pairs(columns);
  if (plan.background) kind.most_pairs = std::min(kind.most_pairs, kBackgroundBlocks);
  return kind;
}

// Tokens of a block if both ends have the same number, else 0.
uint32_t block_tokens(const LookupPair &lookup) {
  return lookup.src.block_size == lookup.dst.block_size ? lookup.src.block_size : 0;
}

using Reported = SmallVector<bool, 2>;  // by lookup: whether a launch reports for it

Choice choice_of(const Plan &plan, uint32_t first, const AlikePairs &kind) {
  if (const AffinePair *const affine = affine_of(plan, plan.pairs[first]))
    return choose_affine(without_pointers(plan.pairs[first]), *affine);
  const LookupPair &lookup = plan.lookups[plan.pairs[first].lookup];
  Choice choice = choose(without_pointers(plan.pairs[first]), kind.alignment, block_tokens(lookup),
                         plan.background);
  if (is_for_slots(choice, plan.rows_of(lookup), lookup, plan.pairs.size()))
    choice.kernel = Kernel::kSlots;
  return choice;
}

// Runs all pairs of the same kind as pair `first`, in as few launches as their pointers, or the
// blocks of a background transfer, allow.
kvx_status_t run_kind(const Plan &plan, uint32_t first, Reported *reported, Common common,
                      uint32_t sms, cudaStream_t stream) {
  const AlikePairs kind = kind_of(plan, first);
  const Choice choice = choice_of(plan, first, kind);
  const uint64_t most_blocks = plan.background ? kBackgroundBlocks : sms * kBlocksPerSm;
  common.rows = plan.rows_of(plan.lookups[plan.pairs[first].lookup]);
  common.row_bound = row_bound(plan, plan.pairs[first].lookup);
  common.shape = choice.shape;
  common.units = choice.units;
  const size_t first_lookup = plan.pairs[first].lookup / 2 * 2;
  for (size_t i = 0; i < 2 && first_lookup + i < plan.lookups.size(); ++i)
    common.lookups[i] = {KernelLookup(plan.lookups[first_lookup + i].src),
                         KernelLookup(plan.lookups[first_lookup + i].dst)};
  for (uint32_t next = first; next < plan.pairs.size();) {
    const PlanePair *pairs[std::max(Large::most_pairs(2), AffineParams::most_pairs(2))];
    common.num_pairs = 0;
    // The first pair that uses a lookup reports its faults.
    common.reporter[0] = common.reporter[1] = UINT32_MAX;
    for (; next < plan.pairs.size() && common.num_pairs < kind.most_pairs;
         next = next_of_kind(plan, first, next + 1)) {
      const PlanePair &pair = plan.pairs[next];
      bool &is_reported = (*reported)[pair.lookup];
      if (!is_reported) common.reporter[pair.lookup % 2] = common.num_pairs;
      is_reported = true;
      pairs[common.num_pairs++] = &pair;
    }
    cut(choice, &common);
    const auto run = plan.pairs[first].affine        ? launch<AffineParams>
                     : common.num_pairs <= kFewPairs ? launch<Small>
                                                     : launch<Large>;
    KVX_TRY(run(plan, common, choice, kind.columns, pairs, most_blocks, stream));
  }
  return KVX_STATUS_OK;
}

}  // namespace

kvx_status_t run(const Plan &plan, Reach *reach, void *stream) {
  if (plan.copy_engine) {
    reach->keep();
    return run_copies(plan, stream);
  }
  Common common{};
  if (plan.rows.count == 0 || row_bound(plan, 0) == 0) return KVX_STATUS_OK;
  for (size_t i = 0; i < plan.lookups.size(); ++i) KVX_TRY(check_narrow(plan, row_bound(plan, i)));
  for (const PlanePair &pair : plan.pairs)
    if (pair.affine) KVX_TRY(check_narrow_blocks(plan, pair, row_bound(plan, pair.lookup)));
  KVX_TRY(check_found_scales(plan));
  KVX_TRY(check_turboquant(plan));
  KVX_TRY(check_rotations(plan));
  KVX_TRY(check_split_tokens(plan));
  KVX_TRY(check_groups_to_channels(plan));
  KVX_TRY(check_tensor_scales(plan));
  KVX_TRY(check_indices(plan, reach));
  common.zero_fill = plan.zero_fill;
  common.call = plan.call;
  uint32_t sms = 0;
  KVX_TRY(count_sms(reach->device(), &sms));
  KVX_TRY(device_status(reach->device(), &common.status));

  Reported reported;
  reported.reserve(plan.lookups.size());
  for (size_t i = 0; i < plan.lookups.size(); ++i) reported.add();
  for (uint32_t i = 0; i < plan.pairs.size(); ++i) {
    if (next_of_kind(plan, i, 0) == i)
      KVX_TRY(run_kind(plan, i, &reported, common, sms, static_cast<cudaStream_t>(stream)));
  }
  return KVX_STATUS_OK;
}

void describe(const Plan &plan, kvx_plan_info_t *info, kvx_plane_info_t *planes) {
  const bool runs = !plan.copy_engine && plan.rows.count && row_bound(plan, 0);
  for (uint32_t first = 0; first < plan.pairs.size(); ++first) {
    if (next_of_kind(plan, first, 0) != first) continue;
    const AlikePairs kind = kind_of(plan, first);
    const char *const name =
        plan.copy_engine ? "copy engine" : name_of(choice_of(plan, first, kind).kernel);
    uint32_t num_pairs = 0;
    for (uint32_t i = first; i < plan.pairs.size(); i = next_of_kind(plan, first, i + 1)) {
      if (runs && num_pairs++ % kind.most_pairs == 0) ++info->num_launches;
      if (!planes) continue;
      planes[i].kernel = name;
      planes[i].launch = runs ? info->num_launches - 1 : 0;
    }
  }
}

}  // namespace kvx::cuda
