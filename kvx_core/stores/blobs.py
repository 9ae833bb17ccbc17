"""Directory: a BlobStore in a directory of a file system, which many processes may share."""

from __future__ import annotations

import errno
import os
import stat
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, BinaryIO

from kvx_core._c.os_files import OpenFile, ReadFile, close, syncs_together
from kvx_core.argument_checks import instance, integer, one_of
from kvx_core.errors import InvalidArgumentError
from kvx_core.snapshot import StoreError
from kvx_core.stores.beneath import (
    ABSENT,
    FOLDER,
    allocated,
    fetch_beneath,
    open_beneath,
    remove_beneath,
)
from kvx_core.stores.blob_store import MAX_WORDS, ListedStore, Put, Write, check_name, is_word
from kvx_core.stores.eviction import File, evictable, is_entry, lone_records
from kvx_core.stores.new_files import NewFiles, Written
from kvx_core.stores.pace import Pace
from kvx_core.stores.root import MODES, Group, Root
from kvx_core.stores.temporary import Temporaries, delete_if_abandoned, is_temporary
from kvx_core.stores.usage import Usage

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer as Buffer

_MAX_NAMES = 1 << 16  # `names` returns at most so many
_FEW = 4  # files: with so many or more, syncing them together is quicker
_TRIES = 5  # of one call, when other processes delete the files that it uses
_NO_HELP_SECONDS = 60  # without dropping files again, after dropping them did not help
_FUTURE_SECONDS = 60  # a time of last use further ahead than this is wrong

_NO_FILE = (*ABSENT, errno.EISDIR, errno.ENXIO, errno.ENODEV, errno.ENAMETOOLONG)
_GONE = (errno.ENOENT, errno.ESTALE)  # deleted during use; ESTALE: NFS may report it late
_FULL = (errno.ENOSPC, errno.EDQUOT)

_RIGHTS = "Give this user the right to, or share the store with its group: `group`"
_WAYS_OUT = {
    errno.ENOSPC: "Free space there, or use another directory",
    errno.EDQUOT: "Raise the quota, or use another directory",
    errno.EACCES: _RIGHTS,
    errno.EPERM: _RIGHTS,
    errno.EROFS: "Mount it writable, or use another directory",
    errno.ENOTDIR: "A file lies where a directory is expected; delete it",
    errno.ELOOP: "A symbolic link lies in the store, which follows none; delete it",
    errno.EMFILE: "Raise the limit of open files (ulimit -n)",
    errno.ENOENT: "Its folders are being deleted by somebody else",
}


class Directory(ListedStore):
    """A BlobStore in a directory, which threads, processes and machines may share.

    A file gets its name when it is complete and on the disk; until then it lies in the folder
    ".tmp". Symbolic links are followed in the path of the root, and nowhere below it. Nothing stays
    open between two calls, so the directory may be deleted and made again.
    """

    root: Path
    usage: Usage

    def __init__(
        self, root: Path | str, max_bytes: int | None = None, *, group: Group = "none"
    ) -> None:
        """root:      the path of the directory, which the first `put` makes
        max_bytes: `put` trims when files take about so many bytes on the disk. None: `put` deletes
                   files when the disk is full
        group:     the access of users in the directory's group, whatever the umask: "none" (folders
                   0700, files 0600), "read" (2750, 0640) or "write", which includes reading (2770,
                   0660). An existing directory keeps its mode, and so does everything on a file
                   system without modes
        Raises InvalidArgumentError.
        """
        instance("root", root, (str, Path), "a path: a str or a pathlib.Path")
        max_bytes = None if max_bytes is None else integer("max_bytes", max_bytes, 0, 2**63 - 1)
        if "\0" in str(root):
            raise InvalidArgumentError(f"root is {str(root)!r}, expected a path without NUL")
        if os.path.isfile(root):
            raise InvalidArgumentError(f"root is {root}, a file, expected a directory")
        one_of("group", group, *MODES)
        self.root = Path(root)
        self.max_bytes = max_bytes
        self.usage = Usage()
        self._root = Root(self.root, group)
        folder_mode, file_mode = MODES[group]
        self._temporaries = Temporaries(folder_mode, file_mode)
        self._new = NewFiles(self._root, self.root, folder_mode, self._temporaries)
        self._room = 0  # bytes that can be put before the next trim
        self._next_drop = 0.0
        self._lock, self._process = Lock(), os.getpid()

    def put(self, name: str, write: Write, *, durable: bool = True) -> bool:
        """Does what BlobStore.put says.

        If the disk is full, deletes the least recently used files until there is room.
        """
        check_name(name)
        handled = sys.exception()
        tries = full_tries = reached = 0

        def measured(file: BinaryIO) -> None:
            nonlocal reached
            handle = file.fileno()
            try:
                write(file)
            finally:
                with suppress(OSError):
                    status = os.fstat(handle)
                    reached = status.st_size + allocated(status)  # some writers set the size first

        while True:
            before, reached = reached, 0
            try:
                is_first = not tries and not full_tries
                num_bytes = self._put(name, write if is_first else measured, durable)
                break
            except (OSError, StoreError) as error:
                code = _code(error, handled)
                if code in _FULL and self._drop_some(full_tries, reached > before):
                    full_tries += 1
                elif code in _GONE and tries < _TRIES:
                    tries += 1
                elif isinstance(error, StoreError):
                    raise
                else:
                    raise self._failure(name, "written", error) from error
        if num_bytes is not None:
            self._has_grown(1, num_bytes)
        return num_bytes is not None

    def put_all(
        self, files: Sequence[tuple[str, Write]], num_bytes: int = 0, *, durable: bool = True
    ) -> list[Put]:
        """Does what BlobStore.put_all says.

        On a local disk, syncs four or more files together: 64 files of 0.5 MB take a tenth of the
        time. All of them are open at once. A file that cannot be written with the others is put
        alone. Several threads write large files. Files get their names in the order of `files`.
        """
        done: dict[int, Put] = {}
        if not files:
            return []
        with suppress(OSError, StoreError), self._new.place() as place:
            if not durable or (len(files) >= _FEW and syncs_together(place.root)):
                for name, _ in files:
                    check_name(name)
                found = self._new.put_together(place, files, num_bytes, durable=durable)
                for i, put in found.items():
                    if isinstance(put, OSError):
                        done[i] = self._failure(files[i][0], "written", put)
                    else:
                        done[i] = put is not None
                sizes = [put for put in found.values() if isinstance(put, int)]
                self._has_grown(len(sizes), sum(sizes))
        for i, (name, write) in enumerate(files):
            if i not in done:
                done[i] = self._put_one(name, write, durable=durable)
        return [done[i] for i in range(len(files))]

    def _has_grown(self, num_files: int, num_bytes: int) -> None:
        self.usage.changed(num_files, num_bytes)
        if self.max_bytes is not None:
            self._make_room(num_bytes, self.max_bytes)

    def open(self, name: str) -> BinaryIO | None:
        """Does what BlobStore.open says."""
        found = self.fetch(name, ())
        if found is None:
            return None
        opened = ReadFile(found.release())
        opened.name = self.path_of(name)
        return opened

    def fetch(
        self, name: str, views: tuple[Buffer, ...], least: int = 0, most: int = -1
    ) -> OpenFile | None:
        """Does what BlobStore.fetch says."""
        check_name(name)
        try:
            path = self._root.path_of(name)
            found = None if path is None else fetch_beneath(None, path, views, least, most)
            if found is None:
                root = self._open_root(name, "read")
                try:
                    found = fetch_beneath(root, name, views, least, most)
                finally:
                    close(root)
        except OSError as error:
            if error.errno in _NO_FILE:
                return None
            raise self._failure(name, "read", error) from error
        return found

    def folder(self) -> int | None:
        """Does what BlobStore.folder says. None if a subclass overrides `fetch`, or the root cannot
        be opened.
        """
        if getattr(self.fetch, "__func__", None) is not Directory.fetch:
            return None
        try:
            return self._root.open()
        except OSError:
            return None

    def names(self, folder: str) -> list[str]:
        """Does what BlobStore.names says; returns at most 65,536 names.

        Leaves out names that cannot be a word of a store's name.
        """
        if not isinstance(folder, str) or folder:
            check_name(folder)
        found: list[str] = []
        pace = Pace()
        with suppress(OSError, StoreError):
            root = self._open_root(folder, "read")
            try:
                handle = open_beneath(root, folder, FOLDER)
            finally:
                close(root)
            try:
                with os.scandir(handle) as entries:
                    words = (entry.name for entry in entries if is_word(entry.name))
                    for word in islice(words, _MAX_NAMES):
                        found.append(word)
                        pace.yield_gil()
            finally:
                close(handle)
        return found

    def delete(self, name: str) -> None:
        """Does what BlobStore.delete says, and deletes folders that become empty."""
        self._delete(name)

    def _delete(self, name: str) -> bool:
        """Deletes a file. Returns True if this call has deleted it. Raises StoreError."""
        check_name(name)
        try:
            root = self._open_root(name, "deleted")
        except FileNotFoundError:
            return False
        try:
            num_bytes = remove_beneath(root, name, os.unlink)
            folder = name.rpartition("/")[0]
            with suppress(OSError):  # it is not empty, or another user owns it
                while folder:
                    remove_beneath(root, folder, os.rmdir)
                    folder = folder.rpartition("/")[0]
        except OSError as error:
            raise self._failure(name, "deleted", error) from error
        finally:
            close(root)
        if num_bytes is not None:
            self.usage.changed(-1, -num_bytes)
        return num_bytes is not None

    def trim(self) -> int:
        """Deletes temporary files whose writer is dead. If files take more than max_bytes, deletes
        the least recently used ones until a tenth of max_bytes is free.

        Keeps files directly in the root. Keeps records (.json, .mac) until their space has no
        entries and nobody has used them for a day. Returns the bytes of the files that are left.
        Raises StoreError.
        """
        found, now = self._listed("trimmed", clean=True)
        left = sum(num_bytes for _, num_bytes, _ in found)
        if now is not None:
            left -= self._drop(lone_records(found, now), left)
        if self.max_bytes is not None and left > self.max_bytes:
            left -= self._drop(evictable(found), left - self.max_bytes * 9 // 10)
        return left

    def files(self, unread: list[str] | None = None) -> list[File]:
        """Does what ListedStore.files says; bytes are those on the disk. Returns an empty list if
        the directory does not exist.
        """
        return self._listed("listed", unread=unread)[0]

    def free_bytes(self) -> int:
        """Returns the bytes that this user can still write on the disk.

        The directory need not exist yet. Raises StoreError.
        """
        path = os.path.abspath(self.root)
        while not os.path.lexists(path):
            path = os.path.dirname(path)
        try:
            space = os.statvfs(path)
        except OSError as error:
            raise self._failure("", "read", error) from error
        return space.f_bavail * space.f_frsize

    def _put(self, name: str, write: Write, durable: bool) -> int | None:
        """Stores a file. Returns its bytes on the disk, None if the name existed.

        Raises StoreError and OSError.
        """
        with self._new.place() as place, ExitStack() as opened:
            (written,) = self._new.write(place, [(name, write)], opened)
            if isinstance(written, FileExistsError):
                self._new.is_there(place, name)  # raises if it is no file
                return None
            if not isinstance(written, Written):
                raise written
            is_new = self._new.publish(place, written, durable=durable)
            if isinstance(is_new, OSError):  # another try would find its own file there
                raise self._failure(name, "written", is_new)
            return written.num_bytes if is_new else None

    def _make_room(self, num_bytes: int, max_bytes: int) -> None:
        """Trims if files may take more than max_bytes, after what was put since the last trim."""
        with self._own_lock(), suppress(StoreError):
            self._room -= num_bytes
            if self._room < 0:
                self._room = max(0, max_bytes - self.trim())

    def _drop_some(self, tries: int, has_helped: bool) -> bool:
        """Makes room on a full disk: deletes a tenth of the bytes here, least recently used first.

        tries:      the number of earlier calls for this file. The first call deletes nothing if
                    another writer has made room
        has_helped: True if the last try wrote more of the file than the one before
        Returns True if the write should be tried again.
        """
        with self._own_lock():
            if tries > 1 and not has_helped:  # other writers took the space
                self._next_drop = time.monotonic() + _NO_HELP_SECONDS
            if time.monotonic() < self._next_drop:
                return False
            try:
                found, _ = self._listed("trimmed", clean=True)
                space = os.statvfs(self.root)
            except (OSError, StoreError):
                return False
            num_bytes = sum(num_bytes for _, num_bytes, _ in found) // 10
            if not tries and space.f_bavail * space.f_frsize > num_bytes:
                return True
            return self._drop(evictable(found), max(num_bytes, 1)) > 0

    def _drop(self, found: list[File], num_bytes: int) -> int:
        """Deletes files in this order until num_bytes are freed.

        Returns the bytes freed, including files that another process deleted first.
        """
        freed = 0
        for _, size, name in found:
            if freed >= num_bytes:
                break
            with suppress(StoreError):
                if self._delete(name) and is_entry(name):
                    self.usage.evicted(size)
                freed += size
        return freed

    def _listed(
        self, verb: str, *, clean: bool = False, unread: list[str] | None = None
    ) -> tuple[list[File], float | None]:
        """Returns the list of `files`, and the time by the file system's clock. The time is None
        without `clean`, or if this process cannot read that clock.

        verb:  what the caller wanted to do, for messages
        clean: True: deletes temporary files whose writer is dead
        Raises StoreError.
        """
        try:
            root = self._open_root("", verb)
        except FileNotFoundError:
            return [], None
        try:
            now = None
            if clean:
                with suppress(OSError):  # reading the clock writes: it may not be allowed
                    now = self._temporaries.now(root)
                self._temporaries.clean(root)
            found = list(_walk(root, "", now, [] if unread is None else unread))
        except OSError as error:
            raise self._failure("", verb, error) from error
        finally:
            close(root)
        # Some file systems do not say how much is allocated: it is 0 for all their files.
        is_said = any(allocated(status) for _, status in found)
        files = sorted(
            (
                status.st_mtime if now is None else min(status.st_mtime, now),
                allocated(status) if is_said else status.st_size,
                name,
            )
            for name, status in found
        )
        self.usage.counted(len(files), sum(num_bytes for _, num_bytes, _ in files))
        return files, now

    def _open_root(self, name: str, verb: str) -> int:
        """Opens the root and returns a handle.

        Raises FileNotFoundError if the root does not exist, StoreError if it cannot be opened.
        """
        try:
            return self._root.open()
        except FileNotFoundError:
            raise
        except OSError as error:
            raise self._failure(name, verb, error) from error

    def _own_lock(self) -> Lock:
        """Returns the lock of this process. A forked child makes a new one, since a thread of the
        parent may have held the old one for ever.
        """
        if self._process != os.getpid():
            self._lock, self._process = Lock(), os.getpid()
        return self._lock

    def _failure(self, name: str, verb: str, error: OSError) -> StoreError:
        way_out = _WAYS_OUT.get(error.errno or 0, "")
        path = self.path_of(name) if name else str(self.root)
        reason = error.strerror or str(error)
        return StoreError(f"{path} cannot be {verb}: {reason}" + (way_out and f". {way_out}"))


def _walk(
    root: int, path: str, now: float | None, unread: list[str]
) -> Iterator[tuple[str, os.stat_result]]:
    """Yields the name and status of each regular file in a folder and the folders below it. Skips
    files directly in the root, and files that vanish or cannot be read.

    now:    the time by the clock of the file system: abandoned temporary files are deleted, and a
            time of last use that lies in the future is set to now. None: nothing is changed
    unread: a list to which each folder that cannot be read is appended, with the reason
    """
    try:
        folder = open_beneath(root, path, FOLDER)
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    name = f"{path}/{entry.name}".lstrip("/")
                    if now is not None and is_temporary(entry.name):
                        delete_if_abandoned(folder, entry.name, now)
                    elif not is_word(entry.name):
                        continue
                    elif entry.is_dir(follow_symlinks=False):
                        if name.count("/") < MAX_WORDS - 2:
                            yield from _walk(root, name, now, unread)
                    elif path:
                        with suppress(OSError):
                            status = entry.stat(follow_symlinks=False)
                            if not stat.S_ISREG(status.st_mode):
                                continue
                            if now is not None and status.st_mtime > now + _FUTURE_SECONDS:
                                os.utime(entry.name, dir_fd=folder, follow_symlinks=False)
                            yield name, status
        finally:
            close(folder)
    except OSError as error:
        if error.errno not in ABSENT:
            unread.append(f"{path or '.'} ({error.strerror or error})")


def _code(error: BaseException | None, handled: BaseException | None) -> int | None:
    """Returns the errno of the OSError that caused `error`; None if no OSError did.

    handled: the exception that was already being handled; it and its causes do not count
    """
    while error is not None and error is not handled:
        if isinstance(error, OSError):
            return error.errno
        error = error.__cause__ or error.__context__
    return None
