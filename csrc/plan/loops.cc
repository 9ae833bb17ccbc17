#include "plan/loops.h"

#include <algorithm>

namespace kvx {
namespace {

constexpr int64_t kMaxTransposedRun = 16;  // bytes; longer runs are copied without a transpose

// Joins loops with the run as long as one of them continues it at both ends.
void grow_run(Loops *loops) {
  for (int i = 0; i < loops->count;) {
    const Loop &dim = loops->at[i];
    if (dim.src == loops->run && dim.dst == loops->run) {
      loops->run *= dim.count;
      std::copy(loops->at + i + 1, loops->at + loops->count, loops->at + i);
      --loops->count;
      i = 0;
    } else {
      ++i;
    }
  }
}

// Sorts loops to read the source forward: the widest step outermost.
void sort_by_source(Loops *loops) {
  for (int i = 1; i < loops->count; ++i)
    for (int j = i; j > 0 && loops->at[j].src > loops->at[j - 1].src; --j)
      std::swap(loops->at[j], loops->at[j - 1]);
}

void merge_loops(Loops *loops) {
  for (int i = 0; i + 1 < loops->count;) {
    Loop &outer = loops->at[i];
    const Loop &inner = loops->at[i + 1];
    if (outer.src == inner.count * inner.src && outer.dst == inner.count * inner.dst) {
      outer = {outer.count * inner.count, inner.src, inner.dst};
      std::copy(loops->at + i + 2, loops->at + loops->count, loops->at + i + 1);
      --loops->count;
    } else {
      ++i;
    }
  }
}

// Finds short runs that follow each other along one loop in the source and another in the
// destination.
void find_transpose(Loops *loops) {
  const bool power_of_two = (loops->run & (loops->run - 1)) == 0;
  if (loops->run > kMaxTransposedRun || !power_of_two) return;
  int in_src = -1, in_dst = -1;
  for (int i = 0; i < loops->count; ++i) {
    if (loops->at[i].src == loops->run) in_src = i;
    if (loops->at[i].dst == loops->run) in_dst = i;
  }
  if (in_src < 0 || in_dst < 0) return;
  const Loop swapped[2] = {loops->at[in_dst], loops->at[in_src]};
  Loop *kept = loops->at;
  for (int i = 0; i < loops->count; ++i)
    if (i != in_src && i != in_dst) *kept++ = loops->at[i];
  std::copy(swapped, swapped + 2, kept);
  loops->transposes = true;
}

// An axis in parts: index i lies at i / extent * outer + i % extent * inner bytes.
struct Parts {
  int64_t extent, outer, inner;

  int64_t offset(int64_t i) const { return i / extent * outer + i % extent * inner; }
};

// The parts of the token axis; one endless part if tokens are not split.
Parts token_parts(const Plane &plane) {
  return {plane.token_pack ? plane.token_pack : INT64_MAX, plane.token_outer_stride,
          plane.token_stride};
}

}  // namespace

int64_t tokens_of_part(const Plane &src, const Plane &dst, int64_t from, int64_t to,
                       int64_t tokens) {
  if (src.token_pack) tokens = std::min(tokens, src.token_pack - from % src.token_pack);
  if (dst.token_pack) tokens = std::min(tokens, dst.token_pack - to % dst.token_pack);
  return tokens;
}

int64_t tokens_of_loops(const Plane &src, const Plane &dst, int64_t from, int64_t to,
                        int64_t tokens) {
  if (!src.token_pack && !dst.token_pack) return tokens;
  const int64_t in_part = tokens_of_part(src, dst, from, to, tokens);
  const int64_t src_part = token_parts(src).extent, dst_part = token_parts(dst).extent;
  const int64_t src_left = src_part - from % src_part, dst_left = dst_part - to % dst_part;
  const bool src_begins = src_left == src_part, dst_begins = dst_left == dst_part;
  const int64_t wide = std::max(src_part, dst_part), narrow = std::min(src_part, dst_part);
  // Whole parts of both, whole parts of one within a part of the other, or less than a part.
  if (src_begins && dst_begins && wide <= tokens && wide % narrow == 0) return tokens / wide * wide;
  const int64_t in_dst_part = std::min(tokens, dst_left), in_src_part = std::min(tokens, src_left);
  if (src_begins && src_part <= in_dst_part) return in_dst_part / src_part * src_part;
  if (dst_begins && dst_part <= in_src_part) return in_src_part / dst_part * dst_part;
  return in_part;
}

bool can_loop(const Plane &src, const Plane &dst) {
  return src.pack % dst.pack == 0 || dst.pack % src.pack == 0;
}

void make_loops(const Plane &src, const Plane &dst, int64_t tokens, int64_t heads, int64_t head_dim,
                int64_t element_bytes, Loops *loops) {
  loops->run = element_bytes;
  loops->count = 0;
  loops->transposes = false;
  const auto add = [&](int64_t count, int64_t src_step, int64_t dst_step) {
    if (count > 1) loops->at[loops->count++] = {count, src_step, dst_step};
  };
  // The parts of an axis at both ends, of which the wider is a multiple of the narrower.
  const auto add_parts = [&](int64_t count, const Parts &from, const Parts &to) {
    if (std::min(from.extent, to.extent) >= count) return add(count, from.inner, to.inner);
    const int64_t wide = std::min(std::max(from.extent, to.extent), count);
    const int64_t narrow = std::min(std::min(from.extent, to.extent), count);
    add(count / wide, from.offset(wide), to.offset(wide));
    add(wide / narrow, from.offset(narrow), to.offset(narrow));
    add(narrow, from.inner, to.inner);
  };
  if (src.token_pack || dst.token_pack) {
    add_parts(tokens, token_parts(src), token_parts(dst));
  } else {
    add(tokens, src.token_stride, dst.token_stride);
  }
  add(heads, src.head_stride, dst.head_stride);
  add_parts(head_dim, {src.pack, src.outer_stride, src.inner_stride},
            {dst.pack, dst.outer_stride, dst.inner_stride});
  grow_run(loops);
  sort_by_source(loops);
  merge_loops(loops);
  find_transpose(loops);
}

Plane dense_plane(uint8_t *base, kvx_dtype_t dtype, int64_t heads, int64_t head_dim) {
  Plane plane{};
  plane.base = base;
  plane.dtype = dtype;
  plane.inner_stride = size_of(dtype);
  plane.head_stride = head_dim * plane.inner_stride;
  plane.token_stride = heads * plane.head_stride;
  plane.outer_stride = plane.head_stride;
  plane.pack = static_cast<uint32_t>(head_dim);
  return plane;
}

}  // namespace kvx
