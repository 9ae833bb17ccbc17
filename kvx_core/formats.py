"""The table of formats, a row each, as csrc/formats/table.h in C.

Sizes, names, DLPack codes and precision come from here.
Spec: 4.3, E.10
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

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
    array_name: str | None = (
        None  # what torch and numpy (with ml_dtypes) call it; None: neither has it
    )
    dlpack: tuple[int, int] | None = None  # (DLDataTypeCode, bits)
    rounding: Rounding | None = None  # of floats
    numbers: int = 1  # of a unit, along dim
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

    @property
    def format(self) -> Format:
        """Its row of the table."""
        return _FORMATS[self]

    @property
    def itemsize(self) -> int:
        """Bytes per element, which is a unit of the format; 0 for INVALID."""
        return _ITEMSIZE[self]

    @property
    def numbers(self) -> int:
        """Numbers per element, along dim."""
        return _FORMATS[self].numbers

    @property
    def array_name(self) -> str:
        """The name torch and numpy (with ml_dtypes) give this type, e.g. "float8_e4m3fn".

        Raises UnsupportedError where they have no such type.
        """
        name = _FORMATS[self].array_name
        if name is None:
            raise UnsupportedError(f"DType.{self.name} has no torch or numpy type")
        return name

    @property
    def label(self) -> str:
        """`array_name` or, if there is none, KVX's own name."""
        return _FORMATS[self].array_name or self.name

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
    return ", ".join(one.label for one in (_FORMATS if takes is None else takes) if one)


@lru_cache(256)  # numpy takes long for the name of a dtype
def _named_as(dtype: Hashable) -> DType | None:
    return _BY_NAME.get(str(dtype).removeprefix("torch.").lower())


# DLPack: kDLInt 0, kDLUInt 1, kDLFloat 2, kDLBfloat 4, kDLFloat8_*.
_FORMATS = {
    DType.INVALID: Format(0),
    DType.F16: Format(2, "float16", (2, 16), Rounding(10, -14, 65504.0)),
    DType.BF16: Format(2, "bfloat16", (4, 16), Rounding(7, -126, 2.0**127 * (2 - 2.0**-7))),
    DType.F32: Format(4, "float32", (2, 32), Rounding(23, -126, 2.0**127 * (2 - 2.0**-23))),
    DType.F8_E4M3: Format(1, "float8_e4m3fn", (10, 8), Rounding(3, -6, 448.0), scaled=True),
    DType.F8_E5M2: Format(1, "float8_e5m2", (12, 8), Rounding(2, -14, 57344.0), scaled=True),
    DType.S32: Format(4, "int32", (0, 32)),
    DType.S64: Format(8, "int64", (0, 64)),
    DType.U32: Format(4, "uint32", (1, 32)),
    DType.U64: Format(8, "uint64", (1, 64)),
    DType.U8: Format(1, "uint8", (1, 8)),
    DType.F8_E4M3FNUZ: Format(1, "float8_e4m3fnuz", (11, 8), Rounding(3, -7, 240.0), scaled=True),
    DType.Q8_0: Format(34, numbers=32),
    DType.Q4_0: Format(18, numbers=32),
    DType.U8_ZERO: Format(1, affine=True),
    DType.U8_BIAS: Format(1, affine=True),
    DType.Q4_1: Format(20, numbers=32),
    DType.IQ4_NL: Format(18, numbers=32),
    DType.Q5_0: Format(22, numbers=32),
    DType.Q5_1: Format(24, numbers=32),
    DType.Q4_K: Format(144, numbers=256),
    DType.Q5_K: Format(176, numbers=256),
    DType.Q6_K: Format(210, numbers=256),
    DType.F4_E2M1: Format(1, numbers=2, affine=True, grouped=True),
    DType.MXFP4: Format(17, numbers=32),
    DType.F8_E8M0: Format(1, "float8_e8m0fnu", (14, 8)),
    DType.TQ2: Format(34, numbers=128),
    DType.TQ3: Format(50, numbers=128),
    DType.TQ4: Format(66, numbers=128),
    # The integers to 127: steps of 1 from the smallest number on.
    DType.S8: Format(1, "int8", (0, 8), Rounding(6, 6, 127.0), scaled=True),
}
# What caches, tokens, tables and scales may have: csrc/formats/format.h, is_element_type,
# is_index_type, is_scale_type, and the scales of groups of F4_E2M1.
ELEMENTS = tuple(
    dtype
    for dtype, row in _FORMATS.items()
    if row.rounding or row.scaled or row.affine or row.numbers > 1 or dtype is DType.U8
)
INDICES = (DType.S32, DType.S64)
SCALES = (DType.F32, DType.F16, DType.BF16, DType.F8_E4M3, DType.F8_E8M0)
_ITEMSIZE = {dtype: found.itemsize for dtype, found in _FORMATS.items()}
_BY_NAME = {
    name.lower(): dtype for dtype in _FORMATS if dtype for name in (dtype.label, dtype.name)
}
