"""Open files: closed without a word, and what their file systems promise.

Source: Linux include/uapi/linux/magic.h; man 2 statfs, f_type
"""

from __future__ import annotations

import ctypes
import errno
import io
import os
import stat
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, BinaryIO, Self

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer as Buffer

# That one preadv or writev takes. Source: Linux include/uapi/linux/uio.h, UIO_MAXIOV
_MOST_PARTS = 1024
_STATFS_BYTES = 256  # at least those of struct statfs, which begins with f_type, a long
_EXT4, _XFS, _BTRFS, _F2FS = 0xEF53, 0x58465342, 0x9123683E, 0xF2F52010
_TMPFS, _OVERLAY = 0x01021994, 0x794C7630

# syncfs brings all to the disk that fsync does. FUSE's does not, and of network file systems only
# the server knows.
_SYNC_TOGETHER = frozenset((_EXT4, _XFS, _BTRFS, _F2FS, _TMPFS))

# A write into a file's mapped memory changes the file's times, once fsync has cleaned its pages.
# On tmpfs and ramfs, whose pages are never clean, it changes none; of network file systems and FUSE
# only the server knows. overlayfs shows the times of the file below it.
# Source: Linux mm/memory.c, do_page_mkwrite; mm/shmem.c has no page_mkwrite
_TELL_OF_MAPPED_WRITES = frozenset((_EXT4, _XFS, _BTRFS, _F2FS, _OVERLAY))

_libc = ctypes.CDLL(None, use_errno=True)


def close(handle: int) -> None:
    """Closes a handle that was read, or whose file was synced: an error then tells of nothing lost.

    Linux frees a handle whatever close(2) returns.
    Source: man 2 close, "Dealing with error returns from close()"
    """
    with suppress(OSError):
        os.close(handle)


class ReadFile(io.FileIO):
    """A file that is read, unbuffered. `close` raises nothing."""

    def close(self) -> None:
        with suppress(OSError):
            super().close()


class OpenFile:
    """A file that is open for reading. It closes itself when it is no longer referenced.

    num_bytes: that it had when it was opened
    """

    __slots__ = ("_handle", "num_bytes")

    def __init__(self, handle: int, num_bytes: int) -> None:
        self._handle, self.num_bytes = handle, num_bytes

    def fileno(self) -> int:
        return self._handle

    def close(self) -> None:
        if (handle := self.release()) >= 0:
            close(handle)

    def release(self) -> int:
        """The handle, which the caller closes now."""
        handle, self._handle = self._handle, -1
        return handle

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def first_bytes(handle: int, views: Sequence[Buffer], least: int, most: int) -> OpenFile:
    """A file that has been opened, which it now owns, and its first bytes.

    views: filled as far as the file goes if it has `least` to `most` bytes
    Raises OSError, ENXIO if it is no regular file.
    """
    found = OpenFile(handle, 0)
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.ENXIO, "no regular file")
    found.num_bytes = status.st_size
    if least <= found.num_bytes <= most:
        with suppress(EOFError):
            read_at(handle, [memoryview(view) for view in views], 0)
    return found


def read_at(handle: int, views: Sequence[memoryview], offset: int) -> None:
    """Fills all views from a file, the first from this offset on.

    Raises EOFError, OSError, ValueError for a file that has been closed.
    """
    if len(views) <= _MOST_PARTS:
        count = os.preadv(handle, views, offset)
        if count == sum(map(len, views)):
            return
    left = deque(view for view in views if view)
    while left:
        count = os.preadv(handle, list(islice(left, _MOST_PARTS)), offset)
        if not count:
            raise EOFError
        offset += count
        _advance(left, count)


def write_all(file: BinaryIO, parts: Iterable[memoryview]) -> None:
    """Writes all parts: with one call if the file is unbuffered, so that the GIL is taken once."""
    left = deque(parts)
    while left:
        if isinstance(file, io.FileIO):
            written = os.writev(file.fileno(), list(islice(left, _MOST_PARTS)))
        else:
            written = file.write(left[0])
        _advance(left, written)


def _advance(left: deque[memoryview], count: int) -> None:
    """Drops the first `count` bytes of what is left to be read or written."""
    while left and count >= len(left[0]):
        count -= len(left.popleft())
    if count:
        left[0] = left[0][count:]


def syncs_together(handle: int) -> bool:
    """Whether syncfs brings the files of this handle's file system to the disk."""
    return hasattr(_libc, "syncfs") and _kind(handle) in _SYNC_TOGETHER


def tells_of_mapped_writes(handle: int) -> bool:
    """Whether a file's times change with every write, those into mapped memory included."""
    return _kind(handle) in _TELL_OF_MAPPED_WRITES


def _kind(handle: int) -> int:
    """f_type of the file system; 0: it does not say."""
    found = ctypes.create_string_buffer(_STATFS_BYTES)
    if _libc.fstatfs(handle, found):
        return 0
    return ctypes.c_long.from_buffer(found).value & 0xFFFFFFFF
