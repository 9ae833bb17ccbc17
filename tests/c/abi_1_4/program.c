/* A program as it was written and compiled for ABI 1.4: headers of that version, in this folder. It
 * compiles with later headers too.
 *
 * It holds every later libkvx to what those headers promise. A kvx_view_t of 1.4 has 80 bytes; each
 * one here ends where its memory ends, so that a library which reads past it crashes. Prints each
 * check that fails.
 */
#define _DEFAULT_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kvx/kvx_ext.h"

#if KVX_ABI_VERSION_MINOR == 4
enum { kViewSize = 80 };
#else
enum { kViewSize = sizeof(kvx_view_t) };
#endif

enum { kBlocks = 2, kBlockSize = 2, kDim = 4, kTokens = kBlocks * kBlockSize };

static int checks = 0, failures = 0;

static void check(int ok, const char *what, int line) {
  ++checks;
  if (ok) return;
  ++failures;
  printf("program.c:%d: failed: %s (last error: %s)\n", line, what, kvx_last_error());
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

static kvx_tensor_desc_t tensor(float *data, uint32_t ndim, int64_t lead) {
  kvx_tensor_desc_t t;
  memset(&t, 0, sizeof(t));
  t.size = sizeof(t);
  t.dtype = KVX_DTYPE_F32;
  t.layout = KVX_LAYOUT_BLOCK_NHD;
  t.memory = KVX_MEMORY_HOST;
  t.ndim = ndim;
  t.shape[0] = lead;
  t.stride[0] = ndim == 4 ? kBlockSize * kDim : kDim;
  t.shape[1] = ndim == 4 ? kBlockSize : 1;
  t.stride[1] = kDim;
  t.shape[2] = ndim == 4 ? 1 : kDim;
  t.stride[2] = ndim == 4 ? kDim : 1;
  t.shape[3] = ndim == 4 ? kDim : 0;
  t.stride[3] = ndim == 4 ? 1 : 0;
  t.data = data;
  return t;
}

static kvx_cache_desc_t cache_of(float *data) {
  kvx_cache_desc_t cache;
  memset(&cache, 0, sizeof(cache));
  cache.size = sizeof(cache);
  cache.num_blocks = kBlocks;
  cache.block_size = kBlockSize;
  cache.num_kv_heads = 1;
  cache.head_dim = kDim;
  cache.k = tensor(data, 4, kBlocks);
  cache.v.size = sizeof(cache.v);
  return cache;
}

/* Which tokens of `data` are not zero, as bits. */
static unsigned stored(const float *data) {
  unsigned bits = 0;
  int t;
  for (t = 0; t < kTokens; ++t) bits |= (unsigned)(data[t * kDim] != 0) << t;
  return bits;
}

int main(void) {
  static float from[kTokens * kDim], to[kTokens * kDim], out[kTokens * kDim];
  static const int32_t indices[] = {1, 0};
  static const int64_t slots[] = {3, -1, 0};
  static const int32_t length = kTokens;
  kvx_cache_desc_t src_cache = cache_of(from), dst_cache = cache_of(to);
  const kvx_cache_desc_t *src_layer = &src_cache, *dst_layer = &dst_cache;
  kvx_write_options_t *with = (kvx_write_options_t *)at_the_end_of_memory(sizeof(*with));
  kvx_gather_options_t *options = (kvx_gather_options_t *)at_the_end_of_memory(sizeof(*options));
  kvx_view_t *src = (kvx_view_t *)at_the_end_of_memory(sizeof(*src));
  kvx_view_t *dst = (kvx_view_t *)at_the_end_of_memory(sizeof(*dst));
  kvx_migrate_desc_t *migrate = (kvx_migrate_desc_t *)at_the_end_of_memory(sizeof(*migrate));
  kvx_backend_info_t *info = (kvx_backend_info_t *)at_the_end_of_memory(sizeof(*info));
  kvx_version_t version;
  kvx_block_table_t table;
  kvx_seq_lens_t lens;
  kvx_write_desc_t write;
  kvx_gather_desc_t gather;
  int i;
  for (i = 0; i < kTokens * kDim; ++i) from[i] = (float)(i + 1);

  memset(&version, 0, sizeof(version));
  CHECK(KVX_CHECK_VERSION() == KVX_STATUS_OK);
  CHECK(kvx_get_version(&version) == KVX_STATUS_OK && version.abi_major == KVX_ABI_VERSION_MAJOR);
  CHECK(version.abi_minor >= 4);
  CHECK(sizeof(*with) == 8 && sizeof(*options) == 48 && sizeof(*src) == kViewSize);
  CHECK(sizeof(*migrate) == 40 && sizeof(*info) == 40);
  info->size = sizeof(*info);
  CHECK(kvx_backend_info(info) == KVX_STATUS_OK && info->num_threads > 0 && info->version != NULL);
  CHECK(kvx_set_num_threads(1) == KVX_STATUS_OK && kvx_set_team(NULL, 0) == KVX_STATUS_OK);

  /* write, with options */
  memset(&write, 0, sizeof(write));
  write.size = sizeof(write);
  write.io.size = sizeof(write.io);
  write.io.key = tensor(from, 3, kTokens);
  write.io.value.size = sizeof(write.io.value);
  write.io.num_tokens = 3;
  write.io.num_kv_heads = 1;
  write.io.head_dim = kDim;
  write.slots.size = sizeof(write.slots);
  write.slots.dtype = KVX_DTYPE_S64;
  write.slots.token_count = 3;
  write.slots.invalid_slot = -1;
  write.slots.slots = slots;
  with->size = sizeof(*with);
  with->flags = KVX_FLAG_BACKGROUND;
  CHECK(kvx_write_kv_ext(&dst_cache, &write, with, NULL) == KVX_STATUS_OK);
  CHECK(stored(to) == 9); /* tokens 0 and 3 */
  CHECK(memcmp(to + 3 * kDim, from, kDim * sizeof(float)) == 0);
  CHECK(memcmp(to, from + 2 * kDim, kDim * sizeof(float)) == 0);

  /* gather, with a null block */
  memset(&table, 0, sizeof(table));
  table.size = sizeof(table);
  table.format = KVX_BLOCK_TABLE_PACKED;
  table.index_dtype = KVX_DTYPE_S32;
  table.seq_count = 1;
  table.max_blocks_per_seq = table.indices_count = kBlocks;
  table.indices = indices;
  table.flags = 1u << 3; /* since 1.5: else needed null blocks are refused */

  memset(&lens, 0, sizeof(lens));
  lens.size = sizeof(lens);
  lens.dtype = KVX_DTYPE_S32;
  lens.seq_count = 1;
  lens.lengths = &length;
  memset(&gather, 0, sizeof(gather));
  gather.size = sizeof(gather);
  gather.io.size = sizeof(gather.io);
  gather.io.key = tensor(out, 3, kTokens);
  gather.io.value.size = sizeof(gather.io.value);
  gather.io.num_tokens = gather.max_seq_len = kTokens;
  gather.io.num_kv_heads = 1;
  gather.io.head_dim = kDim;
  gather.block_table = table;
  gather.seq_lens = lens;
  options->size = sizeof(*options);
  CHECK(kvx_gather_kv_ext(&src_cache, &gather, options, NULL) == KVX_STATUS_OK);
  CHECK(stored(out) == 15);
  CHECK(memcmp(out, from + 2 * kDim, 2 * kDim * sizeof(float)) == 0);
  options->null_block_plus_1 = KVX_NULL_BLOCK(0);
  options->flags = KVX_FLAG_ZERO_FILL;
  CHECK(kvx_gather_kv_ext(&src_cache, &gather, options, NULL) == KVX_STATUS_OK);
  CHECK(stored(out) == 3); /* tokens 2 and 3 lie in block 0 */

  /* migrate, between views of kViewSize bytes */
  src->size = dst->size = sizeof(*src);
  src->num_layers = dst->num_layers = 1;
  src->layers = &src_layer;
  dst->layers = &dst_layer;
  src->block_table = dst->block_table = &table;
  migrate->size = sizeof(*migrate);
  migrate->seq_lens = &lens;
  migrate->src = src;
  migrate->dst = dst;
  memset(to, 0, sizeof(to));
  CHECK(kvx_migrate_kv(migrate, NULL) == KVX_STATUS_OK);
  CHECK(memcmp(from, to, sizeof(to)) == 0);
  src->null_block_plus_1 = KVX_NULL_BLOCK(1);
  memset(to, 0, sizeof(to));
  CHECK(kvx_migrate_kv(migrate, NULL) == KVX_STATUS_OK);
  CHECK(stored(to) == 3);
  migrate->flags = KVX_FLAG_ZERO_FILL;
  dst->null_block_plus_1 = KVX_NULL_BLOCK(0);
  memset(to, 1, sizeof(to));
  CHECK(kvx_migrate_kv(migrate, NULL) == KVX_STATUS_OK);
  CHECK(stored(to) == 3); /* block 1 is zeroed, block 0 is left alone */

  /* what 1.4 refused is refused, with nothing written */
  memset(to, 0, sizeof(to));
  src->null_block_plus_1 = dst->null_block_plus_1 = 0;
  dst->reserved_0 = 1;
  CHECK(kvx_migrate_kv(migrate, NULL) == KVX_STATUS_INVALID_ARGUMENT);
  dst->reserved_0 = 0;
  src->size = kViewSize - 1;
  CHECK(kvx_migrate_kv(migrate, NULL) == KVX_STATUS_INVALID_ARGUMENT && stored(to) == 0);
  CHECK(strncmp(kvx_last_error(), "src.size is ", 12) == 0);

  printf("%d checks, %d failures\n", checks, failures);
  return failures ? EXIT_FAILURE : EXIT_SUCCESS;
}
