"""Copiers: copies of sequences between two caches on the host, described once.

To describe where a chunk lies takes longer than to copy it. So a description is used again: its
arrays get the blocks, the starts and the length of the next copy.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress

import numpy as np

from kvx_core.desc.tables import BlockTable, SeqLens
from kvx_core.desc.view import CacheSpan, CacheView
from kvx_core.ops.migrate import bound_copy
from kvx_core.snapshot.section import BlockIds

_NOWHERE = np.iinfo(np.int32).max  # no cache has a block of this id: a copy that reads it fails
_LEAST_ROOM = 64


class _End:
    """A span of a view whose table and start are arrays."""

    def __init__(self, view: CacheView, room: int, *, holes: bool) -> None:
        """room: blocks of the longest sequence; holes: null ones are skipped"""
        self.room = room
        self._row, self._starts = np.full(room, _NOWHERE, np.int64), np.zeros(1, np.int64)
        self._num_blocks = 0  # of the sequence
        table = BlockTable.packed(self._row[None])
        table = table.with_holes() if holes else table
        self.span: CacheSpan = view.at(block_table=table, starts=self._starts)

    def look_up(self, blocks: BlockIds, start: int) -> None:
        """Makes it the span of another sequence, from token `start` on."""
        num_blocks = len(blocks)
        self._row[:num_blocks] = blocks
        if num_blocks < self._num_blocks:
            self._row[num_blocks : self._num_blocks] = _NOWHERE  # nothing stays of a longer one
        self._num_blocks, self._starts[0] = num_blocks, start


class _Copier:
    """One thread has it at a time."""

    def __init__(self, src: _End, dst: _End) -> None:
        self.src, self.dst = src, dst
        self._lens = np.zeros(1, np.int64)
        self._copy = bound_copy(src.span, dst.span, SeqLens.of(self._lens))

    def copy(self, num_tokens: int) -> None:
        """Copies the first tokens from one end to the other."""
        self._lens[0] = num_tokens
        self._copy()


class Copiers:
    """Copies of sequences of one view into blocks of another. Threads may share them."""

    def __init__(self, src: CacheView, dst: CacheView) -> None:
        self._src, self._dst = src, dst
        self._idle: deque[_Copier] = deque()  # that no thread has

    def copy(
        self, src: BlockIds, src_start: int, dst: BlockIds, dst_start: int, num_tokens: int
    ) -> None:
        """Copies tokens of a sequence, from src_start on, to dst_start on of another one.

        src, dst: their blocks
        Raises InvalidArgumentError, UnsupportedError, OutOfRangeError.
        """
        copier = None
        with suppress(IndexError):
            copier = self._idle.pop()
        if copier is None or copier.src.room < len(src) or copier.dst.room < len(dst):
            rooms = (max(_LEAST_ROOM, 2 * len(blocks)) for blocks in (src, dst))
            src_room, dst_room = rooms
            copier = _Copier(
                _End(self._src, src_room, holes=False), _End(self._dst, dst_room, holes=True)
            )
        copier.src.look_up(src, src_start)
        copier.dst.look_up(dst, dst_start)
        copier.copy(num_tokens)
        self._idle.append(copier)  # after an error nobody gets it
