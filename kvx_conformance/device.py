"""Bytes of a GPU's memory, read and written from the host by torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

DEVICE = "cuda"


@dataclass(frozen=True)
class OnDevice:
    """A strided array of uint8 in the current GPU's memory.

    What is read is a copy in the host's memory, after all that torch's current stream has to do
    before it.

    data:      address of its first byte
    num_bytes: from there to its last one
    strides:   in bytes
    """

    data: int
    num_bytes: int
    shape: Sequence[int]
    strides: Sequence[int]

    def __getitem__(self, place: Any) -> Any:
        found = np.array(self._tensor()[place].cpu())
        return found if found.ndim else found[()]

    def __setitem__(self, place: Any, value: Any) -> None:
        import torch

        tensor = self._tensor()
        tensor[place] = torch.from_numpy(np.array(value, np.uint8)).to(tensor.device)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        found: npt.NDArray[Any] = self[...]
        return found if dtype is None else found.astype(dtype)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Source: https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html"""
        data = self.data, False
        return {"shape": (self.num_bytes,), "typestr": "|u1", "data": data, "version": 3}

    def _tensor(self) -> Any:
        return memory_of(self).as_strided([*self.shape], [*self.strides])


def memory_of(array: OnDevice) -> Any:
    """Its bytes from the first to the last, as a tensor of torch that shares them."""
    import torch

    return torch.as_tensor(array, device=DEVICE)


def zeros(shape: Sequence[int], dtype: npt.DTypeLike) -> Any:
    """A new tensor of torch on the current GPU."""
    import torch

    return torch.from_numpy(np.zeros(shape, dtype)).to(DEVICE)
