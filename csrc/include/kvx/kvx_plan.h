/* KVX plans: a migration that is validated once, looked at, run many times, or carried out by
 * somebody else.
 *
 *   kvx_plan_t *plan;
 *   kvx_plan_create(&migrate, &plan);                     what kvx_migrate_kv does before it copies
 *   kvx_plan_describe(plan, NULL, &info, NULL, 0);        what it would move, how, in which time
 *   kvx_plan_run(plan, &lookups, stream);                 as often as there are tokens to move
 *   kvx_plan_ranges(plan, &lookups, visit, context);      or the copies, for a transport
 *   kvx_plan_free(plan);
 *
 * A plan keeps copies of all descriptors that it was made from, so that these may go once
 * kvx_plan_create has returned. The memory that they describe stays the caller's and MUST stay
 * where it is until the plan is freed: K, V, planes, pools and scales always; tables, slots,
 * lengths and starts as long as calls use them. Their contents may change between calls: every call
 * reads indices, lengths and scales anew.
 *
 * A plan is never changed. Threads may share it, and may run it at the same time as long as the
 * runs write different memory. kvx_plan_free MUST NOT meet another call.
 *
 * Spec: E.13 */
#ifndef KVX_PLAN_H_
#define KVX_PLAN_H_

#include "kvx/kvx_migrate.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A kept migration. */
typedef struct kvx_plan_t kvx_plan_t;

/* Validates a migration, as kvx_migrate_kv does, and keeps it. Reads no index and no length, so
 * that `seq_lens` and the tables may be of no sequences where runs give others.
 *
 * *plan: the plan, which the caller frees; NULL if the call fails. What kvx_migrate_kv would refuse
 * is refused here, with its status and sentence. Spec: E.13 */
KVX_API kvx_status_t kvx_plan_create(const kvx_migrate_desc_t *migrate, kvx_plan_t **plan);

/* Frees a plan. NULL is fine. On a device, work that runs have put on streams goes on. */
KVX_API void kvx_plan_free(kvx_plan_t *plan);

/* Where sequences lie at one end. 24 bytes, frozen (it is embedded). A field that is NULL is as the
 * plan was made. One that is given MUST be of the kind that the plan was made with: a table of the
 * same format for a table, slots for slots. The number of sequences, columns and tokens is free. */
typedef struct kvx_end_lookup_t {
  const kvx_block_table_t *block_table;
  const kvx_slot_mapping_t *slots;
  const kvx_seq_lens_t *starts;
} kvx_end_lookup_t;

/* Which tokens a call is about, instead of those that the plan was made with. 64 bytes. */
typedef struct kvx_plan_lookups_t {
  uint32_t size;
  uint32_t max_seq_len;           /* as in kvx_migrate_desc_t; 0: as the plan was made */
  const kvx_seq_lens_t *seq_lens; /* NULL: as the plan was made */
  kvx_end_lookup_t src;
  kvx_end_lookup_t dst;
} kvx_plan_lookups_t;

/* Moves the tokens. `lookups` NULL: those that the plan was made with.
 *
 * Mutates what kvx_migrate_kv would, nothing else, and refuses what that would refuse, before
 * anything is written: wrong lookups with INVALID_ARGUMENT and, on HOST memory, indices and lengths
 * out of range with OUT_OF_RANGE. Planes that have a table of their own keep it. Spec: E.13 */
KVX_API kvx_status_t kvx_plan_run(const kvx_plan_t *plan, const kvx_plan_lookups_t *lookups,
                                  void *stream);

/* The numbers in a kvx_plane_info_t and a kvx_plan_info_t that the host cannot know, since lengths
 * or tables lie in device memory. */
#define KVX_UNKNOWN UINT64_MAX

/* Flags of kvx_plane_info_t. */
#define KVX_PLANE_INFO_CONVERTS (1u << 0) /* numbers are converted; else bytes are copied */
#define KVX_PLANE_INFO_EXACT (1u << 1)    /* every finite source number can be had back */
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
  uint32_t num_heads;   /* that move */
  uint32_t vector_size; /* numbers of a token and head, of both where planes are joined */
  uint32_t launch;      /* on a device: which of the plan's launches moves it; else 0 */
  uint32_t reserved;
  const char *kernel;     /* what moves it: on a device the kernel, else "copy", "transpose" or
                             "convert"; static */
  uint64_t num_vectors;   /* of tokens and heads that move, or KVX_UNKNOWN */
  uint64_t bytes_read;    /* of K, V or the plane, or KVX_UNKNOWN */
  uint64_t bytes_written; /* zeros of ZERO_FILL included, or KVX_UNKNOWN */
  uint64_t run_bytes;     /* the longest run that is contiguous at both ends, in a block; 0: a plane
                             that is converted */
} kvx_plane_info_t;

/* What a plan does. 96 bytes. Spec: E.13 */
typedef struct kvx_plan_info_t {
  uint32_t size;
  uint32_t num_planes;    /* entries of kvx_plan_describe */
  uint32_t on_device;     /* 1: it runs on the device */
  uint32_t num_launches;  /* kernels on a device; else 0 */
  uint32_t num_threads;   /* on the host, if they are free; else 0 */
  uint32_t is_exact;      /* 1: every plane is copied, or converted exactly */
  uint64_t num_sequences; /* rows: sequences, or beams of them */
  uint64_t num_tokens;    /* within the lengths, of all sequences, or KVX_UNKNOWN */
  uint64_t num_moved;     /* of these: with a source and a destination, or KVX_UNKNOWN */
  uint64_t num_null_src;  /* of these: no source; they are zeroed with ZERO_FILL. Or KVX_UNKNOWN */
  uint64_t num_null_dst;  /* of these: no destination; nothing happens. Or KVX_UNKNOWN */
  uint64_t bytes_read;    /* of all planes, or KVX_UNKNOWN */
  uint64_t bytes_written; /* of all planes, or KVX_UNKNOWN */
  double copy_bytes_per_second; /* of this machine, measured once per process; 0: not known */
  double seconds;               /* an estimate: bytes_written at that speed; 0: not known */
} kvx_plan_info_t;

/* Describes what kvx_plan_run would do with the same `lookups`, and refuses what it would refuse,
 * with the same sentence: on HOST memory indices, lengths and scales are checked. Moves nothing.
 *
 * info:   filled; the caller sets `size`
 * planes: [num_planes], filled; the caller sets the `size` of each. num_planes MUST be that of
 *         info. NULL with num_planes 0: not asked for
 *
 * The first call in a process measures how fast this machine copies, for some milliseconds.
 * Spec: E.13 */
KVX_API kvx_status_t kvx_plan_describe(const kvx_plan_t *plan, const kvx_plan_lookups_t *lookups,
                                       kvx_plan_info_t *info, kvx_plane_info_t *planes,
                                       uint32_t num_planes);

/* One copy of a plan. 32 bytes. */
typedef struct kvx_range_t {
  uint32_t plane; /* which of kvx_plan_describe's */
  uint32_t reserved;
  const void *src; /* NULL: `bytes` of zeros (ZERO_FILL) */
  void *dst;
  uint64_t bytes;
} kvx_range_t;

/* Takes the next `count` ranges, which are valid during the call. Returns 0 to be given more, any
 * other number to end the call, which then returns OK. */
typedef int (*kvx_take_ranges_t)(void *context, const kvx_range_t *ranges, uint64_t count);

/* Lists the copies that kvx_plan_run would make with the same `lookups`: a memcpy of each moves the
 * same bytes. Runs that follow each other at both ends are one range. Planes come in their order;
 * within a plane, sequences and their tokens do.
 *
 * Reads tables, slots, lengths and starts, which MUST lie in memory that the host can read; touches
 * no other memory of either end. Refuses what run would refuse, and with UNSUPPORTED plans that
 * convert a plane, by name. Spec: E.13 */
KVX_API kvx_status_t kvx_plan_ranges(const kvx_plan_t *plan, const kvx_plan_lookups_t *lookups,
                                     kvx_take_ranges_t take, void *context);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* KVX_PLAN_H_ */
