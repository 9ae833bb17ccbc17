// Another dtype or scale, a warp per token, eight elements per lane and step: any layouts whose
// vectors consist of such units at both ends.
#include <type_traits>

#include "cuda/codec.cuh"
#include "cuda/kernels.h"
#include "cuda/lookup.cuh"

namespace kvx::cuda {
namespace {

// The first scale of a token at each end; NULL: none.
struct TokenScales {
  const uint8_t *src, *dst;
};

// The scales of a head: its elements are multiplied by the source's and divided by the
// destination's.
template <class Src, class Dst>
struct HeadScales {
  float scale = 1.0f, divisor = 1.0f;

  HeadScales() = default;
  __device__ __forceinline__ HeadScales(const PlanePair &shape, const TokenScales &scales,
                                        uint32_t head) {
    if constexpr (kIsFp8<Src>) scale = scale_of(shape.src_scales, scales.src, head);
    if constexpr (kIsFp8<Dst>) divisor = scale_of(shape.dst_scales, scales.dst, head);
  }

  __device__ __forceinline__ bool are_usable() const {
    return is_usable(scale) && is_usable(divisor);
  }
};

template <class Src, class Dst>
struct Conversion {
  HeadScales<Src, Dst> scales;
  Divisor divisor;

  __device__ __forceinline__ explicit Conversion(const HeadScales<Src, Dst> &of)
      : scales(of), divisor(of.divisor) {}

  __device__ __forceinline__ Eight<Dst> operator()(const Eight<Src> &stored) const {
    const auto read = [&](float (&values)[8]) {
      decode(stored, values);
      if constexpr (kIsFp8<Src>) {
#pragma unroll
        for (float &value : values) value *= scales.scale;
      }
    };
    if constexpr (kIsFp8<Dst>) {
      return divisor.encode_quotients<Dst>(read);
    } else {
      float values[8];
      read(values);
      return encode<Dst>(values);
    }
  }
};

// Reports the unusable scales of the heads that begin among a lane's units.
template <class Src, class Dst>
__device__ __forceinline__ void report_scales(const Common &p, const Pair &pair, const Token &token,
                                              const TokenScales &token_scales, uint32_t first,
                                              uint32_t last) {
  for (uint32_t unit = first; unit < last; unit += kWarp) {
    const uint32_t head = p.units.per_head.quotient(unit);
    const HeadScales<Src, Dst> scales(p.shape, token_scales, head);
    if (head * p.units.per_head.divisor == unit && !scales.are_usable())
      report_scale(p, pair, token, head, scales.scale, scales.divisor);
  }
}

// Units in flight per lane, as many as 64 registers hold: one where the source is wide, or where
// FP8 is encoded step by step, and on processors whose code takes more of them.
template <class Src, class Dst>
__device__ constexpr uint32_t units_in_flight() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
  if (kIsFp8<Dst>) return 1;
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  return 1;
#endif
  return sizeof(Eight<Src>) > 16 ? 1 : 2;
}

template <class Src, class Dst, class P>
__global__ void __launch_bounds__(kThreads, 4) convert_kernel(const __grid_constant__ P p) {
  constexpr uint32_t kUnroll = units_in_flight<Src, Dst>();
  const PlanePair &shape = p.shape;
  const bool by_head = shape.src_scales.head_stride != 0 || shape.dst_scales.head_stride != 0;
  const uint32_t lane = threadIdx.x % kWarp;
  const Pair pair = this_pair(p);
  each_token_of_warp<true>(p, pair, [&](const Token &token, uint32_t first, uint32_t last) {
    const TokenScales token_scales{scales_at(shape.src_scales, pair.bases.src_scales, token.from),
                                   scales_at(shape.dst_scales, pair.bases.dst_scales, token.to)};
    HeadScales<Src, Dst> scales[kUnroll];
    if (token.src && !by_head) scales[0] = {shape, token_scales, 0};
    Conversion<Src, Dst> convert(scales[0]);
    bool all_usable = true;
    for (uint32_t unit = first + lane; unit < last; unit += kWarp * kUnroll) {
      Eight<Src> stored[kUnroll];
#pragma unroll
      for (uint32_t i = 0; i < kUnroll; ++i) {
        const uint32_t u = unit + i * kWarp;
        if (u >= last || !token.src) break;
        const uint32_t head = p.units.per_head.quotient(u);
        const uint32_t in_head = u - head * p.units.per_head.divisor;
        const int64_t from =
            unit_offset(shape.src, p.units.src_per_pack, sizeof(Eight<Src>), head, in_head);
        stored[i] = load_eight<Src>(token.src + from);
        if (by_head) scales[i] = {shape, token_scales, head};
      }
#pragma unroll
      for (uint32_t i = 0; i < kUnroll; ++i) {
        const uint32_t u = unit + i * kWarp;
        if (u >= last) break;
        const uint32_t head = p.units.per_head.quotient(u);
        const uint32_t in_head = u - head * p.units.per_head.divisor;
        uint8_t *const to = token.dst + unit_offset(shape.dst, p.units.dst_per_pack,
                                                    sizeof(Eight<Dst>), head, in_head);
        if (by_head) convert = Conversion<Src, Dst>(scales[i]);
        if (!token.src) {
          store_eight(to, Eight<Dst>{});
        } else if (convert.scales.are_usable()) {
          store_eight(to, convert(stored[i]));
        } else {
          all_usable = false;
        }
      }
    }
    if (!all_usable) report_scales<Src, Dst>(p, pair, token, token_scales, first + lane, last);
  });
}

}  // namespace

template <class P>
void launch_convert(const P &params, const Choice &choice, dim3 grid, cudaStream_t stream) {
  with_fast_codec(choice.shape.src.dtype, [&](auto src) {
    with_fast_codec(choice.shape.dst.dtype, [&](auto dst) {
      using Src = decltype(src);
      using Dst = decltype(dst);
      // Left to other kernels: the same dtype, whose bytes are copied, and FP8 to FP8, a rare
      // change of scales.
      if constexpr (!(kIsFp8<Src> && kIsFp8<Dst>) && !std::is_same_v<Src, Dst>)
        KVX_LAUNCH((convert_kernel<Src, Dst, P>), grid, kThreads, 0, stream, params);
    });
  });
}

}  // namespace kvx::cuda

KVX_INSTANTIATE(launch_convert);
