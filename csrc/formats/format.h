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

constexpr const char *name_of(kvx_dtype_t dtype) {
  switch (dtype) {
    case KVX_DTYPE_F16:
      return "F16";
    case KVX_DTYPE_BF16:
      return "BF16";
    case KVX_DTYPE_F32:
      return "F32";
    case KVX_DTYPE_F8_E4M3:
      return "F8_E4M3";
    case KVX_DTYPE_F8_E5M2:
      return "F8_E5M2";
    case KVX_DTYPE_S32:
      return "S32";
    case KVX_DTYPE_S64:
      return "S64";
    case KVX_DTYPE_U32:
      return "U32";
    case KVX_DTYPE_U64:
      return "U64";
    case KVX_DTYPE_U8:
      return "U8";
    default:
      return "no kvx_dtype_t";
  }
}

// What sentences say was expected where is_element_type(), is_scale_type() or is_index_type() is
// false.
constexpr const char *kElementTypes = "F16, BF16, F32, F8_E4M3, F8_E5M2 or U8";
constexpr const char *kScaleTypes = "F32, F16 or BF16";
constexpr const char *kIndexTypes = "S32 or S64";

constexpr bool is_fp8(kvx_dtype_t dtype) {
  return dtype == KVX_DTYPE_F8_E4M3 || dtype == KVX_DTYPE_F8_E5M2;
}

// Bytes that no call looks into.
constexpr bool is_opaque(kvx_dtype_t dtype) { return dtype == KVX_DTYPE_U8; }

constexpr bool is_scale_type(kvx_dtype_t dtype) {
  return dtype == KVX_DTYPE_F32 || dtype == KVX_DTYPE_F16 || dtype == KVX_DTYPE_BF16;
}

constexpr bool is_index_type(kvx_dtype_t dtype) {
  return dtype == KVX_DTYPE_S32 || dtype == KVX_DTYPE_S64;
}

// Of a cache, and of tokens on their way.
constexpr bool is_element_type(kvx_dtype_t dtype) {
  return is_scale_type(dtype) || is_fp8(dtype) || is_opaque(dtype);
}

}  // namespace kvx
