"""The free blocks of one layer's pool: a stack of block ids.

The ids lie on the device, the number of free ones in pinned host memory, so that neither acquire
nor the kernels that read ids wait for the other. Blocks are taken and given back between two
captured graphs, never inside one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np
import torch
from torch import Tensor

from kvx_core.errors import InternalError, InvalidArgumentError
from kvx_core.words import integer, wrong

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


class BlockAllocator:
    """A free list of blocks 0 to num_blocks - 1: what was given back last is taken first.

    free_ids: (num_blocks,) int32 on `device`, the first `top` of which are free
    top:      (1,) int32 in host memory, pinned if there is a CUDA device
    One thread at a time. Raises InvalidArgumentError.
    """

    def __init__(
        self, num_blocks: int, device: torch.device | str = "cpu", *, name: str = "pool"
    ) -> None:
        self.num_blocks = integer("num_blocks", num_blocks, 0, 2**31 - 1)
        self.device = torch.device(device)
        self.name = name
        pinned = self.device.type == "cuda"
        self.top = torch.full((1,), self.num_blocks, dtype=torch.int32, pin_memory=pinned)
        self.free_ids = torch.arange(self.num_blocks, dtype=torch.int32, device=self.device)
        # The same stack on the host, and which blocks are held: what a release is checked against.
        self._ids = np.arange(self.num_blocks, dtype=np.int32)
        self._held = np.zeros(self.num_blocks, dtype=bool)

    def __repr__(self) -> str:
        return f"BlockAllocator({self.num_free} of {self.num_blocks} blocks free)"

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return int(self.top)

    @property
    def num_held(self) -> int:
        """Blocks that were taken and not given back."""
        return self.num_blocks - self.num_free

    def acquire(self, count: int) -> Tensor:
        """Takes `count` blocks: their ids, (count,) int32 on `device`.

        Raises OutOfBlocksError if fewer are free, and RuntimeError inside a capture; nothing is
        then taken.
        """
        return self.acquire_with_ids(count)[0]

    def acquire_with_ids(self, count: int) -> tuple[Tensor, list[int]]:
        """The same, and the ids as the host knows them, without waiting for the device."""
        self.require_outside_capture()
        count, top = integer("count", count, 0, 2**31 - 1), self.num_free
        if count > top:
            raise OutOfBlocksError(self.name, count, top, self.num_blocks)
        ids = self._ids[top - count : top]
        self._held[ids] = True
        self.top[0] = top - count
        return self.free_ids[top - count : top].clone(), ids.tolist()

    def release(self, block_ids: Tensor | Sequence[int]) -> None:
        """Gives blocks back.

        block_ids: (count,) ids that acquire returned, in any order; ids on a device are read back
        Raises InvalidArgumentError for an id that is out of range, that is not held or is given
        twice, and for more blocks than are held; RuntimeError inside a capture. Nothing is then
        given back.
        """
        self.require_outside_capture()
        ids = _ids(block_ids)
        top = self.num_free
        if len(ids) > self.num_blocks - top:
            raise InvalidArgumentError(
                f"{self.name}: {len(ids)} blocks are released and {self.num_blocks - top} are held"
            )
        for i, block in enumerate(ids):
            if not 0 <= block < self.num_blocks:
                raise InvalidArgumentError(
                    f"{self.name}: block_ids[{i}] is {block}, expected 0 to {self.num_blocks - 1}"
                )
        once, counts = np.unique(ids, return_counts=True)
        for block, count in zip(once.tolist(), counts.tolist(), strict=True):
            if count > 1 or not self._held[block]:
                raise InvalidArgumentError(
                    f"{self.name}: block {block} is released twice"
                    if count > 1
                    else f"{self.name}: block {block} is released and nobody holds it"
                )
        self._held[ids] = False
        self._ids[top : top + len(ids)] = ids
        self.free_ids[top : top + len(ids)] = torch.from_numpy(ids).to(self.device)
        self.top[0] = top + len(ids)

    def holds(self, block_id: int) -> bool:
        """Whether somebody holds this block."""
        return bool(self._held[integer("block_id", block_id, 0, self.num_blocks - 1)])

    def require_outside_capture(self) -> None:
        """Raises InternalError, a RuntimeError, inside a capture."""
        captured = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if captured or _capturing.get():
            raise InternalError(
                f"{self.name}: blocks are taken or given back inside a captured graph, whose "
                "replays would not repeat it. Call prepare_forward before the graph"
            )


def _ids(block_ids: Tensor | Sequence[int]) -> np.ndarray:
    """Block ids in host memory, (count,) int32. Raises InvalidArgumentError."""
    if isinstance(block_ids, Tensor):
        if block_ids.dim() != 1 or block_ids.dtype not in (torch.int32, torch.int64):
            raise wrong("block_ids", block_ids, "a tensor (count,) of int32 or int64, or a list")
        block_ids = block_ids.tolist()
    if not isinstance(block_ids, (list, tuple)):
        raise wrong("block_ids", block_ids, "a tensor (count,) of int32 or int64, or a list")
    checked = [
        integer(f"block_ids[{i}]", block, -(2**31), 2**31 - 1) for i, block in enumerate(block_ids)
    ]
    return np.array(checked, dtype=np.int32)
