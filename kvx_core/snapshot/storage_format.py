"""A StorageFormat is the format in which snapshots and stores keep K and V."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from kvx_core.argument_checks import plural
from kvx_core.errors import InvalidArgumentError, UnsupportedError
from kvx_core.snapshot.coding import CODINGS
from kvx_core.snapshot.contents import GROUP
from kvx_core.snapshot.planes import is_kv
from kvx_core.snapshot.precision import NVFP4, VALUES, Precision
from kvx_core.snapshot.section import Section, lossy_of
from kvx_core.types import Axis, DType


@functools.cache
def _names() -> dict[DType, str]:
    """The formats that K and V can be stored in: floats, and units that contain their own scales.
    FP8 and S8 get a scale for each token and head, NVFP4 gets one for each group of 16 numbers.
    """
    return {
        dtype: NVFP4.name if dtype.format.grouped else dtype.name.lower()
        for dtype in DType
        if dtype.format.grouped
        or ((dtype.format.rounding or dtype.numbers > 1) and not dtype.format.affine)
    }


@functools.cache
def _dtypes() -> dict[str, DType]:
    return {name: dtype for dtype, name in _names().items()}


@dataclass(frozen=True, slots=True)
class StorageFormat:
    """The format that K and V are converted to before they are stored. Other planes do not change.

    dtype:  None: K and V are stored as the cache has them; F4_E2M1: NVFP4
    coding: the lossless encoding of their bytes in a file; "": the bytes are not encoded
    Raises InvalidArgumentError if `dtype` or `coding` is not one that K and V can have, and if both
    are given.
    """

    dtype: DType | None = None
    coding: str = ""

    def __post_init__(self) -> None:
        if self.dtype is not None and not _is_format(self.dtype):
            raise InvalidArgumentError(
                f"dtype is {_words(self.dtype)}, expected None or one of "
                f"{', '.join(f'DType.{dtype.name}' for dtype in _names())}. StorageFormat.of takes "
                "names"
            )
        if not isinstance(self.coding, str) or self.coding not in ("", *CODINGS):
            raise InvalidArgumentError(
                f"coding is {_words(self.coding)}, expected '' or one of {', '.join(CODINGS)}"
            )
        if self.dtype is not None and self.coding:
            raise InvalidArgumentError(
                f"dtype is {_words(self.dtype)} and coding is {self.coding!r}, expected at most "
                "one of them: a coding keeps the dtype of the cache. Leave one out"
            )

    @classmethod
    def of(cls, format: object) -> Self:
        """Returns the format with a name, such as "q8_0", or of a DType.

        format: None: K and V are stored as the cache has them
        Raises InvalidArgumentError if `format` is not a format of numbers.
        """
        if format is None or isinstance(format, cls):
            return format or cls()
        if isinstance(format, str) and format in CODINGS:
            return cls(coding=format)
        if isinstance(format, str) and format in _dtypes():
            return cls(_dtypes()[format])
        try:
            dtype = DType.of(format)
        except InvalidArgumentError:
            dtype = DType.INVALID
        if not _is_format(dtype):
            names = ", ".join([*_dtypes(), *CODINGS])
            raise InvalidArgumentError(
                f"format is {_words(format)}, expected None or one of {names}"
            )
        return cls(dtype)

    @property
    def name(self) -> str:
        """The name that `of` takes; "": K and V are stored as the cache has them."""
        return self.coding if self.dtype is None else _names()[self.dtype]

    @property
    def precision(self) -> Precision:
        """The precision of stored values; all numbers if they are stored as the cache has them."""
        if self.dtype is None:
            return Precision()
        if self.dtype.format.grouped:
            return NVFP4
        return Precision.of(self.dtype, vector_scales=self.dtype.format.scaled)

    def is_lossy_for(self, precision: Precision) -> bool:
        """True if values of this precision are rounded when they are stored.

        FP8, S8 and units of several numbers count as rounded in every other format: their numbers
        are multiplied by scales. Numbers count as rounded too if their format has larger numbers
        than this format: 65504, computed in F16, is 65536 in a BF16 cache and infinity in F16. If
        the dtypes of tensors differ, use `rounds`, which checks each tensor.
        """
        if self.dtype is None:
            return False
        dtypes = [_dtype_of(word) for word in precision.formats]
        return (
            any(dtype.format.scaled for dtype in dtypes)
            or any(dtype.numbers > 1 and dtype is not self.dtype for dtype in dtypes)
            or any(self._overflows(dtype) for dtype in dtypes)
            or precision.meet(self.precision).formats != precision.formats
        )

    def rounds(self, section: Section) -> bool:
        """True if some K or V of a section is rounded when it is stored.

        Checks each dtype of K and V: the precision of the section is the coarsest of all of them.
        Raises InvalidArgumentError if facts.lossy of the section does not name formats.
        """
        if section.encoding != VALUES or not self.converts(section):
            return False
        facts = section.view.facts
        computed = [] if facts.compute_dtype is None else [facts.compute_dtype]
        before = lossy_of(facts)
        found = {dtype for _, dtype, _ in _tensors(section)}
        return any(self._rounds(d, Precision.of(d, *computed).meet(before)) for d in found)

    def _rounds(self, dtype: DType, precision: Precision) -> bool:
        """True if conversion rounds a tensor of this dtype.

        precision: of the tensor's values, which may have come from a coarser format
        """
        if dtype.numbers > 1 and not dtype.format.scaled:
            return dtype is not self.dtype
        if not dtype.format.scaled and self.precision.includes(Precision.of(dtype)):
            return False
        return self.is_lossy_for(precision)

    def _overflows(self, dtype: DType) -> bool:
        """True if the largest float of `dtype` exceeds the largest float of this format."""
        own, other = (None if d is None else d.format.rounding for d in (self.dtype, dtype))
        return own is not None and other is not None and other.largest > own.largest

    def converts(self, section: Section) -> bool:
        """True if storing a section converts some K or V: its dtype is not that of this format."""
        return self.dtype is not None and any(d is not self.dtype for _, d, _ in _tensors(section))

    def check(self, section: Section) -> None:
        """Raises InvalidArgumentError, UnsupportedError if this format cannot hold K and V of a
        section.
        """
        dtype = self.dtype
        for name, found, _ in _tensors(section) if self.coding else ():
            expected = CODINGS[self.coding].dtype
            if found is not expected:
                raise UnsupportedError(
                    f"format is {self.coding!r} and {name} is {found.name}, expected "
                    f"{expected.name}. Choose another format, or none"
                )
        if dtype is None or not self.converts(section):
            return
        if section.encoding != VALUES:
            raise UnsupportedError(
                f"format is {self.name!r} and the cache has opaque bytes, {section.encoding!r}, "
                "expected numbers. Leave the format out: these bytes are stored as they are"
            )
        if dtype.format.grouped:
            self._check_groups(section)
            return
        num_heads = section.heads[1] - section.heads[0]
        for name, _, head_dim in _tensors(section):
            if head_dim % dtype.numbers and num_heads * head_dim % dtype.numbers:
                raise InvalidArgumentError(
                    f"format is {self.name!r} and {name} has head_dim {head_dim}, in "
                    f"{plural(num_heads, 'head')} {num_heads * head_dim} numbers, expected one of "
                    f"them to be a multiple of {dtype.numbers}, the numbers of a unit (spec E.10). "
                    "Choose a format with smaller units, or none"
                )
            if head_dim % dtype.numbers and any(d is dtype for _, d, _ in _tensors(section)):
                raise UnsupportedError(
                    f"format is {self.name!r} and its units span heads in {name}, expected no K or "
                    "V that has this format in the cache. Choose another format, or none"
                )
        if dtype.format.scaled and any(map(is_kv, section.view.planes)):
            raise UnsupportedError(
                f"format is {self.name!r} and K and V are planes, which cannot have a scale for "
                "each token and head. Choose a format without them"
            )

    def _check_groups(self, section: Section) -> None:
        """Raises InvalidArgumentError if a head_dim is not a multiple of GROUP."""
        for name, _, head_dim in _tensors(section):
            if head_dim % GROUP:
                raise InvalidArgumentError(
                    f"format is {self.name!r} and {name} has head_dim {head_dim}, expected a "
                    f"multiple of {GROUP}, the numbers that share a scale (spec E.18). Choose "
                    "another format, or none"
                )


def _is_format(dtype: object) -> bool:
    """True if K and V can be converted to `dtype`. False for plain ints."""
    return isinstance(dtype, DType) and dtype in _names()


def _words(given: object) -> str:
    """Returns an argument in words, for a message."""
    return f"DType.{given.name}" if isinstance(given, DType) else repr(str(given)[:100])


def _dtype_of(word: str) -> DType:
    """Returns the dtype of one of Precision.formats; INVALID for opaque bytes."""
    if word in _dtypes():
        return _dtypes()[word]
    return DType.__members__.get(word.removesuffix("_row").upper(), DType.INVALID)


def _tensors(section: Section) -> Iterator[tuple[str, DType, int]]:
    """Yields the name, dtype and head_dim of each K and V."""
    view = section.view
    for layer, cache in zip(section.layers, view.layers, strict=False):
        dims = {"k": cache.head_dim, "v": cache.v_head_dim}
        for kind, tensor in cache.tensors.items():
            yield f"{kind} of layer {layer}", tensor.dtype, dims[kind]
    for plane in filter(is_kv, view.planes):
        head_dim = plane.extent(Axis.DIM) * plane.dtype.numbers
        yield f"{plane.role_name} of layer {plane.layer}", plane.dtype, head_dim
