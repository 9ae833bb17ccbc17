// The exported functions of kvx_encode.h.
#include "rules/encode.h"

#include "abi/guarded.h"

extern "C" {

kvx_status_t kvx_hadamard(float *values, uint64_t rows, uint32_t dim, int64_t row_stride,
                          uint32_t order) {
  return kvx::guarded([=] {
    uint32_t used = 0;
    KVX_TRY(kvx::check_hadamard(values, rows, dim, row_stride, order, &used));
    kvx::backend::hadamard(values, rows, dim, row_stride, used);
    return KVX_STATUS_OK;
  });
}

}  // extern "C"
