"""Reads files of chunks with as few system calls as possible.

Format: docs/store_format.md, "Entries".
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, overload

import numpy as np

from kvx_core._c import file_calls
from kvx_core._c.os_files import OpenFile
from kvx_core.errors import CorruptError
from kvx_core.snapshot.chunk_file import ChunkFile, Loaded, Wanted, data_of
from kvx_core.snapshot.contents import Header
from kvx_core.snapshot.kind import Kind
from kvx_core.snapshot.memory import Bytes
from kvx_core.snapshot.record import ID_BYTES, KEY_BYTES
from kvx_core.snapshot.room import Room
from kvx_core.snapshot.snapshot import Snapshot

if TYPE_CHECKING:
    from kvx_core.snapshot.secrets import Secrets

# The type of BlobStore.fetch.
Fetch = Callable[[str, tuple[memoryview, ...], int, int], OpenFile | None]


class ToRead(NamedTuple):
    """A file to read."""

    name: str
    key: str  # the key that the tokens must have
    wanted: Wanted
    start: int  # the position that the first token must have
    place: int  # offset of the file's data in the memory that is read into


class LazySnapshots(Sequence[Snapshot]):
    """Snapshots that are made when they are asked for: many are copied together, and then the first
    of them says enough.
    """

    __slots__ = ()

    @abstractmethod
    def _make(self, number: int) -> Snapshot: ...

    @overload
    def __getitem__(self, index: int) -> Snapshot: ...
    @overload
    def __getitem__(self, index: slice) -> list[Snapshot]: ...
    def __getitem__(self, index: int | slice) -> Snapshot | list[Snapshot]:
        numbers = range(len(self))[index]
        return self._make(numbers) if isinstance(numbers, int) else list(map(self._make, numbers))


class ChunkRun(LazySnapshots):
    """Snapshots of good files.

    The files are of one kind and have as many tokens. If there are several, `can_join` is true for
    their snapshots.
    """

    __slots__ = ("_files", "_heads", "_into", "num_files")

    def __init__(
        self, files: Sequence[ToRead], heads: memoryview, into: tuple[Room, int, Bytes]
    ) -> None:
        """files: the first of them is in the run
        heads: parent and ids of these files, one after another
        into:  the room, its memory that the files were read into, and the offset of this memory
        """
        self._files, self._heads, self._into = files, heads, into
        self.num_files = 1

    def __len__(self) -> int:
        return self.num_files

    def _make(self, number: int) -> Snapshot:
        """Raises CorruptError if a scale in the file is invalid."""
        room, at, memory = self._into
        name, _, wanted, start, place = self._files[number]
        size = _head_bytes(wanted)
        head = self._heads[number * size : (number + 1) * size]
        header = Header(start, head[:KEY_BYTES].hex(), wanted.parts)
        tokens = np.frombuffer(head[KEY_BYTES:], "<i8")
        own = memory[place : place + wanted.selection.place.num_bytes]
        return Snapshot.of_file(Loaded.of(header, tokens, wanted, room, at + place, own, name))


def _head_bytes(wanted: Wanted) -> int:
    """The bytes of parent and ids in a file."""
    return KEY_BYTES + ID_BYTES * wanted.layout.num_tokens


def read_chunks(
    folder: int, files: Sequence[ToRead], room: Room, at: int, memory: Bytes
) -> list[ChunkRun | None]:
    """Reads and checks files in C, without the GIL. Returns runs of files that follow one another.

    Returns None in place of a file that C does not read, or that fails a check: `read_chunk` then
    reads it, or raises the reason.
    folder: handle of a directory; the names of files are relative to it, without symbolic links
    files:  at most MOST_FILES
    room:   the room that `files` were made for; it gave `memory` at byte `at`
    """
    read = file_calls.read_chunks()
    quick = [file for file in files if file.wanted.selection.plan is not None]
    if read is None or not quick:
        return [None] * len(files)
    names, _, wanteds, starts, places = zip(*quick, strict=True)
    plans = tuple(wanted.selection.plan for wanted in wanteds)
    good, found = read(folder, names, plans, starts, memory.data, places)
    heads, is_good, end = memoryview(found), iter(good), 0
    runs, run, like, next_one = list[ChunkRun | None](), None, None, (0, 0)
    for i, file in enumerate(files):
        _, key, wanted, start, place = file
        checked = None
        if wanted.selection.plan is not None:
            begin, end = end, end + _head_bytes(wanted)
            if next(is_good) and hashlib.sha256(heads[begin:end]).hexdigest() == key:
                checked = heads[begin:]
        if checked is None:
            runs.append(None)
            run = None
        elif run is not None and wanted is like and (start, place) == next_one:
            run.num_files += 1
        else:
            run = ChunkRun(files[i:], checked, (room, at, memory))
            runs.append(run if _has_good_scales(run, wanted) else None)
            if not _can_go_on(wanted, room, at + place):
                run = None
        like = wanted
        next_one = start + wanted.layout.num_tokens, place + wanted.selection.place.num_bytes
    return runs


def _has_good_scales(run: ChunkRun, wanted: Wanted) -> bool:
    if not wanted.selection.scales:
        return True
    try:
        run[0]
    except CorruptError:
        return False
    return True


def _can_go_on(wanted: Wanted, room: Room, at: int) -> bool:
    """True if the next file like this one can be joined to it, see `can_join`."""
    place = wanted.selection.place
    is_full = wanted.layout.num_tokens == room.num_tokens
    return is_full and place.block is not None and at % place.num_bytes == 0


def read_chunk(
    fetch: Fetch,
    wanted: Wanted,
    secrets: Secrets,
    *,
    name: str,
    key: str | None,
    room: Room,
    taken: tuple[int, Bytes],
) -> Snapshot | None:
    """Reads the snapshot in a file into memory of a room, and checks every byte of it.

    Makes as few system calls as possible. Returns None if the file does not exist.
    room:  the room that `wanted` was made for; several threads may read into memory of one room
    taken: the result of Room.take for wanted.selection.place.num_bytes
    Raises the errors of open_chunk and of ChunkFile.read.
    """
    kind, layout, selection, _, with_head = wanted
    at, memory = taken
    view, groups = memory.data, selection.groups
    head = bytearray(layout.head.num_bytes)
    views: tuple[memoryview, ...] = (memoryview(head),)
    other = view
    if with_head:
        most = layout.most_bytes - layout.head.num_bytes
        data, other = data_of(layout, groups[0], view, min(groups[0].num_bytes, most))
        views = (*views, *data)
    file = fetch(name, views, layout.least_bytes, layout.most_bytes)
    if file is None:
        return None
    with file:
        chunk = ChunkFile(file, kind, secrets, name, layout, file.num_bytes)
        chunk.check_size()
        chunk.check_head(head, key)
        if with_head:
            chunk.check_group(groups[0], view, other)
            groups = groups[1:]
        chunk.read_groups(groups, view)
    return Snapshot.of_file(chunk.loaded(wanted, room, at, memory))


def is_chunk(
    fetch: Fetch, kind: Kind, secrets: Secrets, *, name: str, key: str | None, num_tokens: int
) -> bool:
    """True if the file exists. Reads and checks its head. Raises the errors of open_chunk."""
    layout = kind.layout(num_tokens)
    head = bytearray(layout.head.num_bytes)
    file = fetch(name, (memoryview(head),), layout.least_bytes, layout.most_bytes)
    if file is None:
        return False
    with file:
        chunk = ChunkFile(file, kind, secrets, name, layout, file.num_bytes)
        chunk.check_size()
        chunk.check_head(head, key)
    return True
