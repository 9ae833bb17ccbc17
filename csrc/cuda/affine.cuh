// Scales and zero points, and scales of groups, on the device. Spec: E.14, E.18
#pragma once

#include "cuda/numbers.cuh"
#include "formats/e2m1.h"

namespace kvx::cuda {

__device__ __forceinline__ float load_number(const uint8_t *at, kvx_dtype_t dtype) {
  if (dtype == KVX_DTYPE_F32) return load_as<F32>(at);
  return dtype == KVX_DTYPE_F16 ? load_as<F16>(at) : load_as<Bf16>(at);
}

__device__ __forceinline__ void store_number(uint8_t *at, kvx_dtype_t dtype, float number) {
  if (dtype == KVX_DTYPE_F32) return store_as<F32>(at, number);
  dtype == KVX_DTYPE_F16 ? store_as<F16>(at, number) : store_as<Bf16>(at, number);
}

// Where the scale or zero point of a group of a place's head lies; `data` is the pair's own.
__device__ __forceinline__ uint8_t *number_of(const GroupNumbers &all, uint8_t *data,
                                              const Place &place, uint32_t head, uint32_t group) {
  return data + all.offset_of(place.block, place.offset, head) + group * all.group_stride;
}

// One end of a pair, and where its scales and zero points begin.
struct UnitsAt {
  const AffineEnd &end;
  kvx_dtype_t dtype;
  uint8_t *scales, *zeros;

  __device__ __forceinline__ ScaleZero load(const Place &place, uint32_t head,
                                            uint32_t group) const {
    return {load_number(number_of(end.scales, scales, place, head, group), end.scales.dtype),
            load_number(number_of(end.zeros, zeros, place, head, group), end.zeros.dtype)};
  }
  __device__ __forceinline__ void store(const Place &place, uint32_t head, uint32_t group,
                                        const ScaleZero &unit) const {
    store_number(number_of(end.scales, scales, place, head, group), end.scales.dtype, unit.scale);
    store_number(number_of(end.zeros, zeros, place, head, group), end.zeros.dtype, unit.zero);
  }
  // Of F4_E2M1: where the scale of a group lies, and the scale of the tensor.
  __device__ __forceinline__ uint8_t *group_scale(const Place &place, uint32_t head,
                                                  uint32_t group) const {
    return scales + end.scales.offset_of(place.block, place.offset, int64_t{head}, group);
  }
  __device__ __forceinline__ float tensor_scale() const {
    return zeros ? load_as<F32>(zeros) : 1.0f;
  }
  __device__ __forceinline__ ScaleZero find(const Bounds &bounds) const {
    const ScaleZero unit = dtype == KVX_DTYPE_U8_ZERO ? U8Zero::find(bounds, end.covers_tokens)
                                                      : U8Bias::find(bounds, end.covers_tokens);
    return {saturate_for(end.scales.dtype, unit.scale), saturate_for(end.zeros.dtype, unit.zero)};
  }
  __device__ __forceinline__ float decode(uint8_t q, const ScaleZero &unit) const {
    return dtype == KVX_DTYPE_U8_ZERO ? U8Zero::decode(q, unit) : U8Bias::decode(q, unit);
  }
  __device__ __forceinline__ uint8_t encode(float x, const ScaleZero &unit) const {
    return dtype == KVX_DTYPE_U8_ZERO ? U8Zero::encode(x, unit) : U8Bias::encode(x, unit);
  }
};

__device__ __forceinline__ UnitsAt src_units(const AffineParams &p, uint32_t pair) {
  return {p.affine.src, p.shape.src.dtype, p.address_of(pair, kSrcUnitScales),
          p.address_of(pair, kSrcUnitZeros)};
}
__device__ __forceinline__ UnitsAt dst_units(const AffineParams &p, uint32_t pair) {
  return {p.affine.dst, p.shape.dst.dtype, p.address_of(pair, kDstUnitScales),
          p.address_of(pair, kDstUnitZeros)};
}

// Number d of a head at the source, whose first one lies at `from`. `scale` is that of FP8. Without
// kGroups not from F4_E2M1, for a kernel that has no registers left.
template <bool kGroups = true>
__device__ __forceinline__ float number_from(const Plane &plane, const UnitsAt &units,
                                             const uint8_t *from, const Place &place, uint32_t head,
                                             uint32_t d, float scale) {
  if (!units.end.group) return number_at(plane, from, d) * scale;
  if (kGroups && units.dtype == KVX_DTYPE_F4_E2M1) {
    const uint32_t byte = from[offset_of(plane, d / 2)];
    const uint8_t *const at = units.group_scale(place, head, d / units.end.group);
    const float factor = load_group_scale(at, units.end.scales.dtype) * units.tensor_scale();
    return E2m1::decode(d % 2 ? byte >> 4 : byte & 15u) * factor;
  }
  return units.decode(from[offset_of(plane, d)], units.load(place, head, d / units.end.group));
}

}  // namespace kvx::cuda
