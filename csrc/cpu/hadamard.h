// Rows of float32 numbers times normalized Hadamard matrices. Spec: E.17
#pragma once

#include <cstdint>

namespace kvx::cpu {

// Rotates each group of `order` numbers of each row, in place; the arguments are validated.
void hadamard(float *values, uint64_t rows, uint32_t dim, int64_t row_stride, uint32_t order);

}  // namespace kvx::cpu
