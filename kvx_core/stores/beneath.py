"""Opens, makes and deletes files and folders below a directory handle.

Never follows a symbolic link.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING

from kvx_core._c.file_calls import read_file
from kvx_core._c.os_files import OpenFile, close, first_bytes

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer as Buffer

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Without O_NONBLOCK, opening a FIFO waits for a writer.
FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
NOTHING = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC  # for fstat only; any kind of file

ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)  # no folder of this name

# openat2 (Linux 5.6) walks a whole path in one call; a call per folder takes three times as long.
# Source: linux include/uapi/linux/openat2.h, struct open_how
_SYS_OPENAT2 = 437
_RESOLVE_NO_SYMLINKS = 0x04
_CURRENT = -100  # AT_FDCWD: relative paths begin at the current directory
_HOW_BYTES = 24

# The kernel has no openat2, or a seccomp filter forbids it: some answer EPERM.
_UNAVAILABLE = (errno.ENOSYS, errno.EPERM, errno.EINVAL)

_NO_MODES = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS)
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF)

_read_file = read_file()
_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = [
    *(ctypes.c_long, ctypes.c_int, ctypes.c_char_p),
    *(ctypes.c_void_p, ctypes.c_size_t),
]


def open_beneath(root: int, path: str, flags: int) -> int:
    """Opens `path` below the directory handle `root`; returns a handle.

    path:  words with "/" between them, none of them empty or ".."; "" is the root
    flags: FOLDER, FILE or NOTHING
    Raises OSError: ELOOP or ENOTDIR if a word is a symbolic link. With NOTHING, a link that is the
    last word is opened itself.
    """
    handle = _open(root, path or ".", flags)
    return open_by_folders(root, path, flags) if handle is None else handle


def fetch_beneath(
    root: int | None, path: str, views: tuple[Buffer, ...], least: int, most: int
) -> OpenFile | None:
    """Opens a regular file, marks it as used and fills `views` with its first bytes. Does all of
    this in one call where the kernel has openat2.

    root:        None: `path` is not relative to a handle, and should contain no symbolic link
    least, most: `views` are filled only if the file has `least` to `most` bytes
    Returns None only if `root` is None: if the kernel has no openat2, `path` contains a link, or a
    folder of `path` is a file.
    Raises OSError; ENXIO if `path` is not a regular file.
    """
    handle, size, count = _read_file(
        _CURRENT if root is None else root, os.fsencode(path), least, most, views
    )
    if handle >= 0:
        found = OpenFile(handle, size)
        if count < 0:
            raise OSError(-count, os.strerror(-count), path)
        wanted = sum(len(memoryview(view)) for view in views)
        if least <= size <= most and count < min(size, wanted):
            found.num_bytes = count  # the file has become shorter
        return found
    if root is None and -handle in (errno.ELOOP, errno.ENOTDIR):
        return None  # `path` contains a link now, or the root is a file
    if -handle not in _UNAVAILABLE:
        raise OSError(-handle, os.strerror(-handle), path)
    if root is None:
        return None
    opened = open_by_folders(root, path, FILE)
    with suppress(OSError):  # the file may belong to another user
        os.utime(opened)
    return first_bytes(opened, views, least, most)


def _open(folder: int, path: str, flags: int) -> int | None:
    encoded, how = os.fsencode(path), ctypes.addressof(_how(flags))
    while True:
        handle: int = _syscall(_SYS_OPENAT2, folder, encoded, how, _HOW_BYTES)
        if handle >= 0:
            return handle
        error = ctypes.get_errno()
        if error in _UNAVAILABLE:
            return None
        if error != errno.EINTR:
            raise OSError(error, os.strerror(error), path)


def open_by_folders(root: int, path: str, flags: int) -> int:
    """Does the same as open_beneath where openat2 is not available: opens folder by folder."""
    *folders, last = path.split("/") if path else ["."]
    handle = root
    try:
        for folder in folders:
            inner = os.open(folder, FOLDER, dir_fd=handle)
            if handle != root:
                close(handle)
            handle = inner
        return os.open(last, flags, dir_fd=handle)
    finally:
        if handle != root:
            close(handle)


def sync_folder(handle: int) -> None:
    """Waits until the entries of a directory are on the disk. Raises OSError."""
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:  # some file systems sync files only
            raise


def make_folders(
    root: int, path: str, mode: int, changed: Callable[[int], None] = sync_folder
) -> int:
    """Opens the folder at `path` and returns a handle. Makes missing folders with this mode.

    changed: called with a handle of each folder in which a new folder was made
    Raises OSError.
    """
    with suppress(FileNotFoundError):
        return open_beneath(root, path, FOLDER)
    return make_missing(root, path, mode, changed)


def make_missing(
    root: int, path: str, mode: int, changed: Callable[[int], None] = sync_folder
) -> int:
    """Does the same as make_folders, for a folder that was missing just now: makes it first."""
    above, _, word = path.rpartition("/")
    parent = make_folders(root, above, mode, changed) if above else os.dup(root)
    try:
        try:
            os.mkdir(word, 0o700, dir_fd=parent)
        except FileExistsError:  # another process has made it
            return os.open(word, FOLDER, dir_fd=parent)
        handle = os.open(word, FOLDER, dir_fd=parent)
        try:
            set_mode(handle, mode)
            changed(parent)
        except BaseException:
            close(handle)
            raise
        return handle
    finally:
        close(parent)


def set_mode(handle: int, mode: int) -> None:
    """Sets the mode of a new file or folder; the umask does not count. Raises OSError."""
    try:
        os.fchmod(handle, mode)
    except OSError as error:
        if error.errno not in _NO_MODES:  # a file system without modes
            raise


def sync_file_system(handle: int) -> None:
    """Waits until all files of this handle's file system are on the disk. Raises OSError."""
    if _libc.syncfs(handle):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


@cache
def _how(flags: int) -> ctypes.Array[ctypes.c_uint64]:
    """Returns a struct open_how: flags, mode, resolve."""
    return (ctypes.c_uint64 * 3)(flags, 0, _RESOLVE_NO_SYMLINKS)


def remove_beneath(root: int, name: str, remove: Callable[..., None]) -> int | None:
    """Deletes a file or an empty folder. Returns its bytes, or None if it did not exist.

    remove: os.unlink or os.rmdir
    Raises OSError.
    """
    path, _, last = name.rpartition("/")
    try:
        folder = open_beneath(root, path, FOLDER)
        try:
            status = os.stat(last, dir_fd=folder, follow_symlinks=False)
            remove(last, dir_fd=folder)
        finally:
            close(folder)
    except OSError as error:
        if error.errno not in ABSENT:
            raise
        return None
    return allocated(status) or status.st_size


def allocated(status: os.stat_result) -> int:
    """Returns the bytes that a file takes on the disk; 0 on file systems that do not say."""
    return status.st_blocks * 512
