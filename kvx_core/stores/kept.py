"""Kept: what loads of a store leave for those that follow."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from kvx_core.snapshot import Alike, Room, Snapshot, StoreError
from kvx_core.stores.keys import EntryFile

_MAX_ROOMS = 4  # of which nobody has one
_MAX_ROOM_BYTES = 64 << 20  # of one of these
_MAX_KINDS = 256  # of files that are alike

_Kind = tuple[object, ...]


class Kept:
    """Memory that files were read into, and what files were like. Threads may share it."""

    def __init__(self, key: bytes | None) -> None:
        """key: that files are signed with"""
        self._key = key
        self._rooms: dict[tuple[int, bool], deque[Room]] = {}
        self._alike: dict[_Kind, Alike | Literal["seen once", "unlike"]] = {}

    @contextmanager
    def room(self, num_tokens: int, *, pinned: bool) -> Iterator[Room]:
        """A room for snapshots of so many tokens, the caller's as long as the context is open.

        pinned: see Room
        """
        free = self._rooms.setdefault((num_tokens, pinned), deque(maxlen=_MAX_ROOMS))
        try:
            room = free.pop()
        except IndexError:
            room = Room(num_tokens, pinned=pinned)
        try:
            yield room
        except StoreError:
            self._keep(free, room)
            raise  # after any other error, a device may still read the room
        self._keep(free, room)

    def _keep(self, free: deque[Room], room: Room) -> None:
        if room.num_bytes <= _MAX_ROOM_BYTES:
            free.append(room)

    def alike(self, file: EntryFile, room: Room) -> Alike | None:
        """What the file is like, most likely; None: not known."""
        found = self._alike.get(_kind(file, room))
        return found if isinstance(found, Alike) else None

    def saw(self, file: EntryFile, snapshot: Snapshot, room: Room, tried: Alike | None) -> None:
        """A file was parsed and found good: the second such file tells what those that follow are
        like.

        tried: what the file was not like. If it is laid out so all the same, another version wrote
               it, and no such file is tried again
        """
        kind = _kind(file, room)
        if len(self._alike) >= _MAX_KINDS:
            self._alike.clear()
        if kind not in self._alike:
            self._alike[kind] = "seen once"
            return
        if self._alike[kind] == "seen once" or tried is not None:
            found = Alike.of(snapshot, room, self._key)
            if found is not None and tried is not None and found.layout is tried.layout:
                found = None
            self._alike[kind] = found or "unlike"


def _kind(file: EntryFile, room: Room) -> _Kind:
    return file.num_tokens, file.layers, file.heads, file.precision, room.num_tokens
