// Reads BlockTable, SlotMapping and SeqLens of kvx_core/desc/tables.py, and checks that they still
// have their memory.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpython.h"
#include "kvx/kvx_abi.h"
#include "tensors.h"

namespace kvx {

// A new reference that ends with this.
class Reference {
 public:
  explicit Reference(PyObject *object) : object_(object) {
    if (!object) PyErr_Clear();
  }
  Reference(const Reference &) = delete;
  Reference &operator=(const Reference &) = delete;
  ~Reference() {
    if (object_) Py_DecRef(object_);
  }
  PyObject *get() const { return object_; }

 private:
  PyObject *object_;
};

// The memory that a descriptor names.
struct Array {
  const void *begin;
  uint64_t num_bytes;
};

inline uint64_t size_of_index(kvx_dtype_t dtype) { return dtype == KVX_DTYPE_S32 ? 4 : 8; }

inline Array first_array(const kvx_block_table_t &table) {
  return {table.indices, table.indices_count * size_of_index(table.index_dtype)};
}
inline Array first_array(const kvx_slot_mapping_t &slots) {
  return {slots.slots, slots.token_count * size_of_index(slots.dtype)};
}
inline Array first_array(const kvx_seq_lens_t &lens) {
  return {lens.lengths, lens.seq_count * size_of_index(lens.dtype)};
}
template <class Struct>
Array second_array(const Struct &) {
  return {nullptr, 0};
}
inline Array second_array(const kvx_block_table_t &table) {
  return {table.indptr, table.indptr_count * size_of_index(table.indptr_dtype)};
}

// Descriptors of kvx_core/_c/bound.py.
struct Descriptors {
  PyObject *types[3];                                // BlockTable, SlotMapping, SeqLens
  PyObject *struct_name, *memory_name, *owner_name;  // of their attributes
  PyObject *array_type;                              // numpy.ndarray

  static int index_of(const kvx_block_table_t &) { return 0; }
  static int index_of(const kvx_slot_mapping_t &) { return 1; }
  static int index_of(const kvx_seq_lens_t &) { return 2; }

  // False for another object, for one in other memory, and for one that only Python can tell is in
  // place.
  template <class Struct>
  bool read(const TensorType &tensors, PyObject *object, kvx_memory_type_t memory,
            Struct *desc) const {
    if (tensors.type_of(object) != types[index_of(*desc)]) return false;
    const Reference bytes(PyObject_GetAttr(object, struct_name));
    const Reference where(PyObject_GetAttr(object, memory_name));
    const Reference owner(PyObject_GetAttr(object, owner_name));
    if (!bytes.get() || !where.get() || !owner.get()) return false;
    if (PyBytes_Size(bytes.get()) != sizeof *desc || PyLong_AsLong(where.get()) != memory) {
      return false;
    }
    std::memcpy(desc, PyBytes_AsString(bytes.get()), sizeof *desc);
    return is_in_place(tensors, owner.get(), first_array(*desc)) &&
           is_in_place(tensors, owner.get(), second_array(*desc));
  }

  // As require_array_in_place of kvx_core/desc/in_place.py, but False also for owners that C cannot
  // ask.
  bool is_in_place(const TensorType &tensors, PyObject *owner, const Array &array) const {
    if (tensors.type_of(owner) != as_object(PyTuple_Type)) {
      return is_numpy(tensors, owner) || (tensors.is_tensor(owner) && holds(tensors, owner, array));
    }
    bool is_held = false, is_all_torch = true;
    for (Py_ssize_t i = 0, count = PyTuple_Size(owner); i < count; ++i) {
      PyObject *const part = PyTuple_GetItem(owner, i);
      const bool is_torch = tensors.is_tensor(part);
      if (!is_torch && !is_numpy(tensors, part)) return false;
      is_all_torch &= is_torch;
      is_held |= is_torch && holds(tensors, part, array);
    }
    return is_held || !is_all_torch;
  }

  static bool holds(const TensorType &tensors, PyObject *owner, const Array &array) {
    return !array.num_bytes || tensors.has(owner, array.begin, array.num_bytes);
  }

  // An array has its memory as long as it is kept. None: the caller keeps the memory.
  bool is_numpy(const TensorType &tensors, PyObject *owner) const {
    return is_none(owner) || tensors.type_of(owner) == array_type ||
           PyObject_IsInstance(owner, array_type) == 1;
  }
};

}  // namespace kvx
