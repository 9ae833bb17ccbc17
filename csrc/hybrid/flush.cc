// Entries into blocks, and tails after a flush, in HOST memory.
#include <algorithm>
#include <cstring>

#include "cpu/kernels/kernels.h"
#include "hybrid/numbers.h"
#include "hybrid/quantize.h"
#include "hybrid/rows.h"
#include "hybrid/run.h"

namespace kvx::hybrid {
namespace {

constexpr uint32_t kPart = 128;  // numbers of a key that are encoded at a time: whole groups

void write_fp8_key(const kvx_hybrid_flush_t &f, uint64_t row, uint64_t entry) {
  const void *const key = number_at(f.index_key, f.dtype, row * f.key_dim);
  const float scale = E8m0::decode(page_exponent(largest_of(key, f.dtype, f.key_dim)));
  to_e4m3(f.key_codes + entry * f.key_dim, key, f.dtype, f.key_dim, scale);
  reinterpret_cast<float *>(f.key_scales)[entry] = scale;
}

// Codes and scales of `count` numbers anew, which were rounded to even.
void round_by_thresholds(const kvx_hybrid_flush_t &f, uint8_t *codes, float *scales,
                         const float *numbers, uint32_t count, uint32_t group) {
  const Fp4 with(1.0f);
  for (uint32_t first = 0; first < count; first += group) {
    const float scale = scales[first / group] = key_scale(f, scales[first / group]);
    const float inverse = with.inverse(scale);
    for (uint32_t i = first; i < first + group; i += 2) {
      const uint32_t low = key_code(f, numbers[i] * inverse);
      codes[i / 2] = static_cast<uint8_t>(low | key_code(f, numbers[i + 1] * inverse) << 4);
    }
  }
}

void write_fp4_key(const kvx_hybrid_flush_t &f, uint64_t row, uint64_t entry) {
  const bool is_nv = f.keys == KVX_HYBRID_NVFP4;
  const uint32_t group = is_nv ? 16 : 32, groups = f.key_dim / group;
  const kvx_dtype_t scale_dtype = is_nv ? KVX_DTYPE_F8_E4M3 : KVX_DTYPE_F8_E8M0;
  uint8_t *const codes = f.key_codes + entry * (f.key_dim / 2);
  uint8_t *const stored = f.key_scales + entry * groups;
  const bool by_thresholds = f.flags & KVX_HYBRID_THRESHOLDS;
  for (uint32_t first = 0; first < f.key_dim; first += kPart) {
    float numbers[kPart], scales[kPart / 16];
    const uint32_t count = std::min(kPart, f.key_dim - first);
    to_dtype(numbers, KVX_DTYPE_F32, number_at(f.index_key, f.dtype, row * f.key_dim + first),
             f.dtype, count);
    cpu::kernels().fp4.encode(codes + first / 2, scales, numbers, count / group, group, scale_dtype,
                              1.0f);
    if (by_thresholds) round_by_thresholds(f, codes + first / 2, scales, numbers, count, group);
    for (uint32_t g = 0; g < count / group; ++g)
      store_group_scale(stored + first / group + g, scale_dtype, scales[g]);
  }
}

}  // namespace

void run(const kvx_hybrid_flush_t &f) {
  const uint64_t dim = uint64_t{f.nope_dim} + f.rope_dim;
  each_row(f.num_rows, 4 * (dim + f.key_dim), [&](uint64_t i) {
    const int64_t found = entry_of_row(f, static_cast<uint32_t>(i));
    if (found < 0) return;
    const auto to = static_cast<uint64_t>(found);
    quantize_row(f.fp8 + to * f.nope_dim, number_at(f.rope, KVX_DTYPE_BF16, to * f.rope_dim),
                 f.inv_scale ? f.inv_scale + to : nullptr, number_at(f.entry, f.dtype, i * dim),
                 f.dtype, f.nope_dim, f.rope_dim);
    if (f.keys == KVX_HYBRID_FP8) {
      write_fp8_key(f, i, to);
    } else if (f.keys != KVX_HYBRID_NO_KEYS) {
      write_fp4_key(f, i, to);
    }
  });
}

void run(const kvx_hybrid_state_t &s) {
  const uint64_t bytes = uint64_t{s.ratio} * s.row * size_of_number(s.state);
  each_row(s.num_rows, 4 * bytes, [&](uint64_t i) {
    const int32_t slot = s.slots[i];
    if ((s.mask && !s.mask[i]) || slot < 0 || static_cast<uint32_t>(slot) >= s.num_slots) return;
    const auto at = [&](void *data) { return static_cast<uint8_t *>(data) + slot * bytes; };
    if (s.kb) {
      std::memcpy(at(s.kb), at(s.ka), bytes);
      std::memcpy(at(s.zb), at(s.za), bytes);
    }
    std::memset(at(s.ka), 0, bytes);
    std::memset(at(s.za), 0, bytes);
    s.tail_len[slot] = 0;
  });
}

}  // namespace kvx::hybrid
