/* KVX planes: tensors of a layer besides K and V, and K and V that v1's tensors cannot describe.
 *
 * A plane is one tensor of a layer that tokens or sequences index: an indexer's keys, a latent's
 * rope part, scales in a tensor of their own, a recurrent state. Its axes are a list, so that any
 * of them may be split: tiles of tokens, packs of dim. kvx_span_t lists planes beside the layers. A
 * migration pairs the planes of its two ends by layer and role. Spec: E.11 */
#ifndef KVX_PLANE_H_
#define KVX_PLANE_H_

#include "kvx/kvx_abi.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What an axis of a plane counts. */
typedef enum kvx_axis_t {
  KVX_AXIS_BLOCK = 0,
  KVX_AXIS_TOKEN = 1, /* entries of a block: tokens, unless tokens_per_entry says otherwise */
  KVX_AXIS_HEAD = 2,
  KVX_AXIS_DIM = 3 /* units of the format: numbers, unless it packs several into one */
} kvx_axis_t;

/* One axis, or one part of a split axis. 24 bytes.
 *
 * The list has the parts of a split axis from the outermost to the innermost: index i of an axis
 * split into [4][16] is i / 16 in the first part and i % 16 in the second. */
typedef struct kvx_plane_axis_t {
  kvx_axis_t axis;
  uint32_t reserved; /* 0 */
  int64_t extent;
  int64_t stride_bytes;
} kvx_plane_axis_t;

#define KVX_MAX_PLANE_AXES 8

/* Roles that engines share; any other number below 2^31 is the caller's own. */
typedef enum kvx_role_t {
  KVX_ROLE_K = 0,
  KVX_ROLE_V = 1,
  KVX_ROLE_LATENT = 2,        /* MLA's compressed K and V */
  KVX_ROLE_LATENT_ROPE = 3,   /* its rotated part, if it is a tensor of its own */
  KVX_ROLE_INDEX_K = 4,       /* keys of a sparse indexer */
  KVX_ROLE_INDEX_K_SCALE = 5, /* their scales, if they are a tensor of their own */
  KVX_ROLE_COMPRESSED = 6,    /* entries that stand for several tokens each */
  KVX_ROLE_CONV_STATE = 7,
  KVX_ROLE_STATE = 8 /* recurrent state */
} kvx_role_t;

/* Every tensor-parallel rank holds the same numbers: num_heads and head_start of a migration do not
 * select heads of it. */
#define KVX_PLANE_REPLICATED (1u << 0)

/* A plane. 304 bytes. Spec: E.11 */
typedef struct kvx_plane_t {
  uint32_t size;
  uint32_t role;     /* kvx_role_t, or the caller's own */
  uint32_t layer;    /* of the model or the span: the same number at both ends */
  kvx_dtype_t dtype; /* the format of its numbers */
  kvx_memory_type_t memory;
  uint32_t tokens_per_entry; /* 1; n: an entry stands for n tokens; 0: one entry per sequence */
  uint32_t flags;            /* KVX_PLANE_REPLICATED */
  uint32_t num_axes;
  kvx_plane_axis_t axes[KVX_MAX_PLANE_AXES];
  void *data;                           /* element 0 of every axis */
  const kvx_scale_desc_t *scale;        /* as of a K or V tensor; NULL: none */
  const kvx_scale_desc_t *zero;         /* of formats that have a zero point; NULL: none */
  const kvx_block_table_t *block_table; /* its own; NULL: the span's */
  const kvx_slot_mapping_t *slots;      /* its own; NULL: the span's. One per sequence if
                                           tokens_per_entry is 0 */
  uint64_t reserved[5];                 /* 0 */
} kvx_plane_t;

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* KVX_PLANE_H_ */
