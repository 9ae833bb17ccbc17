"""Kind: how the files of one writer are laid out, stated once for all of them.

Format: docs/store_format.md, "Kinds".
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Self

import numpy as np
from pydantic import ConfigDict, FailFast, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as parsed

from kvx_core.errors import InvalidArgumentError
from kvx_core.facts import OF_ENGINE, CacheFacts
from kvx_core.snapshot.coding import CODINGS
from kvx_core.snapshot.contents import (
    KV_DTYPES,
    SCALE_KINDS,
    Header,
    Part,
    PlaneKind,
    Stored,
    inconsistency,
)
from kvx_core.snapshot.errors import CorruptError, StoreError
from kvx_core.snapshot.file_layout import FileLayout
from kvx_core.snapshot.precision import VALUES, Precision
from kvx_core.snapshot.record import element_bytes
from kvx_core.snapshot.snapshot import Snapshot
from kvx_core.types import DType

FORMAT = 3
MAX_KIND_BYTES = 1 << 20
MAX_TOKENS = 1 << 16  # of a file
_MAX_LAYOUTS = 256  # that a kind remembers
_MAX_PIECES = 1 << 15  # of these together
_MAX_FINGERPRINTS = 16  # and parts of headers
_MAX_EXTENT = 1 << 31
_MAX_TOKEN_BYTES = 1 << 26  # of a token in all tensors, and of what does not grow with tokens
_FACTS = tuple(sorted({f.name for f in fields(CacheFacts)} - {"fingerprint"}))
_KV = re.compile(r"layers\.[0-9]+\.[kv]")
_WORD = re.compile("[A-Za-z][A-Za-z0-9_]{0,31}")  # that a newer version may have for a format
_STRICT = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor of a kind, for any number of tokens."""

    stored: Stored  # as it is for a token and an entry
    tokens_per_entry: int  # 0: its first extent is always the same
    plane: PlaneKind | None  # without whose entries it is not there

    def of(self, num_tokens: int) -> Stored | None:
        """None: a file of so many tokens has none."""
        if self.plane is not None and not self.plane.num_entries(num_tokens):
            return None
        shape = self.stored.shape
        if self.tokens_per_entry:
            shape = num_tokens // self.tokens_per_entry, *shape[1:]
        return replace(self.stored, shape=shape)

    @property
    def shape(self) -> list[int | str]:
        first: int | str = self.stored.shape[0]
        if self.tokens_per_entry:
            first = "n" if self.tokens_per_entry == 1 else f"n/{self.tokens_per_entry}"
        return [first, *self.stored.shape[1:]]


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """Layers, heads, facts and tensors of files. Threads may share it."""

    text: bytes = field(repr=False)  # canonical JSON
    parts: tuple[Part, ...]  # without fingerprint, and most without an engine
    keyed: bool
    encrypted: bool
    _tensors: dict[str, _Tensor] = field(repr=False)
    digest: bytes = field(init=False, repr=False)
    id: str = field(init=False)
    layers: tuple[int, ...] = field(init=False)  # all of them, sorted
    is_states: bool = field(init=False)  # files have states alone, of all their tokens together
    _of_layer: dict[int, Part] = field(init=False, repr=False)
    _layouts: dict[int, FileLayout] = field(default_factory=dict, repr=False)
    _parts: dict[str | None, tuple[Part, ...]] = field(default_factory=dict, repr=False)
    _known: dict[int, tuple[Part, ...]] = field(default_factory=dict, repr=False)  # by their ids

    def __post_init__(self) -> None:
        digest = hashlib.sha256(self.text).digest()
        of_layer = {layer: part for part in self.parts for layer in part.layers}
        object.__setattr__(self, "digest", digest)
        object.__setattr__(self, "id", digest[:16].hex())
        object.__setattr__(self, "layers", tuple(sorted(of_layer)))
        planes = [tensor.plane for tensor in self._tensors.values()]
        states = [plane for plane in planes if plane and not plane.tokens_per_entry]
        object.__setattr__(self, "is_states", len(states) == len(planes))
        object.__setattr__(self, "_of_layer", of_layer)

    @classmethod
    def of(
        cls,
        parts: Iterable[Part],
        tensors: Mapping[str, Stored],
        num_tokens: int,
        *,
        keyed: bool = False,
        encrypted: bool = False,
    ) -> Self:
        """The kind of snapshots with these parts.

        tensors: of one of num_tokens tokens, which has an entry of each plane
        Raises InvalidArgumentError.
        """
        parts = tuple(sorted(map(_bare, parts), key=_layers_of))
        kinds = {kind.name: kind for part in parts for kind in part.planes}
        missing = [name for name in kinds if name not in tensors]
        if missing:
            raise InvalidArgumentError(
                f"tensors of {num_tokens} tokens have no {missing[0]}, expected an entry of each "
                "plane. Give those of a full chunk"
            )
        held = {name: tensor for name, tensor in tensors.items() if name != "tokens"}
        found = {
            name: _tensor(name, held[name], kinds) for name in sorted(held, key=_order_in(held))
        }
        reason = _wrong(parts, found)
        if reason:
            raise InvalidArgumentError(f"tensors: {reason}")
        text = _text(parts, found, keyed=keyed, encrypted=encrypted)
        if len(text) > MAX_KIND_BYTES:
            raise InvalidArgumentError(
                f"the layout of a file takes {len(text)} bytes, expected at most {MAX_KIND_BYTES}"
            )
        return cls(text, parts, keyed, encrypted, found)

    @classmethod
    def parse(cls, raw: bytes, name: str) -> Self:
        """The kind in a file, which anyone may have written.

        name: of the file, for messages
        Raises CorruptError; StoreError if a newer version of KVX has written it.
        """
        if len(raw) > MAX_KIND_BYTES:
            raise CorruptError(f"{name} has {len(raw)} bytes, expected at most {MAX_KIND_BYTES}")
        try:
            content = _CONTENT.validate_json(raw)
            parts = tuple(map(_part, content.groups))
            kinds = {kind.name: kind for part in parts for kind in part.planes}
            if len(kinds) != sum(len(part.planes) for part in parts):
                raise ValueError("it has a plane twice")
            found = {each[0]: _parsed(each, kinds) for each in content.tensors}
            if len(found) != len(content.tensors):
                raise ValueError("it has a tensor twice")
            sizes = [element_bytes(tensor.stored.dtype) for tensor in found.values()]
            if sizes != sorted(sizes, reverse=True):
                raise ValueError("its tensors do not begin with those of larger elements")
            reason = _wrong(parts, found)
            if reason:
                raise ValueError(reason)
            text = _text(parts, found, keyed=content.keyed, encrypted=content.encrypted)
            is_sorted = parts == tuple(sorted(map(_bare, parts), key=_layers_of))
            if content.kvx_kind != FORMAT or not is_sorted or text != raw:
                raise ValueError("it is not written as KVX writes it")
        except ValidationError as error:
            wrong = error.errors(include_url=False, include_context=False, include_input=False)
            if all(each["type"] == "unexpected_keyword_argument" for each in wrong):
                raise _newer(name, ".".join(map(str, wrong[0]["loc"]))) from None
            where, what = wrong[0]["loc"], wrong[0]["msg"]
            raise CorruptError(f"{name} is no kind of files: {where}: {what[:200]}"[:500]) from None
        except _NewerError as error:
            raise _newer(name, str(error)) from None
        except (ValueError, RecursionError, OverflowError) as error:
            raise CorruptError(f"{name} is no kind of files: {error}"[:500]) from None
        return cls(raw, parts, content.keyed, content.encrypted, found)

    def heads_of(self, layer: int) -> tuple[int, int]:
        """The first, and one past the last."""
        return self._of_layer[layer].heads

    def precision_of(self, layer: int) -> Precision:
        """The numbers that values of a layer can be."""
        return Precision.parse(self._of_layer[layer].precision)

    @property
    def planes(self) -> tuple[PlaneKind, ...]:
        """Beside K and V, of all layers."""
        return tuple(plane for part in self.parts for plane in part.planes)

    def precision_of_planes(self, layer: int) -> Precision:
        """The numbers that planes of their dtypes can be."""
        part = self._of_layer[layer]
        if part.encoding != VALUES:
            return Precision.of(opaque=part.encoding)
        names = [plane.name for plane in part.planes if plane.layer == layer]
        return Precision.of(*(self._tensors[name].stored.dtype for name in names))

    def header(self, start: int, prefix: str, fingerprint: str | None) -> Header:
        """Of a snapshot in such a file; equal fingerprints give the same `parts`."""
        return Header(start, prefix, self.with_fingerprint(fingerprint))

    def has_parts(self, header: Header) -> bool:
        """Whether a snapshot has the layers, heads and facts of this kind."""
        known = self._known.get(id(header.parts))
        if known is header.parts:
            return True
        if tuple(sorted(map(_bare, header.parts), key=_layers_of)) != self.parts:
            return False
        if len(self._known) >= _MAX_FINGERPRINTS:
            self._known.clear()
        self._known[id(header.parts)] = header.parts
        return True

    def blank(self, num_tokens: int, fingerprint: str | None) -> Snapshot:
        """A snapshot as such a file has it, without data. Raises StoreError if it is too long.

        fingerprint: of the model, which the file does not say
        """
        tensors, header = self.layout(num_tokens).tensors, self.header(0, "", fingerprint)
        return Snapshot(header, np.zeros(num_tokens, np.int64), tensors)

    def memory_for(self, num_tokens: int, layers: Sequence[int], room_tokens: int) -> int:
        """Bytes of a room that these layers of a file need.

        room_tokens: Room.num_tokens
        """
        return self.layout(num_tokens).selection(layers, room_tokens).place.num_bytes

    def with_fingerprint(self, fingerprint: str | None) -> tuple[Part, ...]:
        """The parts of a snapshot of this model: the same object each time."""
        found = self._parts.get(fingerprint)
        if found is None:
            if len(self._parts) >= _MAX_FINGERPRINTS:
                self._parts.clear()
            found = self._parts[fingerprint] = tuple(
                replace(part, facts=replace(part.facts, fingerprint=fingerprint))
                for part in self.parts
            )
        return found

    def least_bytes(self, num_tokens: int) -> int:
        """Bytes that files of so many tokens have at least: found without a layout."""
        each = (tensor.of(num_tokens) for tensor in self._tensors.values())
        return sum(one.num_bytes for one in each if one is not None and not one.coding)

    def layout(self, num_tokens: int) -> FileLayout:
        """How a file of so many tokens is laid out. Raises StoreError if that is too long."""
        found = self._layouts.get(num_tokens)
        if found is None:
            if not 0 < num_tokens <= MAX_TOKENS:
                raise StoreError(f"a file has {num_tokens} tokens, expected 1 to {MAX_TOKENS}")
            each = ((name, tensor.of(num_tokens)) for name, tensor in self._tensors.items())
            tensors = {name: stored for name, stored in each if stored is not None}
            found = FileLayout.of(
                self.header(0, "", None),
                tensors,
                num_tokens,
                signed=self.keyed,
                encrypted=self.encrypted,
            )
            num_pieces = sum(len(one.pieces) for one in (found, *self._layouts.values()))
            if len(self._layouts) >= _MAX_LAYOUTS or num_pieces > _MAX_PIECES:
                self._layouts.clear()
            self._layouts[num_tokens] = found
        return found


@parsed(config=_STRICT)
class _Group:
    """Layers of a kind, as its text has them. What is wrong is found once: texts may be long."""

    encoding: str
    facts: dict[str, bool | int | str]
    heads: tuple[int, int]
    layers: Annotated[list[int], FailFast()]
    planes: Annotated[list[tuple[int, int, int, bool]], FailFast()]
    precision: str


_Row = tuple[str, str, Annotated[list[int | str], FailFast()], str, str]


@parsed(config=_STRICT)
class _Content:
    """The text of a kind."""

    encrypted: bool
    groups: Annotated[list[_Group], FailFast()]
    keyed: bool
    kvx_kind: int
    tensors: Annotated[list[_Row], FailFast()]


_CONTENT = TypeAdapter(_Content)
_CACHE_FACTS = TypeAdapter(CacheFacts)


class _NewerError(ValueError):
    """A word that this version of KVX does not know."""


def _newer(name: str, word: str) -> StoreError:
    return StoreError(
        f"{name} has {word[:200]}, which this version of KVX does not know. Use the version that "
        "wrote it, or a newer one"
    )


def _bare(part: Part) -> Part:
    """A part without what belongs to the model, and to the engine where its facts say the rest."""
    facts = replace(part.facts, fingerprint=None, engine=_engine_of(part.facts))
    layers, planes = tuple(sorted(part.layers)), tuple(sorted(part.planes))
    return replace(part, layers=layers, facts=facts, planes=planes)


def _engine_of(facts: CacheFacts) -> str | None:
    """The engine, without its version, where its keys are only known to be like its own."""
    if facts.engine is None or all(getattr(facts, name) is not None for name in OF_ENGINE):
        return None
    return next(iter(facts.engine.split()), None)


def _layers_of(part: Part) -> tuple[int, ...]:
    return part.layers


def _tensor(name: str, stored: Stored, kinds: Mapping[str, PlaneKind]) -> _Tensor:
    """A tensor of a kind, from what it is for some number of tokens."""
    is_scale = name.endswith("scale")
    plane = kinds.get(name.removesuffix(".scale"))
    if plane is not None:
        per = 0 if name.endswith(".scale") else plane.tokens_per_entry
    else:
        per = 0 if is_scale and len(stored.shape) < 2 else 1
    shape = (1, *stored.shape[1:]) if per else stored.shape
    stored = Stored(stored.dtype, shape, 0, stored.original, stored.coding)
    return _Tensor(stored, per, plane)


def _order_in(tensors: Mapping[str, Stored]) -> Any:
    """Sorts the tensors of a file: layer by layer, but those with larger elements first."""

    def order(name: str) -> tuple[int, int, int, str]:
        _, layer, rest = name.split(".", 2)
        kinds = ("k", "v", *SCALE_KINDS)
        place = kinds.index(rest) if rest in kinds and name.startswith("layers.") else len(kinds)
        return -element_bytes(tensors[name].dtype), int(layer), place, rest

    return order


def _wrong(parts: tuple[Part, ...], tensors: Mapping[str, _Tensor]) -> str | None:
    """Why tensors cannot be those of these parts, or None."""
    stored = [tensor.stored for tensor in tensors.values()]
    if sum(one.num_bytes for one in stored) > _MAX_TOKEN_BYTES:
        return f"a token has more than {_MAX_TOKEN_BYTES} bytes"
    for name, tensor in tensors.items():
        kv, one = bool(_KV.fullmatch(name)), tensor.stored
        if one.original is not None and not (kv and one.original in KV_DTYPES):
            return f"{name[:100]} was {one.original.name}, expected K or V of numbers"
        if one.coding and not (kv and CODINGS[one.coding].dtype is one.dtype):
            return f"{name[:100]} of {one.dtype.name} is in {one.coding}"
    planes = [kind for part in parts for kind in part.planes]
    num_tokens = max((1, *(kind.tokens_per_entry for kind in planes)))
    held = {name: tensor.of(num_tokens) for name, tensor in tensors.items()}
    content = {name: one for name, one in held.items() if one is not None}
    tokens = {"tokens": Stored(DType.S64, (num_tokens,))}
    return inconsistency(Header(0, "", parts), content | tokens)


def _text(
    parts: Iterable[Part],
    tensors: Mapping[str, _Tensor],
    *,
    keyed: bool,
    encrypted: bool,
) -> bytes:
    groups = [
        {
            "layers": part.layers,
            "heads": part.heads,
            "encoding": part.encoding,
            "precision": part.precision,
            "facts": _of_facts(part.facts),
            "planes": [[k.layer, k.role, k.tokens_per_entry, k.replicated] for k in part.planes],
        }
        for part in parts
    ]
    rows = []
    for name, tensor in tensors.items():
        one = tensor.stored
        original = "" if one.original is None else one.original.name
        rows.append([name, one.dtype.name, tensor.shape, original, one.coding])
    content = {
        "kvx_kind": FORMAT,
        "keyed": keyed,
        "encrypted": encrypted,
        "groups": groups,
        "tensors": rows,
    }
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _of_facts(facts: CacheFacts) -> dict[str, Any]:
    found = {name: getattr(facts, name) for name in _FACTS}
    return {
        name: value.name if isinstance(value, DType) else value
        for name, value in found.items()
        if value is not None
    }


def _part(group: _Group) -> Part:
    given: dict[str, Any] = dict(group.facts)
    for name in given.keys() - set(_FACTS):
        raise _NewerError(f"the fact {name[:100]}") if _WORD.fullmatch(name) else ValueError(name)
    if "compute_dtype" in given:
        given["compute_dtype"] = _dtype(given["compute_dtype"])
    facts = _CACHE_FACTS.validate_json(json.dumps(given), strict=True)
    planes = tuple(PlaneKind(*plane) for plane in group.planes)
    for kind in planes:
        if not 0 <= kind.tokens_per_entry <= MAX_TOKENS:
            raise ValueError(f"an entry stands for {kind.tokens_per_entry} tokens")
    return Part(tuple(group.layers), group.heads, facts, group.encoding, group.precision, planes)


def _parsed(row: _Row, kinds: Mapping[str, PlaneKind]) -> _Tensor:
    name, word, shape, original, coding = row
    first, *rest = shape or [0]
    sizes = [first if isinstance(first, int) else 1, *rest]
    counts = [n for n in sizes if isinstance(n, int) and 0 < n < _MAX_EXTENT]
    if counts != sizes or not 0 < len(sizes) <= 3:
        raise ValueError(f"{name[:100]} has shape {str(shape)[:100]}")
    if coding and coding not in CODINGS:
        raise _NewerError(f"{name[:100]} in {coding[:100]}")
    was = _dtype(original) if original else None
    found = _tensor(name, Stored(_dtype(word), tuple(counts), 0, was, coding), kinds)
    if found.shape != shape:
        raise ValueError(f"{name[:100]} has shape {str(shape)[:100]}, expected {found.shape}")
    return found


def _dtype(word: Any) -> DType:
    found = DType.__members__.get(word) if isinstance(word, str) else None
    if found is None and isinstance(word, str) and _WORD.fullmatch(word):
        raise _NewerError(word)
    if not found:
        raise ValueError(f"{str(word)[:100]} is no dtype")
    return found
