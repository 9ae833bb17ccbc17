// The functions of kvx_lossless.h.
#include "encodings/lossless.h"

#include "abi/guarded.h"

extern "C" {

uint64_t kvx_lossless_bound(uint64_t numbers) { return kvx::lossless::bound(numbers); }

kvx_status_t kvx_lossless_encode(void *encoded, uint64_t capacity, uint64_t *bytes,
                                 const void *data, uint64_t numbers, kvx_dtype_t dtype) {
  return kvx::guarded(
      [=] { return kvx::lossless::encode(encoded, capacity, bytes, data, numbers, dtype); });
}

kvx_status_t kvx_lossless_info(const void *encoded, uint64_t bytes, uint64_t *numbers,
                               kvx_dtype_t *dtype) {
  return kvx::guarded([=] { return kvx::lossless::info(encoded, bytes, numbers, dtype); });
}

kvx_status_t kvx_lossless_decode(void *data, uint64_t first, uint64_t count, const void *encoded,
                                 uint64_t bytes) {
  return kvx::guarded([=] { return kvx::lossless::decode(data, first, count, encoded, bytes); });
}

}  // extern "C"
