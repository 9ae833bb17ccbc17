"""MemoryPool: memory of snapshots that are gone, with its description, for those that follow."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kvx_core.migrate import copy_tokens
from kvx_core.snapshot.capture import part_of, to_capture_all
from kvx_core.snapshot.contents import Part, Stored, is_row
from kvx_core.snapshot.dense import Dense
from kvx_core.snapshot.memory import Bytes, host_memory, laid_out
from kvx_core.snapshot.precision import Precision
from kvx_core.snapshot.section import Section, device_of, ints_on, table_on
from kvx_core.snapshot.storage_format import StorageFormat
from kvx_core.view import CacheSpan, CacheView

_MAX_KINDS = 16  # of snapshots; an engine has one or two
_MAX_LENGTHS = 256  # of snapshots of one kind, whose tensors are remembered


class _Block:
    """Memory of one snapshot at a time, and the caches that copies into it take."""

    __slots__ = ("_dense", "_spans", "memory")

    def __init__(self, tensors: dict[str, Stored], memory: Bytes) -> None:
        self.memory = memory
        self._dense = Dense(tensors, memory)
        self._spans: dict[tuple[int, ...], CacheSpan] = {}

    def span(self, layers: tuple[int, ...]) -> CacheSpan:
        """K and V of these layers, as one block."""
        span = self._spans.get(layers)
        if span is None:
            span = self._spans[layers] = self._dense.view(layers, scales=False).at()
        return span


class Lease:
    """A block as long as a snapshot or an array of it refers to it; then the block is free again.

    The arrays of the snapshot are views of numpy.asarray(lease), which refers to the lease.
    """

    def __init__(self, kind: _Kind, block: _Block) -> None:
        self._kind, self._block = kind, block
        self._is_settled = True  # no device writes to it

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self._block.memory.__array_interface__

    def fill(self, section: Section, start: int, num_tokens: int) -> None:
        """Copies tokens of layers of a section, from token `start` of its sequence on.

        On a device the copies are complete after `settled`.
        Raises InvalidArgumentError, UnsupportedError, OutOfRangeError.
        """
        device = device_of([section])
        self._is_settled = device is None
        src = section.view.at(
            block_table=table_on(section.block_table, device), starts=ints_on([start], device)
        )
        copy_tokens(src, self._block.span(section.layers), ints_on([num_tokens], device))

    def settled(self) -> None:
        """The copies of `fill` are complete."""
        self._is_settled = True

    def __del__(self) -> None:
        # A copy that failed may still run on a device: nobody else may have its memory.
        if self._is_settled:
            self._kind.give_back(self._block)


@dataclass(slots=True)
class _Kind:
    """Snapshots of the same layers of the same caches in one format, of at most so many tokens."""

    views: tuple[CacheView, ...]  # keeps them, so that their ids stay theirs
    parts: tuple[Part, ...]
    tensors: dict[str, Stored]  # of as many tokens as there can be
    num_bytes: int
    is_pinned: bool
    max_free: int  # blocks
    free: deque[_Block] = field(default_factory=deque)
    lengths: dict[int, dict[str, Stored]] = field(default_factory=dict)

    def of_length(self, num_tokens: int) -> dict[str, Stored]:
        """The tensors of a snapshot of so many tokens."""
        found = self.lengths.get(num_tokens)
        if found is None:
            found = {
                name: replace(stored, shape=(num_tokens, *stored.shape[1:]))
                for name, stored in self.tensors.items()
            }
            if len(self.lengths) >= _MAX_LENGTHS:
                self.lengths.clear()
            self.lengths[num_tokens] = found
        return found

    def lend(self) -> Lease:
        try:
            block = self.free.pop()
        except IndexError:
            block = _Block(self.tensors, host_memory(self.num_bytes, pinned=self.is_pinned))
        return Lease(self, block)

    def give_back(self, block: _Block) -> None:
        """May be called in any thread, at any time."""
        if len(self.free) < self.max_free:
            self.free.append(block)


class MemoryPool:
    """Host memory for snapshots of chunks, kept when a snapshot is gone for those that follow.

    New memory costs as much as the copy into it, and describing it costs more. Given to
    Snapshot.reserve. K and V without scales and planes are captured into the pool; all else has new
    memory. Threads may share a pool.
    """

    def __init__(self, num_tokens: int, free_bytes: int = 1 << 30) -> None:
        """num_tokens: of the longest snapshot; longer ones have new memory
        free_bytes: that are kept at most of each kind of snapshot while nobody uses them
        """
        self._num_tokens, self._free_bytes = num_tokens, free_bytes
        self._kinds: dict[Any, _Kind | None] = {}

    def reserve(
        self,
        sections: Sequence[Section],
        num_tokens: int,
        format: StorageFormat,
        carried: Precision,
    ) -> tuple[tuple[Part, ...], dict[str, Stored], Bytes, Lease] | None:
        """Parts, tensors and memory of a snapshot; None if it has to have new memory.

        carried: the coarsest precision that the values had before
        Raises StoreError if there is not enough memory.
        """
        if num_tokens > self._num_tokens:
            return None
        key = tuple((id(s.view), s.layers, s.encoding) for s in sections), format, carried
        if key not in self._kinds:
            if len(self._kinds) >= _MAX_KINDS:
                self._kinds.clear()
            self._kinds[key] = self._kind(sections, format, carried)
        kind = self._kinds.get(key)
        if kind is None:
            return None
        lease = kind.lend()
        return kind.parts, dict(kind.of_length(num_tokens)), np.asarray(lease), lease

    def _kind(
        self, sections: Sequence[Section], format: StorageFormat, carried: Precision
    ) -> _Kind | None:
        if not all(_is_plain(section.view) for section in sections):
            return None
        tensors, num_bytes = laid_out(to_capture_all(sections, self._num_tokens, format))
        num_heads = sections[0].heads[1] - sections[0].heads[0]
        if any(s.dtype.format.scaled and s.original for s in tensors.values()):
            return None
        if any(s.dtype.format.grouped or is_row(s, num_heads) for s in tensors.values()):
            return None
        return _Kind(
            views=tuple(section.view for section in sections),
            parts=tuple(part_of(section, format, carried) for section in sections),
            tensors=tensors,
            num_bytes=num_bytes,
            is_pinned=device_of(sections) is not None,
            max_free=self._free_bytes // num_bytes,
        )


def _is_plain(view: CacheView) -> bool:
    """Whether a view has K and V alone."""
    beside = view.k_scales, view.v_scales, view.k_zeros, view.v_zeros
    return bool(view.layers) and not view.planes and beside == (None,) * 4
