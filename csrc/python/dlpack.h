// DLPack's view of a tensor, and the table through which a Python type gives it without making a
// Python object.
// Source: https://dmlc.github.io/dlpack/latest/c_api.html; torch 2.13 ATen/dlpack.h,
// DLPackExchangeAPI (DLPack 1.3)
#pragma once

#include <cstdint>

namespace kvx {

enum : int32_t { kDLCPU = 1, kDLCUDA = 2, kDLCUDAHost = 3 };
enum : uint8_t {
  kDLInt = 0,
  kDLUInt = 1,
  kDLFloat = 2,
  kDLBfloat = 4,
  kDLFloat8_e4m3fn = 10,
  kDLFloat8_e5m2 = 12,
};

struct DLTensor {
  void *data;
  int32_t device_type;
  int32_t device_id;
  int32_t ndim;
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
  int64_t *shape;
  int64_t *strides;  // elements
  uint64_t byte_offset;
};

// Fills `out` from a tensor of the table's Python type; valid while the tensor is kept alive. 0, or
// -1 with a Python exception.
using DLTensorFromPyObject = int (*)(void *tensor, DLTensor *out);

struct DLPackExchangeApi {
  uint32_t major;
  uint32_t minor;
  const DLPackExchangeApi *older;
  void *managed_tensor_allocator;
  void *managed_tensor_from_py_object;
  void *managed_tensor_to_py_object;
  DLTensorFromPyObject dltensor_from_py_object;  // NULL: not offered
  void *current_work_stream;
};

}  // namespace kvx
