"""Open files: closed without a word, and what their file systems promise.

Source: Linux include/uapi/linux/magic.h; man 2 statfs, f_type
"""

from __future__ import annotations

import ctypes
import io
import os
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import islice
from typing import BinaryIO

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


class OwnFile(ReadFile):
    """One that closes itself when it is no longer referenced. FileIO would warn."""

    def __del__(self) -> None:
        self.close()


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
