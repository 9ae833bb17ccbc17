// Reads torch tensors without making a Python object, and checks that they still have their memory.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpython.h"
#include "dlpack.h"
#include "kvx/kvx_abi.h"

namespace kvx {

inline kvx_dtype_t dtype_of(const DLTensor &tensor) {
  if (tensor.lanes != 1) return KVX_DTYPE_INVALID;
  switch (tensor.code << 8 | tensor.bits) {
    case kDLFloat << 8 | 16:
      return KVX_DTYPE_F16;
    case kDLBfloat << 8 | 16:
      return KVX_DTYPE_BF16;
    case kDLFloat << 8 | 32:
      return KVX_DTYPE_F32;
    case kDLFloat8_e4m3fn << 8 | 8:
      return KVX_DTYPE_F8_E4M3;
    case kDLFloat8_e5m2 << 8 | 8:
      return KVX_DTYPE_F8_E5M2;
    case kDLInt << 8 | 8:
      return KVX_DTYPE_S8;
    case kDLInt << 8 | 32:
      return KVX_DTYPE_S32;
    case kDLInt << 8 | 64:
      return KVX_DTYPE_S64;
  }
  return KVX_DTYPE_INVALID;
}

inline bool is_in(kvx_memory_type_t memory, const DLTensor &tensor) {
  const int32_t type = tensor.device_type;
  return memory == KVX_MEMORY_HOST ? type == kDLCPU || type == kDLCUDAHost
                                   : memory == KVX_MEMORY_DEVICE && type == kDLCUDA;
}

inline void *address_of(const DLTensor &tensor) {
  return tensor.data ? static_cast<char *>(tensor.data) + tensor.byte_offset : nullptr;
}

// Reads torch.Tensor; TensorType of kvx_core/_c/bound.py.
struct TensorType {
  PyObject *type;
  DLTensorFromPyObject to_dlpack;
  Py_ssize_t type_offset;  // of the type in a Python object: PyObject_Type would count a reference
  Py_ssize_t handle_offset;  // of the at::Tensor in a Python object
  bool (*is_neg)(const void *handle);
  int32_t (*data_ptr)(const void *handle, void **data);
  int32_t (*storage_bytes)(const void *handle, int64_t *num_bytes);
  int32_t (*storage_offset)(const void *handle, int64_t *elements);

  // False if torch tensors cannot be read (`type` is NULL), for a tensor of more dimensions than
  // KVX has, for one with torch's negative bit, which DLPack does not report, for one whose storage
  // has been shrunk, and for objects of any other type: the memory of a subclass may have another
  // meaning.
  bool read(PyObject *object, DLTensor *tensor) const {
    return is_tensor(object) && read_any(object, tensor);
  }

  bool is_tensor(PyObject *object) const { return type && type_of(object) == type; }

  // The same of a torch.Tensor or a subclass, of which only the memory is asked.
  bool read_any(PyObject *object, DLTensor *tensor) const {
    if (is_neg(handle_of(object))) return false;
    if (to_dlpack(object, tensor) != 0) {
      PyErr_Clear();
      return false;
    }
    const int32_t ndim = tensor->ndim;
    if (ndim < 0 || ndim > KVX_MAX_TENSOR_DIMS) return false;
    return (!ndim || (tensor->shape && tensor->strides)) && is_whole(handle_of(object), *tensor);
  }

  // Whether the storage holds all elements.
  bool is_whole(const void *handle, const DLTensor &tensor) const {
    int64_t last = 0, bytes = 0, offset = 0;
    for (int32_t axis = 0; axis < tensor.ndim; ++axis) {
      if (tensor.shape[axis] == 0) return true;
      last += (tensor.shape[axis] - 1) * tensor.strides[axis];
    }
    if (storage_bytes(handle, &bytes) != 0 || storage_offset(handle, &offset) != 0) return false;
    const int64_t element_bits = int64_t{tensor.bits} * tensor.lanes;
    return (offset + last + 1) * element_bits <= bytes * 8;
  }

  // Whether bytes from `begin` on are elements of a torch.Tensor without gaps.
  bool has(PyObject *object, const void *begin, uint64_t num_bytes) const {
    DLTensor tensor;
    if (!read_any(object, &tensor)) return false;
    uint64_t bytes = uint64_t{tensor.bits} * tensor.lanes / 8;
    int64_t elements = 1;
    for (int32_t axis = tensor.ndim - 1; axis >= 0; --axis) {
      if (tensor.shape[axis] != 1 && tensor.strides[axis] != elements) return false;
      elements *= tensor.shape[axis];
    }
    bytes *= static_cast<uint64_t>(elements);
    const uint64_t from =
        reinterpret_cast<uintptr_t>(begin) - reinterpret_cast<uintptr_t>(address_of(tensor));
    return from <= bytes && num_bytes <= bytes - from;
  }

  PyObject *type_of(PyObject *object) const {
    return *reinterpret_cast<PyObject **>(reinterpret_cast<char *>(object) + type_offset);
  }

  const void *handle_of(PyObject *object) const {
    return reinterpret_cast<const char *>(object) + handle_offset;
  }
};

// The memory of a tensor when a call was bound to it; _HeldTensor of kvx_core/_c/bound.py.
struct HeldTensor {
  PyObject *tensor;
  void *data;
  int64_t storage_bytes;

  // False if the storage has been resized, or replaced.
  bool is_in_place(const TensorType &tensors) const {
    const void *handle = tensors.handle_of(tensor);
    void *data_now = nullptr;
    int64_t bytes_now = 0;
    return tensors.data_ptr(handle, &data_now) == 0 && data_now == data &&
           tensors.storage_bytes(handle, &bytes_now) == 0 && bytes_now == storage_bytes;
  }
};

struct Held {
  const HeldTensor *tensors;
  Py_ssize_t num_tensors;

  bool are_in_place(const TensorType &type) const {
    return std::all_of(tensors, tensors + num_tensors,
                       [&](const HeldTensor &tensor) { return tensor.is_in_place(type); });
  }
};

// A list or table of integers, contiguous as the ABI requires.
struct Indices {
  kvx_dtype_t dtype;
  uint32_t shape[2];
  const void *data;
};

}  // namespace kvx
