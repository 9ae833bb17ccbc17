/* A program written for KVBM's kernels: it declares their seven functions itself, knows no header
 * of KVX, and links libkvx. Each chunk and buffer has memory of its own with 0xDE around it, and
 * each number is the bytes that the indices of KVBM's own README give it. */
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int cudaError_t;
typedef void *cudaStream_t;
enum { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorNotSupported = 801 };

cudaError_t kvbm_kernels_launch_universal_from_block(void *const *universal_ptrs_device,
                                                     const void *const *block_ptrs_device,
                                                     size_t num_blocks, size_t nh, size_t nl,
                                                     size_t no, size_t nt, size_t hd,
                                                     int dtype_value, int layout_value,
                                                     cudaStream_t stream);
cudaError_t kvbm_kernels_launch_block_from_universal(const void *const *universal_ptrs_device,
                                                     void *const *block_ptrs_device,
                                                     size_t num_blocks, size_t nh, size_t nl,
                                                     size_t no, size_t nt, size_t hd,
                                                     int dtype_value, int layout_value,
                                                     cudaStream_t stream);
cudaError_t kvbm_kernels_launch_operational_copy(
    const void *const *block_ptrs_host, const void *const *block_ptrs_device,
    void *const *operational_ptrs_host, void *const *operational_ptrs_device, size_t num_blocks,
    size_t nl, size_t no, size_t inner, size_t elem_size, int dtype_value, int direction_value,
    int backend_value, cudaStream_t stream);
cudaError_t kvbm_kernels_launch_vectorized_copy(void **src_ptrs_device, void **dst_ptrs_device,
                                                size_t copy_size_bytes, int num_pairs,
                                                cudaStream_t stream);
cudaError_t kvbm_kernels_memcpy_batch(const void *const *src_ptrs_host, void *const *dst_ptrs_host,
                                      size_t size_per_copy, size_t num_copies, int mode,
                                      cudaStream_t stream);
bool kvbm_kernels_has_memcpy_batch_async(void);
bool kvbm_kernels_is_stub_build(void);

static int checks, failures;

#define CHECK(condition)                                     \
  do {                                                       \
    ++checks;                                                \
    if (!(condition)) {                                      \
      ++failures;                                            \
      printf("%s:%d: %s\n", __FILE__, __LINE__, #condition); \
    }                                                        \
  } while (0)

enum { NB = 3, NH = 3, NL = 2, NO = 2, NT = 4, HD = 5 };
enum { CHUNK = NT * NH * HD, CHUNKS = NL * NO, ALL = CHUNKS * CHUNK };
enum { F16, BF16, F32, F64 };
enum { NHD, HND };
enum { TO_OPERATIONAL, FROM_OPERATIONAL };
enum { AUTO, VECTORIZED, KERNEL, ASYNC, BATCH };

static const size_t bytes_of[] = {2, 2, 4, 8};

/* Memory of `size` bytes between 32 bytes of 0xDE, `shift` bytes further than malloc has it. */
enum { EDGE = 32, MOST = ALL * 8 };
static unsigned char *filled(size_t size, size_t shift) {
  unsigned char *memory = malloc(size + 2 * EDGE + shift);
  if (!memory) abort();
  memset(memory, 0xDE, size + 2 * EDGE + shift);
  return memory + EDGE + shift;
}
static bool has_edges(const unsigned char *memory, size_t size) {
  for (size_t i = 0; i < EDGE; ++i)
    if (memory[-1 - (long)i] != 0xDE || memory[size + i] != 0xDE) return false;
  return true;
}
static void release(unsigned char *memory, size_t shift) { free(memory - EDGE - shift); }

/* Byte `i` of the number at these indices. */
static unsigned char byte_of(size_t b, size_t l, size_t o, size_t t, size_t h, size_t d, size_t i) {
  uint32_t hash = (uint32_t)((((((b * NL + l) * NO + o) * NT + t) * NH + h) * HD + d) * 8 + i);
  hash = (hash ^ (hash >> 7)) * 2654435761u;
  return (unsigned char)(hash >> 21);
}

typedef struct {
  unsigned char *chunks[NB * CHUNKS], *universals[NB], *operationals[NB];
  size_t size;
} Blocks;

static Blocks make(int dtype, size_t shift) {
  Blocks blocks;
  blocks.size = bytes_of[dtype];
  for (int i = 0; i < NB * CHUNKS; ++i) blocks.chunks[i] = filled(CHUNK * blocks.size, shift);
  for (int b = 0; b < NB; ++b) {
    blocks.universals[b] = filled(ALL * blocks.size, shift);
    blocks.operationals[b] = filled(ALL * blocks.size, shift);
  }
  return blocks;
}
static void drop(Blocks blocks, size_t shift) {
  for (int i = 0; i < NB * CHUNKS; ++i) release(blocks.chunks[i], shift);
  for (int b = 0; b < NB; ++b) {
    release(blocks.universals[b], shift);
    release(blocks.operationals[b], shift);
  }
}

enum { STACK, OPERATIONAL, UNIVERSAL };

/* Where the number at these indices lies in one of the three, by KVBM's README. */
static unsigned char *place(const Blocks *blocks, int kind, int layout, size_t b, size_t l,
                            size_t o, size_t t, size_t h, size_t d) {
  const size_t in_chunk = layout == NHD ? (t * NH + h) * HD + d : (h * NT + t) * HD + d;
  if (kind == STACK) return blocks->chunks[(b * NL + l) * NO + o] + in_chunk * blocks->size;
  if (kind == OPERATIONAL)
    return blocks->operationals[b] + ((l * NO + o) * CHUNK + in_chunk) * blocks->size;
  return blocks->universals[b] + ((((h * NL + l) * NO + o) * NT + t) * HD + d) * blocks->size;
}

/* Fills in all numbers of one kind, or says whether they are all there. */
static bool each_byte(const Blocks *blocks, int kind, int layout, bool fill) {
  for (size_t b = 0; b < NB; ++b)
    for (size_t l = 0; l < NL; ++l)
      for (size_t o = 0; o < NO; ++o)
        for (size_t t = 0; t < NT; ++t)
          for (size_t h = 0; h < NH; ++h)
            for (size_t d = 0; d < HD; ++d)
              for (size_t i = 0; i < blocks->size; ++i) {
                unsigned char *at = place(blocks, kind, layout, b, l, o, t, h, d) + i;
                if (fill) *at = byte_of(b, l, o, t, h, d, i);
                if (*at != byte_of(b, l, o, t, h, d, i)) return false;
              }
  return true;
}
static bool all_edges(const Blocks *blocks) {
  bool found = true;
  for (int i = 0; i < NB * CHUNKS; ++i) found &= has_edges(blocks->chunks[i], CHUNK * blocks->size);
  for (int b = 0; b < NB; ++b) {
    found &= has_edges(blocks->universals[b], ALL * blocks->size);
    found &= has_edges(blocks->operationals[b], ALL * blocks->size);
  }
  return found;
}
static bool is_untouched(const unsigned char *memory, size_t size) {
  for (size_t i = 0; i < size; ++i)
    if (memory[i] != 0xDE) return false;
  return true;
}

#define TABLE(pointers) ((void *const *)(pointers))
#define CONST_TABLE(pointers) ((const void *const *)(pointers))

static void universal(int dtype, int layout) {
  Blocks blocks = make(dtype, 0);
  each_byte(&blocks, STACK, layout, true);
  CHECK(kvbm_kernels_launch_universal_from_block(TABLE(blocks.universals),
                                                 CONST_TABLE(blocks.chunks), NB, NH, NL, NO, NT, HD,
                                                 dtype, layout, NULL) == cudaSuccess);
  CHECK(each_byte(&blocks, UNIVERSAL, layout, false));
  for (int i = 0; i < NB * CHUNKS; ++i) memset(blocks.chunks[i], 0xDE, CHUNK * blocks.size);
  CHECK(kvbm_kernels_launch_block_from_universal(CONST_TABLE(blocks.universals),
                                                 TABLE(blocks.chunks), NB, NH, NL, NO, NT, HD,
                                                 dtype, layout, NULL) == cudaSuccess);
  CHECK(each_byte(&blocks, STACK, layout, false));
  CHECK(all_edges(&blocks));
  drop(blocks, 0);
}

/* `shift` of the addresses, which are else multiples of 8. */
static void operational(int dtype, int backend, int direction, size_t shift, cudaError_t expected,
                        cudaStream_t stream) {
  Blocks blocks = make(dtype, shift);
  const bool to_operational = direction == TO_OPERATIONAL;
  each_byte(&blocks, to_operational ? STACK : OPERATIONAL, NHD, true);
  CHECK(kvbm_kernels_launch_operational_copy(CONST_TABLE(blocks.chunks), CONST_TABLE(blocks.chunks),
                                             TABLE(blocks.operationals), TABLE(blocks.operationals),
                                             NB, NL, NO, CHUNK, bytes_of[dtype], dtype, direction,
                                             backend, stream) == expected);
  if (expected == cudaSuccess) {
    CHECK(each_byte(&blocks, to_operational ? OPERATIONAL : STACK, NHD, false));
  } else {
    unsigned char *const dst = to_operational ? blocks.operationals[1] : blocks.chunks[1];
    CHECK(is_untouched(dst, CHUNK * blocks.size));
  }
  CHECK(all_edges(&blocks));
  drop(blocks, shift);
}

/* Pairs of every alignment in one call. */
static void pairs(size_t bytes, int mode, cudaError_t expected, cudaStream_t stream) {
  enum { PAIRS = 5 };
  static const size_t shifts[PAIRS] = {0, 8, 4, 2, 1};
  unsigned char *srcs[PAIRS], *dsts[PAIRS];
  for (size_t i = 0; i < PAIRS; ++i) {
    srcs[i] = filled(bytes, shifts[i]);
    dsts[i] = filled(bytes, shifts[PAIRS - 1 - i]);
    for (size_t j = 0; j < bytes; ++j) srcs[i][j] = byte_of(i, 0, 0, 0, 0, j / 8, j % 8);
  }
  const cudaError_t error =
      mode < 0
          ? kvbm_kernels_launch_vectorized_copy((void **)srcs, (void **)dsts, bytes, PAIRS, stream)
          : kvbm_kernels_memcpy_batch(CONST_TABLE(srcs), TABLE(dsts), bytes, PAIRS, mode, stream);
  CHECK(error == expected);
  for (size_t i = 0; i < PAIRS; ++i) {
    CHECK(expected == cudaSuccess ? memcmp(srcs[i], dsts[i], bytes) == 0
                                  : is_untouched(dsts[i], bytes));
    CHECK(has_edges(dsts[i], bytes));
    release(srcs[i], shifts[i]);
    release(dsts[i], shifts[PAIRS - 1 - i]);
  }
}

/* A size of 0 is no work; what cannot be is cudaErrorInvalidValue. */
static void wrong(void) {
  Blocks blocks = make(F16, 0);
  void *const *const universals = TABLE(blocks.universals);
  const void *const *const chunks = CONST_TABLE(blocks.chunks);
#define UNIVERSAL(nb, nh, dtype, layout)                                                      \
  kvbm_kernels_launch_universal_from_block(universals, chunks, nb, nh, NL, NO, NT, HD, dtype, \
                                           layout, NULL)
  CHECK(UNIVERSAL(0, NH, F16, NHD) == cudaSuccess);
  CHECK(UNIVERSAL(NB, 0, F16, NHD) == cudaSuccess);
  CHECK(UNIVERSAL(NB, NH, 4, NHD) == cudaErrorInvalidValue);
  CHECK(UNIVERSAL(NB, NH, -1, NHD) == cudaErrorInvalidValue);
  CHECK(UNIVERSAL(NB, NH, F16, 2) == cudaErrorInvalidValue);
  CHECK(UNIVERSAL((size_t)1 << 40, NH, F16, NHD) == cudaErrorInvalidValue);
  CHECK(kvbm_kernels_launch_universal_from_block(NULL, chunks, NB, NH, NL, NO, NT, HD, F16, NHD,
                                                 NULL) == cudaErrorInvalidValue);
#define OPERATIONAL(nb, size, direction, backend)                                                \
  kvbm_kernels_launch_operational_copy(chunks, chunks, TABLE(blocks.operationals),               \
                                       TABLE(blocks.operationals), nb, NL, NO, CHUNK, size, F16, \
                                       direction, backend, NULL)
  CHECK(OPERATIONAL(0, 2, TO_OPERATIONAL, AUTO) == cudaSuccess);
  CHECK(OPERATIONAL(NB, 4, TO_OPERATIONAL, AUTO) == cudaErrorInvalidValue);
  CHECK(OPERATIONAL(NB, 2, 2, AUTO) == cudaErrorInvalidValue);
  CHECK(OPERATIONAL(NB, 2, TO_OPERATIONAL, 5) == cudaErrorInvalidValue);
  void *pair[1] = {blocks.universals[0]};
  CHECK(kvbm_kernels_launch_vectorized_copy(pair, pair, 0, 1, NULL) == cudaSuccess);
  CHECK(kvbm_kernels_launch_vectorized_copy(pair, pair, 8, 0, NULL) == cudaSuccess);
  CHECK(kvbm_kernels_launch_vectorized_copy(pair, pair, 8, -1, NULL) == cudaErrorInvalidValue);
  CHECK(kvbm_kernels_launch_vectorized_copy(pair, NULL, 8, 1, NULL) == cudaErrorInvalidValue);
  CHECK(kvbm_kernels_memcpy_batch(chunks, universals, 8, 0, 0, NULL) == cudaSuccess);
  CHECK(kvbm_kernels_memcpy_batch(chunks, universals, 8, 1, 3, NULL) == cudaErrorInvalidValue);
  CHECK(is_untouched(blocks.universals[0], ALL * blocks.size));
  CHECK(is_untouched(blocks.operationals[0], ALL * blocks.size));
  CHECK(all_edges(&blocks));
  drop(blocks, 0);
}

/* Auto without a device table copies; a kernel has nothing to read. */
static void without_device_tables(void) {
  Blocks blocks = make(F64, 0);
  each_byte(&blocks, STACK, NHD, true);
  CHECK(kvbm_kernels_launch_operational_copy(CONST_TABLE(blocks.chunks), NULL,
                                             TABLE(blocks.operationals), TABLE(blocks.operationals),
                                             NB, NL, NO, CHUNK, 8, F64, TO_OPERATIONAL, AUTO,
                                             NULL) == cudaSuccess);
  CHECK(each_byte(&blocks, OPERATIONAL, NHD, false));
  drop(blocks, 0);
}

/* With an argument memory is a device's, which this program can read: kernels run on the CPU. */
int main(int argc, char **argv) {
  (void)argv;
  const bool stub = kvbm_kernels_is_stub_build(), has = kvbm_kernels_has_memcpy_batch_async();
  const bool batches = has && argc > 1;
  const cudaStream_t stream = batches ? (cudaStream_t)8 : NULL; /* not the legacy default stream */
  for (int dtype = F16; dtype <= F64; ++dtype) {
    universal(dtype, NHD);
    universal(dtype, HND);
    for (int direction = TO_OPERATIONAL; direction <= FROM_OPERATIONAL; ++direction) {
      operational(dtype, AUTO, direction, 0, cudaSuccess, stream);
      operational(dtype, AUTO, direction, bytes_of[dtype], cudaSuccess, stream);
      operational(dtype, KERNEL, direction, bytes_of[dtype], cudaSuccess, stream);
      operational(dtype, ASYNC, direction, 0, cudaSuccess, stream);
      operational(dtype, BATCH, direction, 0, batches ? cudaSuccess : cudaErrorNotSupported,
                  stream);
      /* 120 bytes of F16 are a multiple of 8. */
      operational(dtype, VECTORIZED, direction, 0, cudaSuccess, stream);
    }
  }
  operational(F16, VECTORIZED, TO_OPERATIONAL, 2, cudaErrorInvalidValue, stream);
  for (size_t bytes = 1; bytes <= 70001; bytes = bytes * 3 + 1) {
    pairs(bytes, -1, cudaSuccess, stream);
    pairs(bytes, 0, cudaSuccess, stream);
    pairs(bytes, 1, cudaSuccess, stream);
    pairs(bytes, 2, batches ? cudaSuccess : cudaErrorNotSupported, stream);
  }
  pairs(70001, -1, cudaSuccess, stream);
  wrong();
  without_device_tables();
  printf("stub build %d, batches %d, %d checks, %d failures\n", stub, has, checks, failures);
  return failures != 0;
}
