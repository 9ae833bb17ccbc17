"""Memory for the tensors of a snapshot, and work on them in several threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache, lru_cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvx_core.snapshot.contents import Stored
from kvx_core.snapshot.errors import StoreError

PAGE = 4096
_ALIGN = 64  # bytes, of each tensor
_THREADED_BYTES = 4 << 20  # below it, handing them to threads costs more than it saves
_MAX_THREADS = 4

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
    if num_bytes < _THREADED_BYTES or len(items) < 2 or _num_cpus() < 2:
        return [work(item) for item in items]
    num_threads = min(_num_cpus(), _MAX_THREADS, len(items))
    results: list[Any] = [None] * len(items)

    def work_on(first: int) -> None:
        for i in range(first, len(items), num_threads):
            results[i] = work(items[i])

    helpers = _helpers(os.getpid())
    others = [helpers.submit(work_on, first) for first in range(1, num_threads)]
    try:
        work_on(0)
    finally:
        wait(others)
    for other in others:
        other.result()
    return results


@cache
def _num_cpus() -> int:
    return os.cpu_count() or 1


@lru_cache(maxsize=1)
def _helpers(process: int) -> ThreadPoolExecutor:
    """The threads of a process, kept: to start them takes as long as to read a megabyte. A forked
    child has none of its parent's.
    """
    return ThreadPoolExecutor(_MAX_THREADS - 1, "kvx-bytes")
