#include "plan/plan_affine.h"

#include <algorithm>
#include <vector>

#include "desc/affine.h"
#include "desc/scale.h"
#include "error.h"
#include "plan/violation.h"
#include "plan/walk.h"

namespace kvx {
namespace {

int64_t step_bytes(const kvx_scale_desc_t &desc, int axis) {
  return desc.shape[axis] > 1 ? desc.stride[axis] * size_of(desc.dtype) : 0;
}

GroupNumbers numbers_of(const kvx_scale_desc_t &desc, uint32_t head_start) {
  GroupNumbers all{};
  all.dtype = desc.dtype;
  all.block_stride = step_bytes(desc, 0);
  if (covers_tokens(desc)) {
    all.head_stride = step_bytes(desc, 1);
    all.group_stride = step_bytes(desc, 2);
  } else {
    all.token_stride = step_bytes(desc, 1);
    all.head_stride = step_bytes(desc, 2);
    if (has_groups(desc)) all.group_stride = step_bytes(desc, 3);
    if (swaps_fours(desc)) all.quarter = static_cast<uint32_t>(desc.shape[3] / 4);
  }
  all.data = static_cast<uint8_t *>(const_cast<void *>(desc.data)) + head_start * all.head_stride;
  return all;
}

AffineEnd end_of(kvx_dtype_t dtype, const AffineDescs &descs, uint32_t head_dim) {
  AffineEnd end{};
  if (!is_affine(dtype)) return end;
  const kvx_scale_desc_t &scales = *descs.scales;
  end.scales = numbers_of(scales, descs.head_start);
  if (!has_group_scales(dtype)) {
    end.zeros = numbers_of(*descs.zeros, descs.head_start);
  } else if (descs.zeros) {
    end.zeros.data = static_cast<uint8_t *>(const_cast<void *>(descs.zeros->data));
    end.zeros.dtype = descs.zeros->dtype;
  }
  end.covers_tokens = covers_tokens(scales);
  const auto groups = has_groups(scales) ? static_cast<uint32_t>(scales.shape[3]) : 1;
  end.group = end.covers_tokens ? 1 : head_dim / groups;
  return end;
}

// Scales or zero points of one end as a plane of their own.
void set_plane(Plane *plane, const GroupNumbers &all, uint32_t groups) {
  plane->base = all.data;
  plane->dtype = all.dtype;
  plane->block_stride = all.block_stride;
  plane->token_stride = all.token_stride;
  plane->head_stride = all.head_stride;
  plane->inner_stride = plane->outer_stride = groups > 1 ? all.group_stride : size_of(all.dtype);
  plane->pack = groups;
  if (!all.quarter) return;
  plane->token_pack = 4;
  plane->token_outer_stride = 4 * all.token_stride;
  plane->token_stride = all.group_stride;
  plane->pack = all.quarter;
  plane->outer_stride = all.token_stride;
  plane->inner_stride = 4 * all.group_stride;
}

// Whether both tensors have one scale of the same value, or none. `readable`: by the host.
bool have_same_scale(const GroupNumbers &src, const GroupNumbers &dst, bool readable) {
  if (src.data == dst.data) return true;
  const auto value = [](const GroupNumbers &of) {
    return of.data ? read_scale(of.data, of.dtype) : 1.0f;
  };
  return readable && value(src) == value(dst);
}

// A pair that copies what lies beside the data of pair `index`.
void add_copy(Plan *plan, size_t index, const GroupNumbers &src, const GroupNumbers &dst,
              uint32_t groups, BesideData what) {
  PlanePair &pair = plan->pairs.add();
  const PlanePair &data = plan->pairs[index];
  pair.num_heads = data.num_heads;
  pair.head_dim = groups;
  pair.lookup = data.lookup;
  pair.plane = data.plane;
  pair.is_v = data.is_v;
  pair.beside = what;
  set_plane(&pair.src, src, groups);
  set_plane(&pair.dst, dst, groups);
}

}  // namespace

void reserve_pairs(Plan *plan, const kvx_span_t &src, const kvx_span_t &dst) {
  const size_t most = size_t{2} * src.num_layers + src.num_planes;
  bool has_affine = src.k_zeros || src.v_zeros || dst.k_zeros || dst.v_zeros;
  const bool has_scales = src.k_scales || src.v_scales || dst.k_scales || dst.v_scales;
  for (uint32_t l = 0; has_scales && l < src.num_layers && !has_affine; ++l)
    for (const kvx_cache_desc_t *cache : {src.layers[l], dst.layers[l]})
      has_affine |= is_affine(cache->k.dtype) || is_affine(cache->v.dtype);
  for (uint32_t i = 0; i < src.num_planes && !has_affine; ++i)
    has_affine = is_affine(src.planes[i]->dtype) || is_affine(dst.planes[i]->dtype);
  plan->pairs.reserve(has_affine ? 3 * most : most);  // scales and zero points may be pairs, too
  if (has_affine) plan->affine.reserve(most);
}

void add_affine(Plan *plan, size_t index, const AffineDescs &src_descs,
                const AffineDescs &dst_descs, uint32_t flags, bool readable) {
  PlanePair &pair = plan->pairs[index];
  const uint32_t dim = pair.convert  // else it counts units
                           ? pair.head_dim
                           : static_cast<uint32_t>(numbers_of(pair.src.dtype, pair.head_dim));
  const AffineEnd src = end_of(pair.src.dtype, src_descs, dim);
  const AffineEnd dst = end_of(pair.dst.dtype, dst_descs, dim);
  const LookupPair &lookup = plan->lookups[pair.lookup];
  const bool has_zeros = !has_group_scales(pair.src.dtype);
  const bool is_same = pair.src.dtype == pair.dst.dtype && src.group == dst.group &&
                       src.scales.dtype == dst.scales.dtype &&
                       (has_zeros ? src.zeros.dtype == dst.zeros.dtype
                                  : have_same_scale(src.zeros, dst.zeros, readable)) &&
                       src.covers_tokens == dst.covers_tokens;
  if (is_same && !src.covers_tokens) {
    add_copy(plan, index, src.scales, dst.scales, dim / src.group, BesideData::kScales);
    if (has_zeros) add_copy(plan, index, src.zeros, dst.zeros, dim / src.group, BesideData::kZeros);
    return;
  }
  pair.convert = true;
  pair.head_dim = dim;
  AffinePair &affine = plan->affine.add();
  pair.affine = static_cast<uint32_t>(plan->affine.size());
  affine.src = src;
  affine.dst = dst;
  affine.keeps_units = is_same && lookup.src.block_size == lookup.dst.block_size;
  affine.requantizes = flags & KVX_FLAG_REQUANTIZE;
  affine.block_size = lookup.dst.block_size;
}

kvx_status_t check_unit_starts(const Plan &plan) {
  for (const PlanePair &pair : plan.pairs) {
    if (!pair.affine) continue;
    const AffinePair &affine = plan.affine[pair.affine - 1];
    const Lookup &dst = plan.lookups[pair.lookup].dst;
    if (!affine.dst.covers_tokens || affine.requantizes || !dst.starts.data) continue;
    for (uint64_t row = 0; row < plan.rows.count; ++row) {
      Violation found{};
      if (!is_within_unit(plan.rows, dst, row, &found)) continue;
      return fail_with(found, field_names(plan, plan.lookups[pair.lookup]));
    }
  }
  return KVX_STATUS_OK;
}

kvx_status_t check_unit_blocks(const Plan &plan, uint64_t tokens) {
  struct Unit {
    int64_t block;
    uint64_t row;
  };
  uint32_t checked = UINT32_MAX;  // lookups of pairs that follow each other are mostly one
  for (const PlanePair &pair : plan.pairs) {
    if (!pair.affine || !plan.affine[pair.affine - 1].dst.covers_tokens) continue;
    if (pair.lookup == checked) continue;
    checked = pair.lookup;
    std::vector<Unit> units;
    uint32_t last = 0;  // offset of the token before
    walk(plan, pair, 0, tokens, [&](uint64_t row, const Place &from, const Place &to, uint64_t) {
      if (to.block < 0 || (from.block < 0 && !plan.zero_fill)) return KVX_STATUS_OK;
      const bool goes_on = !units.empty() && units.back().row == row &&
                           units.back().block == to.block && to.offset > last;
      if (!goes_on) units.push_back({to.block, row});
      last = to.offset;
      return KVX_STATUS_OK;
    });
    std::sort(units.begin(), units.end(), [](const Unit &a, const Unit &b) {
      return a.block != b.block ? a.block < b.block : a.row < b.row;
    });
    const auto twice =
        std::adjacent_find(units.begin(), units.end(),
                           [](const Unit &a, const Unit &b) { return a.block == b.block; });
    if (twice == units.end()) continue;
    return KVX_INVALID(
        "block %lld is a destination of row %llu and, again, of row %llu, but a scale covers all "
        "its tokens (PER_CHANNEL): expected blocks of its own for each row (spec E.14)",
        static_cast<ll>(twice->block), static_cast<ull>(twice->row),
        static_cast<ull>(std::next(twice)->row));
  }
  return KVX_STATUS_OK;
}

}  // namespace kvx
