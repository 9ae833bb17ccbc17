#include "plan/describe.h"

#include <algorithm>
#include <vector>

#include "plan/loops.h"
#include "plan/walk.h"

namespace kvx {
namespace {

bool is_exact(const Plan &plan, const PlanePair &pair) {
  if (!pair.convert) return true;
  if (pair.hadamard) return false;
  if (pair.affine && plan.affine[pair.affine - 1].keeps_units) {  // unless units are cut
    const LookupPair &lookup = plan.lookups[pair.lookup];
    return !lookup.src.starts.data && !lookup.dst.starts.data &&
           lookup.src.mode != LookupMode::kSlots && lookup.src.mode != LookupMode::kRagged;
  }
  return !pair.find_scales && !pair.src_scales.data && !pair.dst_scales.data &&
         includes(pair.dst.dtype, pair.src.dtype);
}

bool finds_scales(const Plan &plan, const PlanePair &pair) {
  return pair.find_scales || (pair.affine && plan.affine[pair.affine - 1].dst.group);
}

// The loops that copy a block's tokens.
Loops loops_of(const PlanePair &pair, const LookupPair &lookup) {
  const uint32_t tokens = std::max(std::min(lookup.src.block_size, lookup.dst.block_size), 1u);
  Loops loops;
  make_loops(pair.src, pair.dst, tokens_of_loops(pair.src, pair.dst, 0, 0, tokens), pair.num_heads,
             can_loop(pair.src, pair.dst) ? pair.head_dim : 1, size_of(pair.src.dtype), &loops);
  return loops;
}

// Bytes of a token's vectors at one end.
uint64_t token_bytes(const PlanePair &pair, const Plane &plane) {
  const int64_t vector =
      pair.convert ? bytes_of(plane.dtype, pair.head_dim) : pair.head_dim * size_of(plane.dtype);
  return pair.num_heads * static_cast<uint64_t>(vector);
}

// The name of a plane of the migration.
struct Name {
  uint32_t layer, role;
};

// The names of all planes; those of a layer are a list.
std::vector<std::vector<Name>> names_of(const kvx_span_t &span) {
  std::vector<std::vector<Name>> names;
  for (uint32_t l = 0; l < span.num_layers; ++l) {
    names.push_back({{l, KVX_ROLE_K}});
    if (!is_absent(span.layers[l]->v)) names.back().push_back({l, KVX_ROLE_V});
  }
  for (uint32_t i = 0; i < span.num_planes; ++i) {
    const kvx_plane_t &plane = *span.planes[i];
    if (i == 0 || span.planes[i - 1]->layer != plane.layer) names.emplace_back();
    names.back().push_back({plane.layer, plane.role});
  }
  return names;
}

void describe(const Plan &plan, const PlanePair &pair, const Name &name, bool is_joined,
              kvx_plane_info_t *plane) {
  const uint32_t size = plane->size;
  *plane = {};
  plane->size = size;
  plane->layer = name.layer;
  plane->role = name.role;
  plane->flags = (pair.convert ? KVX_PLANE_INFO_CONVERTS : 0) |
                 (is_exact(plan, pair) ? KVX_PLANE_INFO_EXACT : 0) |
                 (is_joined ? KVX_PLANE_INFO_JOINED : 0) |
                 (finds_scales(plan, pair) ? KVX_PLANE_INFO_FINDS_SCALES : 0) |
                 (pair.beside == BesideData::kScales ? KVX_PLANE_INFO_SCALES : 0) |
                 (pair.beside == BesideData::kZeros ? KVX_PLANE_INFO_ZEROS : 0);
  plane->src_dtype = pair.src.dtype;
  plane->dst_dtype = pair.dst.dtype;
  plane->num_heads = pair.num_heads;
  plane->hadamard = pair.hadamard;
  plane->vector_size = pair.convert
                           ? pair.head_dim
                           : static_cast<uint32_t>(numbers_of(pair.src.dtype, pair.head_dim));
  plane->num_vectors = plane->bytes_read = plane->bytes_written = KVX_UNKNOWN;
  plane->kernel = "convert";
  if (pair.convert) return;
  const Loops loops = loops_of(pair, plan.lookups[pair.lookup]);
  plane->kernel = loops.transposes ? "transpose" : "copy";
  plane->run_bytes = static_cast<uint64_t>(loops.run);
}

// Counts of tokens: moved, or null at one end.
struct Counts {
  uint64_t moved, null_src, null_dst;
};

Counts count(const Plan &plan, const LookupPair &lookup, uint32_t plane, uint64_t tokens) {
  Counts counts{};
  walk(
      plan, lookup, plane, 0, tokens,
      [&](uint64_t, const Place &from, const Place &to, uint64_t count) {
        (to.block < 0 ? counts.null_dst : from.block < 0 ? counts.null_src : counts.moved) += count;
        return KVX_STATUS_OK;
      });
  return counts;
}

}  // namespace

void describe_planes(const Plan &plan, const kvx_span_t &span, kvx_plan_info_t *info,
                     kvx_plane_info_t *planes) {
  info->num_planes = static_cast<uint32_t>(plan.pairs.size());
  info->num_sequences = plan.call == Call::kWrite ? 0 : plan.rows.count;
  info->num_tokens = info->num_moved = info->num_null_src = info->num_null_dst = KVX_UNKNOWN;
  info->bytes_read = info->bytes_written = KVX_UNKNOWN;
  info->is_exact = 1;
  for (const PlanePair &pair : plan.pairs)
    if (!is_exact(plan, pair)) info->is_exact = 0;
  if (!planes) return;
  const std::vector<std::vector<Name>> names = names_of(span);
  for (size_t layer = 0; layer < plan.layers.size(); ++layer) {
    const PlanePair *const begin = plan.begin_of(layer), *const end = plan.end_of(layer);
    const bool is_joined = static_cast<size_t>(end - begin) < names[layer].size();
    const Name *name = names[layer].data();
    for (const PlanePair *pair = begin; pair != end; ++pair) {
      if (pair != begin && pair->beside == BesideData::kNo) ++name;
      describe(plan, *pair, *name, is_joined, &planes[pair - plan.pairs.begin()]);
    }
  }
}

void count_moves(const Plan &plan, uint64_t tokens, kvx_plan_info_t *info,
                 kvx_plane_info_t *planes) {
  std::vector<Counts> counts;
  for (const LookupPair &lookup : plan.lookups) counts.push_back(count(plan, lookup, 0, tokens));
  // Planes whose entries are no tokens do not count tokens.
  for (size_t i = 0; i < counts.size() && info->num_tokens == KVX_UNKNOWN; ++i) {
    if (plan.lookups[i].src.tokens_per_entry != 1) continue;
    info->num_moved = counts[i].moved;
    info->num_null_src = counts[i].null_src;
    info->num_null_dst = counts[i].null_dst;
    info->num_tokens = info->num_moved + info->num_null_src + info->num_null_dst;
  }
  info->bytes_read = info->bytes_written = 0;
  for (size_t i = 0; i < plan.pairs.size(); ++i) {
    const PlanePair &pair = plan.pairs[i];
    const LookupPair &lookup = plan.lookups[pair.lookup];
    const Counts moves =
        lookup.differs_by_plane() ? count(plan, lookup, pair.plane, tokens) : counts[pair.lookup];
    const uint64_t written = moves.moved + (plan.zero_fill ? moves.null_src : 0);
    const uint64_t read = moves.moved * token_bytes(pair, pair.src);
    const uint64_t stored = written * token_bytes(pair, pair.dst);
    info->bytes_read += read;
    info->bytes_written += stored;
    if (!planes) continue;
    planes[i].num_vectors = moves.moved * pair.num_heads;
    planes[i].bytes_read = read;
    planes[i].bytes_written = stored;
  }
}

}  // namespace kvx
