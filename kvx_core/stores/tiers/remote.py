"""RemoteStore: a BlobStore behind a network. Subclasses say how one file is put and got."""

from __future__ import annotations

import os
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, TypeVar

from kvx_core._c.os_files import OpenFile, ReadFile, write_all
from kvx_core.errors import CorruptError, StoreError
from kvx_core.stores.blob_store import Content, ListedStore, Put, Write, check_name
from kvx_core.stores.eviction import File
from kvx_core.stores.tiers.breaker import Breaker, LeftOut

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer as Buffer

THREADS = 64  # calls at a time
# Files that were expected, are in memory or on their way, and were not fetched yet.
_MOST_AHEAD = 256
_MOST_WHOLE = 16  # the same, of whole files, which may have 64 MB each
_AHEAD_SECONDS = 2.0  # an answer that nobody has asked for after so long is too old
_MOST_BYTES = 1 << 30  # of a file that is opened
_LISTED_SECONDS = 10.0  # a list of names is asked for again after so long
_MOST_LISTED = 1024  # lists that are kept
_PROBED = "kvx-store.json"

Result = TypeVar("Result")


class First(NamedTuple):
    """The first bytes of a file, and how many bytes it has."""

    data: memoryview
    num_bytes: int


class _Asked(NamedTuple):
    """A file that was asked for ahead of the caller."""

    num_bytes: int
    at: float
    first: Future[First | None]


class RemoteStore(ListedStore):
    """A BlobStore whose calls take milliseconds, and may fail.

    A call ends after about `deadline` seconds. After one has failed, all calls fail at once until
    the store answers again. Files are got whole, or their first bytes are. Times of use are not
    kept, and nothing is trimmed: a level above, or a rule of the server, decides what stays.

    Subclasses define the six calls whose names begin with "_call". Threads call them at the same
    time. They raise an error in `failures` when the store does not answer as it should.
    """

    is_far = takes_hints = True
    failures: tuple[type[Exception], ...] = (OSError,)  # errors of calls
    refusals: tuple[type[Exception], ...] = ()  # of these, those that tell nothing of other calls

    def __init__(self, where: str, deadline: float) -> None:
        """where: the store, for messages"""
        self.where, self.deadline = where, deadline
        self._breaker = Breaker(where, lambda: self._call_size(_PROBED))
        self._lock, self._process = Lock(), -1
        self._own_process()

    # ---- what a subclass defines ----

    @abstractmethod
    def _call_put(self, name: str, parts: Sequence[memoryview]) -> bool:
        """Stores a file. Returns False if the name existed."""

    @abstractmethod
    def _call_get(self, name: str, num_bytes: int) -> First | None:
        """Gets the first `num_bytes` bytes of a file, at least 1. Returns None if there is no such
        file.
        """

    @abstractmethod
    def _call_size(self, name: str) -> int | None:
        """Returns the bytes of a file; None if there is no such file."""

    @abstractmethod
    def _call_names(self, folder: str) -> list[str]:
        """Does what BlobStore.names says."""

    @abstractmethod
    def _call_files(self) -> list[File]:
        """Returns the time when it was put, bytes and name of each file, in any order."""

    @abstractmethod
    def _call_delete(self, name: str) -> None:
        """Deletes a file if it exists."""

    # ---- BlobStore ----

    def put(self, name: str, write: Write, *, durable: bool = True) -> bool:
        """Does what BlobStore.put says. Files are always durable."""
        check_name(name)
        self._breaker.check()
        parts = write.parts() if isinstance(write, Content) else [written(write)]
        is_new = self._called(name, "written", lambda: self._call_put(name, parts))
        self._forget(name)
        return is_new

    def put_all(
        self, files: Sequence[tuple[str, Write]], num_bytes: int = 0, *, durable: bool = True
    ) -> list[Put]:
        """Does what BlobStore.put_all says, several files at a time."""
        for name, _ in files:
            check_name(name)
        first = dict(reversed([(name, i) for i, (name, _) in enumerate(files)]))
        tasks = [
            self._pool.submit(self._put_one, name, write, durable=durable)
            if first[name] == i
            else None
            for i, (name, write) in enumerate(files)
        ]
        return [False if task is None else task.result() for task in tasks]

    def open(self, name: str) -> BinaryIO | None:
        """Does what BlobStore.open says: the file is a copy in memory, of 1 GiB at most."""
        found = self._first(name, _MOST_BYTES)
        if found is None:
            return None
        if found.num_bytes > len(found.data):
            raise StoreError(
                f"{self.path_of(name)} has {found.num_bytes} bytes, expected at most {_MOST_BYTES}"
            )
        file = ReadFile(_in_memory(name, [found.data]))
        file.name = self.path_of(name)
        return file

    def fetch(
        self, name: str, views: tuple[Buffer, ...], least: int = 0, most: int = -1
    ) -> OpenFile | None:
        """Does what BlobStore.fetch says. One view gets its bytes alone: the rest of the file
        follows when the caller asks for the handle. Several views: all of the file is got at once,
        if it has at most `most` bytes.
        """
        into = [memoryview(view).cast("B") for view in views]
        wanted = sum(map(len, into))
        found = self._first(name, max(wanted if len(into) == 1 else most, 1))
        if found is None:
            return None
        if least <= found.num_bytes <= most:
            at = 0
            for view in into:
                part = found.data[at : at + len(view)]
                view[: len(part)] = part
                at += len(part)
        return _Fetched(self, name, found)

    def names(self, folder: str) -> list[str]:
        """Does what BlobStore.names says; a list may be ten seconds old."""
        if not isinstance(folder, str) or folder:
            check_name(folder)
        self._own_process()
        known = self._listed.get(folder)
        if known is not None and time.monotonic() - known[0] < _LISTED_SECONDS:
            return list(known[1])
        try:
            found = self._called(f"{folder}/", "listed", lambda: self._call_names(folder))
        except StoreError:
            return []
        with self._lock:
            if len(self._listed) >= _MOST_LISTED:
                self._listed.clear()
            self._listed[folder] = time.monotonic(), tuple(found)
        return found

    def files(self, unread: list[str] | None = None) -> list[File]:
        """Does what ListedStore.files says; times are those when files were put."""
        found = self._called("", "listed", self._call_files)
        return sorted(each for each in found if "/" in each[2])

    def delete(self, name: str) -> None:
        """Does what BlobStore.delete says."""
        check_name(name)
        self._called(name, "deleted", lambda: self._call_delete(name))
        self._forget(name)

    def is_there(self, name: str) -> bool:
        """Does what BlobStore.is_there says."""
        check_name(name)
        asked = self._taken(name, 0)
        if asked is not None:
            return asked.result() is not None
        return self._called(name, "read", lambda: self._call_size(name)) is not None

    def are_there(self, names: Sequence[str]) -> list[bool]:
        """Does what BlobStore.are_there says, for several names at a time."""
        tasks = [self._pool.submit(self.is_there, name) for name in names]
        return [task.result() for task in tasks]

    def read(self, name: str, most_bytes: int) -> bytes | None:
        """Does what BlobStore.read says."""
        found = self._first(name, most_bytes + 1)
        if found is not None and max(found.num_bytes, len(found.data)) > most_bytes:
            raise CorruptError(
                f"{self.path_of(name)} has more than {most_bytes} bytes, expected at most that"
            )
        return None if found is None else bytes(found.data)

    def expect(self, names: Sequence[str], num_bytes: int, *, whole: bool = False) -> None:
        """Does what BlobStore.expect says, for 256 files at a time, or 16 whole ones."""
        self._own_process()
        with self._lock:
            self._awaited.update(dict.fromkeys(names, (max(num_bytes, 1), whole)))
            self._ask_ahead()

    def path_of(self, name: str) -> str:
        """Does what BlobStore.path_of says."""
        return f"{self.where}/{name}"

    # ---- files that are expected ----

    def _ask_ahead(self) -> None:
        """Asks for the next expected files. The caller holds the lock."""
        while self._awaited:
            name, (num_bytes, whole) = next(iter(self._awaited.items()))
            most = _MOST_WHOLE if whole else _MOST_AHEAD
            if len(self._asked) >= most and not self._drop_old():
                return
            del self._awaited[name]
            if name not in self._asked:
                first = self._pool.submit(self._get, name, num_bytes)
                self._asked[name] = _Asked(num_bytes, time.monotonic(), first)

    def _drop_old(self) -> bool:
        """Drops answers that nobody has asked for. Returns False if there are none."""
        old = time.monotonic() - _AHEAD_SECONDS
        names = [name for name, asked in self._asked.items() if asked.at < old]
        for name in names:
            del self._asked[name]
        return bool(names)

    def _taken(self, name: str, num_bytes: int) -> Future[First | None] | None:
        """Takes the answer for an expected file, if it will have the first `num_bytes` bytes."""
        self._own_process()
        if not self._asked and not self._awaited:
            return None
        with self._lock:
            self._awaited.pop(name, None)  # the caller asks now
            found = self._asked.pop(name, None)
            self._ask_ahead()
        if found is None or found.num_bytes < num_bytes:
            return None
        if found.first.cancel():  # it has not begun, and might wait for this very thread
            return None
        is_old = found.first.done() and time.monotonic() - found.at > _AHEAD_SECONDS
        return None if is_old else found.first

    def _forget(self, name: str) -> None:
        """Forgets what is known of a file that has been put or deleted."""
        folder = name
        with self._lock:
            self._asked.pop(name, None)
            while folder:
                folder = folder.rpartition("/")[0]
                self._listed.pop(folder, None)

    # ---- calls ----

    def _first(self, name: str, num_bytes: int) -> First | None:
        """Returns the first bytes of a file, those of an expected file too. Raises StoreError."""
        check_name(name)
        asked = self._taken(name, num_bytes)
        return self._get(name, num_bytes) if asked is None else asked.result()

    def _get(self, name: str, num_bytes: int) -> First | None:
        return self._called(name, "read", lambda: self._call_get(name, num_bytes))

    def _called(self, name: str, verb: str, call: Callable[[], Result]) -> Result:
        """Returns what a call returns. Raises StoreError, LeftOut if the breaker then opens."""
        self._breaker.check()
        try:
            return call()
        except self.failures as error:
            reason = str(error).partition("\n")[0] or type(error).__name__
            cause = error if isinstance(error, OSError) else OSError(reason)
            kind = StoreError
            if not isinstance(error, self.refusals):
                self._breaker.failed(error)
                kind = LeftOut
            raise kind(f"{self.path_of(name)} cannot be {verb}: {reason}") from cause

    @property
    def _pool(self) -> ThreadPoolExecutor:
        self._own_process()
        return self._threads

    def _own_process(self) -> None:
        """Makes threads and memory of this process: a forked child has none of its parent's."""
        if self._process != os.getpid():
            self._lock, self._process = Lock(), os.getpid()
            self._threads = ThreadPoolExecutor(THREADS, "kvx-remote")
            self._awaited: dict[str, tuple[int, bool]] = {}  # num_bytes and whole, of `expect`
            self._asked: dict[str, _Asked] = {}
            self._listed: dict[str, tuple[float, tuple[str, ...]]] = {}


class _Fetched(OpenFile):
    """A file whose first bytes are here: the rest is got when the handle is asked for."""

    __slots__ = ("_first", "_name", "_store")

    def __init__(self, store: RemoteStore, name: str, first: First) -> None:
        super().__init__(-1, first.num_bytes)
        self._store, self._name, self._first = store, name, first

    def fileno(self) -> int:
        """Raises OSError."""
        if self._handle < 0:
            data = self._first.data
            if len(data) < self.num_bytes:
                try:
                    found = self._store._get(self._name, self.num_bytes)
                except StoreError as error:
                    raise OSError(str(error)) from None
                data = memoryview(b"") if found is None else found.data
            self._handle = _in_memory(self._name, [data])
        return self._handle


def _in_memory(name: str, parts: Sequence[memoryview]) -> int:
    """Returns the handle of a new file in memory with this content."""
    handle = os.memfd_create(name.rpartition("/")[2][:200], os.MFD_CLOEXEC)
    with ReadFile(os.dup(handle), "r+b") as file:
        write_all(file, parts)
    os.lseek(handle, 0, os.SEEK_SET)
    return handle


def written(write: Write) -> memoryview:
    """Returns what `write` writes."""
    handle = _in_memory("written", [])
    try:
        with ReadFile(os.dup(handle), "r+b") as file:
            write(file)
        return memoryview(os.pread(handle, os.fstat(handle).st_size, 0))
    finally:
        with suppress(OSError):
            os.close(handle)
