// Tails to entries, in HOST memory.
#include <algorithm>
#include <cmath>

#include "cpu/kernels/kernels.h"
#include "hybrid/numbers.h"
#include "hybrid/quantize.h"
#include "hybrid/rows.h"
#include "hybrid/run.h"

namespace kvx::hybrid {
namespace {

// The sum of squares in kLanes lanes, whose upper half is added to the lower until one is left.
float sum_of_squares(const float *numbers, uint32_t count) {
  float lanes[kLanes] = {};
  for (uint32_t first = 0; first < count; first += kLanes) {
    const uint32_t here = std::min(kLanes, count - first);
    for (uint32_t i = 0; i < here; ++i) lanes[i] += numbers[first + i] * numbers[first + i];
  }
  for (uint32_t half = kLanes / 2; half; half /= 2)
    for (uint32_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

void normalize(float *numbers, const kvx_hybrid_compress_t &c) {
  const float mean = sum_of_squares(numbers, c.head_dim) / static_cast<float>(c.head_dim);
  const float factor = 1.0f / std::sqrt(mean + c.eps);
  for (uint32_t i = 0; i < c.head_dim; ++i) numbers[i] = numbers[i] * factor * c.norm_weight[i];
}

void rotate_last(float *numbers, const kvx_hybrid_compress_t &c, uint32_t row) {
  const uint32_t half = c.rope_dim / 2;
  const int64_t position = position_of(c.positions, c.position_bytes, row);
  const float *const cosines = c.cos_sin + position * c.rope_dim, *const sines = cosines + half;
  float *const last = numbers + c.head_dim - c.rope_dim;
  for (uint32_t i = 0; i < half; ++i) {
    const Rotated to = rotate(last[2 * i], last[2 * i + 1], cosines[i], sines[i]);
    last[2 * i] = to.even, last[2 * i + 1] = to.odd;
  }
}

}  // namespace

void run(const kvx_hybrid_compress_t &c) {
  const auto weigh =
      c.state == KVX_DTYPE_F32 ? cpu::kernels().hybrid.weigh_f32 : cpu::kernels().hybrid.weigh_bf16;
  each_row(c.num_rows, uint64_t{c.ratio} * c.head_dim * 32, [&](uint64_t i) {
    const auto row = static_cast<uint32_t>(i);
    const int64_t slot = tail_of_row(c, row);
    if (slot < 0) return;
    const Streams streams = streams_of(c, row, static_cast<uint32_t>(slot));
    float numbers[4096];
    const cpu::Stream a{streams.ka, streams.za, c.ape_a}, b{streams.kb, streams.zb, c.ape_b};
    weigh(numbers, a, b, streams.stride, c.ratio, c.head_dim);
    if (c.norm_weight) normalize(numbers, c);
    if (c.cos_sin) rotate_last(numbers, c, row);
    to_dtype(number_at(c.out, c.out_dtype, i * c.head_dim), c.out_dtype, numbers, KVX_DTYPE_F32,
             c.head_dim);
  });
}

}  // namespace kvx::hybrid
