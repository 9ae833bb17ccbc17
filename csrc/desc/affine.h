// Questions about scales and zero points of U8_ZERO and U8_BIAS, and scales of F4_E2M1.
#pragma once

#include "desc/span.h"

namespace kvx {

// Whether a unit covers all tokens of a block.
inline bool covers_tokens(const kvx_scale_desc_t &numbers) {
  return numbers.granularity == KVX_SCALE_PER_CHANNEL;
}

// Whether a head's numbers have a scale for each of several groups.
inline bool has_groups(const kvx_scale_desc_t &numbers) {
  return numbers.granularity == KVX_SCALE_PER_GROUP ||
         numbers.granularity == KVX_SCALE_PER_GROUP_4X4;
}

// Whether tokens and groups swap places in fours.
inline bool swaps_fours(const kvx_scale_desc_t &numbers) {
  return numbers.granularity == KVX_SCALE_PER_GROUP_4X4;
}

// NULL: none.
inline const kvx_scale_desc_t *zeros_of(const kvx_span_t &span, uint32_t l, bool is_v) {
  const kvx_scale_desc_t *const *const list = is_v ? span.v_zeros : span.k_zeros;
  return list ? list[l] : nullptr;
}

}  // namespace kvx
