"""Reads files of chunks with as few calls of the system as can be.

Format: docs/store_format.md, "Entries".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvx_core._c.os_files import OpenFile
from kvx_core.snapshot.chunk_file import ChunkFile, Wanted, data_of
from kvx_core.snapshot.kind import Kind
from kvx_core.snapshot.memory import Bytes
from kvx_core.snapshot.room import Room
from kvx_core.snapshot.snapshot import Snapshot

if TYPE_CHECKING:
    from kvx_core.snapshot.secrets import Secrets

# BlobStore.fetch
Fetch = Callable[[str, tuple[memoryview, ...], int, int], OpenFile | None]


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
    return chunk.snapshot(wanted, room, at, memory)


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
