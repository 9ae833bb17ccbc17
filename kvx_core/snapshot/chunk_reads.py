"""Reads files of chunks with as few system calls as possible.

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


def read_chunks(
    folder: int, files: Sequence[ToRead], room: Room, at: int, memory: Bytes
) -> list[Snapshot | None]:
    """Reads and checks files in C, without the GIL. Returns a snapshot for each file.

    Returns None in place of a file that C does not read, or that fails a check: `read_chunk` then
    reads it, or raises the reason.
    folder: handle of a directory; the names of files are relative to it, without symbolic links
    files:  at most MOST_FILES
    room:   the room that `files` were made for; it gave `memory` at byte `at`
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
