"""The options of write_kv, gather_kv and migrate: each is listed, checked and made C once, here.

A ...Keywords types what callers may pass; an ...Options holds the checked values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Self, TypedDict

from kvx_core._c import abi
from kvx_core.argument_checks import coerce_fields, flag, int64, integer
from kvx_core.desc.scales import ScaleDesc
from kvx_core.desc.tensors import TensorLike
from kvx_core.errors import InvalidArgumentError
from kvx_core.types import Transfer

Scale = ScaleDesc | TensorLike | float  # a number or a tensor of one element: PER_TENSOR


class WriteKeywords(TypedDict, total=False):
    """Options of write_kv and WritePlan; write_kv documents them."""

    k_scale: Scale | None
    v_scale: Scale | None
    find_scales: bool
    transfer: Transfer | str


class GatherKeywords(TypedDict, total=False):
    """Options of gather_kv and GatherPlan; gather_kv documents them."""

    k_scale: Scale | None
    v_scale: Scale | None
    null_block_id: int
    zero_fill: bool
    secondary_num_blocks: int
    transfer: Transfer | str


class MoveKeywords(TypedDict, total=False):
    """Options of migrate and copy_tokens; migrate documents them."""

    num_heads: int | None
    zero_fill: bool
    find_scales: bool
    requantize: bool
    hadamard_k: int
    hadamard_v: int
    convert_states: bool
    transfer: Transfer | str


class _Options:
    """Base of the options: keywords, each with a default."""

    __slots__ = ()
    _defaults: ClassVar[dict[type, Any]] = {}

    @classmethod
    def of(cls, keywords: Mapping[str, Any]) -> Self:
        """The options of a call. Calls whose keywords equal the defaults share one object.

        Raises InvalidArgumentError; TypeError for an unknown keyword.
        """
        usual: Self | None = cls._defaults.get(cls)
        if usual is None:
            usual = cls._defaults[cls] = cls()
        for name, value in keywords.items():
            if value is not getattr(usual, name, cls):
                break
        else:
            return usual
        try:
            return cls(**keywords)
        except TypeError:
            known = [field.name for field in fields(usual) if field.init]  # type: ignore[arg-type]
            for name in keywords:
                if name not in known:
                    expected = ", ".join(known)
                    raise TypeError(f"unexpected keyword {name!r}, expected {expected}") from None
            raise


@dataclass(frozen=True, slots=True)
class WriteOptions(_Options):
    """The options of write_kv. Raises InvalidArgumentError, UnsupportedError."""

    k_scale: ScaleDesc | None = None
    v_scale: ScaleDesc | None = None
    find_scales: bool = False
    transfer: Transfer = Transfer.KERNEL
    key: str = field(init=False, compare=False)  # tells them apart; "" if there are scales

    def __post_init__(self) -> None:
        coerce_fields(
            self,
            k_scale=_scale,
            v_scale=_scale,
            find_scales=flag,
            transfer=Transfer.called,
        )
        bare = self.k_scale is self.v_scale is None
        _set_key(self, f"write {self.find_scales:d} {self.transfer:d}" if bare else "")

    def to_c(self) -> abi.kvx_write_options_t:
        return abi.kvx_write_options_t(
            flags=abi.flags(find_scales=self.find_scales) | self.transfer
        )


@dataclass(frozen=True, slots=True)
class GatherOptions(_Options):
    """The options of gather_kv. Raises InvalidArgumentError, UnsupportedError."""

    k_scale: ScaleDesc | None = None
    v_scale: ScaleDesc | None = None
    null_block_id: int = abi.NO_NULL_BLOCK
    zero_fill: bool = False
    secondary_num_blocks: int = 0
    transfer: Transfer = Transfer.KERNEL
    key: str = field(init=False, compare=False)  # tells them apart; "" if there are scales

    def __post_init__(self) -> None:
        coerce_fields(
            self,
            k_scale=_scale,
            v_scale=_scale,
            null_block_id=int64,
            zero_fill=flag,
            secondary_num_blocks=integer,
            transfer=Transfer.called,
        )
        numbers = self.null_block_id, self.secondary_num_blocks, self.zero_fill, self.transfer
        bare = self.k_scale is self.v_scale is None
        _set_key(self, "gather {} {} {:d} {:d}".format(*numbers) if bare else "")

    def to_c(self) -> abi.kvx_gather_options_t:
        return abi.kvx_gather_options_t(
            flags=abi.flags(self.zero_fill) | self.transfer,
            null_block_plus_1=abi.null_block_plus_1(self.null_block_id),
            secondary_num_blocks=self.secondary_num_blocks,
            k_scale=abi.pointer_to(self.k_scale),
            v_scale=abi.pointer_to(self.v_scale),
        )


@dataclass(frozen=True, slots=True)
class MoveOptions(_Options):
    """The options of migrate. Raises InvalidArgumentError."""

    num_heads: int | None = None
    zero_fill: bool = False
    find_scales: bool = False
    requantize: bool = False
    hadamard_k: int = 0
    hadamard_v: int = 0
    convert_states: bool = False
    transfer: Transfer = Transfer.KERNEL
    key: str = field(init=False, compare=False)  # tells them apart

    def __post_init__(self) -> None:
        coerce_fields(
            self,
            num_heads=_count_or_none,
            zero_fill=flag,
            find_scales=flag,
            requantize=flag,
            hadamard_k=_rotated,
            hadamard_v=_rotated,
            convert_states=flag,
            transfer=Transfer.called,
        )
        _set_key(self, f"{self.num_heads} {self.flags} {self.convert_states:d}")

    @property
    def flags(self) -> int:
        rotated = abi.rotation_flags(self.hadamard_k, self.hadamard_v)
        found = abi.flags(self.zero_fill, self.find_scales, self.requantize)
        return found | rotated | self.transfer


def _set_key(options: object, key: str) -> None:
    object.__setattr__(options, "key", key)


def _scale(name: str, scale: Scale | None) -> ScaleDesc | None:
    return None if scale is None else ScaleDesc.of(scale, name=name)


def _rotated(name: str, order: Any) -> int:
    number = integer(name, order)
    if number == 1 or number > 4096 or number & (number - 1):
        raise InvalidArgumentError(
            f"{name} is {number}, expected a power of two from 2 to 4096, or 0 (spec E.17)"
        )
    return number


def _count_or_none(name: str, count: Any) -> int | None:
    return None if count is None else integer(name, count)
