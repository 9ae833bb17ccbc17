// Rows to the records of engines' pages and back: a block of threads per row, a warp per group.
#include "hybrid/blocks.cuh"

namespace kvx::hybrid {
namespace {

constexpr uint32_t kWarps = kThreads / kWarp;
static_assert(kPageGroup == 2 * kWarp && kPageRope == 2 * kWarp);

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

template <class Format>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    write_pages_kernel(const __grid_constant__ kvx_hybrid_pages_t p) {
  using Bits = typename Format::Bits;
  const Record to = record_of_row(p, blockIdx.x);
  if (!to.data) return;
  const Bits *const row = static_cast<const Bits *>(p.rows) + uint64_t{blockIdx.x} * kPageDim;
  const bool is_first = threadIdx.x % kWarp == 0;
  each_pair_of_groups([&](uint32_t group, uint32_t d) {
    const float first = Format::decode(row[d]), second = Format::decode(row[d + 1]);
    int32_t most = largest_magnitude(largest_magnitude(0, first), second);
#pragma unroll
    for (uint32_t step = kWarp / 2; step; step /= 2)
      most = max(most, __shfl_xor_sync(kAllLanes, most, step));
    const uint8_t exponent = page_exponent(most);
    const float inverse = page_inverse(exponent);
    const uint32_t codes = cuda::encode_two<E4m3>(first * inverse, second * inverse);
    *reinterpret_cast<uint16_t *>(to.data + d) = static_cast<uint16_t>(codes);
    if (is_first) to.scales[group] = exponent;
  });
  pair_of_rope([&](uint32_t d) {
    auto *const rope = reinterpret_cast<uint16_t *>(to.data + kPageNope) + (d - kPageNope);
    if constexpr (sizeof(Bits) == 2) {
      rope[0] = row[d], rope[1] = row[d + 1];
    } else {
      write_two<Bf16>(rope, Format::decode(row[d]), Format::decode(row[d + 1]));
    }
    if (is_first) to.scales[kPageGroups] = 0;
  });
}

template <class Format>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    read_pages_kernel(const __grid_constant__ kvx_hybrid_pages_t p) {
  using Bits = typename Format::Bits;
  const Record from = record_of_row(p, blockIdx.x);
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
      KVX_LAUNCH((write_pages_kernel<Format>), dim3(p.num_rows), dim3(kThreads), 0, on, p);
    } else {
      KVX_LAUNCH((read_pages_kernel<Format>), dim3(p.num_rows), dim3(kThreads), 0, on, p);
    }
  });
  return launched();
}

}  // namespace kvx::hybrid
