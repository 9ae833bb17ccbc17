/* KVX and its host: the version check, the build and the machine, the formats, the threads of large
 * calls, and the tokens that calls on a device have skipped.
 *
 * Before its first call a program checks the library that it has loaded:
 *
 *   if (KVX_CHECK_VERSION() != KVX_STATUS_OK) die(kvx_last_error());
 *
 * All else here is optional. Settings apply to calls on HOST memory that begin after them. */
#ifndef KVX_HOST_H_
#define KVX_HOST_H_

#include "kvx/kvx_abi.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- The library ---- */

/* Checks that this library serves a program compiled for ABI version abi_major.abi_minor: OK, or
 * INCOMPATIBLE if the major versions differ or the program's minor version is later than the
 * library's. KVX_CHECK_VERSION() checks the version of the header that it is compiled with.
 * Spec: 3 */
KVX_API kvx_status_t kvx_check_version(uint32_t abi_major, uint32_t abi_minor);
#define KVX_CHECK_VERSION() kvx_check_version(KVX_ABI_VERSION_MAJOR, KVX_ABI_VERSION_MINOR)

/* What this build and this machine offer. 40 bytes. */
typedef struct kvx_backend_info_t {
  uint32_t size;
  uint32_t has_cuda;    /* 1: built with CUDA kernels */
  uint32_t num_threads; /* of a large call on HOST memory, the caller's included */
  uint32_t reserved;
  const char *cpu_isa;   /* of the copies: "avx512vbmi", "avx512", "avx2" or "portable" */
  const char *version;   /* version of the library, "major.minor.patch" */
  uint64_t stream_bytes; /* calls that move at least this many bytes store past the caches */
} kvx_backend_info_t;

/* Fills *info, whose `size` the caller has set. INVALID_ARGUMENT if info is NULL or too small. */
KVX_API kvx_status_t kvx_backend_info(kvx_backend_info_t *info);

/* ---- Formats ---- */

#define KVX_FORMAT_ELEMENT (1u << 0) /* caches, and tokens on their way, may have it */
#define KVX_FORMAT_SCALED (1u << 1)  /* a scale may lie beside the data: FP8 and S8. Spec: 6.6 */
#define KVX_FORMAT_ZEROS (1u << 2)   /* a scale and a zero point lie beside it. Spec: E.14 */
#define KVX_FORMAT_GROUPS (1u << 3)  /* a scale for each group lies beside it. Spec: E.18 */

/* What an element type is. 40 bytes. */
typedef struct kvx_format_info_t {
  uint32_t size;
  uint32_t flags;     /* KVX_FORMAT_* */
  const char *name;   /* that of kvx_dtype_t, "F16"; static */
  uint32_t numbers;   /* along dim in an element, which is a unit. Spec: E.10 */
  uint32_t bytes;     /* of an element */
  uint32_t alignment; /* of an element */
  uint32_t digits;    /* of precision in bits, the leading one included, of a float or of integers
                         that are such numbers (S8); else 0 */
  int32_t lowest;     /* 2^lowest is the smallest positive number of these */
  float largest;      /* finite number of these; else 0 */
} kvx_format_info_t;

/* Fills *info, whose `size` the caller has set. INVALID_ARGUMENT if info is NULL or too small, or
 * `dtype` is no kvx_dtype_t or INVALID. */
KVX_API kvx_status_t kvx_format_info(kvx_dtype_t dtype, kvx_format_info_t *info);

/* ---- Threads ---- */

/* Sets how many threads a large call on HOST memory uses, for the whole process. 1: the caller
 * alone. 0: the default, KVX_NUM_THREADS or else the cores of the process, at most 16. */
KVX_API kvx_status_t kvx_set_num_threads(uint32_t num_threads);

/* Runs work(data) at once on `num_threads` threads of the host program, the calling thread among
 * them, and returns when all have returned; num_threads 0: the host chooses. GOMP_parallel, which
 * the OpenMP runtimes of GCC, LLVM and Intel export, has this type; `flags` is 0. If it has not run
 * work on the calling thread, libkvx does so: whatever other threads have left is then done there.
 */
typedef void (*kvx_parallel_t)(void (*work)(void *data), void *data, unsigned num_threads,
                               unsigned flags);

/* Lets large calls on HOST memory from this thread use `num_threads` threads of the host program
 * instead of libkvx's own. Threads that have just worked for the host are awake, so that smaller
 * calls are worth sharing too. KVX_NUM_THREADS and kvx_set_num_threads still limit their number.
 * parallel NULL: libkvx's own threads again, as in a forked child. */
KVX_API kvx_status_t kvx_set_host_threads(kvx_parallel_t parallel, uint32_t num_threads);

/* ---- The device ---- */

/* Reports the tokens that calls on DEVICE memory have skipped because an index, a length or a scale
 * in the data was out of range: a call cannot check device memory before it runs.
 *
 * Waits for `stream`. Returns OK if calls on the current device, on any stream, have skipped
 * nothing since the last kvx_device_status; otherwise the status that a call on HOST memory would
 * have returned. The sentence names the first skipped token and their number. UNSUPPORTED if
 * `stream` is being captured: what is captured has not run. Spec: E.7 */
KVX_API kvx_status_t kvx_device_status(void *stream);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* KVX_HOST_H_ */
