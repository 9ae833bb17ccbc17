"""Reads files of chunks with as few calls of the system as can be.

Format: docs/store_format.md, "Entries".
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvx_core._c import file_calls
from kvx_core._c.os_files import OpenFile
from kvx_core.snapshot.chunk_file import ChunkFile, Loaded, Wanted, data_of
from kvx_core.snapshot.contents import Header
from kvx_core.snapshot.errors import CorruptError
from kvx_core.snapshot.kind import Kind
from kvx_core.snapshot.memory import Bytes
from kvx_core.snapshot.record import ID_BYTES, KEY_BYTES
from kvx_core.snapshot.room import Room
from kvx_core.snapshot.snapshot import Snapshot

if TYPE_CHECKING:
    from kvx_core.snapshot.secrets import Secrets

# BlobStore.fetch
Fetch = Callable[[str, tuple[memoryview, ...], int, int], OpenFile | None]


class ToRead(NamedTuple):
    """A file that is read."""

    name: str
    key: str  # that its tokens must have
    wanted: Wanted
    start: int  # that it must have: the position of its first token
    place: int  # where its data begin in the memory that is read into


def read_chunks(
    folder: int, files: Sequence[ToRead], room: Room, at: int, memory: Bytes
) -> list[Snapshot | None]:
    """The snapshots in files that C reads and checks without the GIL; None: `read_chunk` reads the
    file, or says why not.

    folder: a handle of the directory that names are relative to, without symbolic links
    files:  at most MOST_FILES
    room:   that they were made for, which has given the memory at `at`
    """
    read, snapshots = file_calls.read_chunks(), list[Snapshot | None]([None] * len(files))
    quick = [(i, file) for i, file in enumerate(files) if file.wanted.selection.plan is not None]
    if read is None or not quick:
        return snapshots
    names, _, wanteds, starts, places = zip(*(file for _, file in quick), strict=True)
    plans = tuple(wanted.selection.plan for wanted in wanteds)
    good, found = read(folder, names, plans, starts, memory.data, places)
    view, ids, begin = memoryview(found), np.frombuffer(found, "<i8"), 0
    for (i, file), is_good in zip(quick, good, strict=True):
        name, key, wanted, start, place = file
        first, begin = begin, begin + KEY_BYTES + ID_BYTES * wanted.layout.num_tokens
        if not is_good or hashlib.sha256(view[first:begin]).hexdigest() != key:
            continue
        header = Header(start, found[first : first + KEY_BYTES].hex(), wanted.parts)
        tokens = ids[(first + KEY_BYTES) // ID_BYTES : begin // ID_BYTES]
        own = memory[place : place + wanted.selection.place.num_bytes]
        with suppress(CorruptError):
            loaded = Loaded.of(header, tokens, wanted, room, at + place, own, name)
            snapshots[i] = Snapshot.of_file(loaded)
    return snapshots


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
    """The snapshot in a file, in memory of a room, every byte of it checked; None: there is no
    such file. Takes as few calls of the system as can be.

    room:  that `wanted` was made for; threads may read into memory of one room
    taken: what Room.take has returned for wanted.selection.place.num_bytes
    Errors are those of open_chunk and of ChunkFile.read.
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
    """Whether there is a file; its head has been read and checked then. Raises as open_chunk."""
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
