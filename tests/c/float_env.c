/* The caller's floating-point mode changes no byte, and is what it was after a call.
 *
 * Writes float32 into caches of other formats in every rounding mode and with subnormals flushed to
 * zero, and compares with what the mode of a fresh thread gives. Exits with 1 if they differ.
 */
#include <fenv.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "kvx/kvx_abi.h"
#include "kvx/kvx_error.h"

enum { kTokens = 64, kDim = 8, kNumbers = kTokens * kDim, kBytes = 4 * kNumbers };

#if defined(__x86_64__)
#include <immintrin.h>
static unsigned flushing(void) { return _mm_getcsr() & 0x8040; } /* FTZ, DAZ */
static void flush(int on) { _mm_setcsr((_mm_getcsr() & ~0x8040u) | (on ? 0x8040u : 0)); }
#else
static uint64_t fpcr(void) {
  uint64_t mode;
  __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
  return mode;
}
static unsigned flushing(void) { return (unsigned)(fpcr() >> 24 & 1); } /* FZ */
static void flush(int on) {
  const uint64_t mode = (fpcr() & ~((uint64_t)1 << 24)) | ((uint64_t)on << 24);
  __asm__ volatile("msr fpcr, %0" ::"r"(mode));
}
#endif

static float numbers[kNumbers];
static unsigned char cache_bytes[2][kBytes];

static void set_tensor(kvx_tensor_desc_t *tensor, kvx_dtype_t dtype, void *data, uint32_t ndim,
                       const int64_t *shape) {
  int64_t stride = 1;
  int d;
  tensor->size = sizeof(*tensor);
  tensor->dtype = dtype;
  tensor->layout = ndim == 4 ? KVX_LAYOUT_BLOCK_NHD : KVX_LAYOUT_BLOCK_CUSTOM;
  tensor->memory = KVX_MEMORY_HOST;
  tensor->data = data;
  tensor->ndim = ndim;
  for (d = (int)ndim - 1; d >= 0; --d) {
    tensor->shape[d] = shape[d];
    tensor->stride[d] = stride;
    stride *= shape[d];
  }
}

/* Writes all numbers as K into a cache of one block, which `to` holds; V is the same. */
static kvx_status_t write_as(kvx_dtype_t dtype, unsigned char *to) {
  static int64_t slots[kTokens];
  static unsigned char v[kBytes];
  const int64_t block[] = {1, kTokens, 1, kDim}, tokens[] = {kTokens, 1, kDim};
  kvx_cache_desc_t cache;
  kvx_write_desc_t write;
  int i;
  memset(&cache, 0, sizeof(cache));
  memset(&write, 0, sizeof(write));
  memset(to, 0xA5, kBytes);
  for (i = 0; i < kTokens; ++i) slots[i] = i;
  cache.size = sizeof(cache);
  cache.num_blocks = 1;
  cache.block_size = kTokens;
  cache.num_kv_heads = 1;
  cache.head_dim = kDim;
  set_tensor(&cache.k, dtype, to, 4, block);
  set_tensor(&cache.v, dtype, v, 4, block);
  write.size = sizeof(write);
  write.io.size = sizeof(write.io);
  write.io.num_tokens = kTokens;
  write.io.num_kv_heads = 1;
  write.io.head_dim = kDim;
  set_tensor(&write.io.key, KVX_DTYPE_F32, numbers, 3, tokens);
  set_tensor(&write.io.value, KVX_DTYPE_F32, numbers, 3, tokens);
  write.slots.size = sizeof(write.slots);
  write.slots.dtype = KVX_DTYPE_S64;
  write.slots.token_count = kTokens;
  write.slots.invalid_slot = -1;
  write.slots.slots = slots;
  return kvx_write_kv(&cache, &write, NULL);
}

int main(void) {
  static const kvx_dtype_t dtypes[] = {KVX_DTYPE_F16, KVX_DTYPE_BF16, KVX_DTYPE_F8_E4M3,
                                       KVX_DTYPE_F8_E5M2};
  static const int modes[] = {FE_TONEAREST, FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO};
  unsigned i, d, m, failures = 0, checks = 0;
  for (i = 0; i < kNumbers; ++i) { /* of every size: float32's subnormals, those of each format */
    const uint32_t bits = i < 64 ? i * 131101u : i * 8388593u + 77u;
    memcpy(&numbers[i], &bits, sizeof(bits));
    if (numbers[i] != numbers[i]) numbers[i] = 1.03125f;
  }
  for (d = 0; d < sizeof(dtypes) / sizeof(dtypes[0]); ++d) {
    for (m = 0; m < 2 * sizeof(modes) / sizeof(modes[0]); ++m) {
      const int on = (int)(m & 1), rounding = modes[m / 2];
      unsigned kept, asked;
      int ok = write_as(dtypes[d], cache_bytes[0]) == KVX_STATUS_OK;
      fesetround(rounding), flush(on), asked = flushing();
      ok &= write_as(dtypes[d], cache_bytes[1]) == KVX_STATUS_OK;
      kept = flushing() == asked && fegetround() == rounding;
      fesetround(FE_TONEAREST), flush(0);
      ok &= kept && memcmp(cache_bytes[0], cache_bytes[1], kBytes) == 0;
      ++checks;
      if (ok) continue;
      ++failures;
      printf("dtype %d, rounding %d, flushing %d: other bytes, or another mode (%s)\n",
             (int)dtypes[d], rounding, on, kvx_last_error());
    }
  }
  printf("%u checks, %u failures\n", checks, failures);
  return failures != 0;
}
