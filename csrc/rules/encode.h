// Rules of kvx_encode.h.
#pragma once

#include "kvx/kvx_encode.h"

namespace kvx {

// Sets *used to the order of the matrix, which `order` 0 leaves to dim.
kvx_status_t check_hadamard(const float *values, uint64_t rows, uint32_t dim, int64_t row_stride,
                            uint32_t order, uint32_t *used);

}  // namespace kvx
