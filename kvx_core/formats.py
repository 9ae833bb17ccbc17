"""Formats by name. Their sizes and precision are in csrc/formats/table.h: libkvx is asked at first
use. What torch, numpy and DLPack call them is here.

Spec: 4.3, E.10
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from enum import IntEnum
from functools import cached_property, lru_cache
from typing import NamedTuple

from kvx_core._c import abi
from kvx_core.errors import InvalidArgumentError, UnsupportedError

__all__ = ["DType", "Format", "Rounding"]


class Rounding(NamedTuple):
    """Precision and exponent range of a float format, or of integers that are such numbers."""

    mantissa: int  # bits, without the leading one
    smallest: int  # exponent of the smallest normal number
    largest: float

    def includes(self, other: Rounding) -> bool:
        """Whether every finite number of `other` is one of these."""
        return (
            self.mantissa >= other.mantissa
            and self.smallest - self.mantissa <= other.smallest - other.mantissa
            and self.largest >= other.largest
        )


class Format(NamedTuple):
    """A row of the table."""

    itemsize: int  # bytes of a unit, the element of a tensor
    rounding: Rounding | None = None  # of floats
    numbers: int = 1  # of a unit, along dim
    is_element: bool = False  # of caches and of tokens on their way
    scaled: bool = False  # FP8 and S8: a scale may lie beside it
    affine: bool = False  # a scale and a zero point for each unit lie beside it [E.14, E.18]
    grouped: bool = False  # affine, without zero points: a scale of the tensor, or none [E.18]


class DType(IntEnum):
    """Format of a tensor's elements. Spec: 4.3"""

    INVALID = 0
    F16 = 1
    BF16 = 2
    F32 = 3
    F8_E4M3 = 4
    F8_E5M2 = 5
    S32 = 6
    S64 = 7
    U32 = 8
    U64 = 9
    U8 = 10
    F8_E4M3FNUZ = 11
    Q8_0 = 12
    Q4_0 = 13
    U8_ZERO = 14
    U8_BIAS = 15
    Q4_1 = 16
    IQ4_NL = 17
    Q5_0 = 18
    Q5_1 = 19
    Q4_K = 20
    Q5_K = 21
    Q6_K = 22
    F4_E2M1 = 23
    MXFP4 = 24
    F8_E8M0 = 25
    TQ2 = 26
    TQ3 = 27
    TQ4 = 28
    S8 = 29

    @cached_property
    def format(self) -> Format:
        """Its row of the table."""
        if self is DType.INVALID:
            return Format(0)
        row = abi.format_info(self)
        mantissa = row.digits - 1
        return Format(
            row.bytes,
            Rounding(mantissa, row.lowest + mantissa, row.largest) if row.digits else None,
            row.numbers,
            is_element=bool(row.flags & abi.FORMAT_ELEMENT),
            scaled=bool(row.flags & abi.FORMAT_SCALED),
            affine=bool(row.flags & (abi.FORMAT_ZEROS | abi.FORMAT_GROUPS)),
            grouped=bool(row.flags & abi.FORMAT_GROUPS),
        )

    @cached_property
    def itemsize(self) -> int:
        """Bytes per element, which is a unit of the format; 0 for INVALID."""
        return self.format.itemsize

    @cached_property
    def numbers(self) -> int:
        """Numbers per element, along dim."""
        return self.format.numbers

    @property
    def array_name(self) -> str:
        """The name torch and numpy (with ml_dtypes) give this type, e.g. "float8_e4m3fn".

        Raises UnsupportedError where they have no such type.
        """
        if self not in _ARRAYS:
            raise UnsupportedError(f"DType.{self.name} has no torch or numpy type")
        return _ARRAYS[self].name

    @property
    def label(self) -> str:
        """`array_name` or, if there is none, KVX's own name."""
        return _ARRAYS[self].name if self in _ARRAYS else self.name

    @classmethod
    def of(
        cls, dtype: object, name: str = "dtype", *, takes: Iterable[DType] | None = None
    ) -> DType:
        """`dtype` as a DType, from a DType, a name, a torch.dtype or a numpy dtype.

        dtype: names are those of torch, numpy, ml_dtypes or KVX, such as "bfloat16" or "BF16"
        name:  of the field or argument, for errors
        takes: what errors list: the formats that the caller takes; None: all. The caller, or
               libkvx, refuses other formats
        Raises InvalidArgumentError for anything that is not a KVX dtype.
        """
        if isinstance(dtype, cls):
            return dtype
        try:  # numpy.float16 and other scalar types go by their names
            found = _named_as(dtype.__name__ if isinstance(dtype, type) else dtype)
        except TypeError:  # it has no hash
            found = _named_as(str(dtype))
        if found is None:
            raise no_dtype(name, dtype, takes)
        return found


def no_dtype(name: str, dtype: object, takes: Iterable[DType] | None) -> InvalidArgumentError:
    """The exception for a dtype that the caller does not take; None: it takes all."""
    found = dtype.__name__ if isinstance(dtype, type) else dtype
    text = found.label if isinstance(found, DType) else str(found)
    return InvalidArgumentError(f"{name} is {text!r}, expected one of {labels(takes)} (spec 4.3)")


def labels(takes: Iterable[DType] | None) -> str:
    """Names of formats, for errors; None: of all."""
    return ", ".join(one.label for one in (DType if takes is None else takes) if one)


@lru_cache(256)  # numpy takes long for the name of a dtype
def _named_as(dtype: Hashable) -> DType | None:
    return _BY_NAME.get(str(dtype).removeprefix("torch.").lower())


class _Array(NamedTuple):
    """An element type of torch and numpy (with ml_dtypes)."""

    name: str
    dlpack: tuple[int, int]  # (DLDataTypeCode, bits)


# DLPack: kDLInt 0, kDLUInt 1, kDLFloat 2, kDLBfloat 4, kDLFloat8_*.
_ARRAYS = {
    DType.F16: _Array("float16", (2, 16)),
    DType.BF16: _Array("bfloat16", (4, 16)),
    DType.F32: _Array("float32", (2, 32)),
    DType.F8_E4M3: _Array("float8_e4m3fn", (10, 8)),
    DType.F8_E5M2: _Array("float8_e5m2", (12, 8)),
    DType.S32: _Array("int32", (0, 32)),
    DType.S64: _Array("int64", (0, 64)),
    DType.U32: _Array("uint32", (1, 32)),
    DType.U64: _Array("uint64", (1, 64)),
    DType.U8: _Array("uint8", (1, 8)),
    DType.F8_E4M3FNUZ: _Array("float8_e4m3fnuz", (11, 8)),
    DType.F8_E8M0: _Array("float8_e8m0fnu", (14, 8)),
    DType.S8: _Array("int8", (0, 8)),
}
OF_DLPACK = {array.dlpack: dtype for dtype, array in _ARRAYS.items()}
_BY_NAME = {name.lower(): dtype for dtype in DType if dtype for name in (dtype.label, dtype.name)}


class Formats(Collection[DType]):
    """Formats that something holds for. `find` is asked for them at first use: importing kvx_core
    loads no library.
    """

    def __init__(self, find: Callable[[], Iterable[DType]]) -> None:
        self._find = find

    @cached_property
    def _found(self) -> tuple[DType, ...]:
        return tuple(self._find())

    def __iter__(self) -> Iterator[DType]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __contains__(self, dtype: object) -> bool:
        return dtype in self._found


# What caches, tokens, tables and scales may have: csrc/formats/format.h, is_element_type,
# is_index_type, is_scale_type, and the scales of groups of F4_E2M1.
ELEMENTS = Formats(lambda: (dtype for dtype in DType if dtype.format.is_element))
INDICES = (DType.S32, DType.S64)
SCALES = (DType.F32, DType.F16, DType.BF16, DType.F8_E4M3, DType.F8_E8M0)
