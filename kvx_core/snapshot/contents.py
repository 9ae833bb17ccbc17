"""Contents: the description of what a snapshot holds, and the check that its parts agree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from kvx_core.facts import CacheFacts
from kvx_core.snapshot.precision import VALUES, Precision
from kvx_core.types import DType

SCALE_KINDS = ("k_scale", "v_scale")
FP8 = tuple(dtype for dtype in DType if dtype.format.scaled)
KV_DTYPES = (DType.F16, DType.BF16, DType.F32, *FP8, DType.U8)  # what K and V may be
_MAX_INDEX = 1 << 24  # of layers and heads


@dataclass(frozen=True, slots=True)
class Part:
    """Layers of a snapshot that share facts, encoding and precision: one section when captured."""

    layers: tuple[int, ...]
    facts: CacheFacts
    encoding: str
    precision: str  # Precision.name


@dataclass(frozen=True, slots=True)
class Header:
    """What a snapshot contains, without its tokens and tensors."""

    start: int  # position in the sequence of the first token
    prefix: str  # opaque key of the tokens before it
    heads: tuple[int, int]
    parts: tuple[Part, ...]

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(sorted(layer for part in self.parts for layer in part.layers))

    @property
    def precision(self) -> Precision:
        """The coarsest of all parts."""
        found = Precision()
        for part in self.parts:
            found = found.meet(Precision.parse(part.precision))
        return found


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor: dtype, shape, and where its bytes begin in the file or in memory."""

    dtype: DType
    shape: tuple[int, ...]
    offset: int
    checksum: str = ""  # in a file

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def type(self) -> tuple[DType, tuple[int, ...]]:
        return self.dtype, self.shape


NOTHING = Stored(DType.U8, (), 0)


def inconsistency(header: Header, tensors: Mapping[str, Stored]) -> str | None:
    """Why a header's content cannot be right, or None."""
    layers = [layer for part in header.parts for layer in part.layers]
    tokens = tensors.get("tokens", NOTHING)
    if tokens.dtype is not DType.S64 or len(tokens.shape) != 1 or not tokens.shape[0]:
        return f"tokens is {tokens.dtype.name} {tokens.shape}, expected I64 of 1 axis"
    if (
        not layers
        or len(set(layers)) != len(layers)
        or min(layers) < 0
        or max(layers) >= _MAX_INDEX
    ):
        return f"its layers are {layers}, expected indices of layers of the model, each once"
    first, last = header.heads
    if header.start < 0 or not 0 <= first < last <= _MAX_INDEX:
        return f"start is {header.start}, heads are {header.heads}, expected a range of each"
    for part in header.parts:
        try:
            Precision.parse(part.precision)
        except ValueError as error:
            return str(error)
    known = {"tokens"}
    counts = (tokens.shape[0], last - first)  # of tokens and heads
    for layer, encoding in ((i, part.encoding) for part in header.parts for i in part.layers):
        for kind in ("k", "v"):
            name = f"layers.{layer}.{kind}"
            if name in tensors or kind == "k":
                known |= {name, f"{name}_scale"}
                reason = next(_wrong_tensor(name, tensors, counts, encoding), None)
                if reason:
                    return reason
    others = sorted(set(tensors) - known)
    return f"{others[0]} belongs to none of its layers {layers}" if others else None


def _wrong_tensor(
    name: str, tensors: Mapping[str, Stored], counts: tuple[int, int], encoding: str
) -> Iterator[str]:
    """What is wrong with K or V of a layer, or with its scale; None if nothing is."""
    stored, scale = tensors.get(name, NOTHING), tensors.get(f"{name}_scale")
    if (
        stored.shape[:2] != counts
        or len(stored.shape) != 3
        or not stored.shape[2]
        or stored.dtype not in KV_DTYPES
        or (stored.dtype is DType.U8) is (encoding == VALUES)
    ):
        yield (
            f"{name} is {stored.dtype.name} {stored.shape}, expected {counts} and a head_dim, of a "
            f"dtype of {encoding!r}"
        )
    if scale is not None and (
        scale.dtype is not DType.F32
        or stored.dtype not in FP8
        or scale.shape not in ((1,), counts[1:], counts)
    ):
        yield (
            f"{name}_scale is {scale.dtype.name} {scale.shape} for {name} of "
            f"{stored.dtype.name}, expected F32 (1,), {counts[1:]} or {counts} for FP8"
        )
