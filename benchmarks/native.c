/* The copies that KVX is measured against, and the timing of calls too short to time from Python.
 *
 * bench_copy is a plain copy of whole tensors, or of their blocks one by one, on one thread or
 * several.
 * bench_rows is the loop that one would write by hand: a memcpy per contiguous piece. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kvx/kvx_ext.h"

#define EXPORT __attribute__((visibility("default")))

/* ---- Streaming stores: past the caches, so that the destination is not read first ---- */

#if defined(__x86_64__)
/* Up to the alignment that streaming needs, and what is left behind the last whole step. */
static size_t head_bytes(const uint8_t *dst, size_t bytes, size_t alignment) {
  const size_t head = (size_t)(-(uintptr_t)dst & (alignment - 1));
  return head < bytes ? head : bytes;
}

static inline void fetch(const uint8_t *next, size_t bytes) {
  for (size_t line = 0; line < bytes; line += 64) __builtin_prefetch(next + line, 0, 2);
}

__attribute__((target("avx512f"))) static void stream_avx512(uint8_t *dst, const uint8_t *src,
                                                             const uint8_t *next, size_t bytes) {
  const size_t head = head_bytes(dst, bytes, 64);
  memcpy(dst, src, head);
  dst += head, src += head, bytes -= head;
  for (; bytes >= 256; bytes -= 256, dst += 256, src += 256, next += next ? 256 : 0) {
    if (next) fetch(next, 256);
    const __m512i a = _mm512_loadu_si512(src), b = _mm512_loadu_si512(src + 64),
                  c = _mm512_loadu_si512(src + 128), d = _mm512_loadu_si512(src + 192);
    _mm512_stream_si512((__m512i *)dst, a);
    _mm512_stream_si512((__m512i *)(dst + 64), b);
    _mm512_stream_si512((__m512i *)(dst + 128), c);
    _mm512_stream_si512((__m512i *)(dst + 192), d);
  }
  memcpy(dst, src, bytes);
}

__attribute__((target("avx2"))) static void stream_avx2(uint8_t *dst, const uint8_t *src,
                                                        const uint8_t *next, size_t bytes) {
  const size_t head = head_bytes(dst, bytes, 32);
  memcpy(dst, src, head);
  dst += head, src += head, bytes -= head;
  for (; bytes >= 128; bytes -= 128, dst += 128, src += 128, next += next ? 128 : 0) {
    if (next) fetch(next, 128);
    const __m256i a = _mm256_loadu_si256((const __m256i *)src),
                  b = _mm256_loadu_si256((const __m256i *)(src + 32)),
                  c = _mm256_loadu_si256((const __m256i *)(src + 64)),
                  d = _mm256_loadu_si256((const __m256i *)(src + 96));
    _mm256_stream_si256((__m256i *)dst, a);
    _mm256_stream_si256((__m256i *)(dst + 32), b);
    _mm256_stream_si256((__m256i *)(dst + 64), c);
    _mm256_stream_si256((__m256i *)(dst + 96), d);
  }
  memcpy(dst, src, bytes);
}
#endif

static void plain_memcpy(uint8_t *dst, const uint8_t *src, const uint8_t *next, size_t bytes) {
  (void)next;
  memcpy(dst, src, bytes);
}

/* Fetches what follows, from `next` on, unless that is NULL. */
typedef void (*copy_t)(uint8_t *dst, const uint8_t *src, const uint8_t *next, size_t bytes);

enum method_t { METHOD_MEMCPY = 0, METHOD_STREAM = 1, METHOD_BLOCKS = 2 };

static copy_t copy_of(int method) {
  if (method == METHOD_MEMCPY) return plain_memcpy;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return stream_avx512;
  if (__builtin_cpu_supports("avx2")) return stream_avx2;
#endif
  return NULL;
}

/* What METHOD_STREAM stores with on this machine; NULL: it has no streaming stores known here. */
EXPORT const char *bench_stream_isa(void) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return "avx512";
  if (__builtin_cpu_supports("avx2")) return "avx2";
#endif
  return NULL;
}

/* ---- Threads: asleep between copies, woken by a condition, as KVX's are ---- */

#define MAX_THREADS 64

typedef struct piece_t {
  uint8_t *dst;
  const uint8_t *src;
  size_t bytes;
} piece_t;

static struct {
  pthread_mutex_t mutex;
  pthread_cond_t wake, done;
  int started, wanted, running;
  copy_t copy;
  const piece_t *pieces;
  size_t count, at_once; /* pieces in all, and that a thread takes at a time */
  int fetches;           /* the next piece, while one is copied */
  atomic_size_t next;
} pool = {.mutex = PTHREAD_MUTEX_INITIALIZER,
          .wake = PTHREAD_COND_INITIALIZER,
          .done = PTHREAD_COND_INITIALIZER};

static void copy_pieces(void) {
  for (size_t begin; (begin = atomic_fetch_add(&pool.next, pool.at_once)) < pool.count;) {
    const size_t end = begin + pool.at_once < pool.count ? begin + pool.at_once : pool.count;
    for (size_t i = begin; i < end; ++i) {
      const uint8_t *next = pool.fetches && i + 1 < end ? pool.pieces[i + 1].src : NULL;
      pool.copy(pool.pieces[i].dst, pool.pieces[i].src, next, pool.pieces[i].bytes);
    }
  }
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

static void *helper(void *unused) {
  (void)unused;
  pthread_mutex_lock(&pool.mutex);
  for (;;) {
    while (pool.wanted == 0) pthread_cond_wait(&pool.wake, &pool.mutex);
    --pool.wanted;
    pthread_mutex_unlock(&pool.mutex);
    copy_pieces();
    pthread_mutex_lock(&pool.mutex);
    if (--pool.running == 0) pthread_cond_signal(&pool.done);
  }
  return NULL;
}

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* Copies `count` pieces, which `threads` threads take one by one, or with METHOD_BLOCKS, which
 * streams and fetches the next one meanwhile, 64 at a time. Returns seconds, or -1 if this
 * machine has no such method or no thread could be made. */
EXPORT double bench_copy(int method, int threads, const piece_t *pieces, size_t count) {
  const copy_t copy = copy_of(method);
  if (!copy || threads < 1 || threads > MAX_THREADS) return -1;
  pthread_mutex_lock(&pool.mutex);
  for (; pool.started < threads - 1; ++pool.started) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, helper, NULL) != 0) {
      pthread_mutex_unlock(&pool.mutex);
      return -1;
    }
    pthread_detach(thread);
  }
  const double begin = now();
  pool.copy = copy, pool.pieces = pieces, pool.count = count;
  pool.fetches = method == METHOD_BLOCKS, pool.at_once = pool.fetches ? 64 : 1;
  atomic_store(&pool.next, 0);
  pool.wanted = pool.running = threads - 1;
  for (int i = 1; i < threads; ++i) pthread_cond_signal(&pool.wake);
  pthread_mutex_unlock(&pool.mutex);
  copy_pieces();
  pthread_mutex_lock(&pool.mutex);
  while (pool.running > 0) pthread_cond_wait(&pool.done, &pool.mutex);
  pthread_mutex_unlock(&pool.mutex);
  return now() - begin;
}

/* Reads a buffer larger than the last-level cache, so that nothing else is left in it. */
EXPORT uint64_t bench_evict(const uint64_t *buffer, size_t bytes) {
  uint64_t sum = 0;
  for (size_t i = 0; i < bytes / 8; i += 8) sum += buffer[i];
  return sum;
}

/* ---- Calls of microseconds, repeated here. Seconds per call; -1 if a call failed ---- */

typedef struct rows_t {
  uint8_t *dst;
  const uint8_t *src;
  const int64_t *dst_bytes, *src_bytes; /* [count], where each row begins */
  size_t count, row_bytes;
} rows_t;

static void copy_rows(const rows_t *rows) {
  for (size_t i = 0; i < rows->count; ++i)
    memcpy(rows->dst + rows->dst_bytes[i], rows->src + rows->src_bytes[i], rows->row_bytes);
}

EXPORT double bench_rows(const rows_t *tensors, size_t count, size_t repeats) {
  const double begin = now();
  for (size_t r = 0; r < repeats; ++r)
    for (size_t i = 0; i < count; ++i) copy_rows(&tensors[i]);
  return (now() - begin) / (double)repeats;
}

/* Rows of numbers from one format to another, by a library's functions: by one, or by two with a
 * row of float32 between them. */
typedef struct {
  void (*first)(const void *, void *, int64_t), (*second)(const void *, void *, int64_t);
  const uint8_t *from;
  void *stage;
  uint8_t *to;
  size_t from_bytes, to_bytes; /* of a row */
  int64_t numbers;
  size_t rows;
} convert_t;

EXPORT double bench_convert(const convert_t *how, size_t repeats) {
  const double begin = now();
  for (size_t r = 0; r < repeats; ++r)
    for (size_t i = 0; i < how->rows; ++i) {
      const uint8_t *const from = how->from + i * how->from_bytes;
      uint8_t *const to = how->to + i * how->to_bytes;
      how->first(from, how->second ? how->stage : to, how->numbers);
      if (how->second) how->second(how->stage, to, how->numbers);
    }
  return (now() - begin) / (double)repeats;
}

EXPORT double bench_write(kvx_status_t (*write_kv)(const kvx_cache_desc_t *,
                                                   const kvx_write_desc_t *, void *),
                          const kvx_cache_desc_t *cache, const kvx_write_desc_t *write,
                          size_t repeats) {
  const double begin = now();
  for (size_t r = 0; r < repeats; ++r)
    if (write_kv(cache, write, NULL) != KVX_STATUS_OK) return -1;
  return (now() - begin) / (double)repeats;
}

/* A call for each layer, one after the other. */
EXPORT double bench_write_each(kvx_status_t (*write_kv)(const kvx_cache_desc_t *,
                                                        const kvx_write_desc_t *, void *),
                               const kvx_cache_desc_t *const *caches,
                               const kvx_write_desc_t *const *writes, uint32_t num_layers,
                               size_t repeats) {
  const double begin = now();
  for (size_t r = 0; r < repeats; ++r)
    for (uint32_t l = 0; l < num_layers; ++l)
      if (write_kv(caches[l], writes[l], NULL) != KVX_STATUS_OK) return -1;
  return (now() - begin) / (double)repeats;
}

EXPORT double bench_write_layers(
    kvx_status_t (*write_layers)(const kvx_cache_desc_t *const *, const kvx_write_desc_t *const *,
                                 uint32_t, const kvx_write_options_t *, void *),
    const kvx_cache_desc_t *const *caches, const kvx_write_desc_t *const *writes,
    uint32_t num_layers, size_t repeats) {
  const double begin = now();
  for (size_t r = 0; r < repeats; ++r)
    if (write_layers(caches, writes, num_layers, NULL, NULL) != KVX_STATUS_OK) return -1;
  return (now() - begin) / (double)repeats;
}

EXPORT double bench_gather(kvx_status_t (*gather_kv)(const kvx_cache_desc_t *,
                                                     const kvx_gather_desc_t *, void *),
                           const kvx_cache_desc_t *cache, const kvx_gather_desc_t *gather,
                           size_t repeats) {
  const double begin = now();
  for (size_t r = 0; r < repeats; ++r)
    if (gather_kv(cache, gather, NULL) != KVX_STATUS_OK) return -1;
  return (now() - begin) / (double)repeats;
}

EXPORT double bench_migrate(kvx_status_t (*migrate_kv)(const kvx_migrate_desc_t *, void *),
                            const kvx_migrate_desc_t *migrate, size_t repeats) {
  const double begin = now();
  for (size_t r = 0; r < repeats; ++r)
    if (migrate_kv(migrate, NULL) != KVX_STATUS_OK) return -1;
  return (now() - begin) / (double)repeats;
}
