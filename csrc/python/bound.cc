// Bound calls: write_kv, gather_kv and runs of a plan as Python functions that read their arguments
// in tens of nanoseconds each.
//
// They read plain torch tensors, through DLPack, and in HOST memory numpy's arrays; slots, tables
// and lengths there may also be other buffers, lists and tuples of int. If they cannot read an
// argument, they do nothing and return minus the sum of what Python must describe (`Left`). Python
// reads every kind of tensor and raises for one that cannot be used; then it calls again with C
// structs. libkvx validates the call, as always.
//
// A call keeps the objects that it is bound to, torch tensors behind the descriptors included. It
// also returns to Python if the storage of one of these has been resized or replaced.
#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "binding.h"

namespace kvx {
namespace {

struct Write {
  static constexpr char kName[] = "kvx.write";

  Binding bound;
  decltype(&kvx_write_kv_ext) function;
  const kvx_cache_desc_t *cache;
  const kvx_write_desc_t *like;  // the constant part of each call; key and value are empty
  const kvx_write_options_t *options;

  PyObject *kept() const { return bound.kept; }

  // (key, value or None, slots[, stream[, key, value, slots as structs]]) -> status, or minus a sum
  // of Left
  PyObject *run(PyObject *const *args, Py_ssize_t num_args) const {
    const Arguments given{args, 3, num_args};
    kvx_write_desc_t write = *like;
    long left = bound.moved(given);
    if (!bound.read(given, 0, &write.io.key)) left |= kKey;
    if (!bound.read_value(given, 1, &write.io.value)) left |= kValue;
    if (!bound.read(given, 2, &write.slots)) left |= kIndices;
    if (left) return left_to_python(left);

    write.io.num_tokens = write.slots.token_count;
    kvx_status_t status;
    auto now = *options;
    now.flags |= bound.owner_flag(given);
    const auto run = [&](void *stream) { return function(cache, &write, &now, stream); };
    if (!bound.call(given, bound.is_brief(write.io), &status, run)) return nullptr;
    return PyLong_FromLong(status);
  }
};

struct Gather {
  static constexpr char kName[] = "kvx.gather";

  Binding bound;
  decltype(&kvx_gather_kv_ext) function;
  const kvx_cache_desc_t *cache;
  const kvx_gather_desc_t *like;
  const kvx_gather_options_t *options;

  PyObject *kept() const { return bound.kept; }

  // (key, value or None, block_table, seq_lens[, stream[, key, value, block_table, seq_lens as
  // structs, max_seq_len or None]]) -> status, or minus a sum of Left
  PyObject *run(PyObject *const *args, Py_ssize_t num_args) const {
    const Arguments given{args, 4, num_args};
    kvx_gather_desc_t gather = *like;
    long left = bound.moved(given);
    if (!bound.read(given, 0, &gather.io.key, /*is_written=*/true)) left |= kKey;
    if (!bound.read_value(given, 1, &gather.io.value, /*is_written=*/true)) left |= kValue;
    if (!bound.read(given, 2, &gather.block_table)) left |= kIndices;
    if (!bound.read(given, 3, &gather.seq_lens)) left |= kLens;
    if (left) return left_to_python(left);

    const kvx_tensor_desc_t &key = gather.io.key;
    const uint64_t num_rows =
        uint64_t{gather.block_table.seq_count} * std::max(gather.block_table.beam_width, 1u);
    int64_t max_seq_len = 0;
    if (given.are_described() && !is_none(args[num_args - 1])) {
      max_seq_len = PyLong_AsLong(args[num_args - 1]);
    } else if (key.ndim == 4) {
      max_seq_len = key.shape[1];
    } else if (key.ndim > 0) {
      max_seq_len =
          key.shape[0] / static_cast<int64_t>(std::clamp<uint64_t>(num_rows, 1, INT64_MAX));
    }
    const bool are_counts = 0 <= max_seq_len && max_seq_len <= UINT32_MAX &&
                            num_rows <= UINT32_MAX / std::max<uint64_t>(max_seq_len, 1);
    if (!are_counts) return left_to_python(kSizes);

    gather.io.num_tokens = static_cast<uint32_t>(num_rows * max_seq_len);
    gather.max_seq_len = static_cast<uint32_t>(max_seq_len);
    kvx_status_t status;
    auto now = *options;
    now.flags |= bound.owner_flag(given);
    const auto run = [&](void *stream) { return function(cache, &gather, &now, stream); };
    if (!bound.call(given, bound.is_brief(gather.io), &status, run)) return nullptr;
    return PyLong_FromLong(status);
  }
};

// The sum of lengths on the host, and the longest of them. libkvx refuses negative ones.
template <class Int>
void measure(const kvx_seq_lens_t &lens, uint64_t *sum, int64_t *longest) {
  const auto *lengths = static_cast<const Int *>(lens.lengths);
  for (uint32_t i = 0; i < lens.seq_count; ++i) {
    *sum += static_cast<uint64_t>(lengths[i]);
    *longest = std::max(*longest, int64_t{lengths[i]});
  }
}

// What slots and a table that are given as numbers have at an end of a plan; PlanEnd of
// kvx_core/_c/bound.py.
struct PlanEnd {
  int64_t invalid_slot;
  uint32_t table_flags;
};

struct RunPlan {
  static constexpr char kName[] = "kvx.run_plan";
  static constexpr Py_ssize_t kNumTensors = 7;

  Binding bound;
  decltype(&kvx_plan_run) function;
  const kvx_plan_t *plan;
  uint64_t token_bytes;  // 0: calls are not brief
  PlanEnd ends[2];       // source and destination
  bool counts;           // leaves lengths that the host cannot read to Python

  PyObject *kept() const { return bound.kept; }

  // (seq_lens, then block_table, slots and starts of the source and of the destination, stream or
  // None[, these seven as structs, max_seq_len]): descriptors or what they are made of, tables
  // PACKED, or None for those of the plan -> the tokens of all rows, 0 if the host cannot read
  // their lengths; or minus a sum of Left; or minus (status << kFailed)
  PyObject *run(PyObject *const *args, Py_ssize_t num_args) const {
    if (num_args != kNumTensors + 1 && num_args != 2 * kNumTensors + 2) {
      return left_to_python(kSizes);
    }
    const Arguments given{args, kNumTensors, num_args};
    kvx_plan_lookups_t lookups = {};
    kvx_block_table_t tables[2] = {};
    kvx_slot_mapping_t slots[2] = {};
    kvx_seq_lens_t starts[2] = {}, lens = {};
    lookups.size = sizeof lookups;
    const auto read = [&](Py_ssize_t i, auto *desc, auto **found) {
      if (is_none(given.tensor(i)) && !given.are_described()) return true;
      if (is_none(given.tensor(i)) && is_none(args[kNumTensors + 1 + i])) return true;
      desc->size = sizeof *desc;
      *found = desc;
      return bound.read(given, i, desc);
    };
    long left = bound.moved(given);
    if (!read(0, &lens, &lookups.seq_lens)) left |= kLens;
    for (const int end : {0, 1}) {
      kvx_end_lookup_t *const lookup = end ? &lookups.dst : &lookups.src;
      tables[end].format = KVX_BLOCK_TABLE_PACKED;
      tables[end].flags = ends[end].table_flags;
      slots[end].invalid_slot = ends[end].invalid_slot;
      if (!read(3 * end + 1, &tables[end], &lookup->block_table)) left |= kIndices;
      if (!read(3 * end + 2, &slots[end], &lookup->slots)) left |= kIndices;
      if (!read(3 * end + 3, &starts[end], &lookup->starts)) left |= kLens;
    }
    const bool is_read = lens.lengths && bound.index_memory == KVX_MEMORY_HOST;
    const bool are_counted = is_read || (lookups.seq_lens && !lens.seq_count);
    if (counts && !given.are_described() && !are_counted) left |= kLens;
    if (left) return left_to_python(left);

    uint64_t num_tokens = 0;
    int64_t longest = 0;
    if (given.are_described()) {
      longest = PyLong_AsLong(args[num_args - 1]);
    } else if (is_read && lens.dtype == KVX_DTYPE_S32) {
      measure<int32_t>(lens, &num_tokens, &longest);
    } else if (is_read && lens.dtype == KVX_DTYPE_S64) {
      measure<int64_t>(lens, &num_tokens, &longest);
    }
    const uint64_t rows = std::max(rows_of(tables[0]), rows_of(tables[1]));
    num_tokens *= std::max<uint64_t>(rows / std::max(lens.seq_count, 1u), 1);
    // Beyond what the field holds no bound is named: such lengths are libkvx's to refuse.
    const bool is_bound = 0 <= longest && longest <= UINT32_MAX;
    lookups.max_seq_len = is_bound ? static_cast<uint32_t>(longest) : 0;
    const bool is_brief = token_bytes && is_read && !given.are_described() &&
                          bound.memory == KVX_MEMORY_HOST &&
                          static_cast<double>(num_tokens) * token_bytes <= kBriefBytes;
    kvx_status_t status;
    const auto run = [&](void *stream) { return function(plan, &lookups, stream); };
    if (!bound.call(given, is_brief, &status, run)) return nullptr;
    return PyLong_FromLong(status ? -(long{status} << kFailed) : static_cast<long>(num_tokens));
  }

  static uint64_t rows_of(const kvx_block_table_t &table) {
    return uint64_t{table.seq_count} * std::max(table.beam_width, 1u);
  }
};

// Address, device, dtype, shape and strides of tensors, as bytes to compare or to look up.
struct Identity {
  static constexpr char kName[] = "kvx.identity";
  static constexpr Py_ssize_t kMostTensors = 4;

  TensorType tensors;

  PyObject *kept() const { return tensors.type; }

  // (tensor or None, ...) -> bytes, or a number where one cannot be read
  PyObject *run(PyObject *const *args, Py_ssize_t num_args) const {
    struct {
      void *data;
      int64_t storage_bytes;
      int32_t device_type, device_id, dtype, ndim;
      int64_t shape[KVX_MAX_TENSOR_DIMS], stride[KVX_MAX_TENSOR_DIMS];
    } all[kMostTensors] = {};
    if (num_args > kMostTensors) return left_to_python(kKey);
    for (Py_ssize_t i = 0; i < num_args; ++i) {
      DLTensor found;
      all[i].ndim = -1;
      if (is_none(args[i])) continue;
      if (!tensors.read(args[i], &found) ||
          tensors.storage_bytes(tensors.handle_of(args[i]), &all[i].storage_bytes) != 0) {
        return left_to_python(kKey);
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

// Reads integers on the host as a call does.
struct ReadIndices {
  static constexpr char kName[] = "kvx.read_indices";

  Binding bound;  // to nothing

  PyObject *kept() const { return bound.kept; }

  // (tensor, array or list, ndim: 1 or 2) -> (dtype, rows, columns or 0, address, None or a
  // bytearray with the numbers of a list), or None where it cannot be read
  PyObject *run(PyObject *const *args, Py_ssize_t num_args) const {
    const Arguments given{args, num_args, num_args};
    Indices found = {};
    const auto ndim = static_cast<int32_t>(PyLong_AsLong(args[1]));
    const bool has_memory =
        bound.type.is_tensor(args[0]) || bound.descriptors.is_numpy(bound.type, args[0]);
    const bool is_list = Items(args[0], bound.type.type_of(args[0])).is_sequence;
    // Others would have to lend their memory for longer than this call.
    if ((!has_memory && !is_list) || !bound.read(given, 0, ndim, &found)) return Py_BuildValue("");

    PyObject *numbers = nullptr;
    if (is_list) {
      const int64_t count = int64_t{found.shape[0]} * (ndim == 2 ? found.shape[1] : 1);
      const auto num_bytes = static_cast<Py_ssize_t>(count * sizeof(int64_t));
      numbers = PyByteArray_FromStringAndSize(static_cast<const char *>(found.data), num_bytes);
      if (!numbers) return nullptr;
      found.data = PyByteArray_AsString(numbers);
    }
    const auto address = reinterpret_cast<unsigned long long>(found.data);
    const auto dtype = static_cast<int>(found.dtype);
    return numbers
               ? Py_BuildValue("iIIKN", dtype, found.shape[0], found.shape[1], address, numbers)
               : Py_BuildValue("iIIKs", dtype, found.shape[0], found.shape[1], address, nullptr);
  }
};

// object.__setattr__ of many attributes, as __init__ of a frozen dataclass calls it for each.
struct SetFields {
  static constexpr char kName[] = "kvx.set_fields";

  PyObject *kept() const { return &_Py_NoneStruct; }

  // (object, tuple of names, a value of each) -> object; NULL with a Python exception
  PyObject *run(PyObject *const *args, Py_ssize_t num_args) const {
    for (Py_ssize_t i = 2; i < num_args; ++i) {
      PyObject *const name = PyTuple_GetItem(args[1], i - 2);
      if (!name || PyObject_GenericSetAttr(args[0], name, args[i]) != 0) return nullptr;
    }
    return Py_BuildValue("O", args[0]);
  }
};

// Whether C can read tensors, those of subclasses too: their storage then holds all elements.
struct AreWhole {
  static constexpr char kName[] = "kvx.are_whole";

  TensorType tensors;

  PyObject *kept() const { return tensors.type; }

  // (tensor, ...) -> bool
  PyObject *run(PyObject *const *args, Py_ssize_t num_args) const {
    return PyBool_FromLong(std::all_of(args, args + num_args, [&](PyObject *object) {
      DLTensor found;
      const bool is_tensor =
          tensors.type_of(object) == tensors.type || PyObject_IsInstance(object, tensors.type) == 1;
      return is_tensor && tensors.read_any(object, &found);
    }));
  }
};

// Whether tensors still have the memory that they had.
struct InPlace {
  static constexpr char kName[] = "kvx.in_place";

  TensorType type;
  Held held;
  PyObject *owner;  // owner of `held`; the function keeps it alive

  PyObject *kept() const { return owner; }

  // () -> bool
  PyObject *run(PyObject *const *, Py_ssize_t) const {
    return PyBool_FromLong(held.are_in_place(type));
  }
};

}  // namespace
}  // namespace kvx

extern "C" {

// The function that reads a type's tensors; NULL if the type's capsule `__dlpack_c_exchange_api__`
// has none of this version.
KVX_API kvx::DLTensorFromPyObject kvx_python_reader(PyObject *capsule) {
  const auto *api = static_cast<const kvx::DLPackExchangeApi *>(
      PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
  if (!api) PyErr_Clear();
  return api && api->major == 1 ? api->dltensor_from_py_object : nullptr;
}

KVX_API PyObject *kvx_python_write(const kvx::Binding *bound, decltype(&kvx_write_kv_ext) function,
                                   const kvx_cache_desc_t *cache, const kvx_write_desc_t *like,
                                   const kvx_write_options_t *options) {
  return kvx::function_of(kvx::Write{*bound, function, cache, like, options});
}

KVX_API PyObject *kvx_python_gather(const kvx::Binding *bound,
                                    decltype(&kvx_gather_kv_ext) function,
                                    const kvx_cache_desc_t *cache, const kvx_gather_desc_t *like,
                                    const kvx_gather_options_t *options) {
  return kvx::function_of(kvx::Gather{*bound, function, cache, like, options});
}

KVX_API PyObject *kvx_python_plan(const kvx::Binding *bound, decltype(&kvx_plan_run) function,
                                  const kvx_plan_t *plan, uint64_t token_bytes,
                                  const kvx::PlanEnd *src, const kvx::PlanEnd *dst, int counts) {
  return kvx::function_of(
      kvx::RunPlan{*bound, function, plan, token_bytes, {*src, *dst}, !!counts});
}

KVX_API PyObject *kvx_python_identity(const kvx::TensorType *tensors) {
  return kvx::function_of(kvx::Identity{*tensors});
}

KVX_API PyObject *kvx_python_set_fields() { return kvx::function_of(kvx::SetFields{}); }

KVX_API PyObject *kvx_python_indices(const kvx::Binding *bound) {
  return kvx::function_of(kvx::ReadIndices{*bound});
}

KVX_API PyObject *kvx_python_are_whole(const kvx::TensorType *tensors) {
  return kvx::function_of(kvx::AreWhole{*tensors});
}

KVX_API PyObject *kvx_python_in_place(const kvx::TensorType *type, const kvx::HeldTensor *held,
                                      Py_ssize_t num_held, PyObject *owner) {
  return kvx::function_of(kvx::InPlace{*type, {held, num_held}, owner});
}

}  // extern "C"
