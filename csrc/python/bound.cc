// Bound calls: write_kv and gather_kv as Python functions that read their tensors through DLPack,
// which costs tens of nanoseconds each.
//
// They take torch tensors as these usually come. Anything else they leave to Python, which knows
// every kind of tensor and says what is wrong with one that cannot be used: they return kNotTaken
// and have done nothing. Whether a call is valid is for libkvx to say, as always.
//
// A call keeps what Python has bound it to, torch tensors behind the descriptors included. It
// leaves to Python also once the storage of one of these has been resized or replaced.
#include <algorithm>
#include <cstdint>

#include "cpython.h"
#include "dlpack.h"
#include "kvx/kvx_ext.h"

namespace kvx {
namespace {

constexpr long kNotTaken = -1;
constexpr double kBriefElements = 8 << 10;  // microseconds, wherever they lie

PyObject *not_taken() { return PyLong_FromLong(kNotTaken); }

kvx_dtype_t dtype_of(const DLTensor &tensor) {
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
    case kDLInt << 8 | 32:
      return KVX_DTYPE_S32;
    case kDLInt << 8 | 64:
      return KVX_DTYPE_S64;
  }
  return KVX_DTYPE_INVALID;
}

bool is_in(kvx_memory_type_t memory, const DLTensor &tensor) {
  const int32_t type = tensor.device_type;
  return memory == KVX_MEMORY_HOST ? type == kDLCPU || type == kDLCUDAHost
                                   : memory == KVX_MEMORY_DEVICE && type == kDLCUDA;
}

void *address_of(const DLTensor &tensor) {
  return tensor.data ? static_cast<char *>(tensor.data) + tensor.byte_offset : nullptr;
}

// How torch.Tensor is read; TensorType of kvx_core/_bound.py.
struct TensorType {
  PyObject *type;
  DLTensorFromPyObject to_dlpack;
  Py_ssize_t type_offset;    // of its type in a Python object: PyObject_Type counts a reference
  Py_ssize_t handle_offset;  // of the at::Tensor in its Python object
  bool (*is_neg)(const void *handle);
  int32_t (*data_ptr)(const void *handle, void **data);
  int32_t (*storage_bytes)(const void *handle, int64_t *num_bytes);

  // False for a tensor of more dimensions than KVX has, for one whose numbers torch negates when it
  // reads them, which DLPack does not say, and for all that is not of this very type: to a subclass
  // its memory may mean something else.
  bool read(PyObject *object, DLTensor *tensor) const {
    if (type_of(object) != type || is_neg(handle_of(object))) return false;
    if (to_dlpack(object, tensor) != 0) {
      PyErr_Clear();
      return false;
    }
    return tensor->ndim <= KVX_MAX_TENSOR_DIMS && (tensor->strides || tensor->ndim == 0);
  }

  PyObject *type_of(PyObject *object) const {
    return *reinterpret_cast<PyObject **>(reinterpret_cast<char *>(object) + type_offset);
  }

  const void *handle_of(PyObject *object) const {
    return reinterpret_cast<const char *>(object) + handle_offset;
  }
};

// Where the memory of a tensor lay when a call was bound to it; Held of kvx_core/_bound.py.
struct Held {
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

bool are_in_place(const TensorType &tensors, const Held *held, Py_ssize_t num_held) {
  return std::all_of(held, held + num_held,
                     [&](const Held &tensor) { return tensor.is_in_place(tensors); });
}

// A list or table of integers, contiguous as the ABI wants it.
struct Indices {
  kvx_dtype_t dtype;
  uint32_t shape[2];
  const void *data;
};

// What every call is bound to; Binding of kvx_core/_bound.py.
struct Binding {
  TensorType tensors;
  const Held *held;  // the tensors that the cache and its scales describe
  Py_ssize_t num_held;
  const kvx_cache_desc_t *cache;
  kvx_memory_type_t index_memory;  // where slots, tables and lengths are read
  void *stream;
  PyObject *ask_stream;  // a function that each call asks for the stream, or None
  PyObject *kept;        // whatever owns all this; the function holds it

  bool is_in_place() const { return are_in_place(tensors, held, num_held); }

  // A key or value in the cache's memory. `desc` is empty but for its size.
  bool read(PyObject *object, kvx_tensor_desc_t *desc) const {
    DLTensor found;
    if (!tensors.read(object, &found) || !is_in(cache->k.memory, found)) return false;
    desc->dtype = dtype_of(found);
    desc->layout = KVX_LAYOUT_BLOCK_CUSTOM;
    desc->memory = cache->k.memory;
    desc->ndim = static_cast<uint32_t>(found.ndim);
    std::copy_n(found.shape, found.ndim, desc->shape);
    std::copy_n(found.strides, found.ndim, desc->stride);
    desc->data = address_of(found);
    return desc->dtype != KVX_DTYPE_INVALID;
  }

  bool read(PyObject *object, int32_t ndim, Indices *indices) const {
    DLTensor found;
    if (!tensors.read(object, &found) || !is_in(index_memory, found) || found.ndim != ndim) {
      return false;
    }
    int64_t size = 1;
    for (int32_t i = ndim - 1; i >= 0; --i) {
      const int64_t extent = found.shape[i];
      if (extent > UINT32_MAX || (extent > 1 && found.strides[i] != size)) return false;
      indices->shape[i] = static_cast<uint32_t>(extent);
      size *= extent;
    }
    indices->dtype = dtype_of(found);
    indices->data = address_of(found);
    return indices->dtype != KVX_DTYPE_INVALID && size <= UINT32_MAX;
  }

  // Makes the call, without the GIL unless it is over sooner than other threads could use it.
  // Returns its status. The caller's arguments hold the tensors.
  template <class Function, class Desc, class Options>
  PyObject *call(Function function, const Desc &desc, const Options *options) const {
    void *now = stream;
    if (!is_none(ask_stream)) {
      PyObject *answer = PyObject_CallObject(ask_stream, nullptr);
      if (!answer) return nullptr;
      now = is_none(answer) ? nullptr : PyLong_AsVoidPtr(answer);
      Py_DecRef(answer);
      if (!now && PyErr_Occurred()) return nullptr;
    }
    const kvx_tensor_desc_t &value = desc.io.value;
    const auto v_head_dim = value.ndim ? static_cast<double>(value.shape[value.ndim - 1]) : 0.0;
    const double heads = double{1} * desc.io.num_tokens * desc.io.num_kv_heads;
    const bool is_brief = cache->k.memory == KVX_MEMORY_HOST &&
                          heads * (desc.io.head_dim + v_head_dim) <= kBriefElements;
    PyThreadState *state = is_brief ? nullptr : PyEval_SaveThread();
    const kvx_status_t status = function(cache, &desc, options, now);
    if (state) PyEval_RestoreThread(state);
    return PyLong_FromLong(status);
  }
};

struct Write {
  static constexpr char kName[] = "kvx.write";

  Binding bound;
  decltype(&kvx_write_kv_ext) function;
  const kvx_write_desc_t *like;  // what stays the same from call to call; key and value are empty
  const kvx_write_options_t *options;

  PyObject *kept() const { return bound.kept; }

  // (key, value or None, slots) -> status
  PyObject *run(PyObject *const *args, Py_ssize_t num_args) const {
    kvx_write_desc_t write = *like;
    Indices slots;
    if (num_args != 3 || !bound.is_in_place() || !bound.read(args[0], &write.io.key) ||
        (!is_none(args[1]) && !bound.read(args[1], &write.io.value)) ||
        !bound.read(args[2], 1, &slots)) {
      return not_taken();
    }
    write.io.num_tokens = slots.shape[0];
    write.slots.dtype = slots.dtype;
    write.slots.token_count = slots.shape[0];
    write.slots.slots = slots.data;
    return bound.call(function, write, options);
  }
};

struct Gather {
  static constexpr char kName[] = "kvx.gather";

  Binding bound;
  decltype(&kvx_gather_kv_ext) function;
  const kvx_gather_desc_t *like;
  const kvx_gather_options_t *options;

  PyObject *kept() const { return bound.kept; }

  // (key, value or None, block_table, seq_lens) -> status
  PyObject *run(PyObject *const *args, Py_ssize_t num_args) const {
    kvx_gather_desc_t gather = *like;
    const kvx_tensor_desc_t &key = gather.io.key;
    Indices table, lens;
    if (num_args != 4 || !bound.is_in_place() || !bound.read(args[0], &gather.io.key) ||
        (!is_none(args[1]) && !bound.read(args[1], &gather.io.value)) ||
        !bound.read(args[2], 2, &table) || !bound.read(args[3], 1, &lens) || key.ndim < 3) {
      return not_taken();
    }
    const int64_t num_rows = table.shape[0];
    const int64_t max_seq_len =
        key.ndim == 4 ? key.shape[1] : key.shape[0] / std::max<int64_t>(num_rows, 1);
    if (max_seq_len > UINT32_MAX || num_rows * max_seq_len > UINT32_MAX) return not_taken();

    gather.io.num_tokens = static_cast<uint32_t>(num_rows * max_seq_len);
    gather.max_seq_len = static_cast<uint32_t>(max_seq_len);
    gather.block_table.index_dtype = table.dtype;
    gather.block_table.seq_count = table.shape[0];
    gather.block_table.max_blocks_per_seq = table.shape[1];
    gather.block_table.indices = table.data;
    gather.block_table.indices_count = table.shape[0] * table.shape[1];
    gather.seq_lens.dtype = lens.dtype;
    gather.seq_lens.seq_count = lens.shape[0];
    gather.seq_lens.lengths = lens.data;
    return bound.call(function, gather, options);
  }
};

// What tensors are and where they lie, as bytes to compare or to look up.
struct Fingerprint {
  static constexpr char kName[] = "kvx.fingerprint";
  static constexpr Py_ssize_t kMostTensors = 4;

  TensorType tensors;

  PyObject *kept() const { return tensors.type; }

  // (tensor or None, ...) -> bytes, or kNotTaken
  PyObject *run(PyObject *const *args, Py_ssize_t num_args) const {
    struct {
      void *data;
      int64_t storage_bytes;
      int32_t device_type, device_id, dtype, ndim;
      int64_t shape[KVX_MAX_TENSOR_DIMS], stride[KVX_MAX_TENSOR_DIMS];
    } all[kMostTensors] = {};
    if (num_args > kMostTensors) return not_taken();
    for (Py_ssize_t i = 0; i < num_args; ++i) {
      DLTensor found;
      all[i].ndim = -1;
      if (is_none(args[i])) continue;
      if (!tensors.read(args[i], &found) ||
          tensors.storage_bytes(tensors.handle_of(args[i]), &all[i].storage_bytes) != 0) {
        return not_taken();
      }
      all[i].data = address_of(found);
      all[i].device_type = found.device_type;
      all[i].device_id = found.device_id;
      all[i].dtype = found.code << 24 | found.bits << 16 | found.lanes;
      all[i].ndim = found.ndim;
      std::copy_n(found.shape, found.ndim, all[i].shape);
      std::copy_n(found.strides, found.ndim, all[i].stride);
    }
    const auto num_bytes = num_args * static_cast<Py_ssize_t>(sizeof all[0]);
    return PyBytes_FromStringAndSize(reinterpret_cast<const char *>(all), num_bytes);
  }
};

// Whether tensors have the memory that they had.
struct InPlace {
  static constexpr char kName[] = "kvx.in_place";

  TensorType tensors;
  const Held *held;
  Py_ssize_t num_held;
  PyObject *owner;  // of what `held` points to; the function holds it

  PyObject *kept() const { return owner; }

  // () -> bool
  PyObject *run(PyObject *const *, Py_ssize_t) const {
    return PyBool_FromLong(are_in_place(tensors, held, num_held));
  }
};

// The capsules are nobody else's, so they have no names to compare in each call.
template <class T>
T *state_of(PyObject *capsule) {
  return static_cast<T *>(PyCapsule_GetPointer(capsule, nullptr));
}

// `self`: (capsule of the state, what it needs), which the garbage collector can look into.
template <class T>
PyObject *run(PyObject *self, PyObject *const *args, Py_ssize_t num_args) {
  const T *state = state_of<T>(PyTuple_GetItem(self, 0));
  return state ? state->run(args, num_args) : nullptr;
}

// A Python function that runs this state; NULL with a Python exception.
template <class T>
PyObject *function_of(const T &state) {
  static PyMethodDef method = {T::kName, &run<T>, METH_FASTCALL, nullptr};
  T *owned = new T(state);
  PyObject *capsule =
      PyCapsule_New(owned, nullptr, [](PyObject *capsule) { delete state_of<T>(capsule); });
  if (!capsule) {
    delete owned;
    return nullptr;
  }
  PyObject *self = PyTuple_Pack(2, capsule, state.kept());
  Py_DecRef(capsule);
  if (!self) return nullptr;
  PyObject *function = PyCFunction_NewEx(&method, self, nullptr);
  Py_DecRef(self);
  return function;
}

}  // namespace
}  // namespace kvx

extern "C" {

// What reads a type's tensors; NULL if the capsule `__dlpack_c_exchange_api__` of the type offers
// nothing of this version.
KVX_API kvx::DLTensorFromPyObject kvx_python_reader(PyObject *capsule) {
  const auto *api = static_cast<const kvx::DLPackExchangeApi *>(
      PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
  if (!api) PyErr_Clear();
  return api && api->major == 1 ? api->dltensor_from_py_object : nullptr;
}

KVX_API PyObject *kvx_python_write(const kvx::Binding *bound, decltype(&kvx_write_kv_ext) function,
                                   const kvx_write_desc_t *like,
                                   const kvx_write_options_t *options) {
  return kvx::function_of(kvx::Write{*bound, function, like, options});
}

KVX_API PyObject *kvx_python_gather(const kvx::Binding *bound,
                                    decltype(&kvx_gather_kv_ext) function,
                                    const kvx_gather_desc_t *like,
                                    const kvx_gather_options_t *options) {
  return kvx::function_of(kvx::Gather{*bound, function, like, options});
}

KVX_API PyObject *kvx_python_fingerprint(const kvx::TensorType *tensors) {
  return kvx::function_of(kvx::Fingerprint{*tensors});
}

KVX_API PyObject *kvx_python_in_place(const kvx::TensorType *tensors, const kvx::Held *held,
                                      Py_ssize_t num_held, PyObject *owner) {
  return kvx::function_of(kvx::InPlace{*tensors, held, num_held, owner});
}

}  // extern "C"
