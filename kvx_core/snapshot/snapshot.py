"""A Snapshot holds tokens of one sequence in memory or a file, to move them between any engines.

A snapshot has the keys and values of a run of tokens, for some layers of a model and some heads of
each layer: per layer (num_tokens, num_kv_heads, head_dim), in the dtype of the cache that it was
captured from or in the format that the capture asks for. Beside K and V it may have planes:
(num_entries, num_heads, dim), or (1, num_heads, dim) for a state. It does not depend on block size,
layout or block ids; facts, scales and precision are part of it. The file is safetensors.
kvx_core.stores decides which file belongs to which prompt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from kvx_core._c.os_files import OpenFile
from kvx_core.argument_checks import each_is_a, int64s, integer, is_a, or_none, takes, text
from kvx_core.desc.facts import compare
from kvx_core.errors import InvalidArgumentError, StoreError
from kvx_core.ops.write_gather import device_status
from kvx_core.snapshot.capture import Copy, token_ids, unlike_head_dims
from kvx_core.snapshot.chunk_file import ChunkFile, Loaded
from kvx_core.snapshot.chunks import Chunks
from kvx_core.snapshot.contents import (
    SCALE_KINDS,
    Header,
    Stored,
    cache_bytes_of,
    layer_of,
    names_of,
    planes_of,
    scale_name,
)
from kvx_core.snapshot.dense import Dense
from kvx_core.snapshot.memory import Bytes
from kvx_core.snapshot.planes import (
    by_entry,
    cut,
    held_planes,
    name_of,
    scale_of,
    unlike_planes,
    view_of_planes,
)
from kvx_core.snapshot.pool import Lease, Leased, MemoryPool, copy_into
from kvx_core.snapshot.precision import Precisions, all_or_each
from kvx_core.snapshot.record import MAX_HEADER_BYTES
from kvx_core.snapshot.restore import check_places, restore_layers
from kvx_core.snapshot.room import Placed, Room, placed
from kvx_core.snapshot.rows import capture_rows, rows_of, unlike_rows
from kvx_core.snapshot.scales import (
    bare,
    has_vector_scales,
    scale_values,
    scales_as_cache,
    scales_of,
)
from kvx_core.snapshot.secrets import Secrets
from kvx_core.snapshot.section import Section, device_of, ints_on, table_on
from kvx_core.snapshot.snapshot_file import open_snapshot, write_snapshot
from kvx_core.snapshot.storage_format import StorageFormat
from kvx_core.types import DType

_PRECISION = or_none(all_or_each)
_MAX_REASON = 500  # characters: strings in a file may be long


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """Tokens of one sequence in some layers and heads, with the data in memory or still in a file.

    A snapshot that was opened by path keeps the file open until `close`, the end of a `with`, or
    until it is freed.
    """

    header: Header
    tokens: npt.NDArray[np.int64]
    tensors: dict[str, Stored] = field(repr=False)
    memory: Bytes | None = field(default=None, repr=False, compare=False)
    file: ChunkFile | None = field(default=None, repr=False, compare=False)  # if it has the data
    lease: Lease | None = field(default=None, repr=False, compare=False)  # of a pool's memory
    room: Room | None = field(default=None, repr=False, compare=False)  # owns the memory
    at: int = field(default=0, repr=False, compare=False)  # bytes, from the start of the room
    place: Placed | None = field(default=None, repr=False, compare=False)  # of the tensors
    name: str = "the snapshot"  # for messages
    kind: object = field(default=None, repr=False, compare=False)  # of a file in a store

    @classmethod
    @takes(sections=each_is_a(Section))
    def capture(
        cls,
        tokens: Sequence[int] | npt.NDArray[Any],
        sections: Sequence[Section],
        *,
        start: int = 0,
        prefix: str = "",
        precision: Precisions | None = None,
        format: StorageFormat | DType | str | None = None,
    ) -> Self | None:
        """Copies tokens of a sequence from caches to new host memory. Returns the snapshot.

        tokens:    token ids; the first one is token `start` of the sequence in every section
        sections:  no two hold the same layer; their heads and head_dims may differ
        prefix:    an opaque key of the tokens before these
        precision: the coarsest precision that the values had before they came into these caches:
                   one for all layers, or a list with one for each layer of the model; None: not
                   coarser than Section.precision
        format:    the format that K and V are converted to, such as "q8_0", see StorageFormat;
                   None: K and V stay as they are. `restore` converts them to the dtype of its
                   cache. If numbers are rounded, CacheFacts.lossy in the header names the format.
                   Other planes stay as they are
        The caches may change again after the call. Returns None if a block of these tokens is null.
        Raises InvalidArgumentError, UnsupportedError, OutOfRangeError.
        """
        snapshot = cls.reserve(
            tokens, sections, start=start, prefix=prefix, precision=precision, format=format
        )
        if snapshot is not None:
            for section in sections:
                snapshot.fill(section)
            snapshot.settle(sections)
        return snapshot

    @classmethod
    @takes(sections=each_is_a(Section), start=integer, precision=_PRECISION)
    def reserve(
        cls,
        tokens: Sequence[int] | npt.NDArray[Any],
        sections: Sequence[Section],
        *,
        start: int = 0,
        prefix: str = "",
        precision: Precisions | None = None,
        format: StorageFormat | DType | str | None = None,
        pool: MemoryPool | None = None,
    ) -> Self | None:
        """Allocates the memory for `capture`, so that layers can be copied one by one.

        Call `fill` once for each layer, and `settle` before the caches change. Arguments, result
        and errors are those of `capture`.

        pool: lends its memory to the snapshot as long as the snapshot lives; None: new memory
        """
        ids = token_ids(tokens)
        if not len(ids):
            raise InvalidArgumentError("tokens is empty, expected at least 1 token")
        chunks = Chunks(
            sections, start, start + len(ids), precision=precision, format=format, pool=pool
        )
        return cls.reserve_of(chunks, ids, start=start, prefix=prefix)

    @classmethod
    def reserve_of(
        cls, chunks: Chunks, tokens: npt.NDArray[np.int64], *, start: int, prefix: str = ""
    ) -> Self | None:
        """Reserves a snapshot as `reserve`, for one of several chunks of a run of tokens: faster.

        tokens: token ids of the chunk, which begins at position `start`
        """
        reserved = chunks.reserve(start, len(tokens))
        if reserved is None:
            return None
        parts, tensors, memory, lease = reserved
        header = Header(start, prefix, parts)
        return cls(header, tokens, tensors, memory, lease=lease, kind=chunks.kind)

    @staticmethod
    def fill_all(snapshots: Iterable[Snapshot], section: Section) -> None:
        """Fills each of these snapshots of one sequence, with as few copies as possible."""
        leased = []
        for one in snapshots:
            if one.lease is None:
                one.fill(section)
            else:
                leased.append(Leased(one.lease, one.header.start, len(one.tokens)))
        copy_into(leased, section)

    @takes(section=is_a(Section))
    def fill(self, section: Section) -> None:
        """Copies layers of a section into this snapshot.

        section: a section that `reserve` was given, or Section.of some of its layers
        Mutates this snapshot. Waits for a device only if the units of the format span heads, or to
        read scales per tensor or head from it.
        Raises InvalidArgumentError, UnsupportedError, OutOfRangeError.
        """
        if self.lease is not None:
            return self.fill_all([self], section)
        rows = rows_of(self.tensors, section.layers, section.heads)
        if rows:
            capture_rows(section.of(rows), self._dense, self.header.start)
        num_tokens, device = len(self.tokens), device_of([section])
        copy = Copy(
            lens=ints_on([num_tokens], device),
            src_starts=ints_on([self.header.start], device),
            table=table_on(section.block_table, device),
        )
        converted = {name for name, stored in self.tensors.items() if stored.original is not None}
        for planes in by_entry(held_planes(section.view, self.tensors, rows)):
            as_they_are = [
                plane
                if plane.scale is None or name_of(plane) in converted
                else replace(plane, scale=None)
                for plane in planes
            ]
            cache = view_of_planes(section.view, as_they_are)
            copy.run(cache, self._dense.planes(planes, scales=False), into_table=False)
            for plane in planes:
                scale, name = scale_of(plane), scale_name(name_of(plane))
                if scale is not None and name in self.tensors:
                    self.array(name)[:] = scale_values(scale)
        others = [layer for layer in section.layers if layer not in rows]
        if not section.view.layers or not others:
            return
        section = section.of(others)
        if f"layers.{section.layers[0]}.k" in converted:
            view, dense = replace(section.view, planes=()), self._dense.view(section.layers)
            copy.run(view, dense, into_table=False, find_scales=has_vector_scales(dense))
            return
        copy.run(
            bare(section.view), self._dense.view(section.layers, scales=False), into_table=False
        )
        if has_vector_scales(section.view):
            scales = scales_as_cache(self._dense.view(section.layers))
            copy.run(scales_as_cache(section.view), scales, into_table=False)
            return
        for kind in SCALE_KINDS:
            for layer, scale in zip(section.layers, scales_of(section.view, kind), strict=True):
                if scale is not None:
                    self.array(f"layers.{layer}.{kind}")[:] = scale_values(scale)

    def settle(self, sections: Sequence[Section]) -> None:
        """Waits until the copies of `fill` are complete. Raises OutOfRangeError."""
        if device_of(sections) is not None:
            device_status()
        if self.lease is not None:
            self.lease.settled()

    @classmethod
    def open(
        cls,
        source: Path | BinaryIO,
        *,
        name: str = "",
        key: bytes | Sequence[bytes] | None = None,
        max_header_bytes: int = MAX_HEADER_BYTES,
        num_tokens: int | None = None,
    ) -> Self:
        """Opens the snapshot in a file. Reads the header alone, which has the tokens.

        source: a path of a regular file; or a file open for reading, unbuffered, which the caller
                keeps open as long as data is read
        name:   the name of an open file in messages
        key:    the file must be signed with this key, or with one of these keys; None: the file
                must not be signed
        max_header_bytes: longer headers are refused
        num_tokens: the number of tokens that the file must have; None: any number
        Raises CorruptError if `save` did not write these bytes, UnsignedError if the file is not
        signed with the key, StoreError if it cannot be read.
        """
        file = open_snapshot(source, name, Secrets.of(key), max_header_bytes, num_tokens)
        header = Header(file.start, file.parent, file.kind.parts)
        return cls(header, file.tokens, file.layout.tensors, file=file, name=file.name)

    @classmethod
    def of_file(cls, found: Loaded) -> Self:
        """Returns a snapshot of the data that was read from a file."""
        return cls(
            found.header,
            found.tokens,
            found.place.tensors,
            found.memory,
            room=found.room,
            at=found.at,
            place=found.place,
            name=found.name,
        )

    def save(self, target: Path | BinaryIO, *, key: bytes | None = None) -> None:
        """Writes the snapshot to a file. Does not sync the file.

        target: a path, overwritten if it exists; or a new file that is open for writing
        key:    signs the file; None: the file is not signed
        Raises StoreError if it cannot be written.
        """
        write_snapshot(target, self, Secrets.of(key))

    def close(self) -> None:
        """Closes the file if it was opened by path. Data that was read stays valid."""
        if self.file is not None and isinstance(self.file.file, OpenFile):
            self.file.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    @property
    def num_bytes(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    @property
    def cache_bytes(self) -> int:
        """The value of num_bytes without a format: with K and V as the cache had them."""
        return cache_bytes_of(self.tensors)

    @takes(layers=int64s)
    def names_of(self, layers: Iterable[int]) -> list[str]:
        """Returns the names of the tensors of these layers."""
        return names_of(self.header, self.tensors, tuple(layers))

    @takes(num_tokens=or_none(integer))
    def memory_for(self, layers: Iterable[int], num_tokens: int | None = None) -> int:
        """Returns the bytes of memory that `read` needs for these layers.

        num_tokens: Room.num_tokens of the room that `read` gets; None: new memory
        """
        longest = len(self.tokens) if num_tokens is None else num_tokens
        names = tuple(self.names_of(layers))
        return placed(self.header, self.tensors, names, longest).num_bytes

    @takes(layers=int64s)
    def read(self, layers: Iterable[int], room: Room | None = None) -> Snapshot:
        """Reads the data of some layers into memory, and checks every byte of it.

        Returns a snapshot that has the data of these layers alone.
        room: gives the memory; room.has(memory_for(layers, room.num_tokens)) must be true; None:
              new memory
        Raises CorruptError if the data has changed, StoreError if it cannot be read.
        """
        if self.file is None:
            raise InvalidArgumentError(f"{self.name} is in memory already, expected it in a file")
        return Snapshot.of_file(self.file.read(tuple(layers), room))

    @takes(section=is_a(Section))
    def mismatch(self, section: Section) -> list[str]:
        """Returns the reasons why the section cannot take its layers from this snapshot.

        Each reason is a sentence; without reasons the list is empty. Layers and heads that only one
        of the two has are no reason.
        """
        reasons = []
        facts = section.view.facts
        here = self._layers & set(section.layers)
        for part in self.header.parts:
            shared = [layer for layer in part.layers if layer in here]
            if not shared:
                continue
            if part.encoding != section.encoding:
                reasons.append(
                    f"layers {shared} are stored as {part.encoding!r}, expected "
                    f"{section.encoding!r} as the cache is"
                )
            # Layers and heads are matched by their indices, one by one.
            of_file = replace(
                part.facts,
                num_layers=facts.num_layers,
                first_layer=facts.first_layer,
                first_kv_head=facts.first_kv_head,
            )
            reasons += compare(of_file, facts).reasons_as_is  # restore then copies bytes unchanged
            reasons += unlike_head_dims(section, shared, self.tensors, part.heads)
            rows = rows_of(self.tensors, shared, part.heads)
            reasons += unlike_rows(section, rows, self.tensors)
            reasons += unlike_planes(
                section.view, planes_of(self.header, shared), shared, self.tensors
            )
        return [reason[:_MAX_REASON] for reason in reasons]

    def restore(self, section: Section, start: int, stop: int, *, stream: int | None = None) -> int:
        """Copies tokens `start` to `stop` into a section's cache, for layers and heads of both.

        start, stop: positions in the sequence, within this snapshot
        Mutates the section's cache, except null blocks. Waits for a device.
        Returns the bytes of these tokens as the section stores them.
        Raises StoreError if `mismatch` has a reason, if a plane has no entry that begins at
        `start`, or if there is a state and `stop` is not the end of the snapshot;
        InvalidArgumentError, UnsupportedError, OutOfRangeError.
        """
        end = self.header.start + len(self.tokens)
        start = integer("start", start, self.header.start, end)
        stop = integer("stop", stop, start, end)
        reasons = self.mismatch(section)
        here = self._layers
        layers = [layer for layer in section.layers if layer in here]
        if start < stop:
            reasons += [
                *filter(None, (cut(k, start, stop, end) for k in planes_of(self.header, layers)))
            ]
        if reasons:
            raise StoreError(f"{self.name}: {'; '.join(reasons)}")
        held = self.header.heads
        shared: dict[tuple[int, int], list[int]] = {}  # layers, by the heads that are stored
        for layer in layers if start < stop else ():
            if max(held[layer][0], section.heads[0]) < min(held[layer][1], section.heads[1]):
                shared.setdefault(held[layer], []).append(layer)
        if len(shared) > 1:
            check_places(section.of([*chain(*shared.values())]), start, stop)
        tokens, begin = (start, stop), self.header.start
        dense = self._dense.reachable_from(device_of([section]))
        return sum(
            restore_layers(section.of(layers), dense, heads, tokens, begin, stream)
            for heads, layers in shared.items()
        )

    @takes(name=text)
    def array(self, name: str) -> npt.NDArray[Any]:
        """Returns a tensor. numpy lacks BF16 and FP8: such a tensor has another dtype of its size.

        Units of several numbers are bytes, along the last axis.
        """
        return self._dense.array(name)

    def digest(self) -> str:
        """Returns the SHA-256 of the tokens and the tensors in memory, in hex.

        It covers the names, formats, shapes and stored bytes of tensors. Two captures of the same
        tokens in the same format have the same digest if and only if all of these are equal. To
        compare a lossy snapshot with the cache that it came from, capture the cache again: `verify`
        compares numbers, which a lossy format has changed.
        """
        found = hashlib.sha256(self.tokens.tobytes())
        for name in sorted(self.tensors):
            stored = self.tensors[name]
            found.update(f"{name} {stored.dtype.name} {stored.shape}\n".encode())
            found.update(self._dense.bytes_of(name).data)
        return found.hexdigest()

    @property
    def _dense(self) -> Dense:
        if self.memory is None:
            wrong = f"{self.name} has its data in a file, expected it in memory. Use read(layers)"
            raise InvalidArgumentError(wrong)
        return Dense(self.tensors, self.memory, None if self.room is None else self.room.views)

    @property
    def _layers(self) -> set[int]:
        """The layers that have a tensor here, or a plane without a complete entry."""
        return {layer_of(name) for name in self.tensors} | {
            kind.layer
            for part in self.header.parts
            for kind in part.planes
            if not kind.num_entries(len(self.tokens))
        }
