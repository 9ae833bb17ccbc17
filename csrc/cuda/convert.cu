// Another dtype or scale, eight elements per lane and step: any layouts whose vectors consist of
// such units at both ends. A warp takes 32 units of some tokens, one token after the other.
#include <algorithm>
#include <type_traits>

#include "cuda/codec.cuh"
#include "cuda/kernels.h"
#include "cuda/token_list.cuh"

namespace kvx::cuda {
namespace {

// From one format to another, with the scale of the end that is FP8.
template <class Src, class Dst>
class Conversion {
 public:
  __device__ __forceinline__ explicit Conversion(float scale)
      : scale_(scale), divisor_(kIsFp8<Dst> ? scale : 1.0f) {}

  __device__ __forceinline__ float scale() const { return scale_; }

  // False: the scale is not usable, or quickly() does not give these codes.
  __device__ __forceinline__ bool quickly(const Eight<Src> &stored, Eight<Dst> *converted) const {
    float values[8];
    decode(stored, values);
    if constexpr (kIsFp8<Dst>) {
      return divisor_.template encode_quickly<Dst>(values, converted);
    } else {
      if constexpr (kIsFp8<Src>) {
#pragma unroll
        for (float &value : values) value *= scale_;
      }
      *converted = encode<Dst>(values);
      return !kIsFp8<Src> || is_usable(scale_);
    }
  }

  // To FP8, where the scale is usable.
  __device__ __forceinline__ Eight<Dst> slowly(const Eight<Src> &stored) const {
    float values[8];
    decode(stored, values);
    return divisor_.template encode_slowly<Dst>(values);
  }

 private:
  float scale_;
  Divisor divisor_;
};

// Tokens in flight per lane, as many as 64 registers hold: one where the source is wide, or where
// FP8 is encoded step by step, and on processors whose code takes more of them.
template <class Src, class Dst>
__device__ constexpr uint32_t tokens_in_flight() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
  if (kIsFp8<Dst>) return 1;
#endif
  return sizeof(Eight<Src>) > 16 ? 1 : 2;
}

// A unit of all tokens, of which a lane takes every `step`th.
template <class Src, class Dst>
struct UnitOfTokens {
  const Common &p;
  const Pair &pair;
  const EndScales &scales;
  int64_t from, to;  // bytes from a token's first element
  uint32_t head;
  bool begins_head;
  uint32_t step;

  __device__ __forceinline__ Conversion<Src, Dst> conversion_of(const Listed &token) const {
    return Conversion<Src, Dst>(scale_of(scales.shape, token.scales, head));
  }

  // Moves kTokens tokens, all in flight. kVaries: each has another scale than `convert`.
  template <uint32_t kTokens, bool kVaries>
  __device__ __forceinline__ void move(const Listed *tokens,
                                       const Conversion<Src, Dst> &convert) const {
    Eight<Src> elements[kTokens];
    uint8_t *dst[kTokens];
    float of_token[kTokens];
#pragma unroll
    for (uint32_t i = 0; i < kTokens; ++i) {
      const Listed &token = tokens[i * step];
      elements[i] = load_eight<Src>(token.src + from);
      dst[i] = token.dst + to;
      if (kVaries) of_token[i] = scale_of(scales.shape, token.scales, head);
    }
    bool moved[kTokens], all_moved = true;
#pragma unroll
    for (uint32_t i = 0; i < kTokens; ++i) {
      Eight<Dst> converted;
      moved[i] = kVaries ? Conversion<Src, Dst>(of_token[i]).quickly(elements[i], &converted)
                         : convert.quickly(elements[i], &converted);
      if (moved[i]) store_eight(dst[i], converted);
      all_moved = all_moved && moved[i];
    }
    if (all_moved) return;
    uint32_t left = 0;
#pragma unroll
    for (uint32_t i = 0; i < kTokens; ++i) left |= moved[i] ? 0 : 1u << i;
    KVX_LOOP
    for (; left; left >>= 1, tokens += step)
      if (left & 1) move_slowly(*tokens);
  }

  // Rare, so it loads everything again.
  __device__ __forceinline__ void move_slowly(const Listed &token) const {
    const auto convert = conversion_of(token);
    if (is_usable(convert.scale())) {
      if constexpr (kIsFp8<Dst>)
        store_eight(token.dst + to, convert.slowly(load_eight<Src>(token.src + from)));
    } else if (begins_head) {
      Token of{};
      of.from.block = of.to.block = token.block;
      report_scale(p, pair, of, head, kIsFp8<Src> ? convert.scale() : 1.0f,
                   kIsFp8<Dst> ? convert.scale() : 1.0f);
    }
  }
};

// Not within the template: there g++ puts a static array into no section (tests/hostgrid).
__device__ __forceinline__ TokenList &list_of_warp() {
  __shared__ TokenList lists[kWarps];
  return lists[threadIdx.x / kWarp];
}

// A token has 2^log2_width lanes.
template <class Src, class Dst, class P>
__global__ void __launch_bounds__(kThreads, 4)
    convert_kernel(const __grid_constant__ P p, const uint32_t log2_width) {
  constexpr uint32_t kTokens = tokens_in_flight<Src, Dst>();
  const PlanePair &shape = p.shape;
  const Pair pair = this_pair(p);
  const EndScales scales = kIsFp8<Src> ? EndScales{shape.src_scales, pair.bases.src_scales, true}
                                       : EndScales{shape.dst_scales, pair.bases.dst_scales, false};
  const uint32_t lane = threadIdx.x % kWarp;
  const uint32_t width = 1u << log2_width, at_once = kWarp >> log2_width;
  const auto move_list = [&](uint32_t first, uint32_t last, const Listed *begin, uint32_t stored,
                             uint32_t tokens) {
    for (uint32_t u = first + (lane & (width - 1)); u < last; u += width) {
      const uint32_t head = p.units.per_head.quotient(u);
      const uint32_t in_head = u - head * p.units.per_head.divisor;
      const UnitOfTokens<Src, Dst> unit{
          p,
          pair,
          scales,
          unit_offset(shape.src, p.units.src_per_pack, sizeof(Eight<Src>), head, in_head),
          unit_offset(shape.dst, p.units.dst_per_pack, sizeof(Eight<Dst>), head, in_head),
          head,
          in_head == 0,
          at_once};
      const Listed *token = begin + (lane >> log2_width);
      const auto move = [&](auto varies, const Conversion<Src, Dst> &convert) {
        constexpr bool kVaries = decltype(varies)::value;
        if constexpr (kTokens > 1) {
          KVX_LOOP
          for (; token + (kTokens - 1) * at_once < begin + stored; token += kTokens * at_once)
            unit.template move<kTokens, kVaries>(token, convert);
        }
        KVX_LOOP
        for (; token < begin + stored; token += at_once)
          unit.template move<1, kVaries>(token, convert);
      };
      if (!kIsFp8<Src> && !kIsFp8<Dst>) {
        move(std::false_type{}, Conversion<Src, Dst>(1.0f));
      } else if (scales.vary_by_token()) {
        move(std::true_type{}, Conversion<Src, Dst>(1.0f));
      } else {
        move(std::false_type{}, Conversion<Src, Dst>(scale_of(scales.shape, scales.data, head)));
      }
      KVX_LOOP
      for (; token < begin + tokens; token += at_once)
        store_eight(token->dst + unit.to, Eight<Dst>{});
    }
  };
  each_list_of_warp(p, pair, scales, list_of_warp(), move_list);
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
        KVX_LAUNCH((convert_kernel<Src, Dst, P>), grid, kThreads, 0, stream, params,
                   log2_from(std::min(params.units_per_part, kWarp)));
    });
  });
}

}  // namespace kvx::cuda

KVX_INSTANTIATE(launch_convert);
