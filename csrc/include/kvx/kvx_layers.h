/* KVX layers: the new tokens of several layers, written in one call.
 *
 * A decode step makes one token per sequence in every layer. Where the keys and values of several
 * layers are at hand together, one call writes them all: it is validated once, the slots are read
 * once, and on a device layers that differ only in their addresses are one launch.
 * The conventions of kvx_abi.h hold. Spec: E.23 */
#ifndef KVX_LAYERS_H_
#define KVX_LAYERS_H_

#include "kvx/kvx_ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Writes like kvx_write_kv_ext(caches[l], writes[l], options, stream) for l < num_layers.
 *
 * caches, writes: [num_layers]; the caches hold as many blocks of as many tokens, and the writes
 *                 have the same slots: dtype, token_count, invalid_slot and address
 * options:        NULL: those of kvx_write_kv
 * Mutates what these calls would, and nothing unless the whole call is valid. Spec: E.23 */
KVX_API kvx_status_t kvx_write_layers(const kvx_cache_desc_t *const *caches,
                                      const kvx_write_desc_t *const *writes, uint32_t num_layers,
                                      const kvx_write_options_t *options, void *stream);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* KVX_LAYERS_H_ */
