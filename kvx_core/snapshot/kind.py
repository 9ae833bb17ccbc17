"""A Kind describes the layout of the files of one writer in a store, or of one snapshot's file.

Format: docs/store_format.md, "Kinds".
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Self

from kvx_core.errors import InvalidArgumentError, StoreError
from kvx_core.snapshot.contents import Header, Part, PlaneKind, Stored
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
_MAX_PIECES = 1 << 15  # of all remembered layouts together
_MAX_FINGERPRINTS = 16  # that a kind remembers, and parts of headers
_MAX_SHARED = 32  # kinds of snapshots that the process remembers
_MAX_SHARED_BYTES = 1 << 16  # of the text of a remembered kind


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """The layers, heads, facts and tensors of files. Threads may share a Kind."""

    text: bytes = field(repr=False)  # canonical JSON
    parts: tuple[Part, ...]  # parts of entries have no fingerprint, and most have no engine
    keyed: bool
    encrypted: bool
    _tensors: dict[str, KindTensor] = field(repr=False)
    prefix: str | None = None  # of the snapshot; None: the files are entries of a store
    digest: bytes = field(init=False, repr=False)
    id: str = field(init=False)
    layers: tuple[int, ...] = field(init=False)  # sorted
    is_states: bool = field(init=False)  # True if files have no tensors but states
    _of_layer: dict[int, Part] = field(init=False, repr=False)
    _layouts: dict[int, FileLayout] = field(default_factory=dict, repr=False)
    _parts: dict[str | None, tuple[Part, ...]] = field(default_factory=dict, repr=False)
    _known: dict[int, tuple[Part, ...]] = field(default_factory=dict, repr=False)  # by id(parts)

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
        """Returns the kind of the files of snapshots with these parts.

        tensors: of a snapshot of num_tokens tokens, which has an entry of each plane
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
        """Returns the kind of one snapshot's file. Other snapshots may not fit this kind.

        Raises CorruptError if no reader would accept it.
        """
        ordered = in_file_order(tensors)
        found = {name: KindTensor(stored, 0, None) for name, stored in ordered.items()}
        text = kind_text(header.parts, found, keyed=keyed, encrypted=False, prefix=header.prefix)
        return cls.of_text(text, "its description", num_tokens)

    @classmethod
    def of_text(cls, raw: bytes, name: str, num_tokens: int) -> Kind:
        """Parses the kind of a snapshot, as `parse`. Equal texts share one remembered object."""
        if len(raw) <= _MAX_SHARED_BYTES:
            with suppress(StoreError):  # its message does not name this file; that of `parse` does
                return _shared(raw, num_tokens)
        return cls.parse(raw, name, num_tokens)

    @classmethod
    def parse(cls, raw: bytes, name: str, num_tokens: int | None = None) -> Self:
        """Parses the text of a kind from a file, without trusting it. Returns the kind.

        name:       of the file, for messages
        num_tokens: of the snapshot whose file has this text; None: the kind is one of entries
        Raises CorruptError; StoreError if a newer version of KVX has written the text.
        """
        return cls(raw, *parsed_kind(raw, name, num_tokens))

    def heads_of(self, layer: int) -> tuple[int, int]:
        """Returns the heads of a layer: first, and one past the last."""
        return self._of_layer[layer].heads

    def precision_of(self, layer: int) -> Precision:
        """Returns the precision of the values of a layer."""
        return Precision.parse(self._of_layer[layer].precision)

    @property
    def planes(self) -> tuple[PlaneKind, ...]:
        """The planes of all layers, without K and V."""
        return tuple(plane for part in self.parts for plane in part.planes)

    def precision_of_planes(self, layer: int) -> Precision:
        """Returns the precision of the planes of a layer, as their dtypes show it."""
        part = self._of_layer[layer]
        if part.encoding != VALUES:
            return Precision.of(opaque=part.encoding)
        names = [plane.name for plane in part.planes if plane.layer == layer]
        return Precision.of(*(self._tensors[name].stored.dtype for name in names))

    def has_parts(self, header: Header) -> bool:
        """True if a snapshot with this header has the layers, heads and facts of this kind."""
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
        """Returns the bytes of a room that these layers of a file need.

        room_tokens: Room.num_tokens of the room
        """
        return self.layout(num_tokens).selection(layers, room_tokens).place.num_bytes

    def with_fingerprint(self, fingerprint: str | None) -> tuple[Part, ...]:
        """Returns the parts with this fingerprint of a model; remembers them.

        A snapshot's file contains its own fingerprints: its parts are returned unchanged.
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
        """Returns a lower bound of a file's bytes for num_tokens tokens. Builds no layout."""
        each = self._of(num_tokens).values()
        return sum(one.num_bytes for one in each if not one.coding)

    def num_bytes(self, num_tokens: int) -> int:
        """Returns the bytes of all tensors in memory for num_tokens tokens. Builds no layout."""
        return sum(one.num_bytes for one in self._of(num_tokens).values())

    def _of(self, num_tokens: int) -> dict[str, Stored]:
        """Returns the tensors of a file of num_tokens tokens."""
        each = ((name, tensor.of(num_tokens)) for name, tensor in self._tensors.items())
        return {name: stored for name, stored in each if stored is not None}

    def layout(self, num_tokens: int) -> FileLayout:
        """Returns the layout of a file of num_tokens tokens.

        Raises StoreError if the file would be too long.
        """
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
        """Raises StoreError if an entry of num_tokens tokens would be too long."""
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
