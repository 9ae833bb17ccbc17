"""Writes the text of a kind, and parses it without trusting it.

Format: docs/store_format.md, "Kinds" and "Snapshots".
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, NamedTuple, Self

from pydantic import ConfigDict, FailFast, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as parsed

from kvx_core.desc.facts import OF_ENGINE, CacheFacts
from kvx_core.errors import CorruptError, StoreError
from kvx_core.snapshot.coding import CODINGS
from kvx_core.snapshot.contents import (
    KV_DTYPES,
    SCALE_KINDS,
    Part,
    PlaneKind,
    Stored,
    inconsistency,
)
from kvx_core.snapshot.record import element_bytes
from kvx_core.types import DType

FORMAT = 3
MAX_KIND_BYTES = 1 << 20
MAX_TOKENS = 1 << 16  # of an entry of a store
_MAX_EXTENT = 1 << 31
_MAX_TOKEN_BYTES = 1 << 26  # of a token or entry in all tensors
_MAX_STATE_BYTES = 1 << 32  # of tensors of constant size: Qwen3-Next 80B has 77 MB of them
_FACTS = tuple(sorted(f.name for f in fields(CacheFacts)))
_KV = re.compile(r"layers\.[0-9]+\.[kv]")
_WORD = re.compile("[A-Za-z][A-Za-z0-9_]{0,31}")  # a name that a newer version may have added
_STRICT = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True, slots=True)
class KindTensor:
    """A tensor of a kind, for any number of tokens."""

    stored: Stored  # the tensor for one token or one entry
    tokens_per_entry: int  # 0: the first extent is constant
    plane: PlaneKind | None  # files without a complete entry of this plane lack the tensor

    def of(self, num_tokens: int) -> Stored | None:
        """Returns the tensor in a file of num_tokens tokens; None if such files lack it."""
        if self.plane is not None and not self.plane.num_entries(num_tokens):
            return None
        if not self.tokens_per_entry:
            return self.stored
        shape = num_tokens // self.tokens_per_entry, *self.stored.shape[1:]
        return replace(self.stored, shape=shape)

    @classmethod
    def of_entries(cls, name: str, stored: Stored, kinds: Mapping[str, PlaneKind]) -> Self:
        """Returns the tensor of entries, from that of a file with any number of tokens.

        kinds: planes by their names
        """
        plane = kinds.get(name.removesuffix(".scale"))
        if plane is not None:
            per = 0 if name.endswith(".scale") else plane.tokens_per_entry
        else:
            per = 0 if name.endswith("scale") and len(stored.shape) < 2 else 1
        shape = (1, *stored.shape[1:]) if per else stored.shape
        return cls(Stored(stored.dtype, shape, 0, stored.original, stored.coding), per, plane)

    @property
    def shape(self) -> list[int | str]:
        first: int | str = self.stored.shape[0]
        if self.tokens_per_entry:
            first = "n" if self.tokens_per_entry == 1 else f"n/{self.tokens_per_entry}"
        return [first, *self.stored.shape[1:]]


@parsed(config=_STRICT)
class _Group:
    """A group of layers in the text of a kind.

    Lists stop at their first error: a text may be long.
    """

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
    prefix: str | None = None  # of a snapshot


_CONTENT = TypeAdapter(_Content)
_CACHE_FACTS = TypeAdapter(CacheFacts)


class Parsed(NamedTuple):
    """The content of the text of a kind."""

    parts: tuple[Part, ...]
    keyed: bool
    encrypted: bool
    tensors: dict[str, KindTensor]
    prefix: str | None


def parsed_kind(raw: bytes, name: str, num_tokens: int | None) -> Parsed:
    """Parses the text of a kind. Arguments and errors are those of Kind.parse."""
    if len(raw) > MAX_KIND_BYTES:
        raise CorruptError(f"{name} has {len(raw)} bytes, expected at most {MAX_KIND_BYTES}")
    of_entries = num_tokens is None
    try:
        content = _CONTENT.validate_json(raw)
        if (content.prefix is None) is not of_entries:
            raise ValueError("it has a prefix, or none: only those of snapshots have one")
        parts = tuple(_part(group, of_entries=of_entries) for group in content.groups)
        kinds = {kind.name: kind for part in parts for kind in part.planes}
        if len(kinds) != sum(len(part.planes) for part in parts):
            raise ValueError("it has a plane twice")
        found = {each[0]: _parsed(each, kinds if of_entries else None) for each in content.tensors}
        if len(found) != len(content.tensors):
            raise ValueError("it has a tensor twice")
        sizes = [element_bytes(tensor.stored.dtype) for tensor in found.values()]
        if sizes != sorted(sizes, reverse=True):
            raise ValueError("its tensors do not begin with those of larger elements")
        reason = why_wrong(parts, found, num_tokens)
        if reason:
            raise ValueError(reason)
        text = kind_text(
            parts,
            found,
            keyed=content.keyed,
            encrypted=content.encrypted,
            prefix=content.prefix,
        )
        is_sorted = parts == bare_parts(parts)
        is_bare = is_sorted or not of_entries
        if content.kvx_kind != FORMAT or not is_bare or text != raw:
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
    return Parsed(parts, content.keyed, content.encrypted, found, content.prefix)


class _NewerError(ValueError):
    """The text has a word that this version of KVX does not know."""


def _newer(name: str, word: str) -> StoreError:
    return StoreError(
        f"{name} has {word[:200]}, which this version of KVX does not know. Use the version that "
        "wrote it, or a newer one"
    )


def bare_parts(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Returns the parts as entries have them, sorted. See `_bare`."""
    return tuple(sorted(map(_bare, parts), key=lambda part: part.layers))


def _bare(part: Part) -> Part:
    """Returns a part without its fingerprint, with its layers and planes sorted.

    The part keeps its engine, without the version, only if a fact of OF_ENGINE is not known.
    """
    facts = replace(part.facts, fingerprint=None, engine=_engine_of(part.facts))
    layers, planes = tuple(sorted(part.layers)), tuple(sorted(part.planes))
    return replace(part, layers=layers, facts=facts, planes=planes)


def _engine_of(facts: CacheFacts) -> str | None:
    """Returns the engine without its version.

    Returns None if the engine is not known, or if all facts of OF_ENGINE are known.

    Without these facts, keys are only known to be like other keys of the same engine.
    """
    if facts.engine is None or all(getattr(facts, name) is not None for name in OF_ENGINE):
        return None
    return next(iter(facts.engine.split()), None)


def in_file_order(tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """Returns tensors in the order of a file: larger elements first, then layer by layer."""

    def order(name: str) -> tuple[int, int, int, str]:
        _, layer, rest = name.split(".", 2)
        kinds = ("k", "v", *SCALE_KINDS)
        place = kinds.index(rest) if rest in kinds and name.startswith("layers.") else len(kinds)
        return -element_bytes(tensors[name].dtype), int(layer), place, rest

    return {name: tensors[name] for name in sorted(tensors, key=order)}


def why_wrong(
    parts: tuple[Part, ...], tensors: Mapping[str, KindTensor], num_tokens: int | None = None
) -> str | None:
    """Returns why a kind with these parts cannot have these tensors, or None.

    num_tokens: of the snapshot that the kind belongs to; None: it is a kind of entries
    """
    if num_tokens is None:
        for what, most, is_constant in (
            ("a token", _MAX_TOKEN_BYTES, False),
            ("a state", _MAX_STATE_BYTES, True),
        ):
            of = [t.stored for t in tensors.values() if (not t.tokens_per_entry) is is_constant]
            if sum(one.num_bytes for one in of) > most:
                return f"{what} has more than {most} bytes"
    for name, tensor in tensors.items():
        kv, one = bool(_KV.fullmatch(name)), tensor.stored
        if one.original is not None and not (kv and one.original in KV_DTYPES):
            return f"{name[:100]} was {one.original.name}, expected K or V of numbers"
        if one.coding and not (kv and CODINGS[one.coding].dtype is one.dtype):
            return f"{name[:100]} of {one.dtype.name} is in {one.coding}"
    if num_tokens is None:
        planes = [kind for part in parts for kind in part.planes]
        num_tokens = max((1, *(kind.tokens_per_entry for kind in planes)))
    held = {name: tensor.of(num_tokens) for name, tensor in tensors.items()}
    content = {name: one for name, one in held.items() if one is not None}
    return inconsistency(parts, content, num_tokens)


def kind_text(
    parts: Iterable[Part],
    tensors: Mapping[str, KindTensor],
    *,
    keyed: bool,
    encrypted: bool,
    prefix: str | None = None,
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
    content: dict[str, Any] = {} if prefix is None else {"prefix": prefix}
    content |= {
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


def _part(group: _Group, *, of_entries: bool) -> Part:
    given: dict[str, Any] = dict(group.facts)
    for name in given.keys() - set(_FACTS):
        raise _NewerError(f"the fact {name[:100]}") if _WORD.fullmatch(name) else ValueError(name)
    if "compute_dtype" in given:
        given["compute_dtype"] = _dtype(given["compute_dtype"])
    facts = _CACHE_FACTS.validate_json(json.dumps(given), strict=True)
    planes = tuple(PlaneKind(*plane) for plane in group.planes)
    for kind in planes:
        if of_entries and not 0 <= kind.tokens_per_entry <= MAX_TOKENS:
            raise ValueError(f"an entry stands for {kind.tokens_per_entry} tokens")
    return Part(tuple(group.layers), group.heads, facts, group.encoding, group.precision, planes)


def _parsed(row: _Row, kinds: Mapping[str, PlaneKind] | None) -> KindTensor:
    """kinds: planes of entries by their names; None: the tensor belongs to a snapshot"""
    name, word, shape, original, coding = row
    first, *rest = shape or [0]
    sizes = [first if isinstance(first, int) else 1, *rest]
    counts = [n for n in sizes if isinstance(n, int) and 0 < n < _MAX_EXTENT]
    if counts != sizes or not 0 < len(sizes) <= 3:
        raise ValueError(f"{name[:100]} has shape {str(shape)[:100]}")
    if coding and coding not in CODINGS:
        raise _NewerError(f"{name[:100]} in {coding[:100]}")
    was = _dtype(original) if original else None
    stored = Stored(_dtype(word), tuple(counts), 0, was, coding)
    found = (
        KindTensor(stored, 0, None) if kinds is None else KindTensor.of_entries(name, stored, kinds)
    )
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
