// Converts to FP8 and finds a scale per token and head. Spec: E.9
#include "cuda/codec.cuh"
#include "cuda/kernels.h"
#include "cuda/lookup.cuh"
#include "desc/scale.h"

namespace kvx::cuda {
namespace {

// The largest `amax` of the `lanes` lanes that share a vector; called by whole warps.
__device__ __forceinline__ float vector_amax(float amax, uint32_t lanes) {
  for (uint32_t step = lanes / 2; step > 0; step /= 2)
    amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, step));
  return amax;
}

// Per lane, as many as 64 registers hold.
template <class Src>
__device__ constexpr uint32_t vectors_in_flight() {
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ <= 890 || __CUDA_ARCH__ >= 1200)
  return 1;
#else
  return sizeof(Eight<Src>) > 16 ? 1 : 2;
#endif
}

// Vectors of up to 32 units of eight elements: the lanes of a vector hold it in registers and read
// it once.
template <class Src, class Dst, class P>
__global__ void __launch_bounds__(kThreads, 4) quantize_kernel(const __grid_constant__ P p) {
  constexpr uint32_t kUnroll = vectors_in_flight<Src>();
  const PlanePair &shape = p.shape;
  const uint32_t lane = threadIdx.x % kWarp;
  const uint32_t units = p.units.per_head.divisor;
  const uint32_t lanes = 1u << (32 - __clz(static_cast<int>(units - 1)));
  const uint32_t unit = lane % lanes;
  const uint32_t heads_at_once = kWarp / lanes;
  const int64_t from = unit_offset(shape.src, p.units.src_per_pack, sizeof(Eight<Src>), 0, unit);
  const int64_t to = unit_offset(shape.dst, p.units.dst_per_pack, sizeof(Eight<Dst>), 0, unit);
  const Pair pair = this_pair(p);
  each_token_of_warp<true>(p, pair, [&](const Token &token, uint32_t begin, uint32_t end) {
    const uint32_t first = p.units.per_head.quotient(begin);
    const uint32_t last = p.units.per_head.quotient(end);
    const uint8_t *const src_scales =
        token.src ? scales_at(shape.src_scales, pair.bases.src_scales, token.from) : nullptr;
    for (uint32_t group = first; group < last; group += heads_at_once * kUnroll) {
      Eight<Src> stored[kUnroll];
      float scales[kUnroll];
#pragma unroll
      for (uint32_t i = 0; i < kUnroll; ++i) {
        const uint32_t head = group + i * heads_at_once + lane / lanes;
        stored[i] = {};
        scales[i] = 1.0f;
        if (head >= last || unit >= units || !token.src) continue;
        stored[i] = load_eight<Src>(token.src + head * shape.src.head_stride + from);
        scales[i] = scale_of(shape.src_scales, src_scales, head);
      }
#pragma unroll
      for (uint32_t i = 0; i < kUnroll; ++i) {
        const uint32_t head = group + i * heads_at_once + lane / lanes;
        float values[8], amax = 0.0f;
        decode(stored[i], values);
#pragma unroll
        for (float &value : values) {
          value *= scales[i];
          amax = fmaxf(amax, fabsf(value));  // of a number and NaN, the number
        }
        amax = vector_amax(amax, lanes);
        if (head >= last || unit >= units) continue;
        if (!is_usable(scales[i])) {
          if (unit == 0) report_scale(p, pair, token, head, scales[i], 1.0f);
          continue;
        }
        const float found = found_scale(amax, largest_of(dtype_of<Dst>()), shape.dst_scales.dtype);
        const Divisor by(found);  // finite quotients: found is as large as amax asks for
        store_eight(token.dst + head * shape.dst.head_stride + to,
                    bits_of(amax) < kInfinity ? by.encode_finite<Dst>(values)
                                              : by.encode_slowly<Dst>(values));
        if (unit == 0) store_scale(shape.dst_scales, pair.bases.dst_scales, token.to, head, found);
      }
    }
  });
}

// Any vectors, a warp each: reads an element at a time, twice.
template <class P>
__global__ void __launch_bounds__(kThreads, 4) quantize_any_kernel(const __grid_constant__ P p) {
  const PlanePair &shape = p.shape;
  const int64_t src_step = shape.src.inner_stride, dst_step = shape.dst.inner_stride;
  const uint32_t lane = threadIdx.x % kWarp;
  const Pair pair = this_pair(p);
  each_token_of_warp<true>(p, pair, [&](const Token &token, uint32_t begin, uint32_t end) {
    const uint32_t first = p.units.per_head.quotient(begin);
    const uint32_t last = p.units.per_head.quotient(end);
    for (uint32_t head = first; head < last; ++head) {
      const float scale =
          token.src ? scale_at(shape.src_scales, pair.bases.src_scales, token.from, head) : 1.0f;
      if (!is_usable(scale)) {
        if (lane == 0) report_scale(p, pair, token, head, scale, 1.0f);
        continue;
      }
      const auto value_at = [&](uint32_t d) {
        const int64_t from = unit_offset(shape.src, p.units.src_per_pack, src_step, head, d);
        return token.src ? load_element(token.src + from, shape.src.dtype) * scale : 0.0f;
      };
      float amax = 0.0f;
      for (uint32_t d = lane; d < shape.head_dim; d += kWarp)
        amax = fmaxf(amax, fabsf(value_at(d)));
      const float found = found_scale(vector_amax(amax, kWarp), largest_of(shape.dst.dtype),
                                      shape.dst_scales.dtype);
      for (uint32_t d = lane; d < shape.head_dim; d += kWarp) {
        const int64_t to = unit_offset(shape.dst, p.units.dst_per_pack, dst_step, head, d);
        store_element(token.dst + to, value_at(d) / found, shape.dst.dtype);
      }
      if (lane == 0) store_scale(shape.dst_scales, pair.bases.dst_scales, token.to, head, found);
    }
  });
}

}  // namespace

template <class P>
void launch_quantize(const P &params, const Choice &choice, dim3 grid, cudaStream_t stream) {
  if (choice.units.elements == 1)
    return KVX_LAUNCH((quantize_any_kernel<P>), grid, kThreads, 0, stream, params);
  with_fast_codec(choice.shape.src.dtype, [&](auto src) {
    using Src = decltype(src);
    with_fast_codec(choice.shape.dst.dtype, [&](auto dst) {
      using Dst = decltype(dst);
      if constexpr (!kIsFp8<Src> && kIsFp8<Dst>)
        KVX_LAUNCH((quantize_kernel<Src, Dst, P>), grid, kThreads, 0, stream, params);
    });
  });
}

}  // namespace kvx::cuda

KVX_INSTANTIATE(launch_quantize);
