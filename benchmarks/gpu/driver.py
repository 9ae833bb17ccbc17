"""NVIDIA's driver library, for what torch has no function. Imports nothing that has to be built."""

from __future__ import annotations

import ctypes
from typing import Any


def load() -> Any:
    """libcuda. Raises OSError where there is no driver."""
    return ctypes.CDLL("libcuda.so.1")


def cuda_version() -> tuple[int, int] | None:
    """The latest CUDA whose programs this driver runs; None: there is no driver."""
    number = ctypes.c_int()
    try:
        if load().cuDriverGetVersion(ctypes.byref(number)):
            return None
    except OSError:
        return None
    return number.value // 1000, number.value % 1000 // 10
