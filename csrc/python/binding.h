// What every bound call has: its arguments, and the objects and memory that it is bound to.
// bound.cc says what bound calls are.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpython.h"
#include "described.h"
#include "function.h"
#include "kvx/kvx_ext.h"
#include "lent.h"
#include "tensors.h"

namespace kvx {
namespace {

constexpr double kBriefBytes = 16 << 10;  // takes microseconds in any memory

// The arguments that a call leaves to Python; bound.py has the same numbers.
enum Left : long {
  kMoved = 1,  // the memory of a bound tensor has moved
  kKey = 2,    // key, as the others below, is nothing that C can read
  kValue = 4,
  kIndices = 8,  // slots or block_table
  kLens = 16,
  kSizes = 32,  // the tensors can be read, but give no number of tokens
};
constexpr int kFailed = 8;  // a plan's run: minus (a status << kFailed)

inline PyObject *left_to_python(long left) { return PyLong_FromLong(-left); }

// The arguments of a call: its tensors, then optionally a stream, then descriptions of the tensors:
// the address of a C struct, or None for one that is read here.
struct Arguments {
  PyObject *const *args;
  Py_ssize_t num_tensors, num_args;
  mutable bool are_owned = true;  // those read so far are torch tensors of the bound owner
  mutable Lent lent = {};

  PyObject *tensor(Py_ssize_t i) const { return args[i]; }
  bool have_stream() const { return num_args > num_tensors; }
  bool are_described() const { return num_args > num_tensors + 1; }

  template <class Struct>
  const Struct *described(Py_ssize_t i) const {
    if (!are_described() || is_none(args[num_tensors + 1 + i])) return nullptr;
    are_owned = false;
    return static_cast<const Struct *>(PyLong_AsVoidPtr(args[num_tensors + 1 + i]));
  }
};

// The objects and memory that every call is bound to; _Binding of kvx_core/_c/bound.py.
struct Binding {
  TensorType type;
  Held held[2];              // the described torch tensors: of cache and scales, of src and dst
  kvx_memory_type_t memory;  // of keys and values
  kvx_memory_type_t index_memory;  // where slots, tables and lengths are read
  int32_t owner;                   // the device of all tensors that are held; -1: not known
  int32_t asks_python;  // whether only Python can tell if tensors are in place: C then reads none
  Descriptors descriptors;
  void *stream;
  PyObject *ask_stream;  // a function that each call asks for the stream, or None
  PyObject *kept;        // owner of all this; the function keeps it alive

  void note_owner(const Arguments &given, const DLTensor &found) const {
    given.are_owned &= found.device_type == kDLCUDA && found.device_id == owner;
  }

  // KVX_FLAG_OWNED_BY if torch has allocated all tensors of the call on one device, else no flag.
  uint32_t owner_flag(const Arguments &given) const {
    constexpr int32_t kMost = 254;
    return given.are_owned && 0 <= owner && owner <= kMost ? KVX_FLAG_OWNED_BY(owner) : 0;
  }

  // Where Python describes tensors, it has checked this itself.
  long moved(const Arguments &given) const {
    if (given.are_described()) return 0;
    const bool is_in_place =
        !asks_python && held[0].are_in_place(type) && held[1].are_in_place(type);
    return is_in_place ? 0L : kMoved;
  }

  // Reads a key or value in the cache's memory. `desc` has only its size set.
  //
  // is_written: refuses an array that is read-only
  bool read(const Arguments &given, Py_ssize_t i, kvx_tensor_desc_t *desc,
            bool is_written = false) const {
    if (const auto *described = given.described<kvx_tensor_desc_t>(i)) {
      *desc = *described;
      return true;
    }
    PyObject *const tensor = given.tensor(i);
    if (type.type_of(tensor) == descriptors.array_type)
      return read_array(given, tensor, desc, is_written);
    DLTensor found;
    if (!type.read(tensor, &found) || !is_in(memory, found)) return false;
    note_owner(given, found);
    desc->dtype = dtype_of(found);
    desc->layout = KVX_LAYOUT_BLOCK_CUSTOM;
    desc->memory = memory;
    desc->ndim = static_cast<uint32_t>(found.ndim);
    std::copy_n(found.shape, found.ndim, desc->shape);
    std::copy_n(found.strides, found.ndim, desc->stride);
    desc->data = address_of(found);
    return desc->dtype != KVX_DTYPE_INVALID;
  }

  bool read_array(const Arguments &given, PyObject *array, kvx_tensor_desc_t *desc,
                  bool is_written) const {
    if (memory != KVX_MEMORY_HOST) return false;
    given.are_owned = false;
    const Py_buffer *buffer = given.lent.buffer(array, is_written ? PyBUF_WRITABLE : 0);
    desc->layout = KVX_LAYOUT_BLOCK_CUSTOM;
    desc->memory = memory;
    return buffer && read_buffer(*buffer, desc);
  }

  bool read_value(const Arguments &given, Py_ssize_t i, kvx_tensor_desc_t *desc,
                  bool is_written = false) const {
    return is_none(given.tensor(i)) || read(given, i, desc, is_written);
  }

  // Reads a torch tensor or, on the host, a buffer, a list or a tuple.
  bool read(const Arguments &given, Py_ssize_t i, int32_t ndim, Indices *indices) const {
    PyObject *const object = given.tensor(i);
    if (!type.is_tensor(object)) {
      if (index_memory != KVX_MEMORY_HOST) return false;
      given.are_owned = false;
      if (ListReader(type, &given.lent).read(object, ndim, indices)) return true;
      const Py_buffer *buffer = given.lent.buffer(object, 0);
      return buffer && read_buffer(*buffer, ndim, indices);
    }
    DLTensor found;
    if (!type.read_any(object, &found) || !is_in(index_memory, found) || found.ndim != ndim) {
      return false;
    }
    note_owner(given, found);
    int64_t size = 1;
    for (int32_t i = ndim - 1; i >= 0; --i) {
      const int64_t extent = found.shape[i];
      if (extent > UINT32_MAX || (extent > 1 && found.strides[i] != size)) return false;
      indices->shape[i] = static_cast<uint32_t>(extent);
      size *= extent;
    }
    indices->dtype = dtype_of(found);
    indices->data = address_of(found);
    return is_index(indices->dtype) && size <= UINT32_MAX;
  }

  bool read(const Arguments &given, Py_ssize_t i, kvx_slot_mapping_t *slots) const {
    if (const auto *described = given.described<kvx_slot_mapping_t>(i)) {
      *slots = *described;
      return true;
    }
    if (descriptors.read(type, given.tensor(i), index_memory, slots)) {
      given.are_owned = false;
      return true;
    }
    Indices found;
    if (!read(given, i, 1, &found)) return false;
    slots->dtype = found.dtype;
    slots->token_count = found.shape[0];
    slots->slots = found.data;
    return true;
  }

  bool read(const Arguments &given, Py_ssize_t i, kvx_block_table_t *table) const {
    if (const auto *described = given.described<kvx_block_table_t>(i)) {
      *table = *described;
      return true;
    }
    if (descriptors.read(type, given.tensor(i), index_memory, table)) {
      given.are_owned = false;
      return true;
    }
    Indices found;
    if (!read(given, i, 2, &found)) return false;
    table->index_dtype = found.dtype;
    table->seq_count = found.shape[0];
    table->max_blocks_per_seq = found.shape[1];
    table->indices = found.data;
    table->indices_count = found.shape[0] * found.shape[1];
    return true;
  }

  bool read(const Arguments &given, Py_ssize_t i, kvx_seq_lens_t *lens) const {
    if (const auto *described = given.described<kvx_seq_lens_t>(i)) {
      *lens = *described;
      return true;
    }
    if (descriptors.read(type, given.tensor(i), index_memory, lens)) {
      given.are_owned = false;
      return true;
    }
    Indices found;
    if (!read(given, i, 1, &found)) return false;
    lens->dtype = found.dtype;
    lens->seq_count = found.shape[0];
    lens->lengths = found.data;
    return true;
  }

  // Makes the call `run(stream)`. Releases the GIL, unless the call is too brief for other threads
  // to use it. False with a Python exception. The caller's arguments keep the tensors alive.
  template <class Run>
  bool call(const Arguments &given, bool is_brief, kvx_status_t *status, const Run &run) const {
    void *now = stream;
    if (given.have_stream() && !is_none(given.args[given.num_tensors])) {
      now = PyLong_AsVoidPtr(given.args[given.num_tensors]);
      if (!now && PyErr_Occurred()) return false;
    } else if (!given.are_described() && !is_none(ask_stream)) {
      PyObject *answer = PyObject_CallObject(ask_stream, nullptr);
      if (!answer) return false;
      now = is_none(answer) ? nullptr : PyLong_AsVoidPtr(answer);
      Py_DecRef(answer);
      if (!now && PyErr_Occurred()) return false;
    }
    PyThreadState *state = is_brief ? nullptr : PyEval_SaveThread();
    *status = run(now);
    if (state) PyEval_RestoreThread(state);
    return true;
  }

  bool is_brief(const kvx_kv_io_desc_t &io) const {
    const auto v_head_dim =
        io.value.ndim ? static_cast<double>(io.value.shape[io.value.ndim - 1]) : 0.0;
    const double heads = double{1} * io.num_tokens * io.num_kv_heads;
    return memory == KVX_MEMORY_HOST && 2 * heads * (io.head_dim + v_head_dim) <= kBriefBytes;
  }
};

}  // namespace
}  // namespace kvx
