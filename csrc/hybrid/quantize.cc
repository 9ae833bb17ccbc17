#include "hybrid/quantize.h"

#include <algorithm>
#include <cstring>

#include "cpu/kernels/kernels.h"
#include "hybrid/numbers.h"

namespace kvx::hybrid {

int32_t largest_of(const void *numbers, kvx_dtype_t dtype, uint32_t count) {
  if (dtype == KVX_DTYPE_F32) {
    const auto *const from = static_cast<const float *>(numbers);
    int32_t most = 0;
    for (uint32_t i = 0; i < count; ++i) most = largest_magnitude(most, from[i]);
    return most;
  }
  const auto *const from = static_cast<const uint16_t *>(numbers);
  int16_t most = 0;
  for (uint32_t i = 0; i < count; ++i) {
    const auto magnitude = static_cast<int16_t>(from[i] & 0x7fff);
    const auto number = static_cast<int16_t>(magnitude > 0x7f80 ? 0 : magnitude);
    most = number > most ? number : most;
  }
  return static_cast<int32_t>(most) << 16;
}

void to_e4m3(uint8_t *to, const void *numbers, kvx_dtype_t dtype, uint32_t count, float divisor) {
  const cpu::Conversion how{{1.0f, divisor}, false, false, 0};
  cpu::kernels().find(dtype, KVX_DTYPE_F8_E4M3)(to, numbers, count, how);
}

void to_dtype(void *to, kvx_dtype_t to_dtype, const void *numbers, kvx_dtype_t dtype,
              uint32_t count) {
  if (to_dtype == dtype) {
    std::memcpy(to, numbers, uint64_t{count} * size_of_number(dtype));
    return;
  }
  const cpu::Conversion how{{1.0f, 1.0f}, false, false, 0};
  cpu::kernels().find(dtype, to_dtype)(to, numbers, count, how);
}

void quantize_row(uint8_t *fp8, void *rope, float *inv_scale, const void *row, kvx_dtype_t dtype,
                  uint32_t nope_dim, uint32_t rope_dim) {
  const float scale = inv_scale ? inverse_scale(largest_of(row, dtype, nope_dim)) : 1.0f;
  to_e4m3(fp8, row, dtype, nope_dim, scale);
  to_dtype(rope, KVX_DTYPE_BF16, number_at(row, dtype, nope_dim), dtype, rope_dim);
  if (inv_scale) *inv_scale = scale;
}

}  // namespace kvx::hybrid
