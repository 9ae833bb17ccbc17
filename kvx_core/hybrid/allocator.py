"""The free blocks of one layer's pool: a stack of block ids.

The ids lie on the device, the number of free ones in pinned host memory, so that neither acquire
nor the kernels that read ids wait for the other. Blocks are taken and given back between two
captured graphs, never inside one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvx_core.argument_checks import bad_argument, integer
from kvx_core.errors import InternalError, InvalidArgumentError
from kvx_core.hybrid._arrays import integers

_capturing: ContextVar[bool] = ContextVar("kvx_hybrid_capturing", default=False)


class OutOfBlocksError(InternalError):
    """A pool has fewer free blocks than were asked for; nothing was taken.

    requested, available, total: blocks
    """

    def __init__(self, what: str, requested: int, available: int, total: int) -> None:
        super().__init__(
            f"{what}: requested {requested} blocks, available {available}, total {total}"
        )
        self.requested, self.available, self.total = requested, available, total


@contextmanager
def capturing() -> Iterator[None]:
    """Marks a region as part of a captured graph: allocators refuse to take or give back blocks.

    Regions that torch captures on a CUDA stream are found without it.
    """
    token = _capturing.set(True)
    try:
        yield
    finally:
        _capturing.reset(token)


class Blocks(NamedTuple):
    """Blocks of several pools."""

    pools: NDArray[np.int64]
    ids: NDArray[np.int32]


class FreeLists:
    """The free lists of L pools in arrays: stacks of block ids, in rows of N, of the largest pool.

    free_ids: (L, N) int32 on `device`, the first top[i] of which are free in pool i
    top:      (L,) int32 in host memory, pinned if there is a CUDA device
    What it is told is not checked: BlockAllocator checks for one pool, BlockTables for all.
    """

    def __init__(self, num_blocks: Sequence[int], device: torch.device) -> None:
        pools, most = len(num_blocks), max(num_blocks, default=0)
        self.top = torch.zeros(pools, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.free_ids = torch.arange(most, dtype=torch.int32, device=device).repeat(pools, 1)
        # The same on the host, and which blocks are held: what a release is checked against.
        self.num_free = self.top.numpy()
        self.num_free[:] = num_blocks
        self.ids = np.tile(np.arange(most, dtype=np.int32), (pools, 1))
        self.is_held = np.zeros((pools, most), dtype=bool)

    def next_blocks(self, counts: NDArray[np.int64]) -> Blocks:
        """The next `counts` blocks of each pool, the pools one after the other."""
        pools = np.repeat(np.arange(len(counts)), counts)
        first = self.num_free - np.cumsum(counts)  # of a pool's blocks, less those of pools before
        return Blocks(pools, self.ids[pools, first[pools] + np.arange(len(pools))])

    def take(self, blocks: Blocks, counts: NDArray[np.int64]) -> None:
        """Takes the blocks of next_blocks."""
        self.is_held[blocks] = True
        self.num_free -= counts.astype(np.int32)

    def put_back(self, pool: int, ids: NDArray[np.int32]) -> None:
        """Gives back blocks of a pool that are held, each once."""
        first = int(self.num_free[pool])
        last = first + len(ids)
        self.is_held[pool, ids] = False
        self.ids[pool, first:last] = ids
        self.free_ids[pool, first:last] = torch.from_numpy(ids).to(self.free_ids.device)
        self.num_free[pool] = last


class BlockAllocator:
    """A free list of blocks 0 to num_blocks - 1: what was given back last is taken first.

    free_ids: (num_blocks,) int32 on `device`, the first `top` of which are free
    top:      (1,) int32 in host memory, pinned if there is a CUDA device
    One thread at a time. Raises InvalidArgumentError.
    """

    def __init__(
        self,
        num_blocks: int,
        device: torch.device | str = "cpu",
        *,
        name: str = "pool",
        lists: FreeLists | None = None,
        pool: int = 0,
    ) -> None:
        """lists, pool: the free lists that have this one, and which it is; None: of its own."""
        self.num_blocks = integer("num_blocks", num_blocks, 0, 2**31 - 1)
        self.device = torch.device(device)
        self.name = name
        self._lists = lists or FreeLists([self.num_blocks], self.device)
        self._pool = pool
        self.top = self._lists.top[pool : pool + 1]
        self.free_ids = self._lists.free_ids[pool, : self.num_blocks]

    def __repr__(self) -> str:
        return f"BlockAllocator({self.num_free} of {self.num_blocks} blocks free)"

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return int(self._lists.num_free[self._pool])

    @property
    def num_held(self) -> int:
        """Blocks that were taken and not given back."""
        return self.num_blocks - self.num_free

    def acquire(self, count: int) -> Tensor:
        """Takes `count` blocks: their ids, (count,) int32 on `device`.

        Raises OutOfBlocksError if fewer are free, and RuntimeError inside a capture; nothing is
        then taken.
        """
        require_outside_capture(self.device, self.name)
        count, top = integer("count", count, 0, 2**31 - 1), self.num_free
        if count > top:
            raise OutOfBlocksError(self.name, count, top, self.num_blocks)
        ids = self.free_ids[top - count : top].clone()
        counts = np.zeros(len(self._lists.top), dtype=np.int64)
        counts[self._pool] = count
        self._lists.take(self._lists.next_blocks(counts), counts)
        return ids

    def release(self, block_ids: Tensor | Sequence[int]) -> None:
        """Gives blocks back.

        block_ids: (count,) ids that acquire returned, in any order; ids on a device are read back
        Raises InvalidArgumentError for an id that is out of range, that is not held or is given
        twice, and for more blocks than are held; RuntimeError inside a capture. Nothing is then
        given back.
        """
        require_outside_capture(self.device, self.name)
        ids = _ids(block_ids)
        if len(ids) > self.num_held:
            raise InvalidArgumentError(
                f"{self.name}: {len(ids)} blocks are released and {self.num_held} are held"
            )
        outside = np.flatnonzero((ids < 0) | (ids >= self.num_blocks))
        if len(outside):
            raise InvalidArgumentError(
                f"{self.name}: block_ids[{outside[0]}] is {ids[outside[0]]}, expected 0 to "
                f"{self.num_blocks - 1}"
            )
        once, counts = np.unique(ids, return_counts=True)
        for block in once[(counts > 1) | ~self._is_held[once]].tolist():
            raise InvalidArgumentError(
                f"{self.name}: block {block} is released twice"
                if counts[once == block] > 1
                else f"{self.name}: block {block} is released and nobody holds it"
            )
        self._lists.put_back(self._pool, ids)

    def holds(self, block_id: int) -> bool:
        """Whether somebody holds this block."""
        return bool(self._is_held[integer("block_id", block_id, 0, self.num_blocks - 1)])

    @property
    def _is_held(self) -> NDArray[np.bool_]:
        row: NDArray[np.bool_] = self._lists.is_held[self._pool]
        return row


def require_outside_capture(device: torch.device, what: str = "the manager") -> None:
    """Raises InternalError, a RuntimeError, inside a capture."""
    captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if captured or _capturing.get():
        raise InternalError(
            f"{what}: blocks are taken or given back inside a captured graph, whose replays would "
            "not repeat it. Call prepare_forward before the graph"
        )


def _ids(block_ids: Tensor | Sequence[int]) -> NDArray[np.int32]:
    """Block ids in host memory, (count,) int32. Raises InvalidArgumentError."""
    if isinstance(block_ids, Tensor):
        if block_ids.dim() != 1 or block_ids.dtype not in (torch.int32, torch.int64):
            raise bad_argument(
                "block_ids", block_ids, "a tensor (count,) of int32 or int64, or a list"
            )
        block_ids = block_ids.tolist()
    if not isinstance(block_ids, (list, tuple)):
        raise bad_argument("block_ids", block_ids, "a tensor (count,) of int32 or int64, or a list")
    return integers("block_ids", block_ids, -(2**31), 2**31 - 1).astype(np.int32)
