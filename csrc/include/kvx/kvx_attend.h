/* KVX attention: one query against tokens of a cache, which are decoded a few at a time.
 *
 * For caches in formats that attention kernels do not read, such as Q8_0: no float32 copy of K or V
 * is made. All memory is HOST. The conventions of kvx_abi.h hold. Spec: E.21 */
#ifndef KVX_ATTEND_H_
#define KVX_ATTEND_H_

#include "kvx/kvx_abi.h"

#ifdef __cplusplus
extern "C" {
#endif

/* kvx_attend_kv's arguments. 264 bytes. */
typedef struct kvx_attend_desc_t {
  uint32_t size;
  uint32_t block;          /* block of the cache that holds the tokens */
  uint32_t start, end;     /* its first token, and the one after its last */
  kvx_tensor_desc_t query; /* [num_q_heads, head_dim], F32, any strides; its layout is not read */
  kvx_tensor_desc_t out;   /* [num_q_heads, head_dim of V], F32, filled */
  const kvx_scale_desc_t *k_scale; /* of the cache's K, if it is FP8 or S8; NULL: 1 */
  const kvx_scale_desc_t *v_scale;
  float scale; /* of the scores */
  uint32_t reserved;
} kvx_attend_desc_t;

/* out[h] = sum over tokens t of softmax over t of (query[h] . K[t, g] * scale) * V[t, g], where g
 * is h / (num_q_heads / num_kv_heads), in float32.
 *
 * cache: one with V; a token's numbers of a head are contiguous in K and in V
 * Mutates `out`, nothing else. Spec: E.21 */
KVX_API kvx_status_t kvx_attend_kv(const kvx_cache_desc_t *cache, const kvx_attend_desc_t *attend);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* KVX_ATTEND_H_ */
