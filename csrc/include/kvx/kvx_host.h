/* KVX and its host: whether the library fits the program, what build and machine it is, the threads
 * that it uses, and what calls on a device have skipped.
 *
 * A program asks once, before its first call, whether the library that it has loaded fits:
 *
 *   if (KVX_CHECK_VERSION() != KVX_STATUS_OK) die(kvx_last_error());
 *
 * Nothing else here needs to be called. Settings hold for calls on HOST memory that begin after
 * them. */
#ifndef KVX_HOST_H_
#define KVX_HOST_H_

#include "kvx/kvx_abi.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- The library ---- */

/* Whether this library can serve a program compiled for ABI version abi_major.abi_minor: OK, or
 * INCOMPATIBLE where the major versions differ or the program's minor version is later than the
 * library's. KVX_CHECK_VERSION() asks for the version of the header that it is compiled with.
 * Spec: 3 */
KVX_API kvx_status_t kvx_check_version(uint32_t abi_major, uint32_t abi_minor);
#define KVX_CHECK_VERSION() kvx_check_version(KVX_ABI_VERSION_MAJOR, KVX_ABI_VERSION_MINOR)

/* What this build and this machine offer. 40 bytes. */
typedef struct kvx_backend_info_t {
  uint32_t size;
  uint32_t has_cuda;    /* 1: built with CUDA kernels */
  uint32_t num_threads; /* threads that a large call on HOST memory uses, the caller's included */
  uint32_t reserved;
  const char *cpu_isa;   /* what the copies use: "avx512vbmi", "avx512", "avx2" or "portable" */
  const char *version;   /* version of the library, "major.minor.patch" */
  uint64_t stream_bytes; /* calls that move at least this many bytes store past the caches */
} kvx_backend_info_t;

/* Fills *info, whose `size` the caller has set. INVALID_ARGUMENT if info is NULL or too small. */
KVX_API kvx_status_t kvx_backend_info(kvx_backend_info_t *info);

/* ---- Threads ---- */

/* Sets how many threads a large call on HOST memory uses, for the whole process. 1: the caller
 * alone. 0: back to the default, KVX_NUM_THREADS or else the cores of the process, at most 16. */
KVX_API kvx_status_t kvx_set_num_threads(uint32_t num_threads);

/* Runs work(data) on `num_threads` threads of the host's at once, 0 for as many as it likes, the
 * calling one among them, and returns when all have returned. This is GOMP_parallel, which the
 * OpenMP runtimes of GCC, LLVM and Intel export; `flags` is 0. */
typedef void (*kvx_parallel_t)(void (*work)(void *data), void *data, unsigned num_threads,
                               unsigned flags);

/* Lets large calls on HOST memory that this thread makes use the host's `num_threads` threads
 * instead of libkvx's own: those that have just worked for the host are awake, so that smaller
 * calls are worth sharing too. KVX_NUM_THREADS and kvx_set_num_threads, where given, bound them.
 * NULL: libkvx's own again. A forked child is back to those. */
KVX_API kvx_status_t kvx_set_host_threads(kvx_parallel_t parallel, uint32_t num_threads);

/* The same by its names until 1.4. */
typedef kvx_parallel_t kvx_team_t;
KVX_API kvx_status_t kvx_set_team(kvx_team_t team, uint32_t num_threads);

/* ---- The device ---- */

/* What calls on DEVICE memory skipped because an index, a length or a scale in the data was out of
 * range. A device call cannot look before it runs, so it skips such tokens and remembers. This
 * waits for `stream` and answers OK if nothing has been skipped on the current device, by calls on
 * any stream, since it was last asked; otherwise what a call on HOST memory would have answered,
 * with the first of them and their number in the sentence. Spec: E.7 */
KVX_API kvx_status_t kvx_device_status(void *stream);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* KVX_HOST_H_ */
