// Arrays of numbers in the lossless encoding: a header, an index of blocks, blocks. Spec: E.19
#pragma once

#include "kvx/kvx_lossless.h"

namespace kvx::lossless {

uint64_t bound(uint64_t numbers);
kvx_status_t encode(void *encoded, uint64_t capacity, uint64_t *bytes, const void *data,
                    uint64_t numbers, kvx_dtype_t dtype);
kvx_status_t info(const void *encoded, uint64_t bytes, uint64_t *numbers, kvx_dtype_t *dtype);
kvx_status_t decode(void *data, uint64_t first, uint64_t count, const void *encoded,
                    uint64_t bytes);

}  // namespace kvx::lossless
