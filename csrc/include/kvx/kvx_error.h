/* KVX errors: why a call has failed, as a sentence.
 *
 *   if (kvx_write_kv(&cache, &write, NULL) != KVX_STATUS_OK) puts(kvx_last_error());
 *   cache.k.shape[1] is 32, expected block_size 16 (BLOCK_NHD, spec 4.2)
 *
 * Sentences are for people; programs compare the status. Spec: E.7 */
#ifndef KVX_ERROR_H_
#define KVX_ERROR_H_

#include "kvx/kvx_abi.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Returns why the last failed call on this thread failed: one sentence with the field, its value,
 * what was expected, the spec section and, if there is one, the way out. "" if no call has failed.
 * Valid until the next failing call on the same thread; a call that succeeds does not change it. */
KVX_API const char *kvx_last_error(void);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* KVX_ERROR_H_ */
