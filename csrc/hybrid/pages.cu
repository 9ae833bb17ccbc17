// Rows to the records of engines' pages and back: a block of threads per row, a warp per group.
#include "hybrid/blocks.cuh"

namespace kvx::hybrid {
namespace {

constexpr uint32_t kWarps = kThreads / kWarp;
static_assert(kPageGroup == 2 * kWarp && kPageRope == 2 * kWarp);
static_assert(kPageGroups + 1 == 2 * kWarps);

template <class Format>
__device__ __forceinline__ void write_two(typename Format::Bits *to, float first, float second) {
  to[0] = Format::encode(first);
  to[1] = Format::encode(second);
}

// Two numbers of each thread: visit(group, the first of them), for the groups of its warp.
template <class Visit>
__device__ __forceinline__ void each_pair_of_groups(const Visit &visit) {
  for (uint32_t group = threadIdx.x / kWarp; group < kPageGroups; group += kWarps)
    visit(group, group * kPageGroup + 2 * (threadIdx.x % kWarp));
}

// The numbers with rotation, two of each thread of the last warp: visit(the first of them).
template <class Visit>
__device__ __forceinline__ void pair_of_rope(const Visit &visit) {
  if (threadIdx.x / kWarp + 1 == kWarps) visit(kPageNope + 2 * (threadIdx.x % kWarp));
}

// Two numbers of a group, and its exponent.
struct TwoOfGroup {
  uint16_t codes;
  uint8_t exponent;
};
__device__ __forceinline__ TwoOfGroup two_of_group(float first, float second) {
  int32_t most = largest_magnitude(largest_magnitude(0, first), second);
#pragma unroll
  for (uint32_t step = kWarp / 2; step; step /= 2)
    most = max(most, __shfl_xor_sync(kAllLanes, most, step));
  const uint8_t exponent = page_exponent(most);
  const float inverse = page_inverse(exponent);
  return {static_cast<uint16_t>(cuda::encode_two<E4m3>(first * inverse, second * inverse)),
          exponent};
}

// A warp has two groups, the last one a group and the numbers with rotation. What they become is
// found while the slot is on its way.
template <class Format>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    write_pages_kernel(const __grid_constant__ kvx_hybrid_pages_t p) {
  using Bits = typename Format::Bits;
  constexpr uint32_t kNext = kWarps * kPageGroup;
  begin_dependent();
  const uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const uint32_t d = warp * kPageGroup + 2 * lane;
  const int64_t slot = p.slots[blockIdx.x];
  const Bits *const row = static_cast<const Bits *>(p.rows) + uint64_t{blockIdx.x} * kPageDim + d;
  const Bits bits[] = {row[0], row[1], row[kNext], row[kNext + 1]};
  const TwoOfGroup one = two_of_group(Format::decode(bits[0]), Format::decode(bits[1]));
  const TwoOfGroup other = two_of_group(Format::decode(bits[2]), Format::decode(bits[3]));
  const Record to = record_of_slot(p, slot);
  if (!to.data) return;
  *reinterpret_cast<uint16_t *>(to.data + d) = one.codes;
  if (lane == 0) to.scales[warp] = one.exponent;
  if (warp + 1 < kWarps) {
    *reinterpret_cast<uint16_t *>(to.data + d + kNext) = other.codes;
    if (lane == 0) to.scales[warp + kWarps] = other.exponent;
    return;
  }
  auto *const rope = reinterpret_cast<uint16_t *>(to.data + kPageNope) + 2 * lane;
  if constexpr (sizeof(Bits) == 2) {
    rope[0] = bits[2], rope[1] = bits[3];
  } else {
    write_two<Bf16>(rope, Format::decode(bits[2]), Format::decode(bits[3]));
  }
  if (lane == 0) to.scales[kPageGroups] = 0;
}

template <class Format>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    read_pages_kernel(const __grid_constant__ kvx_hybrid_pages_t p) {
  using Bits = typename Format::Bits;
  const Record from = record_of_slot(p, p.slots[blockIdx.x]);
  if (!from.data) return;
  Bits *const row = static_cast<Bits *>(p.rows) + uint64_t{blockIdx.x} * kPageDim;
  each_pair_of_groups([&](uint32_t group, uint32_t d) {
    const float scale = E8m0::decode(from.scales[group]);
    const float first = E4m3::decode(from.data[d]), second = E4m3::decode(from.data[d + 1]);
    write_two<Format>(row + d, first * scale, second * scale);
  });
  pair_of_rope([&](uint32_t d) {
    const auto *const rope =
        reinterpret_cast<const uint16_t *>(from.data + kPageNope) + (d - kPageNope);
    if constexpr (sizeof(Bits) == 2) {
      row[d] = rope[0], row[d + 1] = rope[1];
    } else {
      write_two<Format>(row + d, Bf16::decode(rope[0]), Bf16::decode(rope[1]));
    }
  });
}

}  // namespace

kvx_status_t launch(const kvx_hybrid_pages_t &p, Direction direction, void *stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  with_format(p.dtype, [&](auto format) {
    using Format = decltype(format);
    if (direction == Direction::kWrite) {
      KVX_LAUNCH_DEPENDENT((write_pages_kernel<Format>), dim3(p.num_rows), dim3(kThreads), on, p);
    } else {
      KVX_LAUNCH((read_pages_kernel<Format>), dim3(p.num_rows), dim3(kThreads), 0, on, p);
    }
  });
  return launched();
}

}  // namespace kvx::hybrid
