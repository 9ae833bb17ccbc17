"""Sequences: where one sequence after another lies in a view, in descriptors that are made once.

To describe where a chunk lies takes longer than to copy it. So a description is used again: its
arrays get the blocks and the start of the next sequence.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from kvx_core import _abi
from kvx_core.lookup import bound_find
from kvx_core.snapshot.section import ints_on, table_on
from kvx_core.tables import BlockTable, BlockTableFormat, SeqLens
from kvx_core.types import Memory
from kvx_core.view import CacheSpan, CacheView

_NOWHERE = np.iinfo(np.int32).max  # no cache has a block of this id: a call that reads it fails
_LEAST_BLOCKS = 64

BlockIds = npt.NDArray[np.integer[Any]]
_NO_BLOCKS: BlockIds = np.empty(0, np.int64)


class _OneSequence:
    """A span of a view whose table, start and length are arrays. One thread has it at a time."""

    def __init__(self, view: CacheView, room: int) -> None:
        """room: blocks of the longest sequence"""
        self.room = room
        self._table = np.full((1, room), _NOWHERE, np.int64)
        self._starts, self._lens = np.zeros(1, np.int64), np.zeros(1, np.int64)
        self._num_blocks = 0  # of the sequence
        self.span = view.at(block_table=self._table, starts=self._starts)
        self._find: Callable[[int], npt.NDArray[Any]] | None = None

    def look_up(self, blocks: BlockIds, start: int) -> None:
        """Makes it the span of another sequence, from token `start` on."""
        row, num_blocks = self._table[0], len(blocks)
        row[:num_blocks] = blocks
        row[num_blocks : self._num_blocks] = _NOWHERE  # nothing stays of a longer one
        self._num_blocks, self._starts[0] = num_blocks, start

    def nulls(self, num_tokens: int) -> npt.NDArray[np.bool_]:
        """Which of its tokens are stored nowhere."""
        if self._find is None:
            self._find = bound_find(self.span, SeqLens.of(self._lens))
        self._lens[0] = num_tokens
        null: npt.NDArray[np.bool_] = self._find(num_tokens)["block"] < 0
        return null


class Sequences:
    """Spans of sequences in one view of K and V. Threads may share it."""

    def __init__(self, view: CacheView) -> None:
        self._view = view
        self._idle: deque[_OneSequence] = deque()  # that no thread has

    @contextmanager
    def at(
        self, table: BlockTable | BlockIds | None, start: int, device: Any
    ) -> Iterator[CacheSpan]:
        """The span of a sequence from token `start` on, as an end of a copy. It is that of another
        sequence when the context has ended.

        table:  as Section.block_table, or block ids
        device: that reads the table; None: the host
        """
        blocks = _on_host(table) if device is None else None
        if blocks is None:
            row = BlockTable.packed(table[None]) if isinstance(table, np.ndarray) else table
            starts = ints_on([start], device)
            yield self._view.at(block_table=table_on(row, device), starts=starts)
            return
        one = self._lend(blocks, start)
        yield one.span
        self._idle.append(one)  # after an error nobody gets it

    def nulls(
        self, table: BlockTable | None, start: int, num_tokens: int
    ) -> npt.NDArray[np.bool_] | None:
        """Which tokens of a sequence are stored nowhere; None for a table that `at` does not copy.

        Raises OutOfRangeError for block ids that are out of range.
        """
        blocks = _on_host(table)
        if blocks is None:
            return None
        one = self._lend(blocks, start)
        null = one.nulls(num_tokens)
        self._idle.append(one)
        return null

    def _lend(self, blocks: BlockIds, start: int) -> _OneSequence:
        one = None
        with suppress(IndexError):
            one = self._idle.pop()
        if one is None or one.room < len(blocks):
            one = _OneSequence(self._view, max(_LEAST_BLOCKS, 2 * len(blocks)))
        one.look_up(blocks, start)
        return one


def _on_host(table: BlockTable | BlockIds | None) -> BlockIds | None:
    """The block ids of a row; None for a table of another format, or on a device."""
    if isinstance(table, np.ndarray):
        return table
    if table is None or table.format is not BlockTableFormat.PACKED:
        return None
    if table.memory is not Memory.HOST:
        return None
    table.require_in_place("section.block_table")
    num_bytes = table.indices_count * table.index_dtype.itemsize
    dtype = table.index_dtype.array_name
    return np.frombuffer(_abi.read(table.indices, num_bytes), dtype) if num_bytes else _NO_BLOCKS
