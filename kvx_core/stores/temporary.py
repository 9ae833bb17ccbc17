"""Temporaries: makes the temporary files of a store, and deletes those of dead writers.

A writer holds a lock on its file. If a process gets that lock, and the file was made on the same
file system under the same running kernel, the writer is dead. Machines may not see each other's
locks: a file of another machine is deleted when it has not changed for a day, by the clock of the
file system, since the clocks of machines may differ.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from struct import Struct

from kvx_core._c.file_calls import write_files
from kvx_core._c.os_files import close
from kvx_core.stores.beneath import FOLDER, make_folders, open_beneath

_FOLDER = ".tmp"
# O_RDWR: NFS gives an exclusive lock only on files open for writing. O_NONBLOCK: it may be a FIFO.
_TO_LOCK = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EINVAL, errno.ENOLCK)

_ABANDONED_SECONDS = 24 * 3600  # if locks do not tell, a file unchanged for so long is abandoned
_CLEAN_SECONDS = 600  # between two cleanings by one process
_MAX_CLEANED = 4096  # files looked at in one cleaning
_TRIES = 5

_write_files = write_files()
_TWO = Struct("<2q")  # what it says of a file


@dataclass(slots=True)
class Temporary:
    """A new file without a name in the store yet: its handle, its folder's, and its name there."""

    file: int  # -1: it has ended
    folder: int
    name: str

    def end(self) -> None:
        """Deletes the name and closes the file; it stays if it has got another name."""
        if self.file >= 0:
            file, self.file = self.file, -1
            try:
                with suppress(OSError):  # `clean` deletes it later
                    os.unlink(self.name, dir_fd=self.folder)
            finally:
                close(file)


class Temporaries:
    """The temporary files of a store, all in the folder ".tmp" of its root."""

    def __init__(self, folder_mode: int, file_mode: int) -> None:
        self._folder_mode, self._file_mode = folder_mode, file_mode
        self._next_cleaning = 0.0

    @contextmanager
    def folder(self, root: int) -> Iterator[int]:
        """Yields a handle of the folder. Makes it if it is missing. Raises OSError."""
        folder = make_folders(root, _FOLDER, self._folder_mode)
        try:
            if time.monotonic() >= self._next_cleaning:
                self._clean(folder)
            yield folder
        finally:
            close(folder)

    def new(
        self, folder: int, root: int, files: Sequence[tuple[str, Sequence[memoryview]]]
    ) -> list[tuple[Temporary, int] | OSError]:
        """Writes new, locked files. Returns each and its bytes on the disk, or its OSError:
        FileExistsError if its name in the store exists.

        folder: a handle from `folder`, open until the files are ended
        root:   a handle of the root, below which the names are
        files:  names in the store, and bytes: parts that follow one another
        The caller calls `end` of each. Raises OSError.
        """
        place = _place(os.fstat(folder).st_dev)
        found: list[tuple[Temporary, int] | OSError] = [_error(errno.ENOENT)] * len(files)
        left: Sequence[int] = range(len(files))
        for _ in range(_TRIES):
            names = [f".{place}-{secrets.token_hex(8)}.tmp" for _ in left]
            written = _write_files(
                folder,
                tuple(map(os.fsencode, names)),
                self._file_mode,
                tuple(tuple(files[i][1]) for i in left),
                root,
                tuple(os.fsencode(files[i][0]) for i in left),
            )
            again = list[int]()
            for i, name, (file, num_bytes) in zip(
                left, names, _TWO.iter_unpack(written), strict=True
            ):
                if file >= 0:
                    # Some file systems allocate nothing before they sync.
                    num_bytes = max(num_bytes, sum(map(len, files[i][1])))
                    found[i] = Temporary(file, folder, name), num_bytes
                elif file == -errno.EAGAIN:
                    again.append(i)
                else:
                    found[i] = _error(-file)
            left = again
            if not left:
                break
        return found

    def clean(self, root: int) -> None:
        """Deletes the files of dead writers."""
        with suppress(OSError):
            folder = open_beneath(root, _FOLDER, FOLDER)
            try:
                self._clean(folder)
            finally:
                close(folder)

    def now(self, root: int) -> float:
        """Returns the time by the clock of the file system, in seconds. Raises OSError."""
        folder = make_folders(root, _FOLDER, self._folder_mode)
        try:
            return _clock(folder)
        finally:
            close(folder)

    def _clean(self, folder: int) -> None:
        self._next_cleaning = time.monotonic() + _CLEAN_SECONDS
        with suppress(OSError):
            now = _clock(folder)
            with os.scandir(folder) as entries:
                names = [entry.name for entry in islice(entries, _MAX_CLEANED)]
            for name in names:
                if is_temporary(name):
                    delete_if_abandoned(folder, name, now)


def is_temporary(name: str) -> bool:
    """True for the name of a temporary file, of this version of KVX or an earlier one."""
    return name.startswith(".") and name.endswith(".tmp")


def delete_if_abandoned(folder: int, name: str, now: float) -> None:
    """Deletes a temporary file whose writer is dead.

    folder: the handle of its folder
    now:    by the clock of the file system, in seconds
    """
    with suppress(OSError):
        file = os.open(name, _TO_LOCK, dir_fd=folder)
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode):
                return
            is_locked = _lock(file)
            if is_locked is False:
                return
            is_dead = is_locked and name.startswith(f".{_place(status.st_dev)}-")
            if is_dead or status.st_mtime < now - _ABANDONED_SECONDS:
                os.unlink(name, dir_fd=folder)
        finally:
            close(file)


def _lock(file: int) -> bool | None:
    """Tries to lock a file. True if this process has the lock now, False if another one has it.

    Returns None on file systems without locks. Raises OSError.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        raise
    return True


def _error(code: int) -> OSError:
    return OSError(code, os.strerror(code))


def _clock(folder: int) -> float:
    os.utime(folder)  # now, by the clock of the file system
    return os.fstat(folder).st_mtime


@cache
def _place(device: int) -> str:
    """Returns an id of a mounted file system of the running kernel, within which locks work."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        boot = secrets.token_bytes(16)  # so that no other process has it
    return hashlib.sha256(b"%s %d" % (boot, device)).hexdigest()[:16]
