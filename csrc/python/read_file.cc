// Opens a file below a folder, marks it as used and reads its first bytes, in one call that holds
// the GIL only at its ends.
#include "cpython.h"
#include "files.h"
#include "kvx/kvx_abi.h"

namespace kvx {
namespace {

constexpr int kMostViews = 64;

struct Views {
  Py_buffer buffers[kMostViews];
  iovec parts[kMostViews];
  int num = 0;

  ~Views() {
    for (int i = 0; i < num; ++i) PyBuffer_Release(&buffers[i]);
  }

  // False with a Python exception.
  bool take(PyObject *view) {
    if (PyObject_GetBuffer(view, &buffers[num], PyBUF_WRITABLE)) return false;
    parts[num] = {buffers[num].buf, static_cast<size_t>(buffers[num].len)};
    ++num;
    return true;
  }
};

struct Found {
  int64_t handle;  // or minus an errno
  int64_t size = 0;
  int64_t count = 0;  // of bytes that were read, or minus an errno
};

Found found(int folder, const char *path, int64_t least, int64_t most, Views *views) {
  const int handle = opened(folder, path);
  if (handle < 0) return {handle};
  const int64_t size = size_of(handle);
  if (size < 0) {
    close(handle);
    return {size};
  }
  mark_as_used(handle);
  Found found = {handle, size};
  if (least <= size && size <= most) found.count = filled(handle, views->parts, views->num);
  return found;
}

// NULL with a Python exception if there is no memory.
PyObject *tuple_of(const Found &one) {
  PyObject *const handle = PyLong_FromLong(one.handle), *const size = PyLong_FromLong(one.size),
                  *const count = PyLong_FromLong(one.count);
  PyObject *const all = handle && size && count ? PyTuple_Pack(3, handle, size, count) : nullptr;
  if (handle) Py_DecRef(handle);
  if (size) Py_DecRef(size);
  if (count) Py_DecRef(count);
  return all;
}

// (folder, path, least, most, views) -> (handle, size, bytes that were read). EINVAL: there are
// more than kMostViews.
PyObject *run(PyObject *, PyObject *const *args, Py_ssize_t num_args) {
  if (num_args != 5) return nullptr;
  const long folder = PyLong_AsLong(args[0]);
  const char *const path = PyBytes_AsString(args[1]);
  const long least = PyLong_AsLong(args[2]), most = PyLong_AsLong(args[3]);
  const Py_ssize_t num = PyTuple_Size(args[4]);
  if (PyErr_Occurred()) return nullptr;
  Views views;
  Found one = {-EINVAL};
  if (num <= kMostViews) {
    for (Py_ssize_t i = 0; i < num; ++i) {
      if (!views.take(PyTuple_GetItem(args[4], i))) return nullptr;
    }
    PyThreadState *const state = PyEval_SaveThread();
    one = found(static_cast<int>(folder), path, least, most, &views);
    PyEval_RestoreThread(state);
  }
  PyObject *const all = tuple_of(one);
  if (!all && one.handle >= 0) close(static_cast<int>(one.handle));
  return all;
}

}  // namespace
}  // namespace kvx

extern "C" KVX_API PyObject *kvx_python_read_file(void) {
  static PyMethodDef method = {"kvx.read_file", &kvx::run, METH_FASTCALL, nullptr};
  return PyCFunction_NewEx(&method, nullptr, nullptr);
}
