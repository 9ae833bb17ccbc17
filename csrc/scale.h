// One scale as float32, from HOST memory.
#pragma once

#include <cmath>

#include "codec.h"

namespace kvx {

inline float read_scale(const void *data, kvx_dtype_t dtype) {
  if (dtype == KVX_DTYPE_F32) return *static_cast<const float *>(data);
  const uint16_t bits = *static_cast<const uint16_t *>(data);
  return dtype == KVX_DTYPE_F16 ? F16::decode(bits) : Bf16::decode(bits);
}

inline bool is_usable_scale(float scale) { return std::isfinite(scale) && scale > 0.0f; }

}  // namespace kvx
