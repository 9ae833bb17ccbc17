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
constexpr uint32_t kGroup = 4;    // units that a thread moves together at the inner end

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

  // The order of a token's vectors changes every kPerVector tokens, so that threads with a run each
  // use different banks.
  __device__ __forceinline__ V *at(uint32_t token, uint32_t unit) {
    const uint32_t vector = unit / kPerVector ^ token / kPerVector;
    return &units[token][vector * kPerVector + unit % kPerVector];
  }
};

// The same number, of which the compiler knows nothing: what follows from it is computed here, not
// earlier, and takes no registers while tokens are found.
__device__ __forceinline__ uint32_t anew(uint32_t number) {
#if defined(__CUDA_ARCH__)
  asm volatile("" : "+r"(number));
#endif
  return number;
}

// The units of a head that are in the tile, and the thread that moves its share of them.
struct Window {
  uint32_t head, unit, count, thread;
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
  int64_t step;  // bytes from a unit to the next of its group at the inner end
};

// Bytes from a unit of a pack to the next at the inner end.
KVX_HD int64_t step_of(const Plane &inner, const Units &units, uint32_t unit_bytes) {
  return units.elements == 1 ? inner.inner_stride : int64_t{unit_bytes};
}

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

// Transposes a square of kPerWord x kPerWord units, a word for each row.
template <uint32_t kPerWord>
__device__ __forceinline__ void transpose(uint32_t (&rows)[kPerWord]) {
  static_assert(kPerWord == 1 || kPerWord == 2 || kPerWord == 4);
  if constexpr (kPerWord == 2) {
    const uint32_t first = rows[0], second = rows[1];
    rows[0] = __byte_perm(first, second, 0x5410);
    rows[1] = __byte_perm(first, second, 0x7632);
  } else if constexpr (kPerWord == 4) {
    uint32_t pairs[4];  // of the units 0 and 1, 2 and 3 of two rows
    for (uint32_t i = 0; i < 4; ++i)
      pairs[i] = __byte_perm(rows[i / 2 * 2], rows[i / 2 * 2 + 1], i % 2 ? 0x7362 : 0x5140);
    for (uint32_t i = 0; i < 4; ++i)
      rows[i] = __byte_perm(pairs[i / 2], pairs[i / 2 + 2], i % 2 ? 0x7632 : 0x5410);
  }
}

// Moves all tokens between the tile and the outer end; each thread moves every kStep-th W: one unit
// or a vector of them.
template <class W, bool kStore, class V>
__device__ __forceinline__ void move_outer(Tile<V> &tile, const End &end, const Window &window) {
  constexpr uint32_t kPerW = sizeof(W) / sizeof(V);
  constexpr uint32_t kColumns = kUnits / kPerW, kStep = kThreads / kColumns;
  constexpr uint32_t kAtOnce = kPerW == 1 ? 2 : Tile<V>::kTokens / kStep;  // loads in flight
  const uint32_t unit = window.thread % kColumns * kPerW;
  if (unit >= window.count) return;
  const int64_t offset = end.offset(window, unit);
  for (uint32_t first = window.thread / kColumns; first < Tile<V>::kTokens;
       first += kAtOnce * kStep) {
    W units[kAtOnce];
    uint8_t *at[kAtOnce];
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      const uint32_t token = first + i * kStep;
      at[i] = tile.outer[token];
      if (kStore) {
        units[i] = *reinterpret_cast<W *>(tile.at(token, unit));
      } else if (at[i]) {
        units[i] = load<W>(at[i] + offset);
      }
    }
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      if (!at[i]) continue;
      if (kStore) {
        store(at[i] + offset, units[i]);
      } else {
        *reinterpret_cast<W *>(tile.at(first + i * kStep, unit)) = units[i];
      }
    }
  }
}

// Moves a group of units of the run that begins at `token` between the tile and the inner end.
template <bool kStore, class V>
__device__ __forceinline__ void move_run(Tile<V> &tile, uint32_t token, const End &end,
                                         int64_t step, const Window &window) {
  static_assert(kThreads / kRuns * kGroup == kUnits);
  using W = Vector<kVectorBytes>;
  using Group = Vector<kGroup * sizeof(V)>;
  constexpr uint32_t kPerVector = Tile<V>::kPerVector, kPerWord = sizeof(uint32_t) / sizeof(V);
  constexpr uint32_t kWords = kVectorBytes / sizeof(uint32_t);
  const uint32_t unit = window.thread / kRuns * kGroup;
  if (token == Tile<V>::kTokens || unit >= window.count) return;
  uint8_t *at = tile.inner[token] + end.offset(window, unit);
  // Along a run the order of the vectors changes once at most.
  const uint32_t change = kPerVector - token % kPerVector;
  V *const begin = tile.at(token, unit);
  V *const later = tile.at(token + kPerVector - 1, unit) - (kPerVector - 1) * kUnits;
  const auto group_of = [&](uint32_t i) {
    return reinterpret_cast<Group *>((i < change ? begin : later) + i * kUnits);
  };
  uint32_t vectors[kGroup][kWords]{};  // of a unit each
  // The tokens of a word of each vector, from or to the tile
  const auto move_word = [&](uint32_t word) {
    uint32_t groups[kPerWord][kGroup / kPerWord];  // of a token each
#pragma unroll
    for (uint32_t k = 0; kStore && k < kPerWord; ++k) {
      const Group group = *group_of(word * kPerWord + k);
      memcpy(groups[k], &group, sizeof group);
    }
#pragma unroll
    for (uint32_t j = 0; j < kGroup / kPerWord; ++j) {
      uint32_t square[kPerWord];
      for (uint32_t k = 0; k < kPerWord; ++k)
        square[k] = kStore ? groups[k][j] : vectors[j * kPerWord + k][word];
      transpose(square);
      for (uint32_t k = 0; k < kPerWord; ++k)
        (kStore ? vectors[j * kPerWord + k][word] : groups[k][j]) = square[k];
    }
#pragma unroll
    for (uint32_t k = 0; !kStore && k < kPerWord; ++k) {
      Group group;
      memcpy(&group, groups[k], sizeof group);
      *group_of(word * kPerWord + k) = group;
    }
  };
#pragma unroll
  for (uint32_t word = 0; kStore && word < kWords; ++word) move_word(word);
#pragma unroll
  for (uint32_t i = 0; i < kGroup; ++i, at += step) {
    if (unit + i >= window.count) break;
    W vector;
    if (kStore) {
      memcpy(&vector, vectors[i], sizeof vector);
      store(at, vector);
    } else {
      vector = load<W>(at);
      memcpy(vectors[i], &vector, sizeof vector);
    }
  }
#pragma unroll
  for (uint32_t word = 0; !kStore && word < kWords; ++word) move_word(word);
}

// Moves the units of `token` between the tile and the inner end; each thread moves every kStep-th.
template <bool kStore, class V>
__device__ __forceinline__ void move_single(Tile<V> &tile, uint32_t token, const End &end,
                                            const Window &window) {
  constexpr uint32_t kAtOnce = 2;  // loads in flight
  constexpr uint32_t kStep = kThreads / Tile<V>::kTokens;
  if (token == Tile<V>::kTokens) return;
  uint8_t *const at = tile.inner[token];
  for (uint32_t first = window.thread / Tile<V>::kTokens; first < window.count;
       first += kAtOnce * kStep) {
    V units[kAtOnce];
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      const uint32_t unit = first + i * kStep;
      if (unit >= window.count) continue;
      units[i] = kStore ? *tile.at(token, unit) : load<V>(at + end.offset(window, unit));
    }
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      const uint32_t unit = first + i * kStep;
      if (unit >= window.count) continue;
      if (kStore) {
        store(at + end.offset(window, unit), units[i]);
      } else {
        *tile.at(token, unit) = units[i];
      }
    }
  }
}

// Finds the tokens of a tile, one per thread. False: there are none.
template <bool kToInner, class V, class P>
__device__ __forceinline__ bool find_tokens(const P &p, uint32_t item, uint32_t skipped,
                                            Tile<V> &tile) {
  if (threadIdx.x >= Tile<V>::kTokens) return false;
  const uint32_t index = p.parts.quotient(item);
  const Pair pair = this_pair(p);
  const bool reports = pair.reports && index * p.parts.divisor == item;
  const Chunk chunk = chunk_of(p, pair.lookup, index, skipped, reports && threadIdx.x == 0);
  Token token{};
  if (threadIdx.x < chunk.end - chunk.begin)
    token = token_at<true>(p, pair, chunk, chunk.begin + threadIdx.x, reports);
  uint8_t *const src = const_cast<uint8_t *>(token.src);
  tile.inner[threadIdx.x] = kToInner ? token.dst : src;
  tile.outer[threadIdx.x] = kToInner ? src : token.dst;
  if (token.dst && !src)  // no window loads it: it stays zero in all
    for (uint32_t unit = 0; unit < kUnits; ++unit) tile.units[threadIdx.x][unit] = V{};
  if (threadIdx.x < kRuns) tile.runs[threadIdx.x] = Tile<V>::kTokens;
  return chunk.begin < chunk.end;
}

// kToInner: tokens are innermost at the destination, otherwise at the source.
template <class V, bool kToInner, class P>
__global__ void __launch_bounds__(kThreads, 4) tile_kernel(const __grid_constant__ P p, Wide wide) {
  using W = Vector<kVectorBytes>;
  constexpr uint32_t kTokens = Tile<V>::kTokens;
  static_assert(kTokens % kWarp == 0);
  KVX_DYNAMIC_SHARED(Tile<V>, shared);
  Tile<V> &tile = *shared;
  const Units &units = p.units;
  const Plane &inner_plane = kToInner ? p.shape.dst : p.shape.src;
  const End inner{inner_plane, kToInner ? units.dst_per_pack : units.src_per_pack,
                  step_of(inner_plane, units, sizeof(V))};
  const End outer{kToInner ? p.shape.src : p.shape.dst,
                  kToInner ? units.src_per_pack : units.dst_per_pack, sizeof(V)};
  const uint32_t items = p.chunks * p.parts.divisor;
  for (uint32_t item = blockIdx.x; item < items; item += gridDim.x) {
    for (uint32_t skipped = 0; skipped < p.tokens_per_chunk; skipped += kTokens) {
      // Find the tokens. Warps may have read different lengths: all go on, or none.
      if (!__syncthreads_or(find_tokens<kToInner>(p, item, skipped, tile))) {
        const uint32_t index = p.parts.quotient(anew(item));
        if (p.measures_rows && __syncthreads_and(is_past_rows(p, index))) return;
        break;
      }
      if (wide.inner && threadIdx.x < kTokens) find_run(tile);
      __syncthreads();
      const uint32_t run = tile.runs[threadIdx.x % kRuns], single = single_token(tile);
      const auto part = p.parts.divide(anew(item)).remainder;
      const uint32_t last = min((part + 1) * p.units_per_part, units.per_token.divisor);
      for (uint32_t unit = part * p.units_per_part; unit < last;) {
        const uint32_t head = units.per_head.quotient(unit);
        const uint32_t in_head = unit - head * units.per_head.divisor;
        const uint32_t rest = min(units.per_head.divisor - in_head, last - unit);
        const Window window{head, in_head, min(rest, kUnits), anew(threadIdx.x)};
        // Load
        if (!kToInner) {
          move_run<false>(tile, run, inner, wide.step, window);
          move_single<false>(tile, single, inner, window);
        } else if (wide.outer) {
          move_outer<W, false>(tile, outer, window);
        } else {
          move_outer<V, false>(tile, outer, window);
        }
        __syncthreads();
        // Store
        if (kToInner) {
          move_run<true>(tile, run, inner, wide.step, window);
          move_single<true>(tile, single, inner, window);
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
    const Bases bases = p.bases_of(i);
    outer_bits |= misalignment(to_inner ? bases.src : bases.dst) |
                  misalignment(to_inner ? bases.src_secondary : bases.dst_secondary);
  }
  // The units of a group, which begins at a multiple of kGroup, are equally far apart.
  const bool has_step = inner_pack == 1 || inner_pack == p.units.per_head.divisor ||
                        (inner_pack | p.units_per_part) % kGroup == 0;
  return {inner_bits % kVectorBytes == 0 && has_step, outer_bits % kVectorBytes == 0,
          inner_pack == 1 ? inner.outer_stride : step_of(inner, p.units, unit_bytes)};
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
