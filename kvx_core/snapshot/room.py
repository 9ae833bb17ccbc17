"""A Room is host memory that snapshots are read into and restored from, and that is used again.

Describing memory takes longer than copying a chunk out of it. So a room keeps its memory and the
descriptions of it. Chunks of K and V lie side by side in a room, like the blocks of a paged cache,
and one copy moves many chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import lcm
from typing import NamedTuple

from kvx_core.desc.view import CacheView
from kvx_core.snapshot.contents import Header, Stored, is_row, is_scale, layer_of
from kvx_core.snapshot.dense import Dense, Views
from kvx_core.snapshot.memory import PAGE, Bytes, host_memory, laid_out

_MAX_PLACED = 256  # results of `placed` that the process remembers
_MAX_KEPT = 16  # caches that a room keeps

Tensors = dict[str, Stored]


class Placed(NamedTuple):
    """The places of a snapshot's tensors in its memory."""

    tensors: Tensors
    num_bytes: int  # of the memory: a multiple of PAGE and of each element's bytes
    # The tensors of a chunk of Room.num_tokens tokens: the same object for all snapshots that are
    # blocks of one paged cache. None: the snapshot is no block, since it has planes, scales, units
    # that span heads, or more tokens.
    block: Tensors | None


def placed(header: Header, tensors: Tensors, names: tuple[str, ...], num_tokens: int) -> Placed:
    """Returns the places of some of a snapshot's tensors.

    tensors:    must not change: the result is remembered for this object
    names:      of the tensors to place
    num_tokens: of the longest snapshot that can be a block beside this one
    """
    key = id(tensors), names, num_tokens
    known = _placed.get(key)
    if known is None or known[0] is not tensors:
        if len(_placed) >= _MAX_PLACED:
            _placed.clear()
        known = _placed[key] = tensors, _place(header, tensors, names, num_tokens)
    return known[1]


_placed: dict[tuple[int, tuple[str, ...], int], tuple[Tensors, Placed]] = {}
_blocks: dict[tuple[tuple[str, Stored], ...], Tensors] = {}


def _place(header: Header, tensors: Tensors, names: tuple[str, ...], num_tokens: int) -> Placed:
    held = {name: tensors[name] for name in names}
    block = None
    if _is_plain(header, held, num_tokens):
        whole = {
            name: replace(stored, shape=(num_tokens, *stored.shape[1:]), coding="")  # in memory
            for name, stored in held.items()
        }
        found, num_bytes = laid_out(whole.items())
        block = _blocks.get(key := tuple(found.items()))
        if block is None:
            if len(_blocks) >= _MAX_PLACED:
                _blocks.clear()
            block = _blocks[key] = found
        held = {name: replace(stored, offset=found[name].offset) for name, stored in held.items()}
    else:
        held, num_bytes = laid_out(held.items())
    step = lcm(PAGE, *{stored.dtype.itemsize for stored in held.values()})
    return Placed(held, -(-num_bytes // step) * step, block)


def _is_plain(header: Header, tensors: Tensors, num_tokens: int) -> bool:
    """True if these are K and V alone, of at most num_tokens tokens, and no unit spans heads."""
    if not tensors or any(part.planes for part in header.parts):
        return False
    heads = header.heads
    for name, stored in tensors.items():
        first, last = heads[layer_of(name)]
        if is_scale(name) or is_row(stored, last - first) or not 0 < stored.shape[0] <= num_tokens:
            return False
    return True


class Room:
    """Memory for snapshots of at most num_tokens tokens each. One thread at a time owns it.

    Snapshots in a room are valid until `clear`.
    """

    def __init__(self, num_tokens: int, *, pinned: bool = False) -> None:
        """pinned: CUDA devices can reach it; needs torch"""
        self.num_tokens = num_tokens
        self.views: Views = {}  # of snapshots that are not blocks: see Dense
        self._pinned = pinned
        self._memory = host_memory(0)
        self._used = 0  # bytes
        self._caches: dict[tuple[int, tuple[int, ...], int], tuple[Tensors, CacheView]] = {}

    @property
    def num_bytes(self) -> int:
        return len(self._memory)

    def has(self, num_bytes: int) -> bool:
        """True if num_bytes bytes are free."""
        return self._used + num_bytes <= len(self._memory)

    def clear(self, num_bytes: int, times: int = 1) -> None:
        """Frees everything that was taken. Then at least num_bytes bytes are free.

        New memory has `times` times as many bytes, since the caller will likely need them.
        Raises StoreError if there is not enough memory.
        """
        self._used = 0
        if num_bytes > len(self._memory):
            self.views.clear()
            self._caches.clear()
            self._memory = host_memory(max(1, times) * num_bytes, pinned=self._pinned)

    def take(self, num_bytes: int) -> tuple[int, Bytes]:
        """Takes num_bytes bytes. Returns their offset in the room, and the bytes.

        Raises ValueError if too few bytes are free and others are in use, StoreError if there is
        not enough memory.
        """
        if not self.has(num_bytes):
            if self._used:
                raise ValueError(f"the room has no {num_bytes} bytes left, expected `clear` before")
            self.clear(num_bytes)
        at = self._used
        self._used += num_bytes
        return at, self._memory[at : at + num_bytes]

    def give_back(self, at: int) -> None:
        """Frees everything from offset `at` on."""
        self._used = at

    def cache(self, place: Placed, layers: Sequence[int]) -> CacheView:
        """Returns the room as a paged cache of snapshots with this place.

        Block i begins i * place.num_bytes bytes into the room.
        """
        assert place.block is not None
        key = id(place.block), tuple(layers), place.num_bytes
        known = self._caches.get(key)
        if known is None or known[0] is not place.block:
            if len(self._caches) >= _MAX_KEPT:
                self._caches.clear()
            dense = Dense(place.block, self._memory)
            found = dense.blocks(layers, len(self._memory) // place.num_bytes, place.num_bytes)
            known = self._caches[key] = place.block, found
        return known[1]
