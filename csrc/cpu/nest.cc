#include "cpu/nest.h"

#include <algorithm>

namespace kvx::cpu {
namespace {

constexpr int64_t kMaxTransposedRun = 16;  // bytes; longer runs are copied as they are

// Takes loops into the run as long as one of them continues it on both sides.
void grow_run(Nest *nest) {
  for (int i = 0; i < nest->num_dims;) {
    const Dim &dim = nest->dims[i];
    if (dim.src == nest->run && dim.dst == nest->run) {
      nest->run *= dim.count;
      std::copy(nest->dims + i + 1, nest->dims + nest->num_dims, nest->dims + i);
      --nest->num_dims;
      i = 0;
    } else {
      ++i;
    }
  }
}

// Reads forward through the source: the widest step outermost.
void sort_by_source(Nest *nest) {
  for (int i = 1; i < nest->num_dims; ++i)
    for (int j = i; j > 0 && nest->dims[j].src > nest->dims[j - 1].src; --j)
      std::swap(nest->dims[j], nest->dims[j - 1]);
}

void merge_loops(Nest *nest) {
  for (int i = 0; i + 1 < nest->num_dims;) {
    Dim &outer = nest->dims[i];
    const Dim &inner = nest->dims[i + 1];
    if (outer.src == inner.count * inner.src && outer.dst == inner.count * inner.dst) {
      outer = {outer.count * inner.count, inner.src, inner.dst};
      std::copy(nest->dims + i + 2, nest->dims + nest->num_dims, nest->dims + i + 1);
      --nest->num_dims;
    } else {
      ++i;
    }
  }
}

// Short runs that follow each other along one loop in the source and another in the destination.
void find_transpose(Nest *nest) {
  const bool power_of_two = (nest->run & (nest->run - 1)) == 0;
  if (nest->run > kMaxTransposedRun || !power_of_two) return;
  int in_src = -1, in_dst = -1;
  for (int i = 0; i < nest->num_dims; ++i) {
    if (nest->dims[i].src == nest->run) in_src = i;
    if (nest->dims[i].dst == nest->run) in_dst = i;
  }
  if (in_src < 0 || in_dst < 0) return;
  const Dim swapped[2] = {nest->dims[in_dst], nest->dims[in_src]};
  Dim *kept = nest->dims;
  for (int i = 0; i < nest->num_dims; ++i)
    if (i != in_src && i != in_dst) *kept++ = nest->dims[i];
  std::copy(swapped, swapped + 2, kept);
  nest->transposes = true;
}

}  // namespace

bool has_nest(const Side &src, const Side &dst) {
  return src.pack % dst.pack == 0 || dst.pack % src.pack == 0;
}

void make_nest(const Side &src, const Side &dst, int64_t tokens, int64_t heads, int64_t head_dim,
               int64_t element_bytes, Nest *nest) {
  nest->run = element_bytes;
  nest->num_dims = 0;
  nest->transposes = false;
  const auto add = [&](int64_t count, int64_t src_step, int64_t dst_step) {
    if (count > 1) nest->dims[nest->num_dims++] = {count, src_step, dst_step};
  };
  add(tokens, src.token_stride, dst.token_stride);
  add(heads, src.head_stride, dst.head_stride);
  const int64_t wide = std::min<int64_t>(std::max(src.pack, dst.pack), head_dim);
  const int64_t narrow = std::min<int64_t>(std::min(src.pack, dst.pack), head_dim);
  add(head_dim / wide, element_offset(src, wide), element_offset(dst, wide));
  add(wide / narrow, element_offset(src, narrow), element_offset(dst, narrow));
  add(narrow, src.inner_stride, dst.inner_stride);
  grow_run(nest);
  sort_by_source(nest);
  merge_loops(nest);
  find_transpose(nest);
}

Side dense_side(uint8_t *base, kvx_dtype_t dtype, int64_t heads, int64_t head_dim) {
  Side side{};
  side.base = base;
  side.dtype = dtype;
  side.inner_stride = size_of(dtype);
  side.head_stride = head_dim * side.inner_stride;
  side.token_stride = heads * side.head_stride;
  side.outer_stride = side.head_stride;
  side.pack = static_cast<uint32_t>(head_dim);
  return side;
}

}  // namespace kvx::cpu
