// What the CPU runs for kvx_attend_kv: K and V of one block as byte strides.
#pragma once

#include "kvx/kvx_attend.h"
#include "plan/plan.h"

namespace kvx {

// The vectors of K or V: that of (token, head) lies at base + token * token_stride + head *
// head_stride, its scale at scales.data + token * scales.token_stride + head * scales.head_stride.
struct Vectors {
  const uint8_t *base;
  int64_t token_stride, head_stride;
  uint32_t dim;  // numbers
  kvx_dtype_t dtype;
  Scales scales;
};

// Query heads g * repeats to (g + 1) * repeats use KV head g.
struct Attention {
  Vectors k, v;
  uint32_t num_kv_heads, repeats, num_tokens;
  const float *query;
  float *out;
  int64_t query_strides[2], out_strides[2];  // in numbers: of a head, of dim
  float scale;
};

// Takes validated arguments. Fails for scales that are not finite and above 0.
kvx_status_t plan_attend(const kvx_cache_desc_t &cache, const kvx_attend_desc_t &attend,
                         Attention *plan);

}  // namespace kvx
