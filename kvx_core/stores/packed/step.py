"""Appends one token to each sequence of a packed cache by one call of libkvx.

A decode step does this for every layer: by torch alone, slices and copies of a few KB cost more
than the bytes that they move.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from kvx_core.cache import CacheDesc
from kvx_core.calls import bound_write
from kvx_core.errors import KvxError
from kvx_core.options import WriteOptions
from kvx_core.tensor_desc import describe
from kvx_core.types import Layout

_OPTIONS = WriteOptions()


class Step:
    """The call that appends to these keys and values, (batch, capacity, dim) in host memory.

    Each sequence is a block of `capacity` tokens, and a token has one head of `dim` numbers.
    """

    __slots__ = ("_call", "_dtype", "_first", "_slots", "_slots_of_torch", "keys")

    def __init__(self, keys: Tensor, values: Tensor, call: Callable[..., int]) -> None:
        self.keys = keys
        self._call, self._dtype = call, keys.dtype
        batch, capacity, _ = keys.shape
        self._first = [capacity * row for row in range(batch)]
        slots = np.zeros(batch, np.int64)
        self._slots = slots.data  # whose numbers are set in less time than an array's
        self._slots_of_torch = torch.from_numpy(slots)

    @classmethod
    def of(cls, keys: Tensor, values: Tensor) -> Step | None:
        """None: libkvx does not write such tensors."""
        if keys.device.type != "cpu":
            return None
        try:
            k, v = (describe(half.unsqueeze(2), Layout.BLOCK_NHD) for half in (keys, values))
            return cls(keys, values, bound_write(CacheDesc.from_kv(k, v), _OPTIONS))
        except KvxError:  # such as a dtype that is none of a cache
            return None

    def append(self, new_keys: Tensor, new_values: Tensor, seq_len: int) -> bool:
        """Writes token `seq_len` of every sequence: (batch, 1, dim) of the dtype of the cache.

        False: nothing was written, since they are something else.
        """
        if new_keys.dtype is not self._dtype or new_values.dtype is not self._dtype:
            return False  # libkvx would convert them
        slots = self._slots
        for row, first in enumerate(self._first):
            slots[row] = first + seq_len
        return self._call(new_keys, new_values, self._slots_of_torch) == 0
