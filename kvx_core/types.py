"""The enums of the KVX ABI. Values are those of kvx_abi.h and are never reused.

Spec: 4.2, 4.3, 5.1, 6.6, 8
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Self

from kvx_core.argument_checks import bad_argument
from kvx_core.errors import Status
from kvx_core.formats import DType

__all__ = [
    "DType",
    "Layout",
    "Memory",
    "ScaleGranularity",
    "Status",
    "Transfer",
]


class Named(IntEnum):
    """An enum whose members may be given by their names."""

    @classmethod
    def of(
        cls, member: object, name: str | None = None, *, takes: Iterable[Named] | None = None
    ) -> Self:
        """`member`, or the member that has this name, in capitals or not.

        name:  of the field or argument, for errors
        takes: what errors list: the members that the caller takes; None: all that mean something.
               The caller, or libkvx, refuses others
        Raises InvalidArgumentError.
        """
        if isinstance(member, cls):
            return member
        if isinstance(member, str) and member.upper() in cls.__members__:
            return cls[member.upper()]
        members = [one for one in cls if one.name not in _NO_MEMBERS] if takes is None else takes
        expected = ", ".join(one.name for one in members)
        raise bad_argument(name or cls.__name__, member, f"a kvx_core.{cls.__name__}: {expected}")

    @classmethod
    def called(cls, name: str, member: object) -> Self:
        """The same as `of`, with the name of the field or argument first."""
        return cls.of(member, name)


_NO_MEMBERS = ("INVALID", "UNKNOWN", "NONE")


class Layout(Named):
    """Order of a cache tensor's axes; strides are free. Spec: 4.2"""

    INVALID = 0
    BLOCK_NHD = 1
    BLOCK_HND = 2
    BLOCK_HND_PACKED = 3
    BLOCK_CUSTOM = 15


class BlockTableFormat(Named):
    """How a sequence's tokens are found in a cache. Spec: 5.1"""

    INVALID = 0
    PACKED = 1
    RAGGED = 2
    KV_OFFSETS = 3
    POINTERS = 4
    RING = 5


class Axis(Named):
    """What the index along an axis of a plane counts. Spec: E.11"""

    BLOCK = 0
    TOKEN = 1
    HEAD = 2
    DIM = 3


class Role(Named):
    """What a plane of a layer holds. Spec: E.11"""

    K = 0
    V = 1
    LATENT = 2
    LATENT_ROPE = 3
    INDEX_K = 4
    INDEX_K_SCALE = 5
    COMPRESSED = 6
    CONV_STATE = 7
    STATE = 8


class Memory(Named):
    """Where a buffer lives. Spec: 4.3"""

    UNKNOWN = 0
    HOST = 1
    DEVICE = 2
    UNIFIED = 3


class Transfer(Named):
    """How a call that runs on a device moves bytes; other calls ignore it. Spec: E.2"""

    KERNEL = 0  # as fast as the device can
    BACKGROUND = 2  # on a few multiprocessors, which leaves the others to the model
    COPY_ENGINE = 4  # on none; for same bytes at both ends, with indices in HOST memory


class ScaleGranularity(Named):
    """What one scale covers: value = stored * scale. Spec: 6.6"""

    NONE = 0
    PER_TENSOR = 1
    PER_BLOCK = 2
    PER_HEAD = 3
    PER_BLOCK_HEAD = 4
    PER_TOKEN_HEAD = 16
    PER_CHANNEL = 32
    PER_GROUP = 33
    PER_GROUP_4X4 = 34
