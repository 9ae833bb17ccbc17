"""Describes the contents of a snapshot, and checks that its parts and tensors agree.

K and V of layer 3 are layers.3.k and layers.3.v, (tokens, heads, head_dim), or (tokens, 1, heads *
head_dim) where the units of a format span heads. Their scales are layers.3.k_scale and
layers.3.v_scale; scales of NVFP4 are (tokens, heads, groups). A plane of layer 3 is
planes.3.<role>, (entries, heads, dim), and its scale is planes.3.<role>.scale. Where a unit of a
format has several numbers, the last axis counts units.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvx_core.desc.facts import CacheFacts
from kvx_core.desc.planes import Plane, role_name
from kvx_core.formats import Formats
from kvx_core.snapshot.precision import NVFP4, VALUES, Precision
from kvx_core.types import DType, Role

SCALE_KINDS = ("k_scale", "v_scale")
SCALED = Formats(lambda: (dtype for dtype in DType if dtype.format.scaled))
IN_UNITS = Formats(lambda: (d for d in DType if d.numbers > 1 and not d.format.affine))
# The dtypes of safetensors.
FILE_DTYPES = Formats(lambda: (DType.F16, DType.BF16, DType.F32, *SCALED, DType.U8))
# The dtypes that K, V and planes of a cache may have.
KV_DTYPES = Formats(lambda: (*FILE_DTYPES, *IN_UNITS))
STORED_UNITS = Formats(lambda: (*IN_UNITS, DType.F4_E2M1))  # bytes in a file; NVFP4 uses F4_E2M1
GROUP = 16  # numbers of NVFP4 that share one scale, an F8_E4M3
_MAX_INDEX = 1 << 24  # of a layer or head
_MAX_ROLE = (1 << 31) - 1


@dataclass(frozen=True, slots=True, order=True)
class PlaneKind:
    """A plane of a layer of the model, without its place in memory and the order of its axes."""

    layer: int
    role: int  # a Role, or a number of the caller's own
    tokens_per_entry: int = 1
    replicated: bool = False

    @classmethod
    def of(cls, plane: Plane) -> PlaneKind:
        """Returns the kind of a plane."""
        return cls(plane.layer, plane.role, plane.tokens_per_entry, plane.replicated)

    @property
    def name(self) -> str:
        """The name of its tensor, such as planes.3.index_k or planes.3.role_40."""
        return f"planes.{self.layer}.{role_name(self.role).lower().replace(' ', '_')}"

    @property
    def words(self) -> str:
        return f"{role_name(self.role)} of layer {self.layer}"

    def num_entries(self, num_tokens: int) -> int:
        """Returns the number of complete entries of num_tokens tokens; 1 for a state."""
        return num_tokens // self.tokens_per_entry if self.tokens_per_entry else 1


@dataclass(frozen=True, slots=True)
class Part:
    """Layers of a snapshot that share heads, facts, encoding and precision."""

    layers: tuple[int, ...]
    heads: tuple[int, int]  # heads of the model in these layers: first, and one past the last
    facts: CacheFacts
    encoding: str
    precision: str  # Precision.name
    planes: tuple[PlaneKind, ...] = ()  # planes of these layers beside K and V


@dataclass(frozen=True, slots=True)
class Header:
    """The description of a snapshot, without its tokens and tensors."""

    start: int  # position in the sequence of the first token
    prefix: str  # opaque key of the tokens before the snapshot
    parts: tuple[Part, ...]

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(sorted(layer for part in self.parts for layer in part.layers))

    @property
    def heads(self) -> dict[int, tuple[int, int]]:
        """The heads of each layer: first, and one past the last."""
        return {layer: part.heads for part in self.parts for layer in part.layers}

    @property
    def precision(self) -> Precision:
        """The coarsest precision of all parts."""
        return coarsest_of(self.parts)


def coarsest_of(parts: Iterable[Part]) -> Precision:
    """Returns the coarsest precision of these parts."""
    each = (Precision.parse(part.precision) for part in parts)
    return reduce(Precision.meet, each, Precision())


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor: its dtype, its shape, and the offset of its bytes in the file or in memory."""

    dtype: DType
    shape: tuple[int, ...]
    offset: int = 0
    original: DType | None = None  # dtype in the cache, if the capture converted the numbers
    coding: str = ""  # of the tensor's bytes in a file: see coding.py

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def type(self) -> tuple[DType, tuple[int, ...]]:
        return self.dtype, self.shape

    @property
    def cache_bytes(self) -> int:
        """The bytes of these numbers in the cache that they were captured from."""
        dtype = self.original or self.dtype
        return prod(self.shape) * self.dtype.numbers // dtype.numbers * dtype.itemsize


class Contents(Protocol):
    """The protocol of an object that is written to a file: a Snapshot."""

    @property
    def name(self) -> str:
        """The name in messages."""

    @property
    def header(self) -> Header: ...
    @property
    def tokens(self) -> npt.NDArray[np.int64]: ...
    @property
    def tensors(self) -> dict[str, Stored]: ...
    @property
    def memory(self) -> npt.NDArray[np.uint8] | None: ...


def cache_bytes_of(tensors: Mapping[str, Stored]) -> int:
    """Returns the bytes of tensors in the cache, without scales that the conversion added."""
    found = {scale_name(name) for name, stored in tensors.items() if stored.original is not None}
    return sum(stored.cache_bytes for name, stored in tensors.items() if name not in found)


NOTHING = Stored(DType.U8, ())


def shape_of_kv(
    dtype: DType, num_tokens: int, num_heads: int, head_dim: int
) -> tuple[int, int, int]:
    """Returns the shape of K or V in a dtype. If units span heads, a token is one row, one head."""
    if head_dim % dtype.numbers:
        return num_tokens, 1, num_heads * head_dim // dtype.numbers
    return num_tokens, num_heads, head_dim // dtype.numbers


def layer_of(name: str) -> int:
    """Returns the layer of a tensor."""
    return int(name.split(".")[1])


def is_row(stored: Stored, num_heads: int) -> bool:
    """True if the units of a K or V span heads."""
    return stored.dtype in IN_UNITS and stored.shape[1:2] == (1,) and num_heads > 1


def head_dim_of(stored: Stored, num_heads: int) -> int:
    """Returns how many numbers a head of K or V has."""
    numbers = stored.shape[2] * stored.dtype.numbers
    return numbers // num_heads if is_row(stored, num_heads) else numbers


def inconsistency(
    parts: Sequence[Part], tensors: Mapping[str, Stored], num_tokens: int
) -> str | None:
    """Returns why a snapshot of num_tokens tokens cannot have these parts and tensors, or None."""
    layers = [layer for part in parts for layer in part.layers]
    if (
        not layers
        or len(set(layers)) != len(layers)
        or min(layers) < 0
        or max(layers) >= _MAX_INDEX
    ):
        return f"its layers are {layers}, expected indices of layers of the model, each once"
    heads = [part.heads for part in parts]
    if not all(0 <= lo < hi <= _MAX_INDEX for lo, hi in heads):
        return f"heads are {heads}, expected a range of each"
    for part in parts:
        try:
            Precision.parse(part.precision)
            if part.facts.lossy is not None:
                Precision.parse(part.facts.lossy)
        except ValueError as error:
            return str(error)
    known: set[str] = set()
    for part in parts:
        counts = num_tokens, part.heads[1] - part.heads[0]  # of tokens and heads
        reason = next(_wrong_planes(part, counts, tensors), None)
        if reason:
            return reason
        known |= {name for kind in part.planes for name in _names(kind, counts[0])}
        with_planes = {kind.layer for kind in part.planes}
        for layer in part.layers:
            for kind in ("k", "v"):
                name = f"layers.{layer}.{kind}"
                if name in tensors or (kind == "k" and layer not in with_planes):
                    known |= {name, scale_name(name)}
                    reason = next(_wrong_tensor(name, tensors, counts, part.encoding), None)
                    reason = reason or _wrong_precision(
                        name, tensors.get(name, NOTHING), part.precision
                    )
                    if reason:
                        return reason
                elif kind == "k":
                    break  # a layer without K has no V
    others = sorted(set(tensors) - known)
    return f"{others[0]} belongs to none of its layers {layers}" if others else None


def scale_name(name: str) -> str:
    """Returns the name of the scale of a tensor."""
    return f"{name}_scale" if name.startswith("layers.") else f"{name}.scale"


def group_scale(stored: Stored) -> Stored:
    """Returns the tensor of the scales of a K or V in NVFP4."""
    groups = stored.shape[2] * stored.dtype.numbers // GROUP
    return Stored(DType.F8_E4M3, (*stored.shape[:2], groups))


def is_scale(name: str) -> bool:
    """True if this is the name of a scale."""
    return name.endswith("_scale" if name.startswith("layers.") else ".scale")


def planes_of(header: Header, layers: Iterable[int]) -> list[PlaneKind]:
    """Returns the planes of these layers beside K and V."""
    wanted = set(layers)
    return [kind for part in header.parts for kind in part.planes if kind.layer in wanted]


def names_of(header: Header, tensors: Mapping[str, Stored], layers: Sequence[int]) -> list[str]:
    """Returns the names of the tensors of these layers."""
    names = [f"layers.{layer}.{kind}" for layer in layers for kind in ("k", "v", *SCALE_KINDS)]
    for kind in planes_of(header, layers):
        names += [kind.name, scale_name(kind.name)]
    return [name for name in names if name in tensors]


def _names(kind: PlaneKind, num_tokens: int) -> tuple[str, ...]:
    """Returns the names of the tensors of a plane; none if the plane has no complete entry."""
    return (kind.name, scale_name(kind.name)) if kind.num_entries(num_tokens) else ()


def _wrong_planes(
    part: Part, counts: tuple[int, int], tensors: Mapping[str, Stored]
) -> Iterator[str]:
    """Yields what is wrong with the planes of a part."""
    layers = set(part.layers)
    if len({(kind.layer, kind.role) for kind in part.planes}) != len(part.planes):
        yield "its planes have a role of a layer twice"
    for kind in part.planes:
        n = kind.tokens_per_entry
        if (
            kind.layer not in layers
            or not Role.V < kind.role <= _MAX_ROLE
            or not 0 <= n <= _MAX_ROLE
        ):
            yield f"its plane {kind} is none of its layers {part.layers[:9]}"
        elif entries := kind.num_entries(counts[0]):
            stored = tensors.get(kind.name, NOTHING)
            heads = stored.shape[1:2] if kind.replicated else counts[1:]
            yield from _wrong_tensor(kind.name, tensors, (entries, *heads), part.encoding)


def _wrong_precision(name: str, stored: Stored, precision: str) -> str | None:
    """Returns why numbers in this dtype cannot have this precision, or None."""
    if stored.dtype not in STORED_UNITS:
        return None
    most = NVFP4 if stored.dtype.format.grouped else Precision.of(stored.dtype)
    said = Precision.parse(precision)
    if said.meet(most).formats == said.formats:
        return None
    return f"{name} is {stored.dtype.name}, and precision is {precision!r}, expected {most.name}"


def _wrong_tensor(
    name: str, tensors: Mapping[str, Stored], counts: tuple[int, ...], encoding: str
) -> Iterator[str]:
    """Yields what is wrong with a K, V or plane, or with its scale.

    counts: the number of entries and the number of heads
    """
    stored, scale = tensors.get(name, NOTHING), tensors.get(scale_name(name))
    is_plane = name.startswith("planes.")
    opaque = stored.dtype is DType.U8
    row = not is_plane and len(stored.shape) == 3 and is_row(stored, counts[1])
    if row and stored.shape[0] == counts[0]:
        numbers = stored.shape[2] * stored.dtype.numbers
        if numbers % counts[1] or numbers // counts[1] % stored.dtype.numbers == 0:
            yield (
                f"{name} has rows of {numbers} numbers for {counts[1]} heads, expected as many for "
                f"each, and not whole units of {stored.dtype.numbers}"
            )
        counts = stored.shape[:2]
    if (
        stored.shape[:2] != counts
        or len(stored.shape) != 3
        or not stored.shape[2]
        or stored.dtype not in (KV_DTYPES if is_plane else (*FILE_DTYPES, *STORED_UNITS))
        or (opaque and encoding == VALUES)
        or (not opaque and encoding != VALUES and not is_plane)
    ):
        yield (
            f"{name} is {stored.dtype.name} {stored.shape}, expected {counts} and a head_dim, of a "
            f"dtype of {encoding!r}"
        )
    if stored.dtype.format.grouped:
        numbers = stored.shape[2] * stored.dtype.numbers
        if numbers % GROUP or scale is None or scale.type != group_scale(stored).type:
            yield (
                f"{name} is {NVFP4.name} of {numbers} numbers and its scale is "
                f"{scale and scale.shape}, expected an F8_E4M3 for each {GROUP} numbers"
            )
        return
    shapes: tuple[Any, ...] = ((1,), counts[1:])
    if not is_plane:
        shapes = (*shapes, counts)
    if scale is not None and (
        scale.dtype is not DType.F32 or stored.dtype not in SCALED or scale.shape not in shapes
    ):
        yield (
            f"{scale_name(name)} is {scale.dtype.name} {scale.shape} for {name} of "
            f"{stored.dtype.name}, expected F32 {', '.join(map(str, shapes[:-1]))} or {shapes[-1]} "
            "for FP8 and S8"
        )
