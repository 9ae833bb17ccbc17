"""Landing: an array of the host that a call fills, or memory on the device where it runs."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from kvx_core.desc.in_place import is_torch
from kvx_core.desc.tensors import Borrowed, row_major
from kvx_core.types import DType, Memory


class Landing:
    """Where a call writes for `array`: there, or in a copy of it on a device, read back later."""

    def __init__(self, array: npt.NDArray[Any], beside: Borrowed | None = None) -> None:
        """array:  contiguous
        beside: what the call reads: if it is a torch tensor on a device, the copy is there too
        """
        self._array = array
        self._copy: Any = None
        if beside is not None and beside.memory is Memory.DEVICE and is_torch(beside.owner):
            held = sys.modules["torch"].from_numpy(self._bytes())
            self._copy = held.to(beside.owner.device, copy=True)

    def fields(self, dtype: DType) -> dict[str, Any]:
        """The fields of a Borrowed for this memory, whose bytes are of `dtype`."""
        array, copy = self._array, self._copy
        return {
            "dtype": dtype,
            "memory": Memory.HOST if copy is None else Memory.DEVICE,
            "shape": array.shape,
            "stride": row_major(array.shape),
            "data": array.__array_interface__["data"][0] if copy is None else copy.data_ptr(),
            "owner": array if copy is None else copy,
        }

    def read_back(self) -> None:
        """Copies what the call has written into the array, and waits for it."""
        if self._copy is not None:
            self._bytes()[:] = self._copy.cpu().numpy()

    def _bytes(self) -> npt.NDArray[np.uint8]:
        return self._array.reshape(-1).view(np.uint8)
