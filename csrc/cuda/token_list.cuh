// The tokens that a warp moves, in shared memory: for kernels that take all tokens for some units,
// and then other units, so that what depends on the unit alone is computed once.
#pragma once

#include "cuda/codec.cuh"
#include "cuda/lookup.cuh"

namespace kvx::cuda {

// A token.
struct alignas(16) Listed {
  const uint8_t *src;
  uint8_t *dst;
  const uint8_t *scales;  // of the token's first head, at the end that has scales
  int64_t block;          // at that end, for reports
};

// Tokens without a source come last.
struct TokenList {
  Listed tokens[kWarp];
};

// The scales of one end.
struct EndScales {
  const Scales &shape;
  const uint8_t *data;  // the pair's own; NULL: none
  bool at_src;

  __device__ __forceinline__ bool vary_by_token() const {
    return (shape.block_stride | shape.token_stride) != 0;
  }
};

// Calls move(first, last, list, stored, tokens) with lists of up to 32 tokens, of which the first
// `stored` have a source, and with the units [first, last) of each that this warp moves. For whole
// warps.
template <class P, class Move>
__device__ __forceinline__ void each_list_of_warp(const P &p, const Pair &pair,
                                                  const EndScales &scales, TokenList &list,
                                                  Move move) {
  each_round_of_warp(p, pair, [&](const Token &own, uint32_t first, uint32_t last) {
    const uint32_t stored = __ballot_sync(~0u, own.dst && own.src);
    const uint32_t zeros = __ballot_sync(~0u, own.dst && !own.src);
    const uint32_t before = (1u << threadIdx.x % kWarp) - 1;
    __syncwarp();  // all lanes have read the list before this one
    if (own.dst) {
      const int at = own.src ? __popc(stored & before) : __popc(stored) + __popc(zeros & before);
      const Place &place = scales.at_src ? own.from : own.to;
      list.tokens[at] = {own.src, own.dst, scales_at(scales.shape, scales.data, place),
                         place.block};
    }
    __syncwarp();
    move(first, last, list.tokens, static_cast<uint32_t>(__popc(stored)),
         static_cast<uint32_t>(__popc(stored | zeros)));
  });
}

}  // namespace kvx::cuda
