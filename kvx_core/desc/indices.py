"""Slots, tables and lengths as the ABI wants them: contiguous integers."""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import TypeVar

import numpy as np

from kvx_core._c import bound
from kvx_core.argument_checks import bad_argument
from kvx_core.desc.in_place import is_torch
from kvx_core.desc.tensors import (
    Borrowed,
    Numbers,
    TensorLike,
    borrow,
    borrow_ints,
    int64_array,
    is_tensor,
    own,
    row_major,
)
from kvx_core.errors import InvalidArgumentError, UnsupportedError
from kvx_core.formats import INDICES
from kvx_core.types import DType, Memory

# The structs of kvx_abi.h, with their sizes first.
NO_BLOCK = 2**63 - 1  # an id that no cache has: where an id must be and the caller gave none
INDEX: dict[int, DType] = {DType.S32: DType.S32, DType.S64: DType.S64}  # by their numbers
TABLE, SLOTS, LENS = Struct("@I3i3IxxxxQQ3Ixxxx"), Struct("@IiIqQ"), Struct("@IiIQ")
_T = TypeVar("_T")


def index_list(name: str, numbers: TensorLike | Sequence[int]) -> Borrowed:
    return contiguous(name, borrow_ints(name, numbers), 1)


def contiguous(
    name: str,
    borrowed: Borrowed,
    ndim: int,
    dtypes: tuple[DType, ...] = INDICES,
) -> Borrowed:
    """Borrows integers; refuses strides, which the ABI's tables do not have."""
    if len(borrowed.shape) != ndim:
        raise InvalidArgumentError(f"{name}.ndim is {len(borrowed.shape)}, expected {ndim}")
    if not borrowed.is_contiguous:
        raise InvalidArgumentError(
            f"{name}.stride is {borrowed.stride}, expected {row_major(borrowed.shape)}, "
            "contiguous. Pass a contiguous copy"
        )
    if borrowed.dtype not in dtypes:
        expected = " or ".join(dtype.array_name for dtype in dtypes)
        raise InvalidArgumentError(
            f"{name}.dtype is {borrowed.dtype.array_name}, expected {expected}"
        )
    return borrowed


def table_indices(indices: TensorLike, ndim: int, dtypes: tuple[DType, ...] = INDICES) -> Borrowed:
    """The tensor behind a block table."""
    found = borrow(indices, name="block_table", takes=dtypes)
    return contiguous("block_table.indices", found, ndim, dtypes)


def index_dtype(name: str, given: object) -> DType:
    """The dtype of slots or lengths. Raises InvalidArgumentError."""
    return DType.of(given, name, takes=INDICES)


def table_dtype(name: str, given: object) -> DType:
    """The dtype of a table, whose indices may be addresses. Raises InvalidArgumentError."""
    return DType.of(given, name, takes=(*INDICES, DType.U64))


def padded(name: str, rows: object) -> Numbers:
    """A list of rows as a table, padded with -1 to the longest.

    A table has a column at least (spec 5.1). That of rows without a block is NO_BLOCK: null blocks
    would pass over tokens that the caller has given no place.
    """
    expected = "a tensor of 2 axes, or a list with a list of block ids per sequence"
    if type(rows) is list and len(rows) == 1 and type(rows[0]) is list and rows[0]:
        return own(
            int64_array(f"{name}[0]", rows[0])[None]
        )  # as a connector asks for in every step
    if isinstance(rows, (str, bytes)) or not isinstance(rows, Sequence):
        raise bad_argument(name, rows, expected)
    for i, row in enumerate(rows):
        is_row = isinstance(row, Sequence) or (is_tensor(row) and getattr(row, "ndim", 0) == 1)
        if not is_row or isinstance(row, (str, bytes)):
            raise bad_argument(f"{name}[{i}]", row, f"a list of block ids: {expected}")
    width = max(0, 0, *map(len, rows))
    table = np.full((len(rows), max(width, 1)), -1 if width else NO_BLOCK, np.int64)
    for i, row in enumerate(rows):
        table[i, : len(row)] = int64_array(f"{name}[{i}]", row)
    return own(table)


def has_index_types(
    dtype: object, memory: object, place: int, count: int, invalid: int = -1
) -> bool:
    """Whether fields have the types that `index_list` gives them: a quick check for every call."""
    kinds = type(dtype), type(memory), type(place), type(count), type(invalid)
    if kinds != (DType, Memory, int, int, int):
        return False
    return 0 <= place < 2**64 and 0 <= count < 2**32 and -(2**63) <= invalid < 2**63


def read_numbers(numbers: object, ndim: int) -> tuple[bound.Indices | None, object]:
    """What bound.read_indices gives, and what keeps the memory: `numbers`, or those of a list."""
    found = bound.read_indices(numbers, ndim)
    if found is None or found[4] is None:
        return found, numbers
    if not found[4]:  # numpy has no array of an empty buffer
        return None, numbers
    shape = found[1:3] if ndim == 2 else found[1]
    return found, own(np.frombuffer(found[4], np.int64).reshape(shape))


def made(kind: type[_T], *fields: object) -> _T:
    """A frozen descriptor with these fields, in their order, all of them right: for every call."""
    names: tuple[str, ...] = kind.__slots__  # type: ignore[attr-defined]
    desc: _T = bound.set_fields()(object.__new__(kind), names, *fields)
    return desc


def are_uint32(*numbers: object) -> bool:
    """Whether these are ints of 32 bits without a sign."""
    return all(type(number) is int and 0 <= number < 2**32 for number in numbers)


def host_copy(name: str, at: int, owner: object) -> tuple[int, object]:
    """Copies a torch tensor to HOST memory; returns where its address `at` is now, and the copy."""
    if not is_torch(owner):
        raise UnsupportedError(
            f"{name} is on a device and belongs to a {type(owner).__name__}, expected a "
            "torch.Tensor, which can be read back"
        )
    copy = owner.cpu()
    return copy.data_ptr() + at - owner.data_ptr(), copy
