"""Rooms: memory that files were read into, kept for the loads that follow."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from kvx_core.snapshot import Room, StoreError

_MAX_ROOMS = 4  # of which nobody has one
_MAX_ROOM_BYTES = 64 << 20  # of one of these


class Rooms:
    """Rooms of one store. Threads may share it."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, bool], deque[Room]] = {}

    @contextmanager
    def room(self, num_tokens: int, *, pinned: bool) -> Iterator[Room]:
        """A room for snapshots of so many tokens, the caller's as long as the context is open.

        pinned: see Room
        """
        free = self._free.setdefault((num_tokens, pinned), deque(maxlen=_MAX_ROOMS))
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
