// One scale: read from HOST memory, or found for a vector.
#pragma once

#include <cmath>

#include "formats/scalar.h"
#include "kvx/kvx_abi.h"

namespace kvx {

// The scales of K or V of a write: a descriptor or, if that is empty, v1's pointer to one F32 as a
// descriptor. Without data: there are none.
inline kvx_scale_desc_t scales_of(const kvx_write_desc_t &write, bool is_v) {
  const kvx_scale_desc_t &desc = is_v ? write.v_scale_desc : write.k_scale_desc;
  const void *const per_tensor = is_v ? write.v_scale : write.k_scale;
  if (desc.data || !per_tensor) return desc;
  kvx_scale_desc_t scale{};
  scale.size = sizeof scale;
  scale.dtype = KVX_DTYPE_F32;
  scale.granularity = KVX_SCALE_PER_TENSOR;
  scale.data = per_tensor;
  return scale;
}

// The field that they are in.
inline const char *name_of_scales(const kvx_write_desc_t &write, bool is_v) {
  if (is_v) return write.v_scale_desc.data ? "v_scale_desc" : "v_scale";
  return write.k_scale_desc.data ? "k_scale_desc" : "k_scale";
}

inline bool has_scales(const kvx_write_desc_t &write) {
  return write.k_scale_desc.data || write.v_scale_desc.data || write.k_scale || write.v_scale;
}

inline float read_scale(const void *data, kvx_dtype_t dtype) {
  if (dtype == KVX_DTYPE_F32) return *static_cast<const float *>(data);
  const uint16_t bits = *static_cast<const uint16_t *>(data);
  return dtype == KVX_DTYPE_F16 ? F16::decode(bits) : Bf16::decode(bits);
}

inline void write_scale(void *data, kvx_dtype_t dtype, float scale) {
  if (dtype == KVX_DTYPE_F32) {
    *static_cast<float *>(data) = scale;
  } else {
    *static_cast<uint16_t *>(data) =
        dtype == KVX_DTYPE_F16 ? F16::encode(scale) : Bf16::encode(scale);
  }
}

inline bool is_usable_scale(float scale) { return std::isfinite(scale) && scale > 0.0f; }

// The scale of an FP8 vector whose largest magnitude is `amax`, rounded to the dtype that stores
// it. `largest` is the format's. Spec: E.9
KVX_HD float found_scale(float amax, float largest, kvx_dtype_t scale_dtype) {
  const float exact = amax / largest;
  const float stored = scale_dtype == KVX_DTYPE_F32   ? exact
                       : scale_dtype == KVX_DTYPE_F16 ? F16::decode(F16::encode(exact))
                                                      : Bf16::decode(Bf16::encode(exact));
  return stored > 0.0f && bits_of(stored) < kInfinity ? stored : 1.0f;
}

}  // namespace kvx
