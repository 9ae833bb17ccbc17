// Reads what Python has in its own memory: lists of integers, and buffers such as numpy's arrays.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <new>

#include "cpython.h"
#include "tensors.h"

namespace kvx {

// The items of a list or a tuple, which cannot change: no Python code runs meanwhile.
class Items {
 public:
  // No items but `is_sequence` False for an object of another type, subclasses included: they may
  // have other items than those in their memory.
  Items(PyObject *object, PyObject *type)
      : object_(object), is_list_(type == as_object(PyList_Type)) {
    is_sequence = is_list_ || type == as_object(PyTuple_Type);
    if (is_sequence) size = is_list_ ? PyList_Size(object) : PyTuple_Size(object);
  }

  PyObject *operator[](Py_ssize_t i) const {
    return is_list_ ? PyList_GetItem(object_, i) : PyTuple_GetItem(object_, i);
  }

  bool is_sequence;
  Py_ssize_t size = 0;

 private:
  PyObject *object_;
  bool is_list_;
};

// What Python objects lend to one call: buffers, and copies of lists. All ends with the call, which
// has the GIL then.
class Lent {
 public:
  Lent() = default;
  Lent(const Lent &) = delete;
  Lent &operator=(const Lent &) = delete;
  ~Lent() {
    for (int i = 0; i < num_buffers_; ++i) PyBuffer_Release(&buffers_[i]);
    for (int i = 0; i < num_many_; ++i) delete[] many_[i];
  }

  // An object's buffer with shape, strides and format; NULL if it has none like this, or the call
  // has as many as it can hold.
  const Py_buffer *buffer(PyObject *object, int flags) {
    if (num_buffers_ == kMost || !PyObject_CheckBuffer(object)) return nullptr;
    Py_buffer *const found = buffers_ + num_buffers_;
    if (PyObject_GetBuffer(object, found, PyBUF_RECORDS_RO | flags) != 0) {
      PyErr_Clear();
      return nullptr;
    }
    ++num_buffers_;
    const bool is_complete = !found->ndim || (found->shape && found->strides);
    return is_complete && !found->suboffsets && found->format ? found : nullptr;
  }

  // Memory for so many numbers; NULL if there is none.
  int64_t *numbers(uint64_t count) {
    if (count <= kFew - used_) {
      used_ += count;
      return few_ + used_ - count;
    }
    if (num_many_ == kMost) return nullptr;
    many_[num_many_] = new (std::nothrow) int64_t[count];
    return many_[num_many_++];
  }

 private:
  static constexpr int kMost = 8;
  static constexpr uint64_t kFew = 64;

  Py_buffer buffers_[kMost];
  int num_buffers_ = 0, num_many_ = 0;
  int64_t *many_[kMost];  // of their own: each call makes one of these objects
  uint64_t used_ = 0;
  int64_t few_[kFew];
};

// The dtype of a buffer's elements, among those that a call takes; numpy writes native ones as one
// letter.
inline kvx_dtype_t dtype_of(const Py_buffer &buffer) {
  if (!buffer.format[0] || buffer.format[1]) return KVX_DTYPE_INVALID;
  switch (buffer.format[0]) {
    case 'e':
      return KVX_DTYPE_F16;
    case 'f':
      return KVX_DTYPE_F32;
    case 'b':
      return KVX_DTYPE_S8;
    case 'i':
    case 'l':
    case 'q':
      return buffer.itemsize == 4   ? KVX_DTYPE_S32
             : buffer.itemsize == 8 ? KVX_DTYPE_S64
                                    : KVX_DTYPE_INVALID;
  }
  return KVX_DTYPE_INVALID;
}

inline bool is_index(kvx_dtype_t dtype) { return dtype == KVX_DTYPE_S32 || dtype == KVX_DTYPE_S64; }

// Reads a tensor's memory. False for what it cannot read.
inline bool read_buffer(const Py_buffer &buffer, kvx_tensor_desc_t *desc) {
  desc->dtype = dtype_of(buffer);
  if (desc->dtype == KVX_DTYPE_INVALID || buffer.ndim > KVX_MAX_TENSOR_DIMS) return false;
  desc->ndim = static_cast<uint32_t>(buffer.ndim);
  for (int axis = 0; axis < buffer.ndim; ++axis) {
    if (buffer.strides[axis] % buffer.itemsize) return false;
    desc->shape[axis] = buffer.shape[axis];
    desc->stride[axis] = buffer.strides[axis] / buffer.itemsize;
  }
  desc->data = buffer.buf;
  return true;
}

// Reads contiguous integers of `ndim` axes.
inline bool read_buffer(const Py_buffer &buffer, int32_t ndim, Indices *indices) {
  indices->dtype = dtype_of(buffer);
  if (!is_index(indices->dtype) || buffer.ndim != ndim) return false;
  uint64_t size = 1;
  for (int32_t axis = ndim - 1; axis >= 0; --axis) {
    const Py_ssize_t extent = buffer.shape[axis];
    if (extent > UINT32_MAX) return false;
    const auto expected = static_cast<Py_ssize_t>(size) * buffer.itemsize;
    if (extent > 1 && buffer.strides[axis] != expected) return false;
    indices->shape[axis] = static_cast<uint32_t>(extent);
    size *= static_cast<uint64_t>(extent);
    if (size > UINT32_MAX) return false;
  }
  indices->data = buffer.buf;
  return true;
}

// Reads lists and tuples of integers; `types` tells an object's type.
template <class Types>
class ListReader {
 public:
  ListReader(const Types &types, Lent *lent) : types_(types), lent_(*lent) {}

  // (count,) of integers, or of rows of these, which are padded with -1 to the longest; if all are
  // empty, with NO_BLOCK to a column. As in int64_array and padded of kvx_core. False for what it
  // cannot read.
  bool read(PyObject *object, int32_t ndim, Indices *indices) const {
    const Items items = of(object);
    if (!items.is_sequence || items.size > UINT32_MAX) return false;
    return ndim == 1 ? read_list(items, indices) : read_table(items, indices);
  }

 private:
  Items of(PyObject *object) const { return {object, types_.type_of(object)}; }

  bool read_list(const Items &items, Indices *indices) const {
    int64_t *const numbers = lent_.numbers(static_cast<uint64_t>(items.size));
    *indices = {KVX_DTYPE_S64, {static_cast<uint32_t>(items.size), 0}, numbers};
    return numbers && convert(items, numbers);
  }

  bool read_table(const Items &rows, Indices *indices) const {
    Py_ssize_t longest = 0;
    for (Py_ssize_t i = 0; i < rows.size; ++i) {
      const Items row = of(rows[i]);
      if (!row.is_sequence) return false;
      longest = std::max(longest, row.size);
    }
    const Py_ssize_t width = std::max(longest, Py_ssize_t{1});
    const int64_t padding = longest ? -1 : std::numeric_limits<int64_t>::max();
    const auto count = static_cast<uint64_t>(rows.size) * static_cast<uint64_t>(width);
    if (width > UINT32_MAX || count > UINT32_MAX) return false;
    int64_t *const numbers = lent_.numbers(count);
    if (!numbers) return false;
    for (Py_ssize_t i = 0; i < rows.size; ++i) {
      const Items row = of(rows[i]);
      int64_t *const begin = numbers + i * width;
      if (!convert(row, begin)) return false;
      std::fill(begin + row.size, begin + width, padding);
    }
    *indices = {
        KVX_DTYPE_S64, {static_cast<uint32_t>(rows.size), static_cast<uint32_t>(width)}, numbers};
    return true;
  }

  // False for what is no plain int of 64 bits: only Python may call an object's __index__.
  bool convert(const Items &items, int64_t *numbers) const {
    for (Py_ssize_t i = 0; i < items.size; ++i) {
      PyObject *const item = items[i];
      if (types_.type_of(item) != as_object(PyLong_Type)) return false;
      numbers[i] = PyLong_AsLongLong(item);
      if (numbers[i] == -1 && PyErr_Occurred()) {
        PyErr_Clear();
        return false;
      }
    }
    return true;
  }

  const Types &types_;
  Lent &lent_;
};

}  // namespace kvx
