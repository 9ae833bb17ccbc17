// Tails to entries: a block of threads per entry, and a thread for every 128th number of it.
#include "hybrid/blocks.cuh"

namespace kvx::hybrid {
namespace {

// Calls visit(key, score) with number d of each token of a stream.
template <class Format, class Visit>
__device__ __forceinline__ void each_token(const void *k, const void *z, const float *ape,
                                           uint32_t stride, uint32_t tokens, uint32_t dim,
                                           uint32_t d, Visit visit) {
  using Bits = typename Format::Bits;
  if (!z) return;
  for (uint32_t t = 0; t < tokens; ++t) {
    const uint64_t at = uint64_t{t} * stride + d;
    float score = Format::decode(static_cast<const Bits *>(z)[at]);
    if (ape) score += ape[uint64_t{t} * dim + d];
    visit(Format::decode(static_cast<const Bits *>(k)[at]), score);
  }
}

template <class Format>
__device__ __forceinline__ float weigh(const kvx_hybrid_compress_t &c, const Streams &s,
                                       uint32_t d) {
  float most = -float_of(kInfinity), sum = 0.0f, out = 0.0f;
  const auto both = [&](auto visit) {
    each_token<Format>(s.ka, s.za, c.ape_a, s.stride, c.ratio, c.head_dim, d, visit);
    each_token<Format>(s.kb, s.zb, c.ape_b, s.stride, c.ratio, c.head_dim, d, visit);
  };
  both([&](float, float score) { most = score > most ? score : most; });
  both([&](float key, float score) {
    const float weight = exp_of(score - most);
    sum += weight;
    out += weight * key;
  });
  return out / sum;
}

__device__ __forceinline__ void store_number(const kvx_hybrid_compress_t &c, uint64_t at,
                                             float value) {
  if (c.out_dtype == KVX_DTYPE_F32) {
    static_cast<float *>(c.out)[at] = value;
  } else {
    static_cast<uint16_t *>(c.out)[at] = Bf16::encode(value);
  }
}

// Not within the template: there g++ puts a static array into no section (tests/hostgrid).
using Lanes = float[kLanes];
__device__ __forceinline__ Lanes &lanes_of_block() {
  __shared__ Lanes lanes;
  return lanes;
}

template <class Format>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    compress_kernel(const __grid_constant__ kvx_hybrid_compress_t c) {
  KVX_DYNAMIC_SHARED(float, numbers);
  Lanes &lanes = lanes_of_block();
  static_assert(kLanes == kThreads);
  const uint32_t row = blockIdx.x, thread = threadIdx.x;
  const int64_t slot = tail_of_row(c, row);
  if (slot < 0) return;
  const Streams streams = streams_of(c, row, static_cast<uint32_t>(slot));
  float squares = 0.0f;
  for (uint32_t d = thread; d < c.head_dim; d += kThreads) {
    const float value = weigh<Format>(c, streams, d);
    numbers[d] = value;
    squares += value * value;
  }
  if (c.norm_weight) {
    lanes[thread] = squares;
    for (uint32_t half = kLanes / 2; half; half /= 2) {
      __syncthreads();
      if (thread < half) lanes[thread] += lanes[thread + half];
    }
    __syncthreads();
    const float factor = 1.0f / sqrtf(lanes[0] / static_cast<float>(c.head_dim) + c.eps);
    for (uint32_t d = thread; d < c.head_dim; d += kThreads)
      numbers[d] = numbers[d] * factor * c.norm_weight[d];
  }
  __syncthreads();
  const uint32_t rope = c.cos_sin ? c.rope_dim : 0, nope = c.head_dim - rope, half = rope / 2;
  const uint64_t first = uint64_t{row} * c.head_dim;
  for (uint32_t d = thread; d < nope; d += kThreads) store_number(c, first + d, numbers[d]);
  if (!rope) return;
  const float *const cosines =
      c.cos_sin + position_of(c.positions, c.position_bytes, row) * c.rope_dim;
  for (uint32_t i = thread; i < half; i += kThreads) {
    const uint32_t d = nope + 2 * i;
    const Rotated to = rotate(numbers[d], numbers[d + 1], cosines[i], cosines[half + i]);
    store_number(c, first + d, to.even);
    store_number(c, first + d + 1, to.odd);
  }
}

}  // namespace

kvx_status_t launch(const kvx_hybrid_compress_t &c, void *stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  with_format(c.state, [&](auto format) {
    KVX_LAUNCH((compress_kernel<decltype(format)>), dim3(c.num_rows), dim3(kThreads),
               c.head_dim * sizeof(float), on, c);
  });
  return launched();
}

}  // namespace kvx::hybrid
