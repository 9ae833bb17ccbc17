"""NewFiles: writes files of a store in `.tmp`, syncs them, and gives them their names."""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from kvx_core._c.file_calls import name_files
from kvx_core._c.os_files import close
from kvx_core.snapshot import StoreError
from kvx_core.snapshot.threaded import in_threads
from kvx_core.stores.beneath import (
    NOTHING,
    allocated,
    make_folders,
    open_beneath,
    sync_file_system,
    sync_folder,
)
from kvx_core.stores.blob_store import Content, Write
from kvx_core.stores.root import Root
from kvx_core.stores.temporary import Temporaries, Temporary

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_LARGE = 1 << 20  # bytes of an average file; smaller files are written by one thread,
_TOGETHER = 16 << 20  # so many bytes with one call
_TRIES = 5  # when other processes delete the folder that a call is using

_name_files = name_files()


@dataclass(frozen=True, slots=True)
class Written:
    """A complete file that has no name in the store yet."""

    name: str
    temporary: Temporary
    num_bytes: int  # on the disk


class Place:
    """Handles of a store's root and of its temporary files' folder, opened when first needed."""

    def __init__(self, root: int, open_temporaries: Callable[[], int]) -> None:
        self.root, self._open_temporaries = root, open_temporaries

    @cached_property
    def temporaries(self) -> int:
        """The folder's handle. Threads that need it at once may open one each. Raises OSError."""
        return self._open_temporaries()


class NewFiles:
    """Writes the files of one directory."""

    def __init__(self, root: Root, shown: Path, folder_mode: int, temporaries: Temporaries) -> None:
        """shown: the path of the root, for messages"""
        self._root, self._shown = root, shown
        self._folder_mode, self._temporaries = folder_mode, temporaries

    @contextmanager
    def place(self) -> Iterator[Place]:
        """Yields the place for calls of `write`. Makes a missing root. Raises OSError."""
        with ExitStack() as opened:
            try:
                root = self._root.open()
            except FileNotFoundError:
                self._root.make()
                root = self._root.open()
            opened.callback(close, root)
            yield Place(root, lambda: opened.enter_context(self._temporaries.folder(root)))

    def write(
        self, place: Place, files: Sequence[tuple[str, Write]], opened: ExitStack
    ) -> list[Written | OSError | StoreError]:
        """Writes new files. Returns each, or why there is none: FileExistsError if its name exists.

        opened: when it ends, the files that have got no name are deleted
        Raises OSError, and what a `write` raises besides OSError and StoreError.
        """
        found = dict[int, Written | OSError | StoreError]()
        contents, numbers = list[tuple[str, Sequence[memoryview]]](), list[int]()
        for i, (name, write) in enumerate(files):
            try:
                contents.append((name, write.parts() if isinstance(write, Content) else ()))
                numbers.append(i)
            except StoreError as error:
                found[i] = error
        made = self._temporaries.new(place.temporaries, place.root, contents)
        for one in made:
            if not isinstance(one, OSError):
                opened.callback(one[0].end)
        for i, one in zip(numbers, made, strict=True):
            found[i] = one if isinstance(one, OSError) else self._filled(*files[i], *one)
        return [found[i] for i in range(len(files))]

    def _filled(
        self, name: str, write: Write, temporary: Temporary, num_bytes: int
    ) -> Written | OSError | StoreError:
        """Has `write` write a new file, unless the file has its content already."""
        if not isinstance(write, Content):
            try:
                with self._file(temporary.file, name) as file:
                    write(file)
                num_bytes = _bytes_of(temporary.file)
            except (OSError, StoreError) as error:
                return error
        return Written(name, temporary, num_bytes)

    def _file(self, handle: int, name: str) -> BinaryIO:
        """Returns a file object for a handle, which stays open when the object is closed."""
        file = _NewFile(handle, "r+b", closefd=False)
        file.name = f"{self._shown}/{name}"
        return file

    def publish(self, place: Place, written: Written, *, durable: bool = True) -> bool | OSError:
        """Gives a file its name; False if another writer was first.

        durable: True: syncs the file, its name and its folders to the disk
        Returns an OSError if the name may not be on the disk. Raises OSError if the file has got no
        name, StoreError if something else than a file has it.
        """
        if not durable:
            (is_new,) = self._name_all(place, [written])
            if is_new is None:
                is_new = self._name(place.root, written, _nothing)
            if not is_new:
                self.is_there(place, written.name)  # raises if it is no file
            return is_new
        os.fsync(written.temporary.file)
        unsynced: list[int] = []  # synced after the file has its name
        try:
            is_new = self._name(
                place.root, written, lambda folder: unsynced.insert(0, os.dup(folder))
            )
            try:
                for folder in unsynced:
                    sync_folder(folder)
            except OSError as error:
                return error
        finally:
            for folder in unsynced:
                close(folder)
        if not is_new:
            self.is_there(place, written.name)  # raises if it is no file
        return is_new

    def put_together(
        self, place: Place, files: Sequence[tuple[str, Write]], num_bytes: int, *, durable: bool
    ) -> dict[int, int | OSError | None]:
        """Writes files and gives them their names, in the order of `files`.

        num_bytes: see BlobStore.put_all
        durable:   True: syncs the file system, which must be one that `syncs_together`, twice, with
                   all other writes to it, instead of three times for each file
        Returns by the number of a file its bytes on the disk; None if another writer was first; an
        OSError if the name may not be on the disk. A file that is left out has no name, and must be
        put alone.
        Raises OSError if no file has got its name, and the errors of `write`.
        """
        size = num_bytes // max(len(files), 1)
        step = max(1, _TOGETHER // max(size, 1)) if size < _LARGE else 1
        parts = [files[i : i + step] for i in range(0, len(files), step)]
        with ExitStack() as opened:

            def write(part: Sequence[tuple[str, Write]]) -> Sequence[Written | Exception]:
                return self.write(place, part, opened)

            found = in_threads(write, parts, num_bytes if size >= _LARGE else 0)
            each = enumerate(chain.from_iterable(found))
            written = {i: one for i, one in each if isinstance(one, Written)}
            if durable:
                sync_file_system(place.root)
            put = dict[int, int | OSError | None]()
            named = self._name_all(place, tuple(written.values()))
            for (i, one), is_new in zip(written.items(), named, strict=True):
                with suppress(OSError, StoreError):
                    if is_new is None:
                        is_new = self._name(place.root, one, _nothing)
                    if is_new or self.is_there(place, one.name):
                        put[i] = one.num_bytes if is_new else None
            try:
                if durable:
                    sync_file_system(place.root)
            except OSError as error:
                return {i: None if one is None else error for i, one in put.items()}
            return put

    def is_there(self, place: Place, name: str) -> bool:
        """True if a file has the name. Raises OSError; StoreError if something else has it."""
        try:
            handle = open_beneath(place.root, name, NOTHING)
        except FileNotFoundError:
            return False
        try:
            mode = os.fstat(handle).st_mode
        finally:
            close(handle)
        if not stat.S_ISREG(mode):
            raise StoreError(
                f"{self._shown}/{name} cannot be written: what lies there ({stat.filemode(mode)}) "
                "is no file. Delete it"
            )
        return True

    def _name_all(self, place: Place, files: Sequence[Written]) -> list[bool | None]:
        """Gives files their names in folders that are there already: most are. For each False if
        another writer was first, None if the file must be named alone.
        """
        if not files:
            return []
        errors = _name_files(
            place.temporaries,
            tuple(os.fsencode(one.temporary.name) for one in files),
            tuple(one.temporary.file for one in files),
            place.root,
            tuple(os.fsencode(one.name) for one in files),
        )
        named: list[bool | None] = []
        for one, error in zip(files, memoryview(errors).cast("i"), strict=True):
            if not error:
                one.temporary.file = -1  # it is closed
            named.append({0: True, -errno.EEXIST: False}.get(error))
        return named

    def _name(self, root: int, written: Written, changed: Callable[[int], None]) -> bool:
        """Gives a complete file its name; False if another writer was first. Raises OSError.

        changed: called with a handle of each folder that has changed
        """
        path, _, last = written.name.rpartition("/")
        for tries_left in reversed(range(_TRIES)):
            folder = make_folders(root, path, self._folder_mode, changed)
            try:
                is_new = _link(written.temporary, folder, last)
                changed(folder)
                return is_new
            except FileNotFoundError:  # another process deleted the empty folder
                if not tries_left:
                    raise
            finally:
                close(folder)
        raise AssertionError("the last try returns or raises")


class _NewFile(io.FileIO):
    """A file whose `write` writes everything. io.FileIO.write may write only a part."""

    def write(self, data: ReadableBuffer, /) -> int:
        view = memoryview(data).cast("B")
        num_bytes = len(view)
        while view:
            view = view[super().write(view) :]
        return num_bytes


def _bytes_of(handle: int) -> int:
    """Returns how many bytes a file takes on the disk, or will take: some file systems allocate
    nothing before they sync. Raises OSError.
    """
    status = os.fstat(handle)
    return max(allocated(status), status.st_size)


def _nothing(folder: int) -> None:
    """Does nothing about a changed folder, where `sync_folder` would sync it."""


def _link(temporary: Temporary, folder: int, name: str) -> bool:
    """Gives a file its name in a folder; False if the name exists. Raises OSError."""
    try:
        os.link(  # does not replace a file
            temporary.name,
            name,
            src_dir_fd=temporary.folder,
            dst_dir_fd=folder,
            follow_symlinks=False,
        )
    except FileExistsError:
        return False
    except OSError:  # no hard links here. A file that the rename replaces has the same content
        os.rename(temporary.name, name, src_dir_fd=temporary.folder, dst_dir_fd=folder)
    return True
