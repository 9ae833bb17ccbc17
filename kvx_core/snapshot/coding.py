"""Codings: tensors in fewer bytes in a file, and not one bit changed.

A tensor is encoded when its snapshot is saved and decoded when it is read; in memory it is as it
always is. What a file holds may come from anyone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvx_core._c import abi_lossless
from kvx_core.errors import KvxError
from kvx_core.types import DType

Bytes = npt.NDArray[np.uint8]


class Coding(NamedTuple):
    """A way to write numbers of one dtype in a number of bytes that depends on the numbers."""

    dtype: DType
    encode: Callable[[Bytes], Bytes]
    decode: Callable[[Bytes, Bytes], bool]  # into the first; False: these are no such bytes
    most: int  # bytes that a byte of the file can stand for


def _encode_bf16(data: Bytes) -> Bytes:
    count = data.nbytes // 2
    encoded: Bytes = np.empty(abi_lossless.bound(count), np.uint8)
    written = abi_lossless.encode(
        encoded.ctypes.data, encoded.nbytes, data.ctypes.data, count, DType.BF16
    )
    return encoded[:written]


def _decode_bf16(data: Bytes, encoded: Bytes) -> bool:
    count, at = data.nbytes // 2, encoded.ctypes.data
    try:
        if abi_lossless.num_numbers(at, encoded.nbytes) != count:
            return False
        abi_lossless.decode(data.ctypes.data, 0, count, at, encoded.nbytes)
    except KvxError:
        return False
    return True


# By the names of formats. Sign and mantissa of a number are stored as they are, in a byte.
CODINGS = {"lossless_bf16": Coding(DType.BF16, _encode_bf16, _decode_bf16, most=2)}
