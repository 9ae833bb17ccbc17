"""Moves numbers into TurboQuant's units and out of them by `migrate`."""

from __future__ import annotations

import numpy as np

from kvx_core import (
    DType,
)
from kvx_core.encodings import turboquant
from tests import test_formats as formats

BITS = {DType.TQ2: 2, DType.TQ3: 3, DType.TQ4: 4}


DIM = 128  # of a unit


def encode(numbers: np.ndarray, dtype: DType) -> np.ndarray:
    """[..., numbers] float32 to [..., bytes]."""
    if dtype not in BITS:
        return formats.encode(numbers, dtype)
    units = turboquant.encode(numbers.reshape(*numbers.shape[:-1], -1, DIM), BITS[dtype])
    return np.asarray(units).reshape(*numbers.shape[:-1], -1)


def decode(stored: np.ndarray, dtype: DType) -> np.ndarray:
    """[..., bytes] to [..., numbers] float32."""
    if dtype not in BITS:
        return formats.decode(stored, dtype)
    units = np.ascontiguousarray(stored).reshape(*stored.shape[:-1], -1, dtype.itemsize)
    found = turboquant.decode(units, DIM, BITS[dtype])
    return np.asarray(found).reshape(*stored.shape[:-1], -1)
