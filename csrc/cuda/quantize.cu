// Converts to FP8 and finds a scale per token and head. Spec: E.9
#include "cuda/codec.cuh"
#include "cuda/kernels.h"
#include "cuda/token_list.cuh"
#include "desc/scale.h"

namespace kvx::cuda {
namespace {

// The largest `amax` of the `lanes` lanes that share a vector; called by whole warps.
__device__ __forceinline__ float vector_amax(float amax, uint32_t lanes) {
  for (uint32_t step = lanes / 2; step > 0; step /= 2)
    amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, step));
  return amax;
}

// How the lanes of a warp share the vectors of some heads of some tokens.
struct Sharing {
  uint32_t log2_lanes;         // of a vector
  uint32_t log2_heads;         // of a token at once
  int64_t src_step, dst_step;  // bytes from a lane's unit to its next

  // Few lanes with several units each find a scale with fewer instructions, if that leaves no lane
  // without work.
  explicit Sharing(const Common &p)
      : log2_lanes(log2_from(p.units.per_head.divisor)), log2_heads(0), src_step(0), dst_step(0) {
    const uint32_t units = p.units.per_head.divisor, most_heads = p.units_per_part / units;
    const uint32_t least = least_lanes(units, p.units.bytes);
    const auto take_fewer = [&](uint32_t lanes) {
      return steps(p.shape.src, p.units.src_per_pack, units, lanes, p.units.bytes, &src_step) &&
             steps(p.shape.dst, p.units.dst_per_pack, units, lanes, p.units.dst_bytes, &dst_step);
    };
    while ((1u << log2_lanes) > least &&
           (uint64_t{most_heads} << log2_lanes) * p.tokens_per_chunk > kWarp &&
           take_fewer((1u << log2_lanes) / 2)) {
      --log2_lanes;
    }
    while ((1u << log2_heads) < most_heads && (1u << (log2_heads + log2_lanes)) < kWarp)
      ++log2_heads;
  }

 private:
  // Finds the bytes from unit n to unit n + count, if they are the same for all n.
  static bool steps(const Plane &plane, const FastDiv &per_pack, uint32_t units, uint32_t count,
                    uint32_t unit_bytes, int64_t *found) {
    if (per_pack.divisor >= units) return *found = int64_t{count} * unit_bytes, true;
    if (count % per_pack.divisor) return false;
    return *found = int64_t{count / per_pack.divisor} * plane.outer_stride, true;
  }
};

// Not within the template: there g++ puts a static array into no section (tests/hostgrid).
__device__ __forceinline__ TokenList &list_of_warp() {
  __shared__ TokenList lists[kWarps];
  return lists[threadIdx.x / kWarp];
}

// Vectors of up to 32 units of eight elements: the lanes of a vector hold it in registers and read
// it once.
template <class Src, class Dst, class P>
__global__ void __launch_bounds__(kThreads, 4)
    quantize_kernel(const __grid_constant__ P p, const __grid_constant__ Sharing sharing) {
  constexpr uint32_t kHeld = units_held(sizeof(Eight<Src>));
  const PlanePair &shape = p.shape;
  const uint32_t lane = threadIdx.x % kWarp;
  const uint32_t units = p.units.per_head.divisor;
  const uint32_t unit = lane & ((1u << sharing.log2_lanes) - 1);
  const uint32_t held = unit < units ? ((units - unit - 1) >> sharing.log2_lanes) + 1 : 0;
  const uint32_t heads = 1u << sharing.log2_heads;
  const uint32_t log2_width = sharing.log2_lanes + sharing.log2_heads;  // lanes of a token
  const int64_t from = unit_offset(shape.src, p.units.src_per_pack, sizeof(Eight<Src>), 0, unit);
  const int64_t to = unit_offset(shape.dst, p.units.dst_per_pack, sizeof(Eight<Dst>), 0, unit);
  const Pair pair = this_pair(p);
  const EndScales scales{shape.dst_scales, pair.bases.dst_scales, false};
  each_list_of_warp(
      p, pair, scales, list_of_warp(),
      [&](uint32_t begin, uint32_t end, const Listed *list, uint32_t stored, uint32_t tokens) {
        const uint32_t last = p.units.per_head.quotient(end);
        KVX_LOOP
        for (uint32_t first = p.units.per_head.quotient(begin); first < last; first += heads) {
          const uint32_t head = first + ((lane >> sharing.log2_lanes) & (heads - 1));
          const uint32_t of_head = head < last ? held : 0;
          const int64_t src_offset = head * shape.src.head_stride + from;
          const int64_t dst_offset = head * shape.dst.head_stride + to;
          KVX_LOOP
          for (uint32_t begun = 0; begun < tokens; begun += kWarp >> log2_width) {
            const uint32_t i = begun + (lane >> log2_width);
            const uint32_t loads = i < stored ? of_head : 0, stores = i < tokens ? of_head : 0;
            const uint8_t *const src = loads ? list[i].src + src_offset : nullptr;
            Eight<Src> elements[kHeld];
            Largest<Src> largest;
#pragma unroll
            for (uint32_t k = 0; k < kHeld; ++k) {
              elements[k] = {};
              if (k < loads) elements[k] = load_eight<Src>(src + k * sharing.src_step);
            }
#pragma unroll
            for (uint32_t k = 0; k < kHeld; ++k) largest.add(elements[k]);
            const float amax = vector_amax(largest.magnitude(), 1u << sharing.log2_lanes);
            if (stores == 0) continue;
            const float found =
                found_scale(amax, largest_of(dtype_of<Dst>()), shape.dst_scales.dtype);
            uint8_t *const dst = list[i].dst + dst_offset;
            if (unit == 0) {
              uint8_t *const at = const_cast<uint8_t *>(list[i].scales);
              store_scale_at(at + head * shape.dst_scales.head_stride, found,
                             shape.dst_scales.dtype);
            }
            const Divisor by(found);  // finite quotients: found is as large as amax asks for
            float values[8];
            if (by.is_usual() && bits_of(amax) < kInfinity) {
#pragma unroll
              for (uint32_t k = 0; k < kHeld; ++k) {
                if (k >= stores) break;
                decode(elements[k], values);
                store_eight(dst + k * sharing.dst_step, by.encode_finite<Dst>(values));
              }
            } else if constexpr (kHeld == 1) {
              decode(elements[0], values);
              store_eight(dst, by.encode_slowly<Dst>(values));
            } else {
              // Rare, so it loads everything again
              KVX_LOOP
              for (uint32_t k = 0; k < stores; ++k) {
                decode(load_eight<Src>(list[i].src + src_offset + k * sharing.src_step), values);
                store_eight(dst + k * sharing.dst_step, by.encode_slowly<Dst>(values));
              }
            }
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
        KVX_LAUNCH((quantize_kernel<Src, Dst, P>), grid, kThreads, 0, stream, params,
                   Sharing(params));
    });
  });
}

}  // namespace kvx::cuda

KVX_INSTANTIATE(launch_quantize);
