// Files that C opens for Python, below folders that no symbolic link leads to.
#pragma once

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

namespace kvx {

// Source: Linux include/uapi/linux/openat2.h, struct open_how, RESOLVE_NO_SYMLINKS
constexpr long kOpenat2 = 437;
struct OpenHow {
  uint64_t flags, mode, resolve;
};
constexpr uint64_t kNoSymlinks = 0x04;

// Without O_NONBLOCK, opening a FIFO waits for a writer.
constexpr uint64_t kReadFlags = O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC;

// A file of any sort, or minus an errno. No symbolic link is followed.
inline int opened(int folder, const char *path, uint64_t flags = kReadFlags) {
  const OpenHow how = {flags, 0, kNoSymlinks};
  long handle;
  do {
    handle = syscall(kOpenat2, folder, path, &how, sizeof how);
  } while (handle < 0 && errno == EINTR);
  return handle < 0 ? -errno : static_cast<int>(handle);
}

// The bytes of a regular file, or minus an errno: ENXIO if it is none.
inline int64_t size_of(int handle) {
  struct stat status;
  if (fstat(handle, &status)) return -errno;
  return S_ISREG(status.st_mode) ? status.st_size : -ENXIO;
}

// Marks a file as used now, unless another user has it.
inline void mark_as_used(int handle) { futimens(handle, nullptr); }

// Drops the first `count` bytes of the parts.
template <class Number>
inline void advance(size_t count, iovec **parts, Number *num) {
  for (; *num && count >= (*parts)->iov_len; ++*parts, --*num) count -= (*parts)->iov_len;
  if (*num) {
    (*parts)->iov_base = static_cast<char *>((*parts)->iov_base) + count;
    (*parts)->iov_len -= count;
  }
}

// Fills the parts from the file's begin on, as far as it goes. The number of bytes, or minus an
// errno. Changes the parts.
inline int64_t filled(int handle, iovec *parts, int num) {
  int64_t total = 0;
  while (num) {
    const ssize_t count = preadv(handle, parts, num, total);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return -errno;
    if (!count) break;
    total += count;
    advance(static_cast<size_t>(count), &parts, &num);
  }
  return total;
}

}  // namespace kvx
