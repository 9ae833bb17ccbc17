/* A program that knows KVX only by its installed headers and library. Compiled as C11 and as C++17.
 *
 * It holds the published v1 ABI to its numbers, and the library to the behaviour that programs
 * written against the public draft rely on: version, size guards, refusals, and the bytes of a
 * write, a gather and a migration. Prints each check that fails and exits with 1 then.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvx/kvx_abi.h"
#include "kvx/kvx_ext.h"

#ifdef __cplusplus
#define STATIC_CHECK(condition) static_assert(condition, #condition)
#else
#define STATIC_CHECK(condition) _Static_assert(condition, #condition)
#endif
#define SIZE_IS(type, size) STATIC_CHECK(sizeof(type) == (size))
#define OFFSET_IS(type, field, offset) STATIC_CHECK(offsetof(type, field) == (offset))

/* ---- the numbers of ABI 1.x, LP64 ---- */

SIZE_IS(kvx_version_t, 16);
OFFSET_IS(kvx_version_t, size, 0);
OFFSET_IS(kvx_version_t, abi_major, 4);
OFFSET_IS(kvx_version_t, abi_minor, 8);
OFFSET_IS(kvx_version_t, abi_patch, 12);

SIZE_IS(kvx_tensor_desc_t, 112);
OFFSET_IS(kvx_tensor_desc_t, size, 0);
OFFSET_IS(kvx_tensor_desc_t, dtype, 4);
OFFSET_IS(kvx_tensor_desc_t, layout, 8);
OFFSET_IS(kvx_tensor_desc_t, memory, 12);
OFFSET_IS(kvx_tensor_desc_t, ndim, 16);
OFFSET_IS(kvx_tensor_desc_t, shape, 24);
OFFSET_IS(kvx_tensor_desc_t, stride, 64);
OFFSET_IS(kvx_tensor_desc_t, data, 104);

SIZE_IS(kvx_pool_desc_t, 32);
OFFSET_IS(kvx_pool_desc_t, size, 0);
OFFSET_IS(kvx_pool_desc_t, memory, 4);
OFFSET_IS(kvx_pool_desc_t, bytes_per_block, 8);
OFFSET_IS(kvx_pool_desc_t, primary, 16);
OFFSET_IS(kvx_pool_desc_t, secondary, 24);

SIZE_IS(kvx_cache_desc_t, 280);
OFFSET_IS(kvx_cache_desc_t, size, 0);
OFFSET_IS(kvx_cache_desc_t, num_blocks, 4);
OFFSET_IS(kvx_cache_desc_t, block_size, 8);
OFFSET_IS(kvx_cache_desc_t, num_kv_heads, 12);
OFFSET_IS(kvx_cache_desc_t, head_dim, 16);
OFFSET_IS(kvx_cache_desc_t, k, 24);
OFFSET_IS(kvx_cache_desc_t, v, 136);
OFFSET_IS(kvx_cache_desc_t, pool, 248);

SIZE_IS(kvx_block_table_t, 64);
OFFSET_IS(kvx_block_table_t, size, 0);
OFFSET_IS(kvx_block_table_t, format, 4);
OFFSET_IS(kvx_block_table_t, index_dtype, 8);
OFFSET_IS(kvx_block_table_t, indptr_dtype, 12);
OFFSET_IS(kvx_block_table_t, seq_count, 16);
OFFSET_IS(kvx_block_table_t, beam_width, 20);
OFFSET_IS(kvx_block_table_t, max_blocks_per_seq, 24);
OFFSET_IS(kvx_block_table_t, indices, 32);
OFFSET_IS(kvx_block_table_t, indptr, 40);
OFFSET_IS(kvx_block_table_t, indices_count, 48);
OFFSET_IS(kvx_block_table_t, indptr_count, 52);
OFFSET_IS(kvx_block_table_t, flags, 56);

SIZE_IS(kvx_slot_mapping_t, 32);
OFFSET_IS(kvx_slot_mapping_t, size, 0);
OFFSET_IS(kvx_slot_mapping_t, dtype, 4);
OFFSET_IS(kvx_slot_mapping_t, token_count, 8);
OFFSET_IS(kvx_slot_mapping_t, invalid_slot, 16);
OFFSET_IS(kvx_slot_mapping_t, slots, 24);

SIZE_IS(kvx_seq_lens_t, 24);
OFFSET_IS(kvx_seq_lens_t, size, 0);
OFFSET_IS(kvx_seq_lens_t, dtype, 4);
OFFSET_IS(kvx_seq_lens_t, seq_count, 8);
OFFSET_IS(kvx_seq_lens_t, lengths, 16);

SIZE_IS(kvx_kv_io_desc_t, 248);
OFFSET_IS(kvx_kv_io_desc_t, size, 0);
OFFSET_IS(kvx_kv_io_desc_t, key, 8);
OFFSET_IS(kvx_kv_io_desc_t, value, 120);
OFFSET_IS(kvx_kv_io_desc_t, num_tokens, 232);
OFFSET_IS(kvx_kv_io_desc_t, num_kv_heads, 236);
OFFSET_IS(kvx_kv_io_desc_t, head_dim, 240);

SIZE_IS(kvx_scale_desc_t, 104);
OFFSET_IS(kvx_scale_desc_t, size, 0);
OFFSET_IS(kvx_scale_desc_t, dtype, 4);
OFFSET_IS(kvx_scale_desc_t, granularity, 8);
OFFSET_IS(kvx_scale_desc_t, ndim, 12);
OFFSET_IS(kvx_scale_desc_t, shape, 16);
OFFSET_IS(kvx_scale_desc_t, stride, 56);
OFFSET_IS(kvx_scale_desc_t, data, 96);

SIZE_IS(kvx_write_desc_t, 512);
OFFSET_IS(kvx_write_desc_t, size, 0);
OFFSET_IS(kvx_write_desc_t, io, 8);
OFFSET_IS(kvx_write_desc_t, slots, 256);
OFFSET_IS(kvx_write_desc_t, k_scale, 288);
OFFSET_IS(kvx_write_desc_t, v_scale, 296);
OFFSET_IS(kvx_write_desc_t, k_scale_desc, 304);
OFFSET_IS(kvx_write_desc_t, v_scale_desc, 408);

SIZE_IS(kvx_gather_desc_t, 352);
OFFSET_IS(kvx_gather_desc_t, size, 0);
OFFSET_IS(kvx_gather_desc_t, io, 8);
OFFSET_IS(kvx_gather_desc_t, block_table, 256);
OFFSET_IS(kvx_gather_desc_t, seq_lens, 320);
OFFSET_IS(kvx_gather_desc_t, max_seq_len, 344);

STATIC_CHECK(KVX_STATUS_OK == 0 && KVX_STATUS_INVALID_ARGUMENT == 1);
STATIC_CHECK(KVX_STATUS_UNSUPPORTED == 2 && KVX_STATUS_OUT_OF_RANGE == 3);
STATIC_CHECK(KVX_STATUS_INCOMPATIBLE == 4 && KVX_STATUS_INTERNAL_ERROR == 5);
STATIC_CHECK(KVX_DTYPE_INVALID == 0 && KVX_DTYPE_F16 == 1 && KVX_DTYPE_BF16 == 2);
STATIC_CHECK(KVX_DTYPE_F32 == 3 && KVX_DTYPE_F8_E4M3 == 4 && KVX_DTYPE_F8_E5M2 == 5);
STATIC_CHECK(KVX_DTYPE_S32 == 6 && KVX_DTYPE_S64 == 7 && KVX_DTYPE_U32 == 8);
STATIC_CHECK(KVX_DTYPE_U64 == 9 && KVX_DTYPE_U8 == 10);
STATIC_CHECK(KVX_DTYPE_F8_E4M3FNUZ == 11 && KVX_DTYPE_Q8_0 == 12 && KVX_DTYPE_Q4_0 == 13);
STATIC_CHECK(KVX_DTYPE_Q4_1 == 16 && KVX_DTYPE_IQ4_NL == 17 && KVX_DTYPE_Q5_0 == 18);
STATIC_CHECK(KVX_DTYPE_Q5_1 == 19 && KVX_DTYPE_Q4_K == 20 && KVX_DTYPE_Q5_K == 21);
STATIC_CHECK(KVX_DTYPE_Q6_K == 22);
STATIC_CHECK(KVX_DTYPE_TQ2 == 26 && KVX_DTYPE_TQ3 == 27 && KVX_DTYPE_TQ4 == 28);
STATIC_CHECK(KVX_DTYPE_S8 == 29);
STATIC_CHECK(KVX_MEMORY_UNKNOWN == 0 && KVX_MEMORY_HOST == 1);
STATIC_CHECK(KVX_MEMORY_DEVICE == 2 && KVX_MEMORY_UNIFIED == 3);
STATIC_CHECK(KVX_LAYOUT_INVALID == 0 && KVX_LAYOUT_BLOCK_NHD == 1 && KVX_LAYOUT_BLOCK_HND == 2);
STATIC_CHECK(KVX_LAYOUT_BLOCK_HND_PACKED == 3 && KVX_LAYOUT_BLOCK_CUSTOM == 15);
STATIC_CHECK(KVX_BLOCK_TABLE_INVALID == 0 && KVX_BLOCK_TABLE_PACKED == 1);
STATIC_CHECK(KVX_BLOCK_TABLE_RAGGED == 2 && KVX_BLOCK_TABLE_KV_OFFSETS == 3);
STATIC_CHECK(KVX_BLOCK_TABLE_FLAG_NONE == 0 && KVX_BLOCK_TABLE_FLAG_KVCACHEINDEX == 1);
STATIC_CHECK(KVX_BLOCK_TABLE_FLAG_EXACT == 2 && KVX_BLOCK_TABLE_FLAG_WHOLE == 4);
STATIC_CHECK(KVX_NULL_BLOCK(0) == 1 && KVX_NULL_BLOCK(41) == 42);
STATIC_CHECK(KVX_SCALE_NONE == 0 && KVX_SCALE_PER_TENSOR == 1 && KVX_SCALE_PER_BLOCK == 2);
STATIC_CHECK(KVX_SCALE_PER_HEAD == 3 && KVX_SCALE_PER_BLOCK_HEAD == 4);
STATIC_CHECK(KVX_SCALE_PER_TOKEN_HEAD == 16);
STATIC_CHECK(sizeof(kvx_status_t) == sizeof(int) && sizeof(kvx_dtype_t) == sizeof(int));
STATIC_CHECK(KVX_MAX_TENSOR_DIMS == 5);
STATIC_CHECK(KVX_ABI_VERSION_MAJOR == 1);

/* ---- the numbers of kvx_ext.h ---- */

SIZE_IS(kvx_backend_info_t, 40);
OFFSET_IS(kvx_backend_info_t, has_cuda, 4);
OFFSET_IS(kvx_backend_info_t, num_threads, 8);
OFFSET_IS(kvx_backend_info_t, cpu_isa, 16);
OFFSET_IS(kvx_backend_info_t, version, 24);
OFFSET_IS(kvx_backend_info_t, stream_bytes, 32);

SIZE_IS(kvx_format_info_t, 40);
OFFSET_IS(kvx_format_info_t, flags, 4);
OFFSET_IS(kvx_format_info_t, name, 8);
OFFSET_IS(kvx_format_info_t, numbers, 16);
OFFSET_IS(kvx_format_info_t, bytes, 20);
OFFSET_IS(kvx_format_info_t, alignment, 24);
OFFSET_IS(kvx_format_info_t, digits, 28);
OFFSET_IS(kvx_format_info_t, lowest, 32);
OFFSET_IS(kvx_format_info_t, largest, 36);

SIZE_IS(kvx_write_options_t, 8);

SIZE_IS(kvx_gather_options_t, 48);
OFFSET_IS(kvx_gather_options_t, flags, 4);
OFFSET_IS(kvx_gather_options_t, reserved_0, 8);
OFFSET_IS(kvx_gather_options_t, secondary_num_blocks, 16);
OFFSET_IS(kvx_gather_options_t, k_scale, 24);
OFFSET_IS(kvx_gather_options_t, v_scale, 32);
OFFSET_IS(kvx_gather_options_t, null_block_plus_1, 40);

SIZE_IS(kvx_span_t, 112);
OFFSET_IS(kvx_span_t, num_layers, 4);
OFFSET_IS(kvx_span_t, layers, 8);
OFFSET_IS(kvx_span_t, block_table, 16);
OFFSET_IS(kvx_span_t, slots, 24);
OFFSET_IS(kvx_span_t, starts, 32);
OFFSET_IS(kvx_span_t, head_start, 40);
OFFSET_IS(kvx_span_t, secondary_num_blocks, 44);
OFFSET_IS(kvx_span_t, reserved_0, 48);
OFFSET_IS(kvx_span_t, k_scales, 56);
OFFSET_IS(kvx_span_t, v_scales, 64);
OFFSET_IS(kvx_span_t, null_block_plus_1, 72);
OFFSET_IS(kvx_span_t, k_zeros, 80);
OFFSET_IS(kvx_span_t, v_zeros, 88);
OFFSET_IS(kvx_span_t, planes, 96);
OFFSET_IS(kvx_span_t, num_planes, 104);

SIZE_IS(kvx_place_t, 16);
OFFSET_IS(kvx_place_t, offset, 8);
OFFSET_IS(kvx_place_t, pool, 12);
SIZE_IS(kvx_find_desc_t, 48);
OFFSET_IS(kvx_find_desc_t, span, 8);
OFFSET_IS(kvx_find_desc_t, seq_lens, 16);
OFFSET_IS(kvx_find_desc_t, place_count, 24);
OFFSET_IS(kvx_find_desc_t, places, 32);
OFFSET_IS(kvx_find_desc_t, plane_plus_1, 40);
OFFSET_IS(kvx_find_desc_t, layer, 44);

SIZE_IS(kvx_end_lookup_t, 24);
SIZE_IS(kvx_plan_lookups_t, 72);
OFFSET_IS(kvx_plan_lookups_t, seq_lens, 8);
OFFSET_IS(kvx_plan_lookups_t, src, 16);
OFFSET_IS(kvx_plan_lookups_t, dst, 40);
OFFSET_IS(kvx_plan_lookups_t, io, 64);

SIZE_IS(kvx_plane_info_t, 80);
OFFSET_IS(kvx_plane_info_t, src_dtype, 16);
OFFSET_IS(kvx_plane_info_t, launch, 32);
OFFSET_IS(kvx_plane_info_t, kernel, 40);
OFFSET_IS(kvx_plane_info_t, num_vectors, 48);
OFFSET_IS(kvx_plane_info_t, run_bytes, 72);

SIZE_IS(kvx_attend_desc_t, 264);
OFFSET_IS(kvx_attend_desc_t, query, 16);
OFFSET_IS(kvx_attend_desc_t, out, 128);
OFFSET_IS(kvx_attend_desc_t, k_scale, 240);
OFFSET_IS(kvx_attend_desc_t, scale, 256);
SIZE_IS(kvx_hybrid_append_t, 120);
OFFSET_IS(kvx_hybrid_append_t, x, 40);
OFFSET_IS(kvx_hybrid_append_t, head, 96);
OFFSET_IS(kvx_hybrid_append_t, span_starts, 112);
SIZE_IS(kvx_hybrid_tail_t, 104);
OFFSET_IS(kvx_hybrid_tail_t, k, 32);
OFFSET_IS(kvx_hybrid_tail_t, tail_len, 72);
OFFSET_IS(kvx_hybrid_tail_t, span_of, 88);
SIZE_IS(kvx_hybrid_compress_t, 152);
OFFSET_IS(kvx_hybrid_compress_t, eps, 48);
OFFSET_IS(kvx_hybrid_compress_t, ka, 56);
OFFSET_IS(kvx_hybrid_compress_t, out, 144);
SIZE_IS(kvx_hybrid_flush_t, 136);
OFFSET_IS(kvx_hybrid_flush_t, flags, 44);
OFFSET_IS(kvx_hybrid_flush_t, entry, 48);
OFFSET_IS(kvx_hybrid_flush_t, key_scales, 128);
SIZE_IS(kvx_hybrid_state_t, 88);
OFFSET_IS(kvx_hybrid_state_t, slots, 32);
OFFSET_IS(kvx_hybrid_state_t, tail_len, 80);
SIZE_IS(kvx_hybrid_pages_t, 56);
OFFSET_IS(kvx_hybrid_pages_t, page_stride, 24);
OFFSET_IS(kvx_hybrid_pages_t, pages, 48);
SIZE_IS(kvx_blocks_t, 56);
OFFSET_IS(kvx_blocks_t, nb, 8);
OFFSET_IS(kvx_blocks_t, itemsize, 32);
OFFSET_IS(kvx_blocks_t, alignment, 48);
SIZE_IS(kvx_plan_info_t, 96);
OFFSET_IS(kvx_plan_info_t, is_exact, 20);
OFFSET_IS(kvx_plan_info_t, num_sequences, 24);
OFFSET_IS(kvx_plan_info_t, bytes_written, 72);
OFFSET_IS(kvx_plan_info_t, copy_bytes_per_second, 80);
OFFSET_IS(kvx_plan_info_t, seconds, 88);

SIZE_IS(kvx_range_t, 32);
OFFSET_IS(kvx_range_t, src, 8);
OFFSET_IS(kvx_range_t, bytes, 24);

SIZE_IS(kvx_migrate_desc_t, 40);
OFFSET_IS(kvx_migrate_desc_t, flags, 4);
OFFSET_IS(kvx_migrate_desc_t, num_heads, 8);
OFFSET_IS(kvx_migrate_desc_t, seq_lens, 16);
OFFSET_IS(kvx_migrate_desc_t, src, 24);
OFFSET_IS(kvx_migrate_desc_t, dst, 32);

/* ---- checks at run time ---- */

static int checks = 0;
static int failures = 0;

static void check(int ok, const char *what, int line) {
  ++checks;
  if (ok) return;
  ++failures;
  printf("conformance.c:%d: failed: %s (last error: %s)\n", line, what, kvx_last_error());
}
#define CHECK(condition) check((condition) != 0, #condition, __LINE__)

#define ZERO(object) memset(&(object), 0, sizeof(object))

/* One cache and the calls on it. */
enum {
  kBlocks = 5,
  kBlockSize = 4,
  kHeads = 3,
  kDim = 8,
  kPack = 4,
  kElements = kBlocks * kBlockSize * kHeads * kDim,
  kTokens = 6,
  kSeqs = 2,
  kMaxBlocks = 2,
  kMaxLen = 7,
  kRow = kHeads * kDim,
  kSentinel = 0xA5
};

typedef struct fixture_t {
  uint16_t k[kElements], v[kElements];
  uint16_t key[kTokens * kRow], value[kTokens * kRow];
  uint16_t key_out[kSeqs * kMaxLen * kRow], value_out[kSeqs * kMaxLen * kRow];
  int64_t slots[kTokens];
  int32_t slots32[kTokens];
  int32_t indices[kSeqs * kMaxBlocks];
  int32_t lengths[kSeqs];
  kvx_cache_desc_t cache;
  kvx_write_desc_t write;
  kvx_gather_desc_t gather;
} fixture_t;

static fixture_t f;

static void set_shape(kvx_tensor_desc_t *tensor, uint32_t ndim, const int64_t *shape) {
  int64_t stride = 1;
  int d;
  tensor->ndim = ndim;
  for (d = (int)ndim - 1; d >= 0; --d) {
    tensor->shape[d] = shape[d];
    tensor->stride[d] = stride;
    stride *= shape[d];
  }
}

static void set_layout(kvx_tensor_desc_t *tensor, kvx_layout_t layout) {
  const int64_t nhd[] = {kBlocks, kBlockSize, kHeads, kDim};
  const int64_t hnd[] = {kBlocks, kHeads, kBlockSize, kDim};
  const int64_t packed[] = {kBlocks, kHeads, kDim / kPack, kBlockSize, kPack};
  tensor->layout = layout;
  if (layout == KVX_LAYOUT_BLOCK_HND_PACKED) {
    set_shape(tensor, 5, packed);
  } else {
    set_shape(tensor, 4, layout == KVX_LAYOUT_BLOCK_NHD ? nhd : hnd);
  }
}

/* Offset of an element of the cache, spelled out from spec 4.2. */
static size_t element(kvx_layout_t layout, int slot, int head, int dim) {
  const size_t block = (size_t)(slot / kBlockSize), token = (size_t)(slot % kBlockSize);
  const size_t h = (size_t)head, d = (size_t)dim;
  if (layout == KVX_LAYOUT_BLOCK_NHD) {
    return ((block * kBlockSize + token) * kHeads + h) * kDim + d;
  }
  if (layout == KVX_LAYOUT_BLOCK_HND) {
    return ((block * kHeads + h) * kBlockSize + token) * kDim + d;
  }
  return (((block * kHeads + h) * (kDim / kPack) + d / kPack) * kBlockSize + token) * kPack +
         d % kPack;
}

static void init_tensor(kvx_tensor_desc_t *tensor, void *data) {
  tensor->size = sizeof(*tensor);
  tensor->dtype = KVX_DTYPE_F16;
  tensor->layout = KVX_LAYOUT_BLOCK_CUSTOM;
  tensor->memory = KVX_MEMORY_HOST;
  tensor->data = data;
}

/* A valid cache, write and gather over sentinel bytes; each test then breaks one thing. */
static void reset(kvx_layout_t k_layout, kvx_layout_t v_layout) {
  const int64_t in[] = {kTokens, kHeads, kDim};
  const int64_t out[] = {kSeqs, kMaxLen, kHeads, kDim};
  int i;
  ZERO(f);
  memset(f.k, kSentinel, sizeof(f.k));
  memset(f.v, kSentinel, sizeof(f.v));
  memset(f.key_out, kSentinel, sizeof(f.key_out));
  memset(f.value_out, kSentinel, sizeof(f.value_out));
  for (i = 0; i < kTokens * kRow; ++i) {
    f.key[i] = (uint16_t)(0x1000 + i);
    f.value[i] = (uint16_t)(0x2000 + i);
  }

  f.cache.size = sizeof(f.cache);
  f.cache.num_blocks = kBlocks;
  f.cache.block_size = kBlockSize;
  f.cache.num_kv_heads = kHeads;
  f.cache.head_dim = kDim;
  init_tensor(&f.cache.k, f.k);
  set_layout(&f.cache.k, k_layout);
  init_tensor(&f.cache.v, f.v);
  set_layout(&f.cache.v, v_layout);

  f.write.size = sizeof(f.write);
  f.write.io.size = sizeof(f.write.io);
  f.write.io.num_tokens = kTokens;
  f.write.io.num_kv_heads = kHeads;
  f.write.io.head_dim = kDim;
  init_tensor(&f.write.io.key, f.key);
  set_shape(&f.write.io.key, 3, in);
  init_tensor(&f.write.io.value, f.value);
  set_shape(&f.write.io.value, 3, in);
  /* Five tokens of sequence 0 (blocks 3, 1) and one padding token. */
  f.slots[0] = 12, f.slots[1] = 13, f.slots[2] = 14, f.slots[3] = 15, f.slots[4] = 4;
  f.slots[5] = -1;
  f.write.slots.size = sizeof(f.write.slots);
  f.write.slots.dtype = KVX_DTYPE_S64;
  f.write.slots.token_count = kTokens;
  f.write.slots.invalid_slot = -1;
  f.write.slots.slots = f.slots;

  f.gather.size = sizeof(f.gather);
  f.gather.io = f.write.io;
  f.gather.io.num_tokens = kSeqs * kMaxLen;
  f.gather.io.key.data = f.key_out;
  set_shape(&f.gather.io.key, 4, out);
  f.gather.io.value.data = f.value_out;
  set_shape(&f.gather.io.value, 4, out);
  f.indices[0] = 3, f.indices[1] = 1;
  f.indices[2] = 0, f.indices[3] = 999; /* past sequence 1: never read */
  f.lengths[0] = 5, f.lengths[1] = 2;
  f.gather.block_table.size = sizeof(f.gather.block_table);
  f.gather.block_table.format = KVX_BLOCK_TABLE_PACKED;
  f.gather.block_table.index_dtype = KVX_DTYPE_S32;
  f.gather.block_table.seq_count = kSeqs;
  f.gather.block_table.beam_width = 1;
  f.gather.block_table.max_blocks_per_seq = kMaxBlocks;
  f.gather.block_table.indices = f.indices;
  f.gather.block_table.indices_count = kSeqs * kMaxBlocks;
  f.gather.seq_lens.size = sizeof(f.gather.seq_lens);
  f.gather.seq_lens.dtype = KVX_DTYPE_S32;
  f.gather.seq_lens.seq_count = kSeqs;
  f.gather.seq_lens.lengths = f.lengths;
  f.gather.max_seq_len = kMaxLen;
}

static int all_sentinel(const void *data, size_t bytes) {
  const unsigned char *p = (const unsigned char *)data;
  size_t i;
  for (i = 0; i < bytes; ++i) {
    if (p[i] != kSentinel) return 0;
  }
  return 1;
}

static int untouched(void) {
  return all_sentinel(f.k, sizeof(f.k)) && all_sentinel(f.v, sizeof(f.v)) &&
         all_sentinel(f.key_out, sizeof(f.key_out)) &&
         all_sentinel(f.value_out, sizeof(f.value_out));
}

static kvx_status_t validate(void) { return kvx_validate_cache_desc(&f.cache); }
static kvx_status_t write_kv(void) { return kvx_write_kv(&f.cache, &f.write, NULL); }
static kvx_status_t gather_kv(void) { return kvx_gather_kv(&f.cache, &f.gather, NULL); }

/* The call is refused with a sentence that names `word`, and touches nothing. */
static void refused(kvx_status_t got, kvx_status_t expected, const char *word, int line) {
  const char *sentence = kvx_last_error();
  check(got == expected, "status of a bad call", line);
  check(strstr(sentence, word) != NULL, word, line);
  check(untouched(), "a refused call leaves every byte as it was", line);
  reset(KVX_LAYOUT_BLOCK_NHD, KVX_LAYOUT_BLOCK_NHD);
}
#define INVALID(call, word) refused(call, KVX_STATUS_INVALID_ARGUMENT, word, __LINE__)
#define OUT_OF_RANGE(call, word) refused(call, KVX_STATUS_OUT_OF_RANGE, word, __LINE__)

static void test_version(void) {
  kvx_version_t version;
  CHECK(strcmp(kvx_last_error(), "") == 0);
  ZERO(version);
  CHECK(kvx_get_version(&version) == KVX_STATUS_OK);
  CHECK(version.size >= sizeof(version));
  CHECK(version.abi_major == KVX_ABI_VERSION_MAJOR);
  CHECK(version.abi_minor == KVX_ABI_VERSION_MINOR);
  CHECK(version.abi_patch == KVX_ABI_VERSION_PATCH);
  memset(&version, 0xff, sizeof(version));
  CHECK(kvx_get_version(&version) == KVX_STATUS_OK);
  CHECK(version.size >= sizeof(version) && version.abi_major == KVX_ABI_VERSION_MAJOR);
  CHECK(kvx_get_version(NULL) == KVX_STATUS_INVALID_ARGUMENT);

  CHECK(KVX_CHECK_VERSION() == KVX_STATUS_OK);
  CHECK(kvx_check_version(KVX_ABI_VERSION_MAJOR, 0) == KVX_STATUS_OK);
  CHECK(kvx_check_version(KVX_ABI_VERSION_MAJOR + 1, 0) == KVX_STATUS_INCOMPATIBLE);
  CHECK(strstr(kvx_last_error(), "is 2.0, expected 1.0 to 1.") != NULL);
  CHECK(kvx_check_version(0, KVX_ABI_VERSION_MINOR) == KVX_STATUS_INCOMPATIBLE);
  CHECK(kvx_check_version(KVX_ABI_VERSION_MAJOR, KVX_ABI_VERSION_MINOR + 1) ==
        KVX_STATUS_INCOMPATIBLE);
}

static void alone(void (*work)(void *), void *data, unsigned num_threads, unsigned flags) {
  (void)num_threads, (void)flags;
  work(data);
}

static void test_backend(void) {
  kvx_backend_info_t info;
  ZERO(info);
  info.size = sizeof(info);
  CHECK(kvx_backend_info(&info) == KVX_STATUS_OK);
  CHECK(info.num_threads >= 1);
  CHECK(strcmp(info.cpu_isa, "avx512vbmi") == 0 || strcmp(info.cpu_isa, "avx512") == 0 ||
        strcmp(info.cpu_isa, "avx2") == 0 || strcmp(info.cpu_isa, "portable") == 0);
  CHECK(strchr(info.version, '.') != NULL);
  CHECK(kvx_set_num_threads(1) == KVX_STATUS_OK);
  CHECK(kvx_backend_info(&info) == KVX_STATUS_OK && info.num_threads == 1);
  CHECK(kvx_set_num_threads(0) == KVX_STATUS_OK);
  CHECK(kvx_set_host_threads(alone, 1) == KVX_STATUS_OK);
  CHECK(kvx_set_host_threads(NULL, 0) == KVX_STATUS_OK);
  CHECK(kvx_backend_info(NULL) == KVX_STATUS_INVALID_ARGUMENT);
  info.size = sizeof(info) - 1;
  CHECK(kvx_backend_info(&info) == KVX_STATUS_INVALID_ARGUMENT);
}

static void test_formats(void) {
  kvx_format_info_t info;
  int dtype, elements = 0;
  ZERO(info);
  info.size = sizeof(info);
  for (dtype = KVX_DTYPE_F16; kvx_format_info((kvx_dtype_t)dtype, &info) == KVX_STATUS_OK;
       ++dtype) {
    CHECK(info.size == sizeof(info) && info.bytes % info.alignment == 0);
    elements += info.flags & KVX_FORMAT_ELEMENT;
  }
  CHECK(dtype == KVX_DTYPE_S8 + 1 && elements == 24);
  CHECK(kvx_format_info(KVX_DTYPE_BF16, &info) == KVX_STATUS_OK);
  CHECK(strcmp(info.name, "BF16") == 0 && info.flags == KVX_FORMAT_ELEMENT);
  CHECK(info.numbers == 1 && info.bytes == 2 && info.digits == 8 && info.lowest == -133);
  CHECK(kvx_format_info(KVX_DTYPE_Q8_0, &info) == KVX_STATUS_OK);
  CHECK(info.numbers == 32 && info.bytes == 34 && info.alignment == 2 && info.digits == 0);
  CHECK(kvx_format_info(KVX_DTYPE_F8_E4M3, &info) == KVX_STATUS_OK && info.largest == 448);
  CHECK(info.flags == (KVX_FORMAT_ELEMENT | KVX_FORMAT_SCALED));
  CHECK(kvx_format_info(KVX_DTYPE_U8_BIAS, &info) == KVX_STATUS_OK);
  CHECK(info.flags == (KVX_FORMAT_ELEMENT | KVX_FORMAT_ZEROS));
  CHECK(kvx_format_info(KVX_DTYPE_F4_E2M1, &info) == KVX_STATUS_OK);
  CHECK(info.flags == (KVX_FORMAT_ELEMENT | KVX_FORMAT_GROUPS));
  CHECK(kvx_format_info(KVX_DTYPE_INVALID, &info) == KVX_STATUS_INVALID_ARGUMENT);
  CHECK(kvx_format_info(KVX_DTYPE_F16, NULL) == KVX_STATUS_INVALID_ARGUMENT);
  info.size = sizeof(info) - 1;
  CHECK(kvx_format_info(KVX_DTYPE_F16, &info) == KVX_STATUS_INVALID_ARGUMENT);
}

/* Every byte of both cache tensors and of both outputs, against addresses worked out here. */
static void test_round_trip(kvx_layout_t k_layout, kvx_layout_t v_layout, int wide,
                            uint32_t io_ndim) {
  static uint16_t k[kElements], v[kElements];
  static uint16_t key_out[kSeqs * kMaxLen * kRow], value_out[kSeqs * kMaxLen * kRow];
  const int64_t out3[] = {kSeqs * kMaxLen, kHeads, kDim};
  int s, t, h, d;
  reset(k_layout, v_layout);
  memset(k, kSentinel, sizeof(k));
  memset(v, kSentinel, sizeof(v));
  memset(key_out, kSentinel, sizeof(key_out));
  memset(value_out, kSentinel, sizeof(value_out));
  if (!wide) {
    for (t = 0; t < kTokens; ++t) f.slots32[t] = (int32_t)f.slots[t];
    f.write.slots.dtype = KVX_DTYPE_S32;
    f.write.slots.slots = f.slots32;
  }
  CHECK(validate() == KVX_STATUS_OK);
  CHECK(write_kv() == KVX_STATUS_OK);
  for (t = 0; t < kTokens; ++t) {
    if (f.slots[t] < 0) continue;
    for (h = 0; h < kHeads; ++h) {
      for (d = 0; d < kDim; ++d) {
        k[element(k_layout, (int)f.slots[t], h, d)] = f.key[(t * kHeads + h) * kDim + d];
        v[element(v_layout, (int)f.slots[t], h, d)] = f.value[(t * kHeads + h) * kDim + d];
      }
    }
  }
  CHECK(memcmp(f.k, k, sizeof(k)) == 0);
  CHECK(memcmp(f.v, v, sizeof(v)) == 0);

  if (io_ndim == 3) {
    set_shape(&f.gather.io.key, 3, out3);
    set_shape(&f.gather.io.value, 3, out3);
  }
  CHECK(gather_kv() == KVX_STATUS_OK);
  for (s = 0; s < kSeqs; ++s) {
    for (t = 0; t < f.lengths[s]; ++t) {
      const int block = f.indices[s * kMaxBlocks + t / kBlockSize];
      const int slot = block * kBlockSize + t % kBlockSize;
      for (h = 0; h < kHeads; ++h) {
        for (d = 0; d < kDim; ++d) {
          const int to = ((s * kMaxLen + t) * kHeads + h) * kDim + d;
          key_out[to] = k[element(k_layout, slot, h, d)];
          value_out[to] = v[element(v_layout, slot, h, d)];
        }
      }
    }
  }
  CHECK(memcmp(f.key_out, key_out, sizeof(key_out)) == 0);
  CHECK(memcmp(f.value_out, value_out, sizeof(value_out)) == 0);
  CHECK(memcmp(f.k, k, sizeof(k)) == 0 && memcmp(f.v, v, sizeof(v)) == 0);
}

static void test_round_trips(void) {
  const kvx_layout_t layouts[] = {KVX_LAYOUT_BLOCK_NHD, KVX_LAYOUT_BLOCK_HND,
                                  KVX_LAYOUT_BLOCK_HND_PACKED};
  int k, v, wide;
  for (k = 0; k < 3; ++k) {
    for (v = 0; v < 3; ++v) {
      for (wide = 0; wide < 2; ++wide) {
        test_round_trip(layouts[k], layouts[v], wide, 4);
        test_round_trip(layouts[k], layouts[v], wide, 3);
      }
    }
  }
}

/* Five tokens of one sequence, from NHD blocks of four into HND blocks of four elsewhere. */
static void test_migrate(void) {
  static uint16_t k[kElements], v[kElements], expected_k[kElements], expected_v[kElements];
  kvx_cache_desc_t target;
  const kvx_cache_desc_t *from = &f.cache, *to = &target;
  kvx_block_table_t src_table, dst_table;
  kvx_seq_lens_t lens;
  kvx_span_t src, dst;
  kvx_migrate_desc_t migrate;
  const int64_t dst_indices[] = {2, 4};
  const int32_t length = 5;
  int t, h, d;
  reset(KVX_LAYOUT_BLOCK_NHD, KVX_LAYOUT_BLOCK_NHD);
  CHECK(write_kv() == KVX_STATUS_OK);
  memset(k, kSentinel, sizeof(k));
  memset(v, kSentinel, sizeof(v));
  memset(expected_k, kSentinel, sizeof(k));
  memset(expected_v, kSentinel, sizeof(v));
  target = f.cache;
  target.k.data = k;
  set_layout(&target.k, KVX_LAYOUT_BLOCK_HND);
  target.v.data = v;
  set_layout(&target.v, KVX_LAYOUT_BLOCK_HND_PACKED);
  src_table = f.gather.block_table;
  src_table.seq_count = 1;
  src_table.indices_count = kMaxBlocks;
  dst_table = src_table;
  dst_table.index_dtype = KVX_DTYPE_S64;
  dst_table.indices = dst_indices;
  lens = f.gather.seq_lens;
  lens.seq_count = 1;
  lens.lengths = &length;
  ZERO(src);
  src.size = sizeof(src);
  src.num_layers = 1;
  src.layers = &from;
  src.block_table = &src_table;
  dst = src;
  dst.layers = &to;
  dst.block_table = &dst_table;
  ZERO(migrate);
  migrate.size = sizeof(migrate);
  migrate.seq_lens = &lens;
  migrate.src = &src;
  migrate.dst = &dst;
  CHECK(kvx_migrate_kv(&migrate, NULL) == KVX_STATUS_OK);
  for (t = 0; t < length; ++t) {
    const int slot = f.indices[t / kBlockSize] * kBlockSize + t % kBlockSize;
    const int dst_slot = (int)dst_indices[t / kBlockSize] * kBlockSize + t % kBlockSize;
    for (h = 0; h < kHeads; ++h) {
      for (d = 0; d < kDim; ++d) {
        expected_k[element(KVX_LAYOUT_BLOCK_HND, dst_slot, h, d)] =
            f.k[element(KVX_LAYOUT_BLOCK_NHD, slot, h, d)];
        expected_v[element(KVX_LAYOUT_BLOCK_HND_PACKED, dst_slot, h, d)] =
            f.v[element(KVX_LAYOUT_BLOCK_NHD, slot, h, d)];
      }
    }
  }
  CHECK(memcmp(k, expected_k, sizeof(k)) == 0);
  CHECK(memcmp(v, expected_v, sizeof(v)) == 0);
  CHECK(kvx_migrate_kv(NULL, NULL) == KVX_STATUS_INVALID_ARGUMENT);
  migrate.size -= 1;
  CHECK(kvx_migrate_kv(&migrate, NULL) == KVX_STATUS_INVALID_ARGUMENT);
}

/* Options and spans of zeros, but for what must be set, are the usual case: block 0 holds tokens.
 */
static void test_zeros(void) {
  static uint16_t k[kElements], v[kElements], key_out[sizeof(f.key_out) / 2];
  kvx_write_options_t write_options;
  const kvx_cache_desc_t *caches[2];
  const kvx_write_desc_t *writes[2];
  kvx_gather_options_t options;
  kvx_cache_desc_t target;
  const kvx_cache_desc_t *from = &f.cache, *to = &target;
  kvx_span_t src, dst;
  kvx_migrate_desc_t migrate;
  ZERO(write_options), ZERO(options), ZERO(src), ZERO(dst), ZERO(migrate);
  write_options.size = sizeof(write_options);
  options.size = sizeof(options);
  src.size = dst.size = sizeof(src);
  src.num_layers = dst.num_layers = 1;
  src.layers = &from, dst.layers = &to;
  migrate.size = sizeof(migrate);
  migrate.src = &src, migrate.dst = &dst;

  reset(KVX_LAYOUT_BLOCK_NHD, KVX_LAYOUT_BLOCK_NHD);
  f.slots[0] = 0, f.slots[1] = 1; /* sequence 1 lies in block 0 */
  CHECK(kvx_write_kv_ext(&f.cache, &f.write, &write_options, NULL) == KVX_STATUS_OK);
  CHECK(memcmp(f.k, f.key, 2 * kRow * sizeof(uint16_t)) == 0);

  /* The largest number of a device, which is not current: the call finds out for itself */
  memset(f.k, kSentinel, 2 * kRow * sizeof(uint16_t));
  write_options.flags = KVX_FLAG_OWNED_BY(254);
  CHECK(write_options.flags == KVX_FLAG_OWNER_MASK);
  options.flags = KVX_FLAG_OWNED_BY(254);
  CHECK(kvx_write_kv_ext(&f.cache, &f.write, &write_options, NULL) == KVX_STATUS_OK);
  CHECK(memcmp(f.k, f.key, 2 * kRow * sizeof(uint16_t)) == 0);

  CHECK(gather_kv() == KVX_STATUS_OK);
  memcpy(key_out, f.key_out, sizeof(key_out));
  CHECK(memcmp(key_out + kMaxLen * kRow, f.key, 2 * kRow * sizeof(uint16_t)) == 0);
  memset(f.key_out, kSentinel, sizeof(f.key_out));
  CHECK(kvx_gather_kv_ext(&f.cache, &f.gather, &options, NULL) == KVX_STATUS_OK);
  CHECK(memcmp(f.key_out, key_out, sizeof(key_out)) == 0);
  options.null_block_plus_1 = KVX_NULL_BLOCK(0);
  memset(f.key_out, kSentinel, sizeof(f.key_out));
  CHECK(kvx_gather_kv_ext(&f.cache, &f.gather, &options, NULL) == KVX_STATUS_OUT_OF_RANGE);
  CHECK(strstr(kvx_last_error(), "a null block") != NULL);
  f.gather.block_table.flags = KVX_BLOCK_TABLE_FLAG_HOLES;
  CHECK(kvx_gather_kv_ext(&f.cache, &f.gather, &options, NULL) == KVX_STATUS_OK);
  CHECK(all_sentinel(f.key_out + kMaxLen * kRow, sizeof(f.key_out) / 2));

  target = f.cache;
  target.k.data = k, target.v.data = v;
  src.block_table = dst.block_table = &f.gather.block_table;
  migrate.seq_lens = &f.gather.seq_lens;
  memset(k, kSentinel, sizeof(k));
  CHECK(kvx_migrate_kv(&migrate, NULL) == KVX_STATUS_OK);
  CHECK(memcmp(k, f.key, 2 * kRow * sizeof(uint16_t)) == 0);
  writes[0] = writes[1] = &f.write;
  caches[0] = &f.cache, caches[1] = &target;
  memset(k, kSentinel, sizeof(k));
  CHECK(kvx_write_layers(caches, writes, 2, &write_options, NULL) == KVX_STATUS_OK);
  CHECK(memcmp(k, f.key, 2 * kRow * sizeof(uint16_t)) == 0);
  src.null_block_plus_1 = KVX_NULL_BLOCK(0);
  memset(k, kSentinel, sizeof(k));
  CHECK(kvx_migrate_kv(&migrate, NULL) == KVX_STATUS_OK);
  CHECK(all_sentinel(k, kBlockSize * kRow * sizeof(uint16_t)));
}

/* A size one byte too small is refused, a larger one from a newer header is accepted. */
static void test_size_guards(void) {
  struct guard_t {
    const char *name;
    uint32_t *size;
    kvx_status_t (*call)(void);
  } guards[] = {
      {"cache", &f.cache.size, validate},
      {"cache", &f.cache.size, write_kv},
      {"cache", &f.cache.size, gather_kv},
      {"cache.k", &f.cache.k.size, validate},
      {"cache.v", &f.cache.v.size, validate},
      {"write", &f.write.size, write_kv},
      {"io", &f.write.io.size, write_kv},
      {"key", &f.write.io.key.size, write_kv},
      {"value", &f.write.io.value.size, write_kv},
      {"slots", &f.write.slots.size, write_kv},
      {"gather", &f.gather.size, gather_kv},
      {"io", &f.gather.io.size, gather_kv},
      {"key", &f.gather.io.key.size, gather_kv},
      {"value", &f.gather.io.value.size, gather_kv},
      {"block_table", &f.gather.block_table.size, gather_kv},
      {"seq_lens", &f.gather.seq_lens.size, gather_kv},
  };
  size_t i;
  for (i = 0; i < sizeof(guards) / sizeof(guards[0]); ++i) {
    reset(KVX_LAYOUT_BLOCK_NHD, KVX_LAYOUT_BLOCK_NHD);
    *guards[i].size -= 1;
    INVALID(guards[i].call(), guards[i].name);
    *guards[i].size = 0;
    INVALID(guards[i].call(), "size");
    *guards[i].size += 8;
    check(guards[i].call() == KVX_STATUS_OK, "a larger size is accepted", __LINE__);
  }
}

/* An embedded struct that is not used: 0 or at least its size. */
static void test_unused_sizes(void) {
  struct unused_t {
    const char *name;
    uint32_t *size, whole;
    kvx_status_t (*call)(void);
  } unused[] = {
      {"cache.pool", &f.cache.pool.size, sizeof(f.cache.pool), validate},
      {"cache.pool", &f.cache.pool.size, sizeof(f.cache.pool), gather_kv},
      {"cache.v", &f.cache.v.size, sizeof(f.cache.v), validate},
      {"write.io.value", &f.write.io.value.size, sizeof(f.write.io.value), write_kv},
      {"gather.io.value", &f.gather.io.value.size, sizeof(f.gather.io.value), gather_kv},
      {"write.k_scale_desc", &f.write.k_scale_desc.size, sizeof(kvx_scale_desc_t), write_kv},
      {"write.v_scale_desc", &f.write.v_scale_desc.size, sizeof(kvx_scale_desc_t), write_kv},
  };
  size_t i;
  for (i = 0; i < sizeof(unused) / sizeof(unused[0]); ++i) {
    /* Two that are refused, after which the call is made anew, and two that are accepted. */
    const uint32_t sizes[] = {3, unused[i].whole - 1, 0, unused[i].whole};
    size_t s;
    for (s = 0; s < 4; ++s) {
      reset(KVX_LAYOUT_BLOCK_NHD, KVX_LAYOUT_BLOCK_NHD);
      if (strstr(unused[i].name, "cache.v") || strstr(unused[i].name, "value")) {
        ZERO(f.cache.v);
        ZERO(f.write.io.value);
        ZERO(f.gather.io.value);
      }
      *unused[i].size = sizes[s];
      if (s < 2) {
        INVALID(unused[i].call(), unused[i].name);
      } else {
        check(unused[i].call() == KVX_STATUS_OK, "a struct that is not used", __LINE__);
      }
    }
  }
}

/* [block, token, head, dim] with as many heads as tokens, in the order of CUSTOM: refused. */
static void test_ambiguous_axes(void) {
  const int64_t square[] = {kBlocks, kBlockSize, kBlockSize, kDim};
  reset(KVX_LAYOUT_BLOCK_HND, KVX_LAYOUT_BLOCK_HND);
  f.cache.num_kv_heads = kBlockSize;
  ZERO(f.cache.v);
  set_shape(&f.cache.k, 4, square);
  f.cache.k.stride[0] = 1 << 20; /* the test's memory is not touched */
  CHECK(validate() == KVX_STATUS_OK);
  f.cache.k.layout = KVX_LAYOUT_BLOCK_NHD;
  CHECK(validate() == KVX_STATUS_OK);
  f.cache.k.layout = KVX_LAYOUT_BLOCK_CUSTOM;
  INVALID(validate(), "cache.k.shape[1] and shape[2] are both");
}

static void test_cache_rules(void) {
  reset(KVX_LAYOUT_BLOCK_NHD, KVX_LAYOUT_BLOCK_NHD);
  INVALID(kvx_validate_cache_desc(NULL), "cache");
  f.cache.block_size = 0;
  INVALID(validate(), "block_size");
  f.cache.num_blocks = 0;
  INVALID(validate(), "num_blocks");
  f.cache.num_kv_heads = 0;
  INVALID(validate(), "num_kv_heads");
  f.cache.head_dim = 0;
  INVALID(validate(), "head_dim");
  f.cache.k.layout = KVX_LAYOUT_BLOCK_HND; /* the shape is still NHD's */
  INVALID(validate(), "cache.k.shape");
  f.cache.v.shape[1] += 1;
  INVALID(validate(), "cache.v.shape");
  f.cache.k.layout = KVX_LAYOUT_INVALID;
  INVALID(validate(), "layout");
  f.cache.k.dtype = KVX_DTYPE_S32;
  INVALID(validate(), "dtype");
  f.cache.k.data = NULL;
  INVALID(validate(), "cache.k.data");
  set_layout(&f.cache.k, KVX_LAYOUT_BLOCK_HND_PACKED);
  f.cache.k.shape[4] = 3; /* does not divide head_dim 8 */
  INVALID(validate(), "pack");
}

static void test_write_rules(void) {
  reset(KVX_LAYOUT_BLOCK_NHD, KVX_LAYOUT_BLOCK_NHD);
  INVALID(kvx_write_kv(&f.cache, NULL, NULL), "write");
  INVALID(kvx_write_kv(NULL, &f.write, NULL), "cache");
  f.cache.block_size = 0;
  INVALID(write_kv(), "block_size");
  f.write.slots.dtype = KVX_DTYPE_U32;
  INVALID(write_kv(), "slots.dtype");
  f.write.slots.token_count -= 1;
  INVALID(write_kv(), "token_count");
  f.write.io.num_tokens += 1;
  INVALID(write_kv(), "num_tokens");
  f.write.slots.slots = NULL;
  INVALID(write_kv(), "slots");
  f.write.io.num_kv_heads += 1;
  INVALID(write_kv(), "num_kv_heads");
  f.write.io.head_dim += 1;
  INVALID(write_kv(), "head_dim");
  f.slots[2] = kBlocks * kBlockSize;
  OUT_OF_RANGE(write_kv(), "slots[2]");
  f.slots[4] = INT64_MAX;
  OUT_OF_RANGE(write_kv(), "slots[4]");

  /* Nothing to do is not an error. */
  f.write.io.num_tokens = 0;
  f.write.slots.token_count = 0;
  CHECK(write_kv() == KVX_STATUS_OK && untouched());
  reset(KVX_LAYOUT_BLOCK_NHD, KVX_LAYOUT_BLOCK_NHD);
  memset(f.slots, 0xff, sizeof(f.slots)); /* all -1 */
  CHECK(write_kv() == KVX_STATUS_OK && untouched());
  reset(KVX_LAYOUT_BLOCK_NHD, KVX_LAYOUT_BLOCK_NHD);
  f.slots[0] = f.slots[1] = f.slots[2] = f.slots[3] = 17;
  f.slots[4] = INT64_MIN;
  f.write.slots.invalid_slot = 17;
  CHECK(write_kv() == KVX_STATUS_OK && untouched());
}

static void test_gather_rules(void) {
  reset(KVX_LAYOUT_BLOCK_NHD, KVX_LAYOUT_BLOCK_NHD);
  INVALID(kvx_gather_kv(&f.cache, NULL, NULL), "gather");
  INVALID(kvx_gather_kv(NULL, &f.gather, NULL), "cache");
  f.gather.block_table.index_dtype = KVX_DTYPE_U32;
  INVALID(gather_kv(), "index_dtype");
  f.gather.block_table.indices_count -= 1;
  INVALID(gather_kv(), "indices_count");
  f.gather.block_table.indptr_count = kSeqs + 1;
  INVALID(gather_kv(), "indptr_count");
  f.gather.seq_lens.seq_count += 1;
  INVALID(gather_kv(), "seq_count");
  f.gather.seq_lens.dtype = KVX_DTYPE_U32;
  INVALID(gather_kv(), "seq_lens.dtype");
  f.gather.block_table.format = KVX_BLOCK_TABLE_INVALID;
  INVALID(gather_kv(), "format");
  f.gather.block_table.indices = NULL;
  INVALID(gather_kv(), "indices");
  f.gather.seq_lens.lengths = NULL;
  INVALID(gather_kv(), "lengths");
  f.gather.io.num_tokens -= 1;
  INVALID(gather_kv(), "num_tokens");
  f.gather.max_seq_len += 1;
  INVALID(gather_kv(), "max_seq_len");
  f.gather.io.num_kv_heads += 1;
  INVALID(gather_kv(), "num_kv_heads");
  f.indices[1] = kBlocks;
  OUT_OF_RANGE(gather_kv(), "indices[1]");
  f.lengths[1] = -1;
  refused(gather_kv(), KVX_STATUS_OUT_OF_RANGE, "lengths[1]", __LINE__);

  /* A null block is never dereferenced, a sequence longer than max_seq_len is cut to it. */
  f.indices[0] = -1, f.indices[2] = -1;
  f.lengths[0] = 4, f.lengths[1] = 1;
  f.gather.block_table.flags = KVX_BLOCK_TABLE_FLAG_HOLES;
  CHECK(gather_kv() == KVX_STATUS_OK && untouched());
  f.lengths[0] = 8, f.indices[0] = 0;
  CHECK(gather_kv() == KVX_STATUS_OK);
  CHECK(all_sentinel(f.key_out + (size_t)kMaxLen * kRow, sizeof(f.key_out) / 2));
}

static void test_encodings(void) {
  static uint16_t numbers[5000], back[5000];
  static uint8_t encoded[16000];
  float vectors[3][64], decoded[3][64];
  uint8_t units[3][34];
  uint64_t bytes = 0, count = 0;
  kvx_dtype_t dtype = KVX_DTYPE_INVALID;
  reset(KVX_LAYOUT_BLOCK_NHD, KVX_LAYOUT_BLOCK_NHD);
  for (unsigned i = 0; i < 5000; ++i) numbers[i] = (uint16_t)(0x3f00 + i % 300);
  CHECK(kvx_lossless_bound(5000) <= sizeof encoded);
  CHECK(kvx_lossless_encode(encoded, sizeof encoded, &bytes, numbers, 5000, KVX_DTYPE_BF16) ==
        KVX_STATUS_OK);
  CHECK(bytes < sizeof numbers);
  CHECK(kvx_lossless_info(encoded, bytes, &count, &dtype) == KVX_STATUS_OK);
  CHECK(count == 5000 && dtype == KVX_DTYPE_BF16);
  CHECK(kvx_lossless_decode(back, 17, 4983, encoded, bytes) == KVX_STATUS_OK);
  CHECK(memcmp(back, numbers + 17, 2 * 4983) == 0);
  INVALID(kvx_lossless_decode(back, 0, 5000, encoded, bytes - 1), "encoded has");

  for (unsigned i = 0; i < 3 * 64; ++i) vectors[i / 64][i % 64] = (float)(i * 37 % 101) - 50.0f;
  CHECK(kvx_turboquant_bytes(64, 4, 0) == sizeof units[0]);
  CHECK(kvx_turboquant_slot_bytes(128, KVX_TURBOQUANT_4BIT_NC) == 134);
  CHECK(kvx_turboquant_encode(units, sizeof units[0], vectors[0], 64, 3, 64, 4, 0) ==
        KVX_STATUS_OK);
  CHECK(kvx_turboquant_decode(decoded[0], 64, units, sizeof units[0], 3, 64, 4, 0) ==
        KVX_STATUS_OK);
  CHECK(decoded[1][5] - vectors[1][5] < 15.0f && vectors[1][5] - decoded[1][5] < 15.0f);
  INVALID(kvx_turboquant_decode(decoded[0], 64, units, sizeof units[0], 3, 65, 4, 0), "dim");
}

int main(void) {
  test_version();
  test_backend();
  test_formats();
  test_round_trips();
  test_migrate();
  test_zeros();
  test_size_guards();
  test_unused_sizes();
  test_ambiguous_axes();
  test_cache_rules();
  test_write_rules();
  test_gather_rules();
  test_encodings();
  printf("%d checks, %d failures\n", checks, failures);
  return failures ? EXIT_FAILURE : EXIT_SUCCESS;
}
