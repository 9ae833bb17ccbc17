"""Where the files of a store lie: a directory, or whatever else can do these four things.

What is in the files, and how they are named, is for others to know.
"""

from __future__ import annotations

import errno
import io
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import BinaryIO, Protocol

from kvx_core.errors import InvalidArgumentError
from kvx_core.snapshot import StoreError

_STALE_SECONDS = 3600  # nobody writes one file for so long


class BlobStore(Protocol):
    """Files by name. A name is words with "/" between them; the same name has the same content."""

    def put(self, name: str, write: Callable[[BinaryIO], None]) -> bool:
        """Stores what `write` writes to the new file it is given: all of it or nothing, and
        durably. The file is unbuffered, writable and seekable.

        Returns False, and may not call `write`, if the name is there already.
        Raises StoreError, and what `write` raises.
        """
        ...

    def open(self, name: str) -> BinaryIO | None:
        """A regular file with the content, unbuffered, which the caller closes; None: there is none
        (any more). Marks it as used. Raises StoreError for a fault that may pass.
        """
        ...

    def names(self, folder: str) -> list[str]:
        """The last words of the names, and of the folders, directly below a folder."""
        ...

    def delete(self, name: str) -> None:
        """Makes sure that the name is not there. Raises StoreError."""
        ...


class Directory:
    """A BlobStore in a directory, which processes and machines may share.

    A file appears under its name when it is complete and on the disk; until then it has a temporary
    name beside it, beginning with a dot. Who may read is up to the directory: it is made for its
    owner alone if it is not there, and files in it follow the umask.
    """

    def __init__(self, root: Path | str, max_bytes: int | None = None) -> None:
        """root: made when something is put; max_bytes: about which `put` trims; None: never"""
        self.root = Path(root)
        self.max_bytes = max_bytes
        self._room = 0  # bytes to put until the next trim
        self._lock = Lock()

    def put(self, name: str, write: Callable[[BinaryIO], None]) -> bool:
        """As BlobStore.put."""
        path = self._path(name)
        if os.path.lexists(path):
            return False
        temporary = None
        try:
            temporary = self._temporary(path)
            with temporary.open("r+b", buffering=0) as file:
                write(file)
            _sync(temporary)
            num_bytes = temporary.stat().st_size
            is_new = _publish(temporary, path)
            _sync(path.parent)
        except OSError as error:
            raise StoreError(f"{path} cannot be written: {error}") from None
        finally:
            if temporary is not None:
                with suppress(OSError):
                    temporary.unlink(missing_ok=True)
        if is_new and self.max_bytes is not None:
            self._make_room(num_bytes, self.max_bytes)
        return is_new

    def open(self, name: str) -> BinaryIO | None:
        """As BlobStore.open; None for what is no regular file."""
        path = self._path(name)
        try:
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO):
                return None
            raise StoreError(f"{path} cannot be read: {error}") from None
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            return None
        with suppress(OSError):  # a directory that is only read
            os.utime(file)
        return io.FileIO(file)

    def names(self, folder: str) -> list[str]:
        """As BlobStore.names; empty for a folder that cannot be read."""
        try:
            found = os.listdir(self._path(folder) if folder else self.root)
        except OSError:
            return []
        return [name for name in found if not name.startswith(".")]

    def delete(self, name: str) -> None:
        """As BlobStore.delete; folders that this leaves empty go too."""
        path = self._path(name)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"{path} cannot be deleted: {error}") from None
        with suppress(OSError):  # not empty, or not ours
            for folder in path.relative_to(self.root).parents:
                if folder != Path():
                    (self.root / folder).rmdir()

    def trim(self) -> int:
        """Deletes what is not needed: temporary files that nobody writes any more and, if there are
        more than max_bytes, the least recently used files until a tenth of that is free.

        Files directly in the root stay. Returns the bytes that are left.
        """
        found = sorted(self._files())
        left = sum(num_bytes for _, num_bytes, _ in found)
        if self.max_bytes is None or left <= self.max_bytes:
            return left
        for _, num_bytes, name in found:
            if left <= self.max_bytes * 9 // 10:
                break
            with suppress(StoreError):
                self.delete(name)
                left -= num_bytes
        return left

    def _make_room(self, num_bytes: int, max_bytes: int) -> None:
        """Trims when so much was put since the last time that it may be needed."""
        with self._lock:
            self._room -= num_bytes
            if self._room < 0:
                self._room = max(0, max_bytes - self.trim())

    def _files(self) -> Iterator[tuple[int, int, str]]:
        """Time of last use, bytes and name of each file; deletes stale temporary files."""
        stale = time.time() - _STALE_SECONDS
        for folder, _, files in os.walk(self.root):
            for file in files:
                path = Path(folder, file)
                with suppress(OSError):
                    status = path.lstat()
                    if file.startswith("."):
                        if status.st_mtime < stale:
                            path.unlink()
                    elif path.parent != self.root:
                        name = path.relative_to(self.root).as_posix()
                        yield status.st_mtime_ns, status.st_size, name

    def _path(self, name: str) -> Path:
        words = name.split("/")
        if "\0" in name or any(not word or word.startswith(".") for word in words):
            raise InvalidArgumentError(
                f"the name of a blob is {name!r}, expected words with '/' between them, none of "
                "them empty or beginning with a dot"
            )
        return self.root / name

    def _temporary(self, path: Path) -> Path:
        """A new empty file beside `path`."""
        if not self.root.exists():
            self.root.parent.mkdir(parents=True, exist_ok=True)
            self.root.mkdir(mode=0o700, exist_ok=True)
        temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}.tmp")
        for attempt in range(5):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                temporary.touch(exist_ok=False)
                break
            except FileNotFoundError:  # `delete` took the empty folder away
                if attempt == 4:
                    raise
        return temporary


def _publish(temporary: Path, path: Path) -> bool:
    """Gives a complete file its name; False if somebody else was first."""
    try:
        os.link(temporary, path)  # never replaces
    except FileExistsError:
        return False
    except OSError:  # a file system without hard links: what is replaced is the same content
        os.rename(temporary, path)
    return True


def _sync(path: Path) -> None:
    """Waits until a file or the entries of a directory are on the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
