"""A Precision names the numbers that stored values can be, so that nobody takes rounded for exact.

A value that was computed in BF16 and kept in an FP8 cache stays an FP8 number, whatever dtype holds
it later. A cache may load values whose set of numbers includes its own: it would have rounded them
in the same way itself.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Literal, Self

from kvx_core.argument_checks import bad_argument, flag, list_of, text
from kvx_core.errors import InvalidArgumentError
from kvx_core.types import DType

VALUES = "values"  # the encoding of numbers; any other name denotes opaque bytes, U8
Accept = Literal["same", "lossy"]

# Only stores hold NVFP4, with a scale beside each group of 16 numbers and no scale of the tensor.
_NVFP4 = "nvfp4"


@cache
def _numbers() -> dict[str, DType]:
    """Names of number formats. Several numbers in a unit have a scale in the unit."""
    return {
        dtype.name.lower(): dtype
        for dtype in DType
        if dtype.format.rounding or (dtype.numbers > 1 and not dtype.format.affine)
    }


@cache
def _formats() -> dict[str, DType]:
    """The same, NVFP4, and FP8 and S8 with a scale per token and head, which differ from those with
    one scale for all tokens.
    """
    rows = {f"{name}_row": dtype for name, dtype in _numbers().items() if dtype.format.scaled}
    return {**_numbers(), **rows, _NVFP4: DType.F4_E2M1}


@cache
def _includes() -> dict[str, tuple[str, ...]]:
    """The formats whose numbers each format includes; one with scales, only itself."""
    roundings = {name: dtype.format.rounding for name, dtype in _formats().items()}
    return {
        name: (name,)
        if dtype.format.scaled or dtype.format.rounding is None
        else tuple(
            other for other, its in roundings.items() if its and dtype.format.rounding.includes(its)
        )
        for name, dtype in _formats().items()
    }


def _digits(name: str) -> int:
    """Returns the approximate number of significant bits."""
    dtype = _formats().get(name)
    if dtype is None:  # opaque bytes
        return 4
    rounding = dtype.format.rounding
    if rounding is None:
        return dtype.itemsize * 8 // dtype.numbers - 1
    return rounding.mantissa + 1


_OPAQUE = re.compile("rows-[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class Precision:
    """The numbers that several formats have in common; without formats, all numbers.

    formats: no format includes another; "rows-<hash>" are opaque bytes, which include only
             themselves
    """

    formats: tuple[str, ...] = ()

    @classmethod
    def of(cls, *dtypes: object, opaque: str | None = None, vector_scales: bool = False) -> Self:
        """Returns the precision of values that were computed in one dtype and cached in another.

        dtypes: of the computation and of K and V: DTypes, torch or numpy dtypes, or names; layers
                may differ
        opaque: the name of opaque bytes that (some) layers keep; not "values"
        vector_scales: FP8 and S8 dtypes have a scale per token and head
        Raises InvalidArgumentError for a dtype that holds no keys or values.
        """
        vector_scales = flag("vector_scales", vector_scales)
        formats = []
        for given in dtypes:
            dtype = DType.of(given, takes=_numbers().values())
            name = dtype.name.lower()
            if name not in _numbers():
                *names, last = (known.name for known in _numbers().values())
                raise InvalidArgumentError(
                    f"dtype is {dtype.name}, expected {', '.join(names)} or {last} for the "
                    "precision of keys and values"
                )
            formats.append(f"{name}_row" if vector_scales and dtype.format.scaled else name)
        if opaque is not None:
            formats.append(f"rows-{_digest(text('opaque', opaque))}")
        return cls(_coarsest(formats))

    @classmethod
    @lru_cache(maxsize=256)
    def parse(cls, name: str) -> Self:
        """Returns the precision with this `name`. Raises ValueError if no precision has it."""
        formats = tuple(name.split("+"))
        known = all(word in _formats() or _OPAQUE.fullmatch(word) for word in formats)
        if not known or formats != _coarsest(formats):
            raise ValueError(f"precision is {name[:100]!r}, expected one that KVX has written")
        return cls(formats)

    @property
    def name(self) -> str:
        """The precision in one word, for names of files and headers."""
        return "+".join(self.formats)

    @property
    def digits(self) -> int:
        """A number to sort precisions by, if neither includes the other. Larger: more precise."""
        return min(map(_digits, self.formats), default=99)

    def meet(self, other: Precision) -> Precision:
        """Returns the precision of values that went through both precisions."""
        if other == self or not other.formats:
            return self
        return Precision(_coarsest((*self.formats, *other.formats)))

    def includes(self, other: Precision) -> bool:
        """True if this precision has every number of `other`."""
        return all(any(_is_included(b, a) for b in other.formats) for a in self.formats)

    def may_become(self, other: Precision) -> bool:
        """True if conversion can give values the precision `other`. Opaque bytes do not convert."""
        mine, others = ({n for n in p.formats if n not in _formats()} for p in (self, other))
        return mine <= others and (bool(mine) or others != set(other.formats))


NVFP4 = Precision((_NVFP4,))
Precisions = Precision | Sequence[Precision]  # one for all layers, or one for each of the model


def precision_in(given: Precisions, layer: int) -> Precision:
    """Returns the precision of a layer of the model."""
    return given if isinstance(given, Precision) else given[layer]


def all_or_each(name: str, value: Any) -> Precisions:
    """Returns a Precision, or a tuple with one for each layer. Raises InvalidArgumentError."""
    if isinstance(value, Precision):
        return value
    found = list_of(name, value, Precision, "a Precision for each layer of the model")
    if not found:
        raise bad_argument(name, value, "a Precision, or one for each layer of the model")
    return found


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _is_included(name: str, within: str) -> bool:
    return name in _includes().get(within, (within,))


def _coarsest(formats: Iterable[str]) -> tuple[str, ...]:
    """Returns the formats that include no other of these formats, sorted, each once."""
    found = set(formats)
    return tuple(sorted(a for a in found if not any(b != a and _is_included(b, a) for b in found)))
