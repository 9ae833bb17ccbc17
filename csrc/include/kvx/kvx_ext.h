/* Includes all of KVX but kvx_kvbm.h, which says why. Each header is the manual of one concern and
 * can be included alone. */
#ifndef KVX_EXT_H_
#define KVX_EXT_H_

#include "kvx/kvx_abi.h"        /* v1: descriptors, write and gather */
#include "kvx/kvx_attend.h"     /* attention of a query to a cache */
#include "kvx/kvx_blocks.h"     /* KVBM's block layouts and copies */
#include "kvx/kvx_encode.h"     /* rotations before encoding and after decoding */
#include "kvx/kvx_error.h"      /* why a call has failed */
#include "kvx/kvx_host.h"       /* version, build, formats, threads, tokens a device skipped */
#include "kvx/kvx_hybrid.h"     /* DeepSeek-V4's windows, tails and compressed entries */
#include "kvx/kvx_layers.h"     /* the new tokens of several layers in one call */
#include "kvx/kvx_lookup.h"     /* where the tokens of a span lie */
#include "kvx/kvx_lossless.h"   /* bfloat16 in fewer bytes, for stores and wires */
#include "kvx/kvx_migrate.h"    /* from one cache into another */
#include "kvx/kvx_ops.h"        /* flags; options of write and gather */
#include "kvx/kvx_plan.h"       /* migrations that are kept, described, listed */
#include "kvx/kvx_plane.h"      /* tensors of a layer besides K and V */
#include "kvx/kvx_turboquant.h" /* head vectors in 2 to 4 bits per number; vLLM's slots of them */

#endif /* KVX_EXT_H_ */
