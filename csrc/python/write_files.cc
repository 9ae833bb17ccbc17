// Writes new files, and gives files their names, many in one call that holds the GIL only at its
// ends.
#include <limits.h>
#include <string.h>
#include <sys/file.h>

#include <algorithm>
#include <memory>
#include <new>

#include "cpython.h"
#include "files.h"
#include "kvx/kvx_abi.h"

namespace kvx {
namespace {

constexpr int kNewFlags = O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
constexpr uint64_t kAnyFlags = O_PATH | O_NOFOLLOW | O_CLOEXEC;  // whatever has a name
constexpr uint64_t kFolderFlags = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;

// The bytes of a tuple's buffers, as long as it lives.
class Parts {
 public:
  Parts() = default;
  Parts(const Parts &) = delete;
  Parts &operator=(const Parts &) = delete;
  ~Parts() {
    for (Py_ssize_t i = 0; i < num; ++i) PyBuffer_Release(&buffers_[i]);
  }

  // False with a Python exception.
  bool take(PyObject *tuple) {
    const Py_ssize_t size = PyTuple_Size(tuple);
    if (size <= 0) return !size;
    buffers_.reset(new (std::nothrow) Py_buffer[static_cast<size_t>(size)]);
    parts.reset(new (std::nothrow) iovec[static_cast<size_t>(size)]);
    if (!buffers_ || !parts) return PyErr_NoMemory();
    while (num < size && !PyObject_GetBuffer(PyTuple_GetItem(tuple, num), &buffers_[num], 0)) {
      parts[num] = {buffers_[num].buf, static_cast<size_t>(buffers_[num].len)};
      ++num;
    }
    return num == size;
  }

  std::unique_ptr<iovec[]> parts;
  Py_ssize_t num = 0;

 private:
  std::unique_ptr<Py_buffer[]> buffers_;
};

// Takes the lock that tells others that the file's writer lives. 0, also on a file system without
// locks, or minus an errno: EAGAIN if another process has it.
int lock(int handle) {
  if (!flock(handle, LOCK_EX | LOCK_NB)) return 0;
  const bool has_none = errno == ENOSYS || errno == ENOTSUP || errno == EINVAL || errno == ENOLCK;
  return has_none ? 0 : -errno;
}

// Makes a new file the caller's: locked, and with this mode whatever the umask is. 0 or minus an
// errno: EAGAIN if another process took it for abandoned before it was locked.
int make_own(int handle, mode_t mode) {
  struct stat status;
  if (const int error = lock(handle)) return error;
  if (fstat(handle, &status)) return -errno;
  if (!status.st_nlink) return -EAGAIN;
  if ((status.st_mode & 07777) == mode || !fchmod(handle, mode)) return 0;
  const bool has_no_modes = errno == EPERM || errno == ENOTSUP || errno == ENOSYS;
  return has_no_modes ? 0 : -errno;
}

// 0 or minus an errno. Changes the parts.
int write_all(int handle, iovec *parts, Py_ssize_t num) {
  while (num) {
    const ssize_t count =
        writev(handle, parts, static_cast<int>(std::min<Py_ssize_t>(num, IOV_MAX)));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return -errno;
    advance(static_cast<size_t>(count), &parts, &num);
  }
  return 0;
}

// A file to write: its name in the folder, and the path that it is for.
struct NewFile {
  const char *name, *path;
  Parts parts;
};

struct Written {
  int64_t handle;         // or minus an errno
  int64_t num_bytes = 0;  // on the disk
};

bool is_there(int root, const char *path) {
  const int handle = opened(root, path, kAnyFlags);
  if (handle >= 0) close(handle);
  return handle >= 0;
}

Written written(int folder, int root, mode_t mode, NewFile *file) {
  if (is_there(root, file->path)) return {-EEXIST};
  const int handle = openat(folder, file->name, kNewFlags, mode);
  if (handle < 0) return {errno == EEXIST ? -EAGAIN : -errno};
  int error = make_own(handle, mode);
  if (!error) error = write_all(handle, file->parts.parts.get(), file->parts.num);
  struct stat status;
  if (!error && fstat(handle, &status)) error = -errno;
  if (error) {
    unlinkat(folder, file->name, 0);
    close(handle);
    return {error};
  }
  const int64_t allocated = status.st_blocks * 512;
  return {handle, allocated ? allocated : status.st_size};
}

// (folder, names, mode, contents, root, paths) -> a Written for each file, as bytes
PyObject *run_write(PyObject *, PyObject *const *args, Py_ssize_t num_args) {
  if (num_args != 6) return nullptr;
  const auto folder = static_cast<int>(PyLong_AsLong(args[0]));
  const auto mode = static_cast<mode_t>(PyLong_AsLong(args[2]));
  const auto root = static_cast<int>(PyLong_AsLong(args[4]));
  const Py_ssize_t num = PyTuple_Size(args[1]);
  if (PyErr_Occurred()) return nullptr;
  const std::unique_ptr<NewFile[]> files(new (std::nothrow) NewFile[static_cast<size_t>(num)]);
  if (!files) return PyErr_NoMemory();
  for (Py_ssize_t i = 0; i < num; ++i) {
    files[i].name = PyBytes_AsString(PyTuple_GetItem(args[1], i));
    files[i].path = PyBytes_AsString(PyTuple_GetItem(args[5], i));
    if (PyErr_Occurred() || !files[i].parts.take(PyTuple_GetItem(args[3], i))) return nullptr;
  }
  constexpr auto kSize = static_cast<Py_ssize_t>(sizeof(Written));
  PyObject *const found = PyBytes_FromStringAndSize(nullptr, num * kSize);
  if (!found) return nullptr;
  char *const each = PyBytes_AsString(found);
  PyThreadState *const state = PyEval_SaveThread();
  for (Py_ssize_t i = 0; i < num; ++i) {
    const Written one = written(folder, root, mode, &files[i]);
    memcpy(each + i * kSize, &one, sizeof one);
  }
  PyEval_RestoreThread(state);
  return found;
}

// A file without a name in the store, and the name that it is to get.
struct Unnamed {
  const char *name, *path;
  int handle;
};

// Gives a file its name, deletes its old one and closes it. Or minus an errno: nothing has changed.
int give_name(int folder, int root, const Unnamed &file) {
  char path[PATH_MAX];
  const char *const slash = strrchr(file.path, '/');
  const auto length = slash ? static_cast<size_t>(slash - file.path) : 0;
  if (length >= sizeof path) return -ENAMETOOLONG;
  memcpy(path, file.path, length);
  path[length] = 0;
  const int into = slash ? opened(root, path, kFolderFlags) : root;
  if (into < 0) return into;
  const char *const last = slash ? slash + 1 : file.path;
  const int error = linkat(folder, file.name, into, last, 0) ? -errno : 0;
  if (into != root) close(into);
  if (error) return error;
  unlinkat(folder, file.name, 0);
  close(file.handle);
  return 0;
}

// (folder, names, handles, root, paths) -> a C int for each file, as bytes
PyObject *run_name(PyObject *, PyObject *const *args, Py_ssize_t num_args) {
  if (num_args != 5) return nullptr;
  const auto folder = static_cast<int>(PyLong_AsLong(args[0]));
  const auto root = static_cast<int>(PyLong_AsLong(args[3]));
  const Py_ssize_t num = PyTuple_Size(args[1]);
  if (PyErr_Occurred()) return nullptr;
  const std::unique_ptr<Unnamed[]> files(new (std::nothrow) Unnamed[static_cast<size_t>(num)]);
  if (!files) return PyErr_NoMemory();
  for (Py_ssize_t i = 0; i < num; ++i) {
    files[i] = {PyBytes_AsString(PyTuple_GetItem(args[1], i)),
                PyBytes_AsString(PyTuple_GetItem(args[4], i)),
                static_cast<int>(PyLong_AsLong(PyTuple_GetItem(args[2], i)))};
    if (PyErr_Occurred()) return nullptr;
  }
  constexpr auto kSize = static_cast<Py_ssize_t>(sizeof(int));
  PyObject *const found = PyBytes_FromStringAndSize(nullptr, num * kSize);
  if (!found) return nullptr;
  char *const errors = PyBytes_AsString(found);
  PyThreadState *const state = PyEval_SaveThread();
  for (Py_ssize_t i = 0; i < num; ++i) {
    const int error = give_name(folder, root, files[i]);
    memcpy(errors + i * kSize, &error, sizeof error);
  }
  PyEval_RestoreThread(state);
  return found;
}

}  // namespace
}  // namespace kvx

extern "C" KVX_API PyObject *kvx_python_write_files(void) {
  static PyMethodDef method = {"kvx.write_files", &kvx::run_write, METH_FASTCALL, nullptr};
  return PyCFunction_NewEx(&method, nullptr, nullptr);
}

extern "C" KVX_API PyObject *kvx_python_name_files(void) {
  static PyMethodDef method = {"kvx.name_files", &kvx::run_name, METH_FASTCALL, nullptr};
  return PyCFunction_NewEx(&method, nullptr, nullptr);
}
