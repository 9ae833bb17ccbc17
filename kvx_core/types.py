"""The enums of the KVX ABI. Values are those of kvx_abi.h and are never reused.

Spec: 4.2, 4.3, 5.1, 6.6, 8
"""

from __future__ import annotations

from enum import IntEnum
from typing import Self

from kvx_core.errors import InvalidArgumentError, Status, UnsupportedError
from kvx_core.words import wrong

__all__ = [
    "BlockTableFormat",
    "DType",
    "Layout",
    "Memory",
    "ScaleGranularity",
    "Status",
    "Transfer",
]


class _Named(IntEnum):
    """An enum whose members may be given by their names."""

    @classmethod
    def of(cls, member: object, name: str | None = None) -> Self:
        """`member`, or the member that has exactly this name.

        Raises InvalidArgumentError, which calls the argument `name`.
        """
        if isinstance(member, cls):
            return member
        if isinstance(member, str) and member in cls.__members__:
            return cls[member]
        expected = ", ".join(found for found in cls.__members__ if found not in _NO_MEMBERS)
        raise wrong(name or cls.__name__, member, f"a kvx_core.{cls.__name__}: {expected}")

    @classmethod
    def called(cls, name: str, member: object) -> Self:
        """`of`, for a field or argument of this name."""
        return cls.of(member, name)


_NO_MEMBERS = ("INVALID", "UNKNOWN")


class DType(IntEnum):
    """Element type of a tensor. Spec: 4.3"""

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

    @property
    def itemsize(self) -> int:
        """Bytes per element; 0 for INVALID."""
        return _ITEMSIZE[self]

    @property
    def array_name(self) -> str:
        """The name torch and numpy (with ml_dtypes) give this type, e.g. "float8_e4m3fn".

        Raises UnsupportedError for INVALID.
        """
        try:
            return _ARRAY_NAME[self]
        except KeyError:
            raise UnsupportedError("DType.INVALID has no torch or numpy type") from None

    @classmethod
    def from_name(cls, name: str) -> DType:
        """The dtype called `name` by torch, numpy, ml_dtypes or KVX: "bfloat16", "BF16".

        Raises InvalidArgumentError for a name that is not a KVX dtype.
        """
        found = isinstance(name, str) and _BY_NAME.get(name.removeprefix("torch.").lower())
        if not found:
            expected = ", ".join(_ARRAY_NAME.values())
            raise InvalidArgumentError(f"dtype is {name!r}, expected one of {expected} (spec 4.3)")
        return found

    @classmethod
    def of(cls, dtype: object) -> DType:
        """`dtype` as a DType, from a DType, a name, a torch.dtype or a numpy dtype.

        Raises InvalidArgumentError for anything that is not a KVX dtype.
        """
        if isinstance(dtype, cls):
            return dtype
        if isinstance(dtype, type):  # numpy.float16 and other scalar types
            return cls.from_name(dtype.__name__)
        return cls.from_name(str(dtype))

    @classmethod
    def called(cls, name: str, dtype: object) -> DType:
        """`of`, for a field or argument of this name."""
        if isinstance(dtype, cls):
            return dtype
        try:
            return cls.of(dtype)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(str(error).replace("dtype", name, 1)) from None


_ARRAY_NAME = {
    DType.F16: "float16",
    DType.BF16: "bfloat16",
    DType.F32: "float32",
    DType.F8_E4M3: "float8_e4m3fn",
    DType.F8_E5M2: "float8_e5m2",
    DType.S32: "int32",
    DType.S64: "int64",
    DType.U32: "uint32",
    DType.U64: "uint64",
    DType.U8: "uint8",
}
_BY_NAME = {name: dtype for dtype, name in _ARRAY_NAME.items()} | {
    dtype.name.lower(): dtype for dtype in _ARRAY_NAME
}
_ITEMSIZE = dict(zip(DType, (0, 2, 2, 4, 1, 1, 4, 8, 4, 8, 1), strict=True))


class Layout(_Named):
    """Order of a cache tensor's axes; strides are free. Spec: 4.2"""

    INVALID = 0
    BLOCK_NHD = 1
    BLOCK_HND = 2
    BLOCK_HND_PACKED = 3
    BLOCK_CUSTOM = 15


class Memory(_Named):
    """Where a buffer lives. Spec: 4.3"""

    UNKNOWN = 0
    HOST = 1
    DEVICE = 2
    UNIFIED = 3


class Transfer(_Named):
    """How a call that runs on a device moves bytes; other calls ignore it. Spec: E.2"""

    KERNEL = 0  # as fast as the device can
    BACKGROUND = 2  # on a handful of multiprocessors, which leaves the others to the model
    COPY_ENGINE = 4  # on none; for same bytes at both ends, with indices in HOST memory


class BlockTableFormat(_Named):
    """How a sequence's tokens are found in a cache. Spec: 5.1"""

    INVALID = 0
    PACKED = 1
    RAGGED = 2
    KV_OFFSETS = 3


class ScaleGranularity(_Named):
    """What one scale covers: value = stored * scale. Spec: 6.6"""

    NONE = 0
    PER_TENSOR = 1
    PER_BLOCK = 2
    PER_HEAD = 3
    PER_BLOCK_HEAD = 4
    PER_TOKEN_HEAD = 16
