/* KVX beyond v1: all of it. Each header is the manual of one concern and can be included alone. */
#ifndef KVX_EXT_H_
#define KVX_EXT_H_

#include "kvx/kvx_abi.h"     /* v1: descriptors, write and gather */
#include "kvx/kvx_error.h"   /* the sentence behind a failure */
#include "kvx/kvx_host.h"    /* version, build and machine, threads, what a device has skipped */
#include "kvx/kvx_lookup.h"  /* where the tokens of a span lie */
#include "kvx/kvx_migrate.h" /* from one cache into another */
#include "kvx/kvx_ops.h"     /* flags; options of write and gather */
#include "kvx/kvx_plan.h"    /* migrations that are kept, described, listed */
#include "kvx/kvx_plane.h"   /* what a layer holds besides K and V */

#endif /* KVX_EXT_H_ */
