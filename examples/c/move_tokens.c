/* Writes six tokens into a paged cache, gathers them, and migrates them into a cache of another
 * layout, block size and dtype. On the CPU.
 *
 *   cc -std=c11 examples/c/move_tokens.c -o move_tokens $(pkg-config --cflags --libs kvx) \
 *      -Wl,-rpath,$(pkg-config --variable=libdir kvx)
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvx/kvx_ext.h"

enum { kTokens = 6, kHeads = 2, kDim = 8 };
enum { kPagedBlocks = 4, kPagedSize = 4, kDenseSize = 16 };

/* Ends the program with libkvx's sentence if a call has failed. */
static void check(kvx_status_t status) {
  if (status == KVX_STATUS_OK) return;
  fprintf(stderr, "%s\n", kvx_last_error());
  exit(EXIT_FAILURE);
}

/* A contiguous tensor on the host. */
static kvx_tensor_desc_t tensor(void *data, kvx_dtype_t dtype, kvx_layout_t layout, uint32_t ndim,
                                const int64_t *shape) {
  kvx_tensor_desc_t t = {.size = sizeof t};
  t.dtype = dtype, t.layout = layout, t.memory = KVX_MEMORY_HOST, t.ndim = ndim, t.data = data;
  int64_t stride = 1;
  for (uint32_t axis = ndim; axis-- > 0; stride *= shape[axis]) {
    t.shape[axis] = shape[axis];
    t.stride[axis] = stride;
  }
  return t;
}

/* Tokens outside a cache, [token, head, dim]: what a model has computed, or what is gathered. */
static kvx_kv_io_desc_t tokens(float *key, float *value) {
  const int64_t shape[] = {kTokens, kHeads, kDim};
  kvx_kv_io_desc_t io = {.size = sizeof io};
  io.key = tensor(key, KVX_DTYPE_F32, KVX_LAYOUT_INVALID, 3, shape);
  io.value = tensor(value, KVX_DTYPE_F32, KVX_LAYOUT_INVALID, 3, shape);
  io.num_tokens = kTokens, io.num_kv_heads = kHeads, io.head_dim = kDim;
  return io;
}

static kvx_cache_desc_t cache(uint32_t num_blocks, uint32_t block_size, kvx_tensor_desc_t k,
                              kvx_tensor_desc_t v) {
  kvx_cache_desc_t c = {.size = sizeof c};
  c.num_blocks = num_blocks, c.block_size = block_size;
  c.num_kv_heads = kHeads, c.head_dim = kDim;
  c.k = k, c.v = v;
  return c;
}

int main(void) {
  check(KVX_CHECK_VERSION());

  static float key[kTokens][kHeads][kDim], value[kTokens][kHeads][kDim];
  for (int t = 0; t < kTokens; ++t)
    for (int h = 0; h < kHeads; ++h)
      for (int d = 0; d < kDim; ++d) {
        key[t][h][d] = (float)(100 * t + 10 * h + d);
        value[t][h][d] = -key[t][h][d];
      }

  /* A paged cache as vLLM keeps one: [block, token, head, dim]. */
  static float paged_k[kPagedBlocks][kPagedSize][kHeads][kDim];
  static float paged_v[kPagedBlocks][kPagedSize][kHeads][kDim];
  const int64_t nhd[] = {kPagedBlocks, kPagedSize, kHeads, kDim};
  const kvx_cache_desc_t paged =
      cache(kPagedBlocks, kPagedSize, tensor(paged_k, KVX_DTYPE_F32, KVX_LAYOUT_BLOCK_NHD, 4, nhd),
            tensor(paged_v, KVX_DTYPE_F32, KVX_LAYOUT_BLOCK_NHD, 4, nhd));

  /* Tokens 0 to 3 go to block 2, the others to block 0. */
  const int32_t blocks[] = {2, 0}, length = kTokens;
  int64_t slot[kTokens];
  for (int t = 0; t < kTokens; ++t) slot[t] = blocks[t / kPagedSize] * kPagedSize + t % kPagedSize;
  kvx_write_desc_t write = {.size = sizeof write};
  write.io = tokens(&key[0][0][0], &value[0][0][0]);
  write.slots = (kvx_slot_mapping_t){sizeof write.slots, KVX_DTYPE_S64, kTokens, -1, slot};
  check(kvx_write_kv(&paged, &write, NULL));
  printf("written: token 5 begins with %g in block 0\n", paged_k[0][1][0][0]);

  static float got_k[kTokens][kHeads][kDim], got_v[kTokens][kHeads][kDim];
  kvx_block_table_t table = {.size = sizeof table};
  table.format = KVX_BLOCK_TABLE_PACKED, table.index_dtype = KVX_DTYPE_S32;
  table.seq_count = 1, table.indices = blocks;
  table.max_blocks_per_seq = table.indices_count = 2;
  const kvx_seq_lens_t lengths = {sizeof lengths, KVX_DTYPE_S32, 1, &length};
  kvx_gather_desc_t gather = {.size = sizeof gather};
  gather.io = tokens(&got_k[0][0][0], &got_v[0][0][0]);
  gather.block_table = table, gather.seq_lens = lengths, gather.max_seq_len = kTokens;
  check(kvx_gather_kv(&paged, &gather, NULL));
  const int equal = !memcmp(got_k, key, sizeof key) && !memcmp(got_v, value, sizeof value);
  printf("gathered: %s\n", equal ? "equal" : "different");

  /* A dense cache as HF transformers keeps one, in bfloat16: [sequence, head, token, dim]. */
  static uint16_t dense_k[1][kHeads][kDenseSize][kDim], dense_v[1][kHeads][kDenseSize][kDim];
  const int64_t hnd[] = {1, kHeads, kDenseSize, kDim};
  const kvx_cache_desc_t dense =
      cache(1, kDenseSize, tensor(dense_k, KVX_DTYPE_BF16, KVX_LAYOUT_BLOCK_HND, 4, hnd),
            tensor(dense_v, KVX_DTYPE_BF16, KVX_LAYOUT_BLOCK_HND, 4, hnd));
  const kvx_cache_desc_t *const from[] = {&paged}, *const to[] = {&dense};
  kvx_span_t src = {.size = sizeof src}, dst = {.size = sizeof dst};
  src.num_layers = dst.num_layers = 1;
  src.layers = from, src.block_table = &table;
  dst.layers = to; /* no table, no slots: sequence s is block s */
  kvx_migrate_desc_t migrate = {.size = sizeof migrate};
  migrate.seq_lens = &lengths, migrate.src = &src, migrate.dst = &dst;
  check(kvx_migrate_kv(&migrate, NULL));
  /* A bfloat16 is the upper half of a float32; 500 has no lower half. */
  const uint32_t bits = (uint32_t)dense_k[0][0][5][0] << 16;
  float first;
  memcpy(&first, &bits, sizeof first);
  printf("migrated: token 5 begins with %g in the dense cache\n", first);
  return equal && first == key[5][0][0] ? EXIT_SUCCESS : EXIT_FAILURE;
}
