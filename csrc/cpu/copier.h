// Copies runs of tokens of a pair of planes that store the same bytes.
#pragma once

#include "cpu/kernels/kernels.h"
#include "plan/loops.h"

namespace kvx::cpu {

// Copies, and keeps the loops of the last number of tokens: most runs of tokens are one block long.
class Copier {
 public:
  Copier(const Plane &src, const Plane &dst, int64_t heads, int64_t head_dim, bool streaming)
      : src_(src),
        dst_(dst),
        heads_(heads),
        head_dim_(head_dim),
        streaming_(streaming),
        by_element_(!can_loop(src, dst)) {}

  void operator()(uint8_t *dst, const uint8_t *src, const Next &next, int64_t tokens) {
    if (tokens != tokens_) {
      make_loops(src_, dst_, tokens, heads_, by_element_ ? 1 : head_dim_, size_of(src_.dtype),
                 &loops_);
      tokens_ = tokens;
    }
    if (!by_element_) return kernels_.copy(loops_, dst, src, next, streaming_);
    for (int64_t d = 0; d < head_dim_; ++d) {
      const uint8_t *const from = src + element_offset(src_, d);
      uint8_t *const to = dst + element_offset(dst_, d);
      kernels_.copy(loops_, to, from, {to, from}, false);
    }
  }

 private:
  const Plane &src_, &dst_;
  const int64_t heads_, head_dim_;
  const bool streaming_, by_element_;
  const Kernels &kernels_ = kernels();
  int64_t tokens_ = -1;
  Loops loops_;
};

// Units of a vector at the destination: head_dim counts units if bytes are copied, else numbers.
inline int64_t dst_units(const PlanePair &pair) {
  return pair.convert ? units_of(pair.dst.dtype, pair.head_dim) : pair.head_dim;
}

}  // namespace kvx::cpu
