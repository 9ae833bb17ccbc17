// Opens a file below a folder, marks it as used and reads its first bytes: what a load of a store
// does for each of its files, in one call that holds the GIL only at its ends.
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "cpython.h"
#include "kvx/kvx_abi.h"

namespace {

// Source: Linux include/uapi/linux/openat2.h, struct open_how, RESOLVE_NO_SYMLINKS
constexpr long kOpenat2 = 437;
struct OpenHow {
  uint64_t flags, mode, resolve;
};
constexpr uint64_t kNoSymlinks = 0x04;

// Without O_NONBLOCK, opening a FIFO waits for a writer.
constexpr uint64_t kFlags = O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC;
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

int opened(int folder, const char *path) {
  const OpenHow how = {kFlags, 0, kNoSymlinks};
  long handle;
  do {
    handle = syscall(kOpenat2, folder, path, &how, sizeof how);
  } while (handle < 0 && errno == EINTR);
  return handle < 0 ? -errno : static_cast<int>(handle);
}

// Fills the parts as far as the file goes. The number of bytes, or minus an errno.
int64_t filled(int handle, iovec *parts, int num) {
  int64_t total = 0;
  while (num) {
    ssize_t count = preadv(handle, parts, num, total);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return -errno;
    if (!count) break;
    total += count;
    for (; num && static_cast<size_t>(count) >= parts->iov_len; ++parts, --num) {
      count -= static_cast<ssize_t>(parts->iov_len);
    }
    if (num) {
      parts->iov_base = static_cast<char *>(parts->iov_base) + count;
      parts->iov_len -= static_cast<size_t>(count);
    }
  }
  return total;
}

struct Found {
  int64_t handle;  // or minus an errno
  int64_t size = 0;
  int64_t count = 0;  // of bytes that were read, or minus an errno
};

Found found(int folder, const char *path, int64_t least, int64_t most, Views *views) {
  const int handle = opened(folder, path);
  if (handle < 0) return {handle};
  struct stat status;
  const int error = fstat(handle, &status) ? errno : S_ISREG(status.st_mode) ? 0 : ENXIO;
  if (error) {
    close(handle);
    return {-error};
  }
  futimens(handle, nullptr);  // now; it may be another user's
  Found found = {handle, status.st_size};
  if (least <= found.size && found.size <= most) {
    found.count = filled(handle, views->parts, views->num);
  }
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

extern "C" KVX_API PyObject *kvx_python_read_file(void) {
  static PyMethodDef method = {"kvx.read_file", &run, METH_FASTCALL, nullptr};
  return PyCFunction_NewEx(&method, nullptr, nullptr);
}
