"""bfloat16 in fewer bytes, and not one bit changed: exponents coded, the rest as it is. Spec: E.19

For stores and wires. The keys and values of a model take about 11 of 16 bits. What is decoded may
come from anyone: a length that does not fit is an error, and no byte outside the arrays is touched.
It has no checksum; a store that keeps it has one of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvx_core._c import abi_lossless
from kvx_core.argument_checks import integer
from kvx_core.desc.in_place import is_torch
from kvx_core.desc.tensors import Borrowed, TensorLike, borrow, empty_like_owner
from kvx_core.errors import InvalidArgumentError, UnsupportedError
from kvx_core.types import DType, Memory

__all__ = ["BLOCK", "decode", "encode", "num_numbers"]

BLOCK = abi_lossless.BLOCK
"""Numbers that are decoded together: a range costs the blocks that it touches."""


def encode(numbers: TensorLike) -> Any:
    """Encodes a tensor of bfloat16 numbers.

    numbers: any shape, contiguous, BF16 in host memory (torch.bfloat16, or ml_dtypes.bfloat16 in
             numpy). Its shape is not kept
    Returns bytes: a torch.Tensor of uint8 if `numbers` is torch's, else a numpy array of uint8.
    Raises InvalidArgumentError, UnsupportedError. Spec: E.19
    """
    found = _contiguous("numbers", borrow(numbers, name="numbers", takes=(DType.BF16,)))
    count = _count(found)
    encoded: npt.NDArray[np.uint8] = np.empty(abi_lossless.bound(count), np.uint8)
    written = abi_lossless.encode(
        encoded.ctypes.data, encoded.nbytes, found.data, count, found.dtype
    )
    encoded.resize(written, refcheck=False)  # gives back what was not needed, without a copy
    if not is_torch(numbers):
        return encoded
    import torch

    return torch.from_numpy(encoded)


def num_numbers(encoded: TensorLike | bytes) -> int:
    """How many numbers an encoded tensor has, from its header.

    encoded: [bytes] U8 in host memory, contiguous, or bytes
    Raises InvalidArgumentError, UnsupportedError. Spec: E.19
    """
    found = _bytes_of(encoded)
    return abi_lossless.num_numbers(found.data, _count(found))


def decode(
    encoded: TensorLike | bytes,
    *,
    into: TensorLike | None = None,
    first: int = 0,
    count: int | None = None,
) -> Any:
    """Decodes numbers [first, first + count) of an encoded tensor.

    encoded: [bytes] U8 in host memory, contiguous, or bytes; of a memory-mapped file only the parts
             that have these numbers are read
    into:    tensor that is filled: contiguous, writable, BF16 in host memory, of any shape with
             `count` numbers; None: a new one of [count], torch's if `encoded` is torch's, else
             numpy's, which takes ml_dtypes
    first:   number to begin with
    count:   how many; None: as many as `into` has, without it all from `first` on
    Mutates `into`, once all blocks that have these numbers have been checked. Returns `into`, or
    the new tensor. Raises InvalidArgumentError, OutOfRangeError, UnsupportedError. Spec: E.19
    """
    found = _bytes_of(encoded)
    num_bytes = _count(found)
    first = integer("first", first, 0, 2**64 - 1)
    if into is None:
        if count is None:
            count = max(abi_lossless.num_numbers(found.data, num_bytes) - first, 0)
        else:
            held = abi_lossless.num_numbers(found.data, num_bytes)
            count = integer("count", count, 0, 2**64 - 1)
            if count > held:  # before it is allocated
                raise InvalidArgumentError(
                    f"count is {count}, expected at most the {held} numbers of encoded (spec E.19)"
                )
        owner = encoded if is_torch(encoded) else np.empty(0)
        into = empty_like_owner(owner, (count,), DType.BF16)
    target = _contiguous("into", borrow(into, name="into", takes=(DType.BF16,)))
    target.require_writable("into")
    if count is not None and integer("count", count, 0, 2**64 - 1) != _count(target):
        raise InvalidArgumentError(
            f"into has {_count(target)} numbers, expected {count} as count says (spec E.19)"
        )
    abi_lossless.decode(target.data, first, _count(target), found.data, num_bytes)
    return into


def _bytes_of(encoded: TensorLike | bytes) -> Borrowed:
    if isinstance(encoded, (bytes, bytearray, memoryview)):
        try:
            encoded = np.frombuffer(encoded, np.uint8) if len(encoded) else np.empty(0, np.uint8)
        except (BufferError, ValueError) as error:
            raise InvalidArgumentError(
                f"encoded cannot be read: {error}; expected contiguous bytes (spec E.19)"
            ) from None
    return _contiguous("encoded", borrow(encoded, name="encoded", takes=(DType.U8,)), DType.U8)


def _contiguous(name: str, found: Borrowed, dtype: DType = DType.BF16) -> Borrowed:
    """The memory of a tensor that C takes as an address and a count."""
    if found.memory is Memory.DEVICE:
        raise UnsupportedError(
            f"{name}.memory is DEVICE, expected HOST: pass a copy in host memory (spec E.19)"
        )
    if found.dtype is not dtype:
        raise UnsupportedError(
            f"{name}.dtype is {found.dtype.name}, expected {dtype.name} (spec E.19)"
        )
    if not found.is_contiguous:
        raise InvalidArgumentError(
            f"{name}.stride is {found.stride}, expected a contiguous tensor: pass a contiguous "
            "copy (spec E.19)"
        )
    return found


def _count(found: Borrowed) -> int:
    count = 1
    for extent in found.shape:
        count *= extent
    return count
