/* KVX plans: a write, a gather or a migration that is validated once, described, run many times, or
 * listed as copies for somebody else to make.
 *
 *   kvx_plan_t *plan;
 *   kvx_plan_create(&migrate, &plan);                     what kvx_migrate_kv does before it copies
 *   kvx_plan_describe(plan, NULL, &info, NULL, 0);        what it would move, how, how fast
 *   kvx_plan_run(plan, &lookups, stream);                 as often as there are tokens to move
 *   kvx_plan_ranges(plan, &lookups, visit, context);      or the copies, for a transport
 *   kvx_plan_free(plan);
 *
 * kvx_plan_create_write and kvx_plan_create_gather make plans of the other two operations.
 *
 * A plan keeps copies of all descriptors that it was made from: the caller may free these once the
 * plan has been created. The memory that they describe stays the caller's and MUST NOT move until
 * the plan is freed: K, V, planes, pools and scales always; tables, slots, lengths, starts, and the
 * key and value of a write or gather as long as calls use them. Their contents may change between
 * calls: every call reads indices, lengths and scales anew.
 *
 * On a device, the first run there finds out whether kernels reach that memory, and is refused if
 * not; later runs on this device ask for tables, slots, lengths and starts alone.
 *
 * A plan never changes. Threads may share it, and run it at the same time if the runs write
 * different memory. kvx_plan_free MUST NOT run at the same time as another call with the plan.
 *
 * Spec: E.13 */
#ifndef KVX_PLAN_H_
#define KVX_PLAN_H_

#include "kvx/kvx_migrate.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A kept write, gather or migration. */
typedef struct kvx_plan_t kvx_plan_t;

/* Validates a migration, as kvx_migrate_kv does, and keeps it. Reads no index and no length:
 * `seq_lens` and the tables may be of 0 sequences if every run passes its own.
 *
 * *plan: the plan, which the caller frees; NULL if the call fails. Refuses what kvx_migrate_kv
 * would refuse, with the same status and sentence. Spec: E.13 */
KVX_API kvx_status_t kvx_plan_create(const kvx_migrate_desc_t *migrate, kvx_plan_t **plan);

/* The same for kvx_write_kv_ext. `options` may be NULL. The write may be of 0 tokens if every run
 * passes its own: key and value then have a dtype, 3 axes, strides, and no data. Spec: E.13 */
KVX_API kvx_status_t kvx_plan_create_write(const kvx_cache_desc_t *cache,
                                           const kvx_write_desc_t *write,
                                           const kvx_write_options_t *options, kvx_plan_t **plan);

/* The same for kvx_gather_kv_ext. `options` may be NULL. Spec: E.13 */
KVX_API kvx_status_t kvx_plan_create_gather(const kvx_cache_desc_t *cache,
                                            const kvx_gather_desc_t *gather,
                                            const kvx_gather_options_t *options, kvx_plan_t **plan);

/* Frees a plan; NULL does nothing. Work that is already on a device's stream goes on. */
KVX_API void kvx_plan_free(kvx_plan_t *plan);

/* The lookup of sequences at one end. 24 bytes, frozen (it is embedded). NULL: what the plan was
 * made with. A table MUST replace a table of the same format, slots MUST replace slots. The number
 * of sequences, columns and tokens is free. */
typedef struct kvx_end_lookup_t {
  const kvx_block_table_t *block_table;
  const kvx_slot_mapping_t *slots;
  const kvx_seq_lens_t *starts;
} kvx_end_lookup_t;

/* The tokens of one call, in place of those that the plan was made with. 72 bytes.
 *
 * The plan of a migration takes all but `io`, that of a write `dst.slots` and `io`, that of a
 * gather `src.block_table`, `seq_lens`, `max_seq_len` and `io`. Other fields MUST be NULL or 0. */
typedef struct kvx_plan_lookups_t {
  uint32_t size;
  uint32_t max_seq_len;           /* as in the plan's descriptor; 0: what the plan was made with */
  const kvx_seq_lens_t *seq_lens; /* NULL: what the plan was made with */
  kvx_end_lookup_t src;
  kvx_end_lookup_t dst;
  const kvx_kv_io_desc_t *io; /* key and value; NULL: what the plan was made with */
} kvx_plan_lookups_t;

/* Moves the tokens of `lookups`; NULL: those that the plan was made with.
 *
 * Mutates and refuses the same as the operation, and writes nothing before all is checked: wrong
 * lookups give INVALID_ARGUMENT and, on HOST memory, indices and lengths out of range give
 * OUT_OF_RANGE. Planes that have a table of their own keep it. Spec: E.13 */
KVX_API kvx_status_t kvx_plan_run(const kvx_plan_t *plan, const kvx_plan_lookups_t *lookups,
                                  void *stream);

/* The value of a number in kvx_plane_info_t or kvx_plan_info_t that the host does not know, because
 * lengths or tables are in device memory. */
#define KVX_UNKNOWN UINT64_MAX

/* Flags of kvx_plane_info_t. */
#define KVX_PLANE_INFO_CONVERTS (1u << 0) /* numbers are converted; else bytes are copied */
#define KVX_PLANE_INFO_EXACT (1u << 1)    /* every finite source number can be recovered */
#define KVX_PLANE_INFO_JOINED                                       \
  (1u << 2) /* the vectors of the layer's next plane, of V after K, \
               follow at both ends: one entry for both */
#define KVX_PLANE_INFO_FINDS_SCALES (1u << 3) /* scales are found on the way [E.9, E.14] */
#define KVX_PLANE_INFO_SCALES (1u << 4)       /* the scales of the plane before, copied [E.14] */
#define KVX_PLANE_INFO_ZEROS (1u << 5)        /* the zero points of that plane, copied [E.14] */

/* What a plan does with a plane. 80 bytes. Spec: E.13 */
typedef struct kvx_plane_info_t {
  uint32_t size;
  uint32_t layer;
  uint32_t role;  /* kvx_role_t */
  uint32_t flags; /* KVX_PLANE_INFO_* */
  kvx_dtype_t src_dtype;
  kvx_dtype_t dst_dtype;
  uint32_t num_heads;     /* that move */
  uint32_t vector_size;   /* numbers of a token and head, of both where planes are joined */
  uint32_t launch;        /* on a device: the launch that moves it, by number; else 0 */
  uint32_t hadamard;      /* numbers that are rotated together on their way [E.17]; 0: none are */
  const char *kernel;     /* on a device the name of the kernel, else "copy", "transpose" or
                             "convert"; static */
  uint64_t num_vectors;   /* vectors (a token and head) that move, or KVX_UNKNOWN */
  uint64_t bytes_read;    /* of K, V or the plane, or KVX_UNKNOWN */
  uint64_t bytes_written; /* zeros of ZERO_FILL included, or KVX_UNKNOWN */
  uint64_t run_bytes;     /* the longest run that is contiguous at both ends, in a block; 0: a plane
                             that is converted */
} kvx_plane_info_t;

/* What a plan does. 96 bytes. Spec: E.13 */
typedef struct kvx_plan_info_t {
  uint32_t size;
  uint32_t num_planes;          /* entries of kvx_plan_describe */
  uint32_t on_device;           /* 1: it runs on the device */
  uint32_t num_launches;        /* kernels on a device; else 0 */
  uint32_t num_threads;         /* on the host, if they are free; else 0 */
  uint32_t is_exact;            /* 1: every plane is copied, or converted exactly */
  uint64_t num_sequences;       /* rows: sequences, or beams of them; 0 for a write */
  uint64_t num_tokens;          /* the sum of the lengths; rows of the output for a gather
                                   with ZERO_FILL. Or KVX_UNKNOWN */
  uint64_t num_moved;           /* of these: have a source and a destination, or KVX_UNKNOWN */
  uint64_t num_null_src;        /* of these: no source; ZERO_FILL zeroes them. Or KVX_UNKNOWN */
  uint64_t num_null_dst;        /* of these: no destination; nothing happens. Or KVX_UNKNOWN */
  uint64_t bytes_read;          /* of all planes, or KVX_UNKNOWN */
  uint64_t bytes_written;       /* of all planes, or KVX_UNKNOWN */
  double copy_bytes_per_second; /* of this machine or, on a device, of the device between the
                                   memory of both ends; 0: not known */
  double seconds;               /* an estimate: bytes_written at that speed; 0: not known */
} kvx_plan_info_t;

/* Describes what kvx_plan_run would do with the same `lookups`. Refuses the same with the same
 * sentence: on HOST memory it checks indices, lengths and scales. Moves nothing.
 *
 * info:   filled; the caller sets `size`
 * planes: [num_planes], filled; the caller sets the `size` of each. num_planes MUST be that of
 *         info; NULL with num_planes 0: none are described
 *
 * The first call in a process measures this machine's copy speed, for some milliseconds. For a plan
 * on a device, the first call for each device and direction (within it, from or to pinned host
 * memory) measures the device's, on a stream of its own, with 64 MB at both ends. The speed is not
 * known if these cannot be allocated, or with UNIFIED memory. Spec: E.13 */
KVX_API kvx_status_t kvx_plan_describe(const kvx_plan_t *plan, const kvx_plan_lookups_t *lookups,
                                       kvx_plan_info_t *info, kvx_plane_info_t *planes,
                                       uint32_t num_planes);

/* One copy of a plan. 32 bytes. */
typedef struct kvx_range_t {
  uint32_t plane; /* index in kvx_plan_describe's planes */
  uint32_t reserved;
  const void *src; /* NULL: `bytes` of zeros (ZERO_FILL) */
  void *dst;
  uint64_t bytes;
} kvx_range_t;

/* Takes the next `count` ranges, which are valid during the call. Returns 0 to go on, any other
 * number to stop; kvx_plan_ranges then returns OK. */
typedef int (*kvx_take_ranges_t)(void *context, const kvx_range_t *ranges, uint64_t count);

/* Lists the copies that kvx_plan_run would make with the same `lookups`: a memcpy of each moves the
 * same bytes. Runs that follow each other at both ends are one range. Ranges are in the order of
 * planes, and within a plane in the order of sequences and tokens.
 *
 * Reads tables, slots, lengths and starts, which MUST be in memory that the host can read; touches
 * no other memory of either end. Refuses what kvx_plan_run would refuse; a plan that converts a
 * plane gives UNSUPPORTED, and the sentence names the plane. Spec: E.13 */
KVX_API kvx_status_t kvx_plan_ranges(const kvx_plan_t *plan, const kvx_plan_lookups_t *lookups,
                                     kvx_take_ranges_t take, void *context);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* KVX_PLAN_H_ */
