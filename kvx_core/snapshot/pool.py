"""MemoryPool reuses the memory of freed snapshots, and its description, for later snapshots."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import lcm
from typing import Any, NamedTuple
from weakref import ref

import numpy as np

from kvx_core.desc.tables import BlockTable
from kvx_core.desc.view import CacheView
from kvx_core.ops.migrate import copy_rows, copy_tokens
from kvx_core.snapshot.capture import check_sections, parts_of, to_capture, to_capture_all
from kvx_core.snapshot.contents import Part, Stored, is_row
from kvx_core.snapshot.dense import Dense
from kvx_core.snapshot.memory import Bytes, host_memory, laid_out
from kvx_core.snapshot.precision import Precisions
from kvx_core.snapshot.section import Section, device_of, ints_on, row_on_host, table_on
from kvx_core.snapshot.storage_format import StorageFormat

_ALIGN = 64  # bytes; snapshots in a slab begin at multiples of it
_MAX_KINDS = 16  # of snapshots; an engine has one or two
_MAX_LENGTHS = 256  # of snapshots; a kind remembers the tensors of each length
_SLAB_BYTES = 256 << 20  # most bytes of a slab of more than one block


class _Slab:
    """Blocks that lie side by side. Each block is the memory of one snapshot at a time.

    So K of a layer in all snapshots is a tensor of blocks, and one copy into a paged cache fills
    many snapshots.
    """

    def __init__(
        self,
        tensors: dict[str, Stored],
        block_bytes: int,
        num_blocks: int,
        block_tokens: int,
        *,
        pinned: bool,
    ) -> None:
        self.block_tokens = block_tokens
        self.memory = host_memory(block_bytes * num_blocks, pinned=pinned)
        self._dense = Dense(tensors, self.memory)
        self._block_bytes, self._num_blocks = block_bytes, num_blocks
        # The __array_interface__ of each block.
        self.interfaces = [self._block(i).__array_interface__ for i in range(num_blocks)]
        self._views: dict[tuple[int, ...], CacheView] = {}

    def _block(self, index: int) -> Bytes:
        """Returns the memory of a block."""
        return self.memory[index * self._block_bytes : (index + 1) * self._block_bytes]

    def view(self, layers: tuple[int, ...]) -> CacheView:
        """Returns K and V of these layers as a paged cache. A block is a snapshot."""
        found = self._views.get(layers)
        if found is None:
            found = self._dense.blocks(layers, self._num_blocks, self._block_bytes)
            self._views[layers] = found
        return found


class Lease:
    """Owns a block as long as a snapshot or one of its arrays refers to the lease.

    After that the block is free again. The arrays of the snapshot are views of
    numpy.asarray(lease), which refers to the lease.
    """

    def __init__(self, kind: _Kind | None, slab: _Slab, block: int) -> None:
        """kind: the block goes back to it; None: the block is not used again"""
        self._kind, self.slab, self.block = kind, slab, block
        self.is_settled = True  # False while a device may write to the block

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self.slab.interfaces[self.block]

    def settled(self) -> None:
        """Tells the lease that the copies into the block are complete."""
        self.is_settled = True

    def __del__(self) -> None:
        # A copy that failed may still run on a device: its memory must not be used again.
        if self._kind is not None and self.is_settled:
            self._kind.free.append((self.slab, self.block))


class Leased(NamedTuple):
    """A snapshot in memory of a pool, for `copy_into`."""

    lease: Lease
    start: int  # position in the sequence of the snapshot's first token
    num_tokens: int

    def is_followed_by(self, other: Leased, block_tokens: int) -> bool:
        """True if one copy can fill both snapshots."""
        is_full = self.num_tokens == block_tokens
        follows = self.start + self.num_tokens == other.start
        return is_full and follows and self.lease.slab is other.lease.slab


def copy_into(snapshots: Sequence[Leased], section: Section) -> None:
    """Copies tokens of the layers of a section into snapshots in memory of a pool.

    Does not wait for a device: the caller waits, and then calls Lease.settled.
    Raises InvalidArgumentError, UnsupportedError, OutOfRangeError.
    """
    device, table = device_of([section]), section.block_table
    row = row_on_host(table) if device is None else None
    for run in _runs(snapshots):
        for one in run:
            one.lease.is_settled = device is None
        slab, start = run[0].lease.slab, run[0].start
        num_tokens = sum(one.num_tokens for one in run)
        blocks = np.array([one.lease.block for one in run], np.int64)
        if row is not None:
            copy_rows(section.view, row, start, slab.view(section.layers), blocks, 0, num_tokens)
            continue
        of_slab = table_on(BlockTable.packed(blocks[None]), device)
        copy_tokens(
            section.view.at(block_table=table_on(table, device), starts=ints_on([start], device)),
            slab.view(section.layers).at(block_table=of_slab),
            ints_on([num_tokens], device),
        )


def _runs(snapshots: Sequence[Leased]) -> Iterator[list[Leased]]:
    """Yields runs of snapshots. One copy can fill each run."""
    run: list[Leased] = []
    for one in snapshots:
        if run and not run[-1].is_followed_by(one, one.lease.slab.block_tokens):
            yield run
            run = []
        run.append(one)
    if run:
        yield run


class _Kind:
    """Memory for snapshots of the same layers of the same caches in one format.

    They have at most num_tokens tokens each.
    """

    def __init__(
        self,
        sections: Sequence[Section],
        parts: tuple[Part, ...],
        tensors: dict[str, Stored],
        num_bytes: int,
        num_tokens: int,
        free_bytes: int,
    ) -> None:
        """tensors:    of a snapshot of num_tokens tokens, which takes num_bytes
        free_bytes: most bytes of the blocks that are kept

        Does not keep the caches alive.
        """
        self.parts, self.num_tokens = parts, num_tokens
        self.free: deque[tuple[_Slab, int]] = deque()
        self._tensors = tensors
        step = lcm(_ALIGN, *(stored.dtype.itemsize for stored in tensors.values()))
        self._block_bytes = -(-num_bytes // step) * step
        self._is_pinned = device_of(sections) is not None
        self._max_blocks = free_bytes // self._block_bytes  # that may be kept
        self._num_blocks = 0  # that are kept, free or in use
        self._lengths: dict[int, dict[str, Stored]] = {}
        self._lock = threading.Lock()  # guards _num_blocks

    def of_length(self, num_tokens: int) -> dict[str, Stored]:
        """Returns the tensors of a snapshot of num_tokens tokens. They must not be changed."""
        found = self._lengths.get(num_tokens)
        if found is None:
            found = {
                name: replace(stored, shape=(num_tokens, *stored.shape[1:]))
                for name, stored in self._tensors.items()
            }
            if len(self._lengths) >= _MAX_LENGTHS:
                self._lengths.clear()
            self._lengths[num_tokens] = found
        return found

    def prepare(self, num_tokens: int) -> None:
        """Allocates blocks for num_tokens tokens in all, as far as they may be kept.

        Raises StoreError if there is not enough memory.
        """
        missing = -(-num_tokens // self.num_tokens) - len(self.free)
        if missing <= 0:
            return
        with self._lock:
            allowed = self._max_blocks - self._num_blocks
            wanted = min(max(missing, self._num_blocks), max(1, _SLAB_BYTES // self._block_bytes))
            num_blocks = min(wanted, allowed)
            if num_blocks <= 0:
                return
            slab = self._slab(num_blocks)
            self._num_blocks += num_blocks
        self.free.extend((slab, block) for block in reversed(range(num_blocks)))

    def lend(self) -> Lease:
        """Returns a lease of a free or new block. Raises StoreError if memory is short."""
        if not self.free:
            self.prepare(self.num_tokens)
        try:
            return Lease(self, *self.free.pop())
        except IndexError:  # all blocks that may be kept are in use
            return Lease(None, self._slab(1), 0)

    def _slab(self, num_blocks: int) -> _Slab:
        return _Slab(
            self._tensors,
            self._block_bytes,
            num_blocks,
            self.num_tokens,
            pinned=self._is_pinned,
        )


class _Known(NamedTuple):
    """The pool's answer for sections of these views: a _Kind, or None for new memory."""

    views: list[ref[CacheView]]
    kind: _Kind | None

    def is_of(self, sections: Sequence[Section]) -> bool:
        """True if the sections have these views. A new view may have the id of a freed view."""
        return all(view() is one.view for view, one in zip(self.views, sections, strict=True))


class MemoryPool:
    """Keeps the host memory of freed snapshots of chunks for later snapshots.

    New memory costs as much as the copy into it, and describing it costs more. Snapshot.reserve
    takes a pool. K and V without scales and planes are captured into the pool; all other snapshots
    have new memory. The pool frees the memory of snapshots of a view that no longer exists.
    Threads may share a pool.
    """

    def __init__(self, num_tokens: int, free_bytes: int = 1 << 30) -> None:
        """num_tokens: of the longest snapshot in the pool; longer snapshots have new memory
        free_bytes: most bytes that the pool keeps for each kind of snapshot
        """
        self._num_tokens, self._free_bytes = num_tokens, free_bytes
        self._kinds: dict[Any, _Known] = {}

    def kind(
        self,
        sections: Sequence[Section],
        format: StorageFormat,
        carried: Precisions,
        num_tokens: int,
    ) -> _Kind | None:
        """Returns an object that lends memory for snapshots of these sections.

        Returns None if these snapshots must have new memory.
        carried:    the coarsest precision that the values had before; a tuple if for each layer
        num_tokens: of all snapshots that are captured now
        Raises StoreError if there is not enough memory, InvalidArgumentError, UnsupportedError.
        """
        key = tuple((id(s.view), s.layers, s.encoding) for s in sections), format, carried
        known, kinds = self._kinds.get(key), self._kinds
        if known is None or not known.is_of(sections):
            if len(kinds) >= _MAX_KINDS:
                kinds.clear()
            kind = self._kind(sections, format, carried)
            views = [ref(one.view, lambda _: kinds.pop(key, None)) for one in sections]
            known = kinds[key] = _Known(views, kind)
        if known.kind is not None:
            known.kind.prepare(num_tokens)
        return known.kind

    def _kind(
        self, sections: Sequence[Section], format: StorageFormat, carried: Precisions
    ) -> _Kind | None:
        check_sections(sections, format, carried)
        if not all(_is_plain(section.view) for section in sections):
            return None
        for section in sections:
            num_heads = section.heads[1] - section.heads[0]
            for _, stored in to_capture(section, self._num_tokens, format):
                of = stored.dtype.format
                if (of.scaled and stored.original) or of.grouped or is_row(stored, num_heads):
                    return None
        tensors, num_bytes = laid_out(to_capture_all(sections, self._num_tokens, format))
        parts = tuple(parts_of(sections, format, carried))
        return _Kind(sections, parts, tensors, num_bytes, self._num_tokens, self._free_bytes)


def _is_plain(view: CacheView) -> bool:
    """True if a view has K and V alone."""
    beside = view.k_scales, view.v_scales, view.k_zeros, view.v_zeros
    return bool(view.layers) and not view.planes and beside == (None,) * 4
