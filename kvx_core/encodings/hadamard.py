"""Rotates vectors by a normalized Hadamard matrix before they are encoded. Spec: E.17"""

from __future__ import annotations

from collections.abc import Sequence

from kvx_core._c import abi, abi_encode
from kvx_core.argument_checks import integer
from kvx_core.desc.tensors import Borrowed, TensorLike, borrow
from kvx_core.errors import InvalidArgumentError, UnsupportedError
from kvx_core.types import DType, Memory


def hadamard(values: TensorLike, order: int | None = None) -> None:
    """Multiply groups of `order` numbers by the Hadamard matrix H / sqrt(order), in place.

    values: (..., dim) float32 in host memory; numbers of the last axis follow each other, and the
            leading axes are rows with one step between them
    order:  a power of two from 2 to 4096 that divides dim; None: the largest power of two that
            divides dim
    H is Sylvester's matrix: H[i, j] is -1 if i & j has an odd number of ones, else 1. The rotation
    is its own inverse, up to rounding: call it before encoding, and again after decoding.
    Mutates `values`. Raises InvalidArgumentError, UnsupportedError. Spec: E.17

    llama.cpp stores quantized K and V rotated where head_dim is a multiple of 64: K by the largest
    order that divides head_dim, V by order 64. Source: llama.cpp, pull request 21038
    """
    found = borrow(values, name="values", takes=(DType.F32,))
    if found.memory is not Memory.HOST:
        raise UnsupportedError(
            f"values.memory is {found.memory.name}, expected HOST: rotate a copy in host memory "
            "(spec E.17)"
        )
    if found.dtype is not DType.F32:
        raise InvalidArgumentError(f"values.dtype is {found.dtype.name}, expected F32 (spec E.17)")
    if found.ndim == 0:
        raise InvalidArgumentError("values has no axes, expected (..., dim) (spec E.17)")
    found.require_writable("values")
    number = 0 if order is None else integer("order", order, 1)
    dim = found.shape[-1]
    rows, step = _rows(found)
    function = abi_encode.functions().kvx_hadamard
    abi.check(function(found.data, rows, dim, step, number))


def _rows(found: Borrowed) -> tuple[int, int]:
    """The number of rows, and the step from one to the next."""
    *shape, dim = found.shape
    *stride, inner = found.stride
    if 0 in shape:
        return 0, dim
    if inner != 1 and dim > 1:
        raise InvalidArgumentError(
            f"values.stride[{found.ndim - 1}] is {inner}, expected 1: pass a contiguous copy "
            "(spec E.17)"
        )
    return _joined(shape, stride, dim)


def _joined(shape: Sequence[int], stride: Sequence[int], dim: int) -> tuple[int, int]:
    rows, step = 1, dim
    for axis in reversed(range(len(shape))):
        extent = shape[axis]
        if extent == 1:
            continue
        if rows == 1:
            step = stride[axis]
        elif stride[axis] != rows * step:
            raise InvalidArgumentError(
                f"values.stride[{axis}] is {stride[axis]}, expected {rows * step} after "
                f"{rows} rows {step} apart: pass a contiguous copy (spec E.17)"
            )
        rows *= extent
    return rows, step
