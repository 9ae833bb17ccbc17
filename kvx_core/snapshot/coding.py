"""Codings store tensors in fewer bytes of a file, without a loss.

A tensor is encoded when its snapshot is saved, and decoded when it is read. In memory it is never
encoded. Decoders do not trust the bytes of a file.
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
    """An encoding of numbers of one dtype. The number of encoded bytes depends on the numbers."""

    dtype: DType
    encode: Callable[[Bytes], Bytes]
    decode: Callable[[Bytes, Bytes], bool]  # decodes the second into the first; False: invalid
    most: int  # decoded bytes per encoded byte, at most


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


# By the names of formats. lossless_bf16 stores sign and mantissa of a number unchanged, in a byte.
CODINGS = {"lossless_bf16": Coding(DType.BF16, _encode_bf16, _decode_bf16, most=2)}
