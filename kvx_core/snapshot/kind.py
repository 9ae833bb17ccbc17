"""Kind: how files are laid out: those of one writer in a store, or that of one snapshot.

Format: docs/store_format.md, "Kinds".
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Self

from kvx_core.errors import InvalidArgumentError
from kvx_core.snapshot.contents import Header, Part, PlaneKind, Stored
from kvx_core.snapshot.errors import StoreError
from kvx_core.snapshot.file_layout import FileLayout
from kvx_core.snapshot.kind_text import (
    MAX_KIND_BYTES,
    MAX_TOKENS,
    KindTensor,
    bare_parts,
    in_file_order,
    kind_text,
    parsed_kind,
    why_wrong,
)
from kvx_core.snapshot.precision import VALUES, Precision

_MAX_FILE_BYTES = 1 << 33  # of an entry
_MAX_LAYOUTS = 256  # that a kind remembers
_MAX_PIECES = 1 << 15  # of these together
_MAX_FINGERPRINTS = 16  # and parts of headers
_MAX_SHARED = 32  # kinds of snapshots that are remembered
_MAX_SHARED_BYTES = 1 << 16  # of their texts


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """Layers, heads, facts and tensors of files. Threads may share it."""

    text: bytes = field(repr=False)  # canonical JSON
    parts: tuple[Part, ...]  # of entries: without fingerprint, and most without an engine
    keyed: bool
    encrypted: bool
    _tensors: dict[str, KindTensor] = field(repr=False)
    prefix: str | None = None  # of the one snapshot that is laid out so; None: they are entries
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
        parts = bare_parts(parts)
        kinds = {kind.name: kind for part in parts for kind in part.planes}
        missing = [name for name in kinds if name not in tensors]
        if missing:
            raise InvalidArgumentError(
                f"tensors of {num_tokens} tokens have no {missing[0]}, expected an entry of each "
                "plane. Give those of a full chunk"
            )
        found = {
            name: KindTensor.of_entries(name, stored, kinds)
            for name, stored in in_file_order(tensors).items()
        }
        reason = why_wrong(parts, found)
        if reason:
            raise InvalidArgumentError(f"tensors: {reason}")
        text = kind_text(parts, found, keyed=keyed, encrypted=encrypted)
        if len(text) > MAX_KIND_BYTES:
            raise InvalidArgumentError(
                f"the layout of a file takes {len(text)} bytes, expected at most {MAX_KIND_BYTES}"
            )
        return cls(text, parts, keyed, encrypted, found)

    @classmethod
    def of_snapshot(
        cls, header: Header, tensors: Mapping[str, Stored], num_tokens: int, *, keyed: bool
    ) -> Kind:
        """The kind of the file of one snapshot, of these tokens and with these facts alone.

        Raises CorruptError if no reader would take it.
        """
        ordered = in_file_order(tensors)
        found = {name: KindTensor(stored, 0, None) for name, stored in ordered.items()}
        text = kind_text(header.parts, found, keyed=keyed, encrypted=False, prefix=header.prefix)
        return cls.of_text(text, "its description", num_tokens)

    @classmethod
    def of_text(cls, raw: bytes, name: str, num_tokens: int) -> Kind:
        """`parse` of the kind of a snapshot: the same object for snapshots that are alike."""
        if len(raw) <= _MAX_SHARED_BYTES:
            with suppress(StoreError):  # which would not name this file
                return _shared(raw, num_tokens)
        return cls.parse(raw, name, num_tokens)

    @classmethod
    def parse(cls, raw: bytes, name: str, num_tokens: int | None = None) -> Self:
        """The kind in a file, which anyone may have written.

        name:       of the file, for messages
        num_tokens: of the snapshot whose file this is in; None: it is of entries of a store
        Raises CorruptError; StoreError if a newer version of KVX has written it.
        """
        return cls(raw, *parsed_kind(raw, name, num_tokens))

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

    def has_parts(self, header: Header) -> bool:
        """Whether a snapshot has the layers, heads and facts of this kind."""
        known = self._known.get(id(header.parts))
        if known is header.parts:
            return True
        if bare_parts(header.parts) != self.parts:
            return False
        if len(self._known) >= _MAX_FINGERPRINTS:
            self._known.clear()
        self._known[id(header.parts)] = header.parts
        return True

    def memory_for(self, num_tokens: int, layers: Sequence[int], room_tokens: int) -> int:
        """Bytes of a room that these layers of a file need.

        room_tokens: Room.num_tokens
        """
        return self.layout(num_tokens).selection(layers, room_tokens).place.num_bytes

    def with_fingerprint(self, fingerprint: str | None) -> tuple[Part, ...]:
        """The parts of a snapshot of this model: the same object each time. The file of a snapshot
        has fingerprints of its own.
        """
        if self.prefix is not None:
            return self.parts
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
        each = self._of(num_tokens).values()
        return sum(one.num_bytes for one in each if not one.coding)

    def num_bytes(self, num_tokens: int) -> int:
        """Bytes of all tensors in memory: found without a layout."""
        return sum(one.num_bytes for one in self._of(num_tokens).values())

    def _of(self, num_tokens: int) -> dict[str, Stored]:
        """The tensors of a file of so many tokens."""
        each = ((name, tensor.of(num_tokens)) for name, tensor in self._tensors.items())
        return {name: stored for name, stored in each if stored is not None}

    def layout(self, num_tokens: int) -> FileLayout:
        """How a file of so many tokens is laid out. Raises StoreError if that is too long."""
        found = self._layouts.get(num_tokens)
        if found is None:
            if self.prefix is None:
                self._check_size(num_tokens)
            found = FileLayout.of(
                Header(0, "", self.parts),
                self._of(num_tokens),
                num_tokens,
                signed=self.keyed,
                encrypted=self.encrypted,
                digest=self.digest,
                kind=b"" if self.prefix is None else self.text,
            )
            num_pieces = sum(len(one.pieces) for one in (found, *self._layouts.values()))
            if len(self._layouts) >= _MAX_LAYOUTS or num_pieces > _MAX_PIECES:
                self._layouts.clear()
            self._layouts[num_tokens] = found
        return found

    def _check_size(self, num_tokens: int) -> None:
        """Raises StoreError if an entry of so many tokens would be too long."""
        if not 0 < num_tokens <= MAX_TOKENS:
            raise StoreError(f"a file has {num_tokens} tokens, expected 1 to {MAX_TOKENS}")
        num_bytes = self.num_bytes(num_tokens)
        if num_bytes > _MAX_FILE_BYTES:
            raise StoreError(
                f"a file of {num_tokens} tokens has {num_bytes} bytes, expected at most "
                f"{_MAX_FILE_BYTES}. Set a smaller chunk_tokens"
            )


@lru_cache(maxsize=_MAX_SHARED)
def _shared(raw: bytes, num_tokens: int) -> Kind:
    return Kind.parse(raw, "it", num_tokens)
