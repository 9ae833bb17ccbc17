// Another dtype or scale: any layouts whose vectors consist of units of eight elements at both
// ends. A warp takes 32 units of some tokens, a unit per lane, one token after the other. From FP8
// to 16 bits units are of sixteen elements where both ends allow it, for lanes to load 16 bytes.
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

// Whether lanes can load 16 bytes: registers do not suffice for as many numbers of float32.
template <class Src, class Dst>
constexpr bool kCanBeWide = kIsFp8<Src> && sizeof(typename Dst::Bits) == 2;

// Tokens in flight per lane, as many as 64 registers hold: one where the source is wide, or where
// FP8 is encoded step by step, and on processors whose code takes more of them.
template <class Src, class Dst, uint32_t kEights>
__device__ constexpr uint32_t tokens_in_flight() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
  if (kIsFp8<Dst>) return 1;
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  if (kEights > 1) return 1;
#endif
  return sizeof(Eight<Src>) > 16 ? 1 : 2;
}

// What a lane loads of a token: eight elements, or sixteen of FP8.
template <class Src>
__device__ __forceinline__ void load_unit(const uint8_t *at, Eight<Src> (&unit)[1]) {
  unit[0] = load_eight<Src>(at);
}
template <class Src>
__device__ __forceinline__ void load_unit(const uint8_t *at, Eight<Src> (&unit)[2]) {
  const auto vector = *reinterpret_cast<const Vector<sizeof unit> *>(global(at));
  memcpy(unit, &vector, sizeof unit);
}

// Lanes 2n and 2n + 1 swap halves of their units: the even lane then has the first half of both
// units, the odd one the last half, so that each store of the two fills sectors. For whole warps.
template <class Src>
__device__ __forceinline__ void swap_halves(Eight<Src> (&)[1]) {}
template <class Src>
__device__ __forceinline__ void swap_halves(Eight<Src> (&unit)[2]) {
  const bool is_odd = threadIdx.x % 2;
#pragma unroll
  for (uint32_t i = 0; i < sizeof unit[0] / 4; ++i) {
    uint32_t &first = unit[0].words[i], &last = unit[1].words[i];
    const uint32_t others = __shfl_xor_sync(~0u, is_odd ? first : last, 1);
    if (is_odd) {
      first = others;
    } else {
      last = others;
    }
  }
}

// A lane's unit of all tokens, of which it takes every `step`th: kEights times eight elements.
template <class Src, class Dst, uint32_t kEights>
struct UnitOfTokens {
  // Bytes from one of a lane's eights of a token to its next; the other lane's lies between
  static constexpr uint32_t kStep = kEights * sizeof(Eight<Dst>);

  const Common &p;
  const Pair &pair;
  const EndScales &scales;
  int64_t from, to;  // bytes from a token's first element, where the lane loads and stores
  uint32_t head;
  bool begins_head;
  uint32_t step;

  __device__ __forceinline__ Conversion<Src, Dst> conversion_of(const Listed &token) const {
    return Conversion<Src, Dst>(scale_of(scales.shape, token.scales, head));
  }

  // Moves kTokens tokens, all in flight; for whole warps, of which lanes where `stores` is false
  // only load. kVaries: each token has another scale than `convert`.
  template <uint32_t kTokens, bool kVaries>
  __device__ __forceinline__ void move(const Listed *tokens, const Conversion<Src, Dst> &convert,
                                       bool stores) const {
    Eight<Src> elements[kTokens][kEights];
    uint8_t *dst[kTokens];
    float of_token[kTokens];
#pragma unroll
    for (uint32_t i = 0; i < kTokens; ++i) {
      const Listed &token = tokens[i * step];
      load_unit(token.src + from, elements[i]);
      dst[i] = token.dst + to;
      if (kVaries) of_token[i] = scale_of(scales.shape, token.scales, head);
    }
    bool moved[kTokens], all_moved = true;
#pragma unroll
    for (uint32_t i = 0; i < kTokens; ++i) {
      swap_halves(elements[i]);
      moved[i] = true;
      Eight<Dst> converted[kEights];
#pragma unroll
      for (uint32_t k = 0; k < kEights; ++k) {
        const bool is_quick =
            kVaries ? Conversion<Src, Dst>(of_token[i]).quickly(elements[i][k], &converted[k])
                    : convert.quickly(elements[i][k], &converted[k]);
        moved[i] = moved[i] && is_quick;
      }
      if (moved[i] && stores) {
#pragma unroll
        for (uint32_t k = 0; k < kEights; ++k) store_eight(dst[i] + k * kStep, converted[k]);
      }
      all_moved = all_moved && moved[i];
    }
    if (all_moved || !stores) return;
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

// Moves units [first, last) of the tokens of a list. A token has 2^log2_width lanes. Lanes that
// swap halves go through the same loops: those without a unit or a token load another's.
template <class Src, class Dst, uint32_t kEights>
__device__ __forceinline__ void move_list(const Common &p, const Pair &pair,
                                          const EndScales &scales, uint32_t log2_width,
                                          uint32_t first, uint32_t last, const Listed *list,
                                          uint32_t stored, uint32_t tokens) {
  constexpr uint32_t kTokens = tokens_in_flight<Src, Dst, kEights>();
  const uint32_t lane = threadIdx.x % kWarp, of_pair = lane % kEights;
  const uint32_t width = 1u << log2_width, at_once = kWarp >> log2_width;
  const uint32_t of_width = lane & (width - 1), own = lane >> log2_width;
  for (uint32_t u = first + (kEights == 1 ? of_width : 0); u < last; u += width) {
    const bool has_unit = kEights == 1 || u + of_width < last;
    const uint32_t taken = kEights == 1 ? u : min(u + of_width, last - kEights + of_pair);
    const uint32_t head = p.units.per_head.quotient(taken);
    const uint32_t in_head = taken - head * p.units.per_head.divisor;
    const UnitOfTokens<Src, Dst, kEights> unit{
        p,
        pair,
        scales,
        unit_offset(p.shape.src, p.units.src_per_pack, kEights * sizeof(Eight<Src>), head, in_head),
        unit_offset(p.shape.dst, p.units.dst_per_pack, kEights * sizeof(Eight<Dst>), head,
                    in_head - of_pair) +
            of_pair * int64_t{sizeof(Eight<Dst>)},
        head,
        in_head == 0,
        at_once};
    const Listed *token = list + own;
    const auto move = [&](auto varies, const Conversion<Src, Dst> &convert) {
      constexpr bool kVaries = decltype(varies)::value;
      if constexpr (kEights == 1) {
        if constexpr (kTokens > 1) {
          KVX_LOOP
          for (; token + (kTokens - 1) * at_once < list + stored; token += kTokens * at_once)
            unit.template move<kTokens, kVaries>(token, convert, true);
        }
        KVX_LOOP
        for (; token < list + stored; token += at_once)
          unit.template move<1, kVaries>(token, convert, true);
      } else {
        uint32_t left = stored;
        if constexpr (kTokens > 1) {
          KVX_LOOP
          for (; left >= kTokens * at_once; left -= kTokens * at_once, token += kTokens * at_once)
            unit.template move<kTokens, kVaries>(token, convert, has_unit);
        }
        KVX_LOOP
        for (; left > 0; left -= min(left, at_once), token += at_once)
          unit.template move<1, kVaries>(own < left ? token : list + (stored - 1), convert,
                                         has_unit && own < left);
        token = list + stored + own;
      }
    };
    if (!kIsFp8<Src> && !kIsFp8<Dst>) {
      move(std::false_type{}, Conversion<Src, Dst>(1.0f));
    } else if (scales.vary_by_token()) {
      move(std::true_type{}, Conversion<Src, Dst>(1.0f));
    } else {
      move(std::false_type{}, Conversion<Src, Dst>(scale_of(scales.shape, scales.data, head)));
    }
    KVX_LOOP
    for (; token < list + tokens; token += at_once) {
#pragma unroll
      for (uint32_t k = 0; k < kEights; ++k)
        if (has_unit) store_eight(token->dst + unit.to + k * unit.kStep, Eight<Dst>{});
    }
  }
}

// Not within the template: there g++ puts a static array into no section (tests/hostgrid).
__device__ __forceinline__ TokenList &list_of_warp() {
  __shared__ TokenList lists[kWarps];
  return lists[threadIdx.x / kWarp];
}

template <class Src, class Dst, class P>
__global__ void __launch_bounds__(kThreads, 4)
    convert_kernel(const __grid_constant__ P p, const uint32_t log2_width) {
  const PlanePair &shape = p.shape;
  const Pair pair = this_pair(p);
  const EndScales scales = kIsFp8<Src> ? EndScales{shape.src_scales, pair.bases.src_scales, true}
                                       : EndScales{shape.dst_scales, pair.bases.dst_scales, false};
  each_list_of_warp(
      p, pair, scales, list_of_warp(),
      [&](uint32_t first, uint32_t last, const Listed *list, uint32_t stored, uint32_t tokens) {
        if constexpr (kCanBeWide<Src, Dst>) {
          if (p.units.bytes == 2 * sizeof(Eight<Src>))
            return move_list<Src, Dst, 2>(p, pair, scales, log2_width, first, last, list, stored,
                                          tokens);
        }
        move_list<Src, Dst, 1>(p, pair, scales, log2_width, first, last, list, stored, tokens);
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
        KVX_LAUNCH((convert_kernel<Src, Dst, P>), grid, kThreads, 0, stream, params,
                   log2_from(std::min(params.units_per_part, kWarp)));
    });
  });
}

}  // namespace kvx::cuda

KVX_INSTANTIATE(launch_convert);
