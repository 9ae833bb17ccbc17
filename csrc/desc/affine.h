// Questions about scales and zero points of U8_ZERO and U8_BIAS.
#pragma once

#include "desc/span.h"

namespace kvx {

// Whether a unit covers all tokens of a block.
inline bool covers_tokens(const kvx_scale_desc_t &numbers) {
  return numbers.granularity == KVX_SCALE_PER_CHANNEL;
}

// NULL: none.
inline const kvx_scale_desc_t *zeros_of(const kvx_span_t &span, uint32_t l, bool is_v) {
  const kvx_scale_desc_t *const *const list = is_v ? span.v_zeros : span.k_zeros;
  return list ? list[l] : nullptr;
}

}  // namespace kvx
