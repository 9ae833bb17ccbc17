// Same bytes, tokens innermost at one end and units at the other: a transpose. Tiles of tokens by
// units go through shared memory, so that both ends are accessed 16 bytes at a time.
#include <cstring>

#include "cuda/kernels.h"
#include "cuda/lookup.cuh"
#include "cuda/vector.h"

namespace kvx::cuda {
namespace {

constexpr uint32_t kVectorBytes = 16;
constexpr uint32_t kRuns = 8;     // vectors of tokens in a tile
constexpr uint32_t kUnits = 128;  // of a head
constexpr uint32_t kUnroll = 2;   // loads in flight per thread: more would spill at 64 registers

// V is a unit.
template <class V>
struct Tile {
  static constexpr uint32_t kPerVector = kVectorBytes / sizeof(V);
  static constexpr uint32_t kTokens = kRuns * kPerVector;

  // Address of each token at the end that has tokens innermost, and at the other. NULL: none.
  uint8_t *inner[kTokens], *outer[kTokens];
  // The token of every kPerVector at which a run begins: 16 aligned bytes of tokens at the inner
  // end. kTokens: at none.
  uint32_t runs[kRuns];
  alignas(kVectorBytes) V units[kTokens][kUnits];

  // The order of a token's vectors changes from token to token, so that threads that differ only in
  // the token use different banks.
  __device__ __forceinline__ V *at(uint32_t token, uint32_t unit) {
    const uint32_t vector = unit / kPerVector ^ (token + token / kPerVector) % 8;
    return &units[token][vector * kPerVector + unit % kPerVector];
  }
};

// The units of a head that are in the tile.
struct Window {
  uint32_t head, unit, count;
};

// Finds units at one end.
struct End {
  const Plane &plane;
  const FastDiv &per_pack;
  int64_t step;  // within a pack

  __device__ __forceinline__ int64_t offset(const Window &window, uint32_t unit) const {
    return unit_offset(plane, per_pack, step, window.head, window.unit + unit);
  }
};

// Which accesses can have 16 bytes: those of aligned tokens at the inner end, all at the outer end.
struct Wide {
  bool inner, outer;
};

KVX_HD uint32_t misalignment(const uint8_t *at) {
  return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(at)) % kVectorBytes;
}

// Marks the run that begins at this thread's token, if one does.
template <class V>
__device__ __forceinline__ void find_run(Tile<V> &tile) {
  constexpr uint32_t kPerVector = Tile<V>::kPerVector;
  const uint32_t token = threadIdx.x;
  if (token + kPerVector > Tile<V>::kTokens) return;
  const uint8_t *const at = tile.inner[token];
  if (!at || misalignment(at)) return;
  for (uint32_t i = 1; i < kPerVector; ++i)
    if (tile.inner[token + i] != at + i * sizeof(V)) return;
  tile.runs[token / kPerVector] = token;
}

// The token of this thread's column if it has an address and is in no run; otherwise kTokens.
template <class V>
__device__ __forceinline__ uint32_t single_token(const Tile<V> &tile) {
  const uint32_t token = threadIdx.x % Tile<V>::kTokens;
  const uint8_t *const at = tile.inner[token];
  if (!at) return Tile<V>::kTokens;
  const uint32_t first = token - misalignment(at) / static_cast<uint32_t>(sizeof(V));
  const bool in_run = first <= token && tile.runs[first / Tile<V>::kPerVector] == first;
  return in_run ? Tile<V>::kTokens : token;
}

// Moves all tokens between the tile and the outer end; each thread moves every kStep-th W: one unit
// or a vector of them.
template <class W, bool kStore, class V>
__device__ __forceinline__ void move_outer(Tile<V> &tile, const End &end, const Window &window) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
  constexpr uint32_t kAtOnce = sizeof(V) == 1 ? 1 : kUnroll;  // more would spill
#else
  constexpr uint32_t kAtOnce = kUnroll;
#endif
  constexpr uint32_t kPerW = sizeof(W) / sizeof(V);
  constexpr uint32_t kColumns = kUnits / kPerW, kStep = kThreads / kColumns;
  const uint32_t unit = threadIdx.x % kColumns * kPerW;
  if (unit >= window.count) return;
  const int64_t offset = end.offset(window, unit);
  for (uint32_t first = threadIdx.x / kColumns; first < Tile<V>::kTokens;
       first += kAtOnce * kStep) {
    W units[kAtOnce];
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      const uint32_t token = first + i * kStep;
      if (kStore) {
        units[i] = tile.inner[token] ? *reinterpret_cast<W *>(tile.at(token, unit)) : W{};
      } else {
        const uint8_t *const at = tile.outer[token];
        units[i] = load<W>(at ? at + offset : nullptr);
      }
    }
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      const uint32_t token = first + i * kStep;
      if (!kStore) {
        *reinterpret_cast<W *>(tile.at(token, unit)) = units[i];
      } else if (uint8_t *const at = tile.outer[token]) {
        store(at + offset, units[i]);
      }
    }
  }
}

// Moves a W, which is `token` or a run that begins there, between the tile and the inner end; each
// thread moves every kStep-th unit.
template <class W, bool kStore, class V>
__device__ __forceinline__ void move_inner(Tile<V> &tile, uint32_t token, const End &end,
                                           const Window &window) {
  constexpr uint32_t kPerW = sizeof(W) / sizeof(V);
  constexpr uint32_t kAtOnce = kStore && kPerW > 8 ? 1 : kUnroll;  // parts need registers too
  constexpr uint32_t kColumns = Tile<V>::kTokens / kPerW, kStep = kThreads / kColumns;
  if (token == Tile<V>::kTokens) return;
  uint8_t *const at = tile.inner[token];
  for (uint32_t first = threadIdx.x / kColumns; first < window.count; first += kAtOnce * kStep) {
    W tokens[kAtOnce];
    V parts[kPerW];
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      const uint32_t unit = first + i * kStep;
      if (unit >= window.count) continue;
      if (kStore) {
#pragma unroll
        for (uint32_t j = 0; j < kPerW; ++j) parts[j] = *tile.at(token + j, unit);
        memcpy(&tokens[i], parts, sizeof(W));
      } else {
        tokens[i] = load<W>(at + end.offset(window, unit));
      }
    }
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      const uint32_t unit = first + i * kStep;
      if (unit >= window.count) continue;
      if (kStore) {
        store(at + end.offset(window, unit), tokens[i]);
      } else {
        memcpy(parts, &tokens[i], sizeof(W));
#pragma unroll
        for (uint32_t j = 0; j < kPerW; ++j) *tile.at(token + j, unit) = parts[j];
      }
    }
  }
}

// kToInner: tokens are innermost at the destination, otherwise at the source.
template <class V, bool kToInner, class P>
__global__ void __launch_bounds__(kThreads, 4) tile_kernel(const __grid_constant__ P p, Wide wide) {
  using W = Vector<kVectorBytes>;
  constexpr uint32_t kTokens = Tile<V>::kTokens;
  KVX_DYNAMIC_SHARED(Tile<V>, shared);
  Tile<V> &tile = *shared;
  const Pair pair = this_pair(p);
  const Units &units = p.units;
  const Plane &inner_plane = kToInner ? p.shape.dst : p.shape.src;
  const End inner{inner_plane, kToInner ? units.dst_per_pack : units.src_per_pack,
                  units.elements == 1 ? inner_plane.inner_stride : int64_t{sizeof(V)}};
  const End outer{kToInner ? p.shape.src : p.shape.dst,
                  kToInner ? units.src_per_pack : units.dst_per_pack, sizeof(V)};
  const uint32_t items = p.chunks * p.parts.divisor;
  for (uint32_t item = blockIdx.x; item < items; item += gridDim.x) {
    const uint32_t index = p.parts.quotient(item), part = item - index * p.parts.divisor;
    const bool reports = pair.reports && part == 0;
    const uint32_t last = min((part + 1) * p.units_per_part, units.per_token.divisor);
    for (uint32_t skipped = 0; skipped < p.tokens_per_chunk; skipped += kTokens) {
      // Find the tokens
      const Chunk chunk = chunk_of(p, pair.lookup, index, skipped, reports && threadIdx.x == 0);
      if (threadIdx.x < kTokens) {
        Token token{};
        if (threadIdx.x < chunk.end - chunk.begin)
          token = token_at(p, pair, chunk, chunk.begin + threadIdx.x, reports);
        uint8_t *const src = const_cast<uint8_t *>(token.src);
        tile.inner[threadIdx.x] = kToInner ? token.dst : src;
        tile.outer[threadIdx.x] = kToInner ? src : token.dst;
      }
      if (threadIdx.x < kRuns) tile.runs[threadIdx.x] = kTokens;
      // Warps may have read different lengths: all go on, or none.
      if (!__syncthreads_or(chunk.begin < chunk.end)) {
        if (p.measures_rows && __syncthreads_and(is_past_rows(p, index))) return;
        break;
      }
      if (wide.inner && threadIdx.x < kTokens) find_run(tile);
      __syncthreads();
      const uint32_t run = tile.runs[threadIdx.x % kRuns], single = single_token(tile);

      for (uint32_t unit = part * p.units_per_part; unit < last;) {
        const uint32_t head = units.per_head.quotient(unit);
        const uint32_t in_head = unit - head * units.per_head.divisor;
        const uint32_t rest = min(units.per_head.divisor - in_head, last - unit);
        const Window window{head, in_head, min(rest, kUnits)};
        // Load
        if (!kToInner) {
          move_inner<W, false>(tile, run, inner, window);
          move_inner<V, false>(tile, single, inner, window);
        } else if (wide.outer) {
          move_outer<W, false>(tile, outer, window);
        } else {
          move_outer<V, false>(tile, outer, window);
        }
        __syncthreads();
        // Store
        if (kToInner) {
          move_inner<W, true>(tile, run, inner, window);
          move_inner<V, true>(tile, single, inner, window);
        } else if (wide.outer) {
          move_outer<W, true>(tile, outer, window);
        } else {
          move_outer<V, true>(tile, outer, window);
        }
        __syncthreads();
        unit += window.count;
      }
    }
  }
}

template <class P>
Wide wide_accesses(const P &p, bool to_inner, uint32_t unit_bytes) {
  const Plane &inner = to_inner ? p.shape.dst : p.shape.src;
  const Plane &outer = to_inner ? p.shape.src : p.shape.dst;
  const uint32_t inner_pack = (to_inner ? p.units.dst_per_pack : p.units.src_per_pack).divisor;
  const uint32_t outer_pack = (to_inner ? p.units.src_per_pack : p.units.dst_per_pack).divisor;
  const auto packs = [&](const Plane &plane, uint32_t per_pack) {
    return per_pack == p.units.per_head.divisor ? 0 : plane.outer_stride;
  };
  uint64_t inner_bits =
      inner.head_stride | packs(inner, inner_pack) | (inner_pack == 1 ? 0 : inner.inner_stride);
  uint64_t outer_bits = outer.head_stride | packs(outer, outer_pack) | outer.block_stride |
                        outer.token_stride | unit_bytes * uint64_t{outer_pack | p.units_per_part};
  for (uint32_t i = 0; i < p.num_pairs; ++i) {
    const Bases &bases = p.bases[i];
    outer_bits |= misalignment(to_inner ? bases.src : bases.dst) |
                  misalignment(to_inner ? bases.src_secondary : bases.dst_secondary);
  }
  return {inner_bits % kVectorBytes == 0, outer_bits % kVectorBytes == 0};
}

template <class V, class P>
void launch_tile_of(const P &params, dim3 grid, cudaStream_t stream) {
  const bool to_inner = params.shape.dst.token_stride == sizeof(V);
  const Wide wide = wide_accesses(params, to_inner, sizeof(V));
  if (to_inner)
    KVX_LAUNCH((tile_kernel<V, true, P>), grid, kThreads, sizeof(Tile<V>), stream, params, wide);
  else
    KVX_LAUNCH((tile_kernel<V, false, P>), grid, kThreads, sizeof(Tile<V>), stream, params, wide);
}

}  // namespace

template <class P>
void launch_tile(const P &params, const Choice &choice, dim3 grid, cudaStream_t stream) {
  switch (choice.unit_bytes) {
    case 4:
      launch_tile_of<Vector<4>>(params, grid, stream);
      break;
    case 2:
      launch_tile_of<Vector<2>>(params, grid, stream);
      break;
    default:
      launch_tile_of<Vector<1>>(params, grid, stream);
  }
}

}  // namespace kvx::cuda

KVX_INSTANTIATE(launch_tile);
