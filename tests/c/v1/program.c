/* A program with a header of its own, kvx_abi.h in this folder, that has nothing but v1.
 *
 * Every libkvx of major version 1 runs it as it is: structs have the sizes of v1, smaller ones are
 * refused, and a struct ends where its memory ends, so that a library which reads past it crashes.
 * Prints each check that fails.
 */
#define _DEFAULT_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kvx_abi.h"

enum { kBlocks = 3, kBlockSize = 2, kHeads = 2, kDim = 4, kTokens = 5 };
enum { kVector = kHeads * kDim, kCacheNumbers = kBlocks * kBlockSize * kVector };

static int checks = 0, failures = 0;

static void check(int ok, const char *what, int line) {
  ++checks;
  if (ok) return;
  ++failures;
  printf("program.c:%d: failed: %s\n", line, what);
}
#define CHECK(condition) check((condition) != 0, #condition, __LINE__)

/* `bytes` of zeros, behind which no memory follows. */
static void *at_the_end_of_memory(size_t bytes) {
  const size_t page = (size_t)sysconf(_SC_PAGESIZE);
  unsigned char *two = (unsigned char *)mmap(NULL, 2 * page, PROT_READ | PROT_WRITE,
                                             MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (two == (unsigned char *)MAP_FAILED || mprotect(two + page, page, PROT_NONE) != 0) exit(2);
  return two + page - bytes;
}

/* [lead, kHeads, kDim] tokens, or with block_size [lead, block_size, kHeads, kDim] blocks. */
static kvx_tensor_desc_t tensor(float *data, int64_t lead, int64_t block_size) {
  kvx_tensor_desc_t t;
  uint32_t axis;
  memset(&t, 0, sizeof(t));
  t.size = sizeof(t);
  t.dtype = KVX_DTYPE_F32;
  t.layout = KVX_LAYOUT_BLOCK_NHD;
  t.memory = KVX_MEMORY_HOST;
  t.shape[t.ndim++] = lead;
  if (block_size) t.shape[t.ndim++] = block_size;
  t.shape[t.ndim++] = kHeads;
  t.shape[t.ndim++] = kDim;
  for (axis = t.ndim; axis-- > 0;)
    t.stride[axis] = axis == t.ndim - 1 ? 1 : t.stride[axis + 1] * t.shape[axis + 1];
  t.data = data;
  return t;
}

int main(void) {
  static float k[kCacheNumbers], v[kCacheNumbers];
  static float key[kTokens * kVector], value[kTokens * kVector];
  static float got_key[kTokens * kVector], got_value[kTokens * kVector];
  static const int64_t slots[kTokens] = {4, 5, -1, 1, 2}; /* token 2 is left out */
  static const int32_t blocks[kBlocks] = {2, 0, 1}, length = kTokens;
  static const int order[kTokens] = {0, 1, -1, 3, 4}; /* which token the gathered ones are */
  kvx_cache_desc_t *cache = (kvx_cache_desc_t *)at_the_end_of_memory(sizeof(*cache));
  kvx_write_desc_t *write = (kvx_write_desc_t *)at_the_end_of_memory(sizeof(*write));
  kvx_gather_desc_t *gather = (kvx_gather_desc_t *)at_the_end_of_memory(sizeof(*gather));
  kvx_version_t version;
  int t, i;

  memset(&version, 0xff, sizeof(version));
  CHECK(kvx_get_version(&version) == KVX_STATUS_OK && version.size == sizeof(version));
  CHECK(version.abi_major == KVX_ABI_VERSION_MAJOR);

  for (i = 0; i < kTokens * kVector; ++i) {
    key[i] = (float)(i + 1);
    value[i] = (float)-(i + 1);
  }
  cache->size = sizeof(*cache);
  cache->num_blocks = kBlocks;
  cache->block_size = kBlockSize;
  cache->num_kv_heads = kHeads;
  cache->head_dim = kDim;
  cache->k = tensor(k, kBlocks, kBlockSize);
  cache->v = tensor(v, kBlocks, kBlockSize);
  CHECK(kvx_validate_cache_desc(cache) == KVX_STATUS_OK);
  cache->size = sizeof(*cache) - 1;
  CHECK(kvx_validate_cache_desc(cache) == KVX_STATUS_INVALID_ARGUMENT);
  cache->size = sizeof(*cache);

  write->size = sizeof(*write);
  write->io.size = sizeof(write->io);
  write->io.key = tensor(key, kTokens, 0);
  write->io.value = tensor(value, kTokens, 0);
  write->io.num_tokens = kTokens;
  write->io.num_kv_heads = kHeads;
  write->io.head_dim = kDim;
  write->slots.size = sizeof(write->slots);
  write->slots.dtype = KVX_DTYPE_S64;
  write->slots.token_count = kTokens;
  write->slots.invalid_slot = -1;
  write->slots.slots = (void *)slots;
  CHECK(kvx_write_kv(cache, write, NULL) == KVX_STATUS_OK);
  for (t = 0; t < kTokens; ++t) {
    if (slots[t] < 0) continue;
    CHECK(memcmp(k + slots[t] * kVector, key + t * kVector, kVector * sizeof(float)) == 0);
    CHECK(memcmp(v + slots[t] * kVector, value + t * kVector, kVector * sizeof(float)) == 0);
  }
  for (i = 0; i < kVector; ++i) CHECK(k[i] == 0 && k[3 * kVector + i] == 0); /* slots 0 and 3 */
  write->size = sizeof(*write) - 1;
  CHECK(kvx_write_kv(cache, write, NULL) == KVX_STATUS_INVALID_ARGUMENT);

  gather->size = sizeof(*gather);
  gather->io.size = sizeof(gather->io);
  gather->io.key = tensor(got_key, kTokens, 0);
  gather->io.value = tensor(got_value, kTokens, 0);
  gather->io.num_tokens = gather->max_seq_len = kTokens;
  gather->io.num_kv_heads = kHeads;
  gather->io.head_dim = kDim;
  gather->block_table.size = sizeof(gather->block_table);
  gather->block_table.format = KVX_BLOCK_TABLE_PACKED;
  gather->block_table.index_dtype = KVX_DTYPE_S32;
  gather->block_table.seq_count = 1;
  gather->block_table.max_blocks_per_seq = gather->block_table.indices_count = kBlocks;
  gather->block_table.indices = (void *)blocks;
  gather->seq_lens.size = sizeof(gather->seq_lens);
  gather->seq_lens.dtype = KVX_DTYPE_S32;
  gather->seq_lens.seq_count = 1;
  gather->seq_lens.lengths = (void *)&length;
  CHECK(kvx_gather_kv(cache, gather, NULL) == KVX_STATUS_OK);
  for (t = 0; t < kTokens; ++t) {
    for (i = 0; i < kVector; ++i) {
      const float expected = order[t] < 0 ? 0 : key[order[t] * kVector + i];
      CHECK(got_key[t * kVector + i] == expected && got_value[t * kVector + i] == -expected);
    }
  }
  gather->size = sizeof(*gather) - 1;
  CHECK(kvx_gather_kv(cache, gather, NULL) == KVX_STATUS_INVALID_ARGUMENT);

  printf("%d checks, %d failures\n", checks, failures);
  return failures ? EXIT_FAILURE : EXIT_SUCCESS;
}
