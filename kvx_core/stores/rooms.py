"""Rooms: memory for loads, and for captures from a device, kept for later ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvx_core.snapshot import MemoryPool, Room, Section, StoreError
from kvx_core.types import Memory

_MAX_ROOMS = 4  # free rooms that are kept
_MAX_ROOM_BYTES = 64 << 20  # larger rooms are not kept
_MAX_POOL_BYTES = 256 << 20  # kept for captures of the same layers; a chunk has some 16 MiB


class Rooms:
    """The rooms and pools of one store. Threads may share it."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, bool], deque[Room]] = {}
        self._pools: dict[int, MemoryPool] = {}  # by num_tokens: a store has one or two

    def pool(self, sections: Sequence[Section], num_tokens: int) -> MemoryPool | None:
        """Returns the memory into which chunks of so many tokens are captured; None: new memory.

        Caches on a device have a pool: pinned memory takes longer to allocate than to fill, and
        describing it to the device takes longer still. Caches on the host have none: new memory
        costs them a fault per page, and a pool would keep the caches alive.
        """
        if all(section.first_tensor.memory is Memory.HOST for section in sections):
            return None
        return self._pools.setdefault(num_tokens, MemoryPool(num_tokens, _MAX_POOL_BYTES))

    @contextmanager
    def room(self, num_tokens: int, *, pinned: bool) -> Iterator[Room]:
        """Yields a room for snapshots of so many tokens: it is the caller's until the context ends.

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
