"""Memory for the tensors of a snapshot, and work on them in several threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvx_core.snapshot.contents import Stored
from kvx_core.snapshot.errors import StoreError

PAGE = 4096
_ALIGN = 64  # bytes, of each tensor
_THREADED_BYTES = 4 << 20  # below it, starting threads costs more than they save

Bytes = npt.NDArray[np.uint8]
_T = TypeVar("_T")
_R = TypeVar("_R")


def host_memory(num_bytes: int, *, pinned: bool = False) -> Bytes:
    """New host memory that begins at the start of a page, not initialised.

    pinned: CUDA devices can reach it; needs torch
    Raises StoreError if there is not enough memory.
    """
    try:
        if pinned:
            import torch

            buffer: Bytes = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy()
            return buffer
        raw = np.empty(num_bytes + PAGE, np.uint8)
    except (MemoryError, RuntimeError) as error:  # torch's own is a RuntimeError
        raise StoreError(f"no memory for {num_bytes} bytes of keys and values: {error}") from None
    skip = -raw.__array_interface__["data"][0] % PAGE
    return raw[skip : skip + num_bytes]


def laid_out(
    entries: Iterable[tuple[str, Stored]],
) -> tuple[dict[str, Stored], int]:
    """Offsets for tensors that follow one another in memory, and the bytes they take in all."""
    tensors: dict[str, Stored] = {}
    offset = 0
    for name, stored in entries:
        tensors[name] = Stored(stored.dtype, stored.shape, offset, stored.original, stored.coding)
        offset += -(-stored.num_bytes // _ALIGN) * _ALIGN
    return tensors, offset


def in_threads(work: Callable[[_T], _R], items: Sequence[_T], num_bytes: int) -> list[_R]:
    """[work(item) for item in items], in several threads if num_bytes is large."""
    if num_bytes < _THREADED_BYTES:
        return [work(item) for item in items]
    num_threads = min(os.cpu_count() or 1, 4, len(items))
    if num_threads < 2:
        return [work(item) for item in items]
    results: list[Any] = [None] * len(items)

    def work_on(first: int) -> None:
        for i in range(first, len(items), num_threads):
            results[i] = work(items[i])

    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(work_on, range(num_threads)))
    return results
