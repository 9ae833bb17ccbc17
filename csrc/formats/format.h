// How numbers stand in bytes: what there is to know of a dtype besides its codec (scalar.h).
#pragma once

#include <cstdint>

#include "hd.h"
#include "kvx/kvx_abi.h"

namespace kvx {

KVX_HD constexpr int64_t size_of(kvx_dtype_t dtype) {
  switch (dtype) {
    case KVX_DTYPE_F32:
    case KVX_DTYPE_S32:
    case KVX_DTYPE_U32:
      return 4;
    case KVX_DTYPE_S64:
    case KVX_DTYPE_U64:
      return 8;
    case KVX_DTYPE_F16:
    case KVX_DTYPE_BF16:
      return 2;
    default:
      return 1;
  }
}

constexpr bool is_fp8(kvx_dtype_t dtype) {
  return dtype == KVX_DTYPE_F8_E4M3 || dtype == KVX_DTYPE_F8_E5M2;
}

}  // namespace kvx
