"""Allocates memory for the tensors of a snapshot, and assigns their offsets."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kvx_core.errors import StoreError
from kvx_core.snapshot.contents import Stored

PAGE = 4096
_ALIGN = 64  # bytes; offsets of tensors are multiples of it

Bytes = npt.NDArray[np.uint8]


def host_memory(num_bytes: int, *, pinned: bool = False) -> Bytes:
    """Returns new host memory that begins at the start of a page and is not initialised.

    pinned: CUDA devices can reach it; needs torch
    Raises StoreError if there is not enough memory.
    """
    try:
        if pinned:
            import torch

            buffer: Bytes = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy()
            return buffer
        raw = np.empty(num_bytes + PAGE, np.uint8)
    except (MemoryError, RuntimeError) as error:  # torch raises a RuntimeError
        raise StoreError(f"no memory for {num_bytes} bytes of keys and values: {error}") from None
    skip = -raw.__array_interface__["data"][0] % PAGE
    return raw[skip : skip + num_bytes]


def laid_out(
    entries: Iterable[tuple[str, Stored]],
) -> tuple[dict[str, Stored], int]:
    """Assigns offsets to tensors, one behind another. Returns the tensors and their total bytes."""
    tensors: dict[str, Stored] = {}
    offset = 0
    for name, stored in entries:
        tensors[name] = Stored(stored.dtype, stored.shape, offset, stored.original, stored.coding)
        offset += -(-stored.num_bytes // _ALIGN) * _ALIGN
    return tensors, offset
