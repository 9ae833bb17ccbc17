"""Rooms: memory of loads and of captures on a device, kept for those that follow."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvx_core.snapshot import MemoryPool, Room, Section, StoreError
from kvx_core.types import Memory

_MAX_ROOMS = 4  # of which nobody has one
_MAX_ROOM_BYTES = 64 << 20  # of one of these
_MAX_POOL_BYTES = 256 << 20  # of captures of the same layers of a cache; a chunk has some 16 MiB


class Rooms:
    """Rooms of one store. Threads may share it."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, bool], deque[Room]] = {}
        self._pools: dict[int, MemoryPool] = {}  # by num_tokens: a store has one or two

    def pool(self, sections: Sequence[Section], num_tokens: int) -> MemoryPool | None:
        """What chunks of so many tokens are captured into; None: new memory.

        Kept for caches on a device: pinned memory takes longer to allocate than to fill, and to
        describe it to the device takes longer still. New memory of the host costs a fault per page,
        and a pool would keep the caches of the host alive.
        """
        if all(section.first_tensor.memory is Memory.HOST for section in sections):
            return None
        return self._pools.setdefault(num_tokens, MemoryPool(num_tokens, _MAX_POOL_BYTES))

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
