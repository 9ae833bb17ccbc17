"""PrefixStore: finds, loads and stores the keys and values of prefixes of prompts.

A sequence is cut into chunks. Each chunk, the last one perhaps not full, is an entry; its key is a
hash of it and all tokens before it, so that sequences with a common prefix share entries. An entry
is one file, or several that each hold some layers and heads, as ranks of an engine write them, in
one precision or more. keys.py has their names.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, Self

import numpy.typing as npt

from kvx_core.errors import InvalidArgumentError, UnsupportedError
from kvx_core.planes import Plane
from kvx_core.snapshot import (
    VALUES,
    Accept,
    Key,
    PlaneKind,
    Precision,
    Section,
    Snapshot,
    StorageFormat,
    StoreError,
    host_memory,
    token_ids,
)
from kvx_core.stores.blob_store import BlobStore
from kvx_core.stores.config import stored_chunk_tokens
from kvx_core.stores.entries import Carried, Entries
from kvx_core.stores.finder import Finder
from kvx_core.stores.keys import (
    Ids,
    chain,
    entry_of,
    name_of,
    opening_of,
    space_of,
)
from kvx_core.stores.model_planes import ModelPlanes
from kvx_core.stores.source import Source
from kvx_core.types import DType, Memory


@dataclass(frozen=True, slots=True)
class StoredSpan:
    """Tokens of a prompt that one entry holds."""

    start: int
    stop: int
    num_entry_tokens: int  # of the entry, which may continue with other tokens than the prompt
    names: tuple[str, ...]  # of files that together hold all layers and heads


@dataclass(frozen=True, slots=True)
class Match:
    """The longest prefix of a prompt that is stored. Plain data: it may go to another process."""

    num_tokens: int
    spans: tuple[StoredSpan, ...]  # one after the other, from token 0


class PrefixStore:
    """Keys and values of token prefixes of one model. Threads and processes may share a store.

    With accept "same", an entry is found and loaded if its values are at least as precise as those
    of the reader's own cache. With "lossy", every entry is. Once a coarser entry was loaded,
    everything that this object (and those it was `salted` from) captures counts as that coarse, and
    readers that ask for more precision do not find it.

    With a lossy format, everything is stored and found apart from what is exact and from what other
    formats have rounded: its entries have other keys.
    """

    def __init__(
        self,
        blobs: BlobStore,
        *,
        fingerprint: str,
        num_layers: int,
        total_kv_heads: int,
        precision: Precision,
        chunk_tokens: int | None = None,
        new_chunk_tokens: int = 128,
        salt: str = "",
        accept: Accept = "same",
        key: bytes | None = None,
        planes: Iterable[Plane | PlaneKind] = (),
        format: StorageFormat | DType | str | None = None,
    ) -> None:
        """A store of one model in `blobs`, which other models may use too.

        fingerprint:  of the model as it is computed: ModelRecord.fingerprint
        num_layers:   of the model; an entry is found once it holds all of them
        total_kv_heads: of the model, in every layer
        precision:    of the reader's cache: Precision.of(dtype of the computation, dtype of K and
                      V); the coarsest where layers differ
        chunk_tokens: None: as the store has it, new_chunk_tokens for a new one
        salt:         sequences with another salt are not found
        accept:       "same" or "lossy", see above
        key:          at least 32 bytes: signs files, and only files signed with it are found; None:
                      nothing is signed
        planes:       beside K and V, of all layers of the model; entries with other planes, or
                      with none, are not found
        format:       what K and V are stored in, such as "q8_0", see StorageFormat; None: as the
                      cache has them
        Raises InvalidArgumentError if the store has another chunk_tokens, StoreError if it is no
        store.
        """
        requested = new_chunk_tokens if chunk_tokens is None else chunk_tokens
        if min(num_layers, total_kv_heads, requested) < 1:
            raise InvalidArgumentError(
                f"num_layers is {num_layers}, total_kv_heads {total_kv_heads}, chunk_tokens "
                f"{requested}, expected at least 1 of each"
            )
        if accept not in ("same", "lossy"):
            raise InvalidArgumentError(f"accept is {accept!r}, expected 'same' or 'lossy'")
        if not isinstance(precision, Precision) or not precision.formats:
            raise InvalidArgumentError(
                f"precision is {precision!r}, expected Precision.of(dtype of the computation, "
                "dtype of K and V)"
            )
        self._signer = None if key is None else Key(key)
        self._blobs = blobs
        self._fingerprint = fingerprint
        self._shape = (num_layers, total_kv_heads)
        self.format = StorageFormat.of(format)
        self._lossy = self.format.name if self.format.is_lossy_for(precision) else ""
        self._precision, self._accept = precision.meet(self.format.precision), accept
        self._carried = Carried()
        self._planes = ModelPlanes.of(planes)
        # A header has, per layer: four tensors, their checksums, and facts with the fingerprint.
        limit = (64 << 10) + num_layers * ((4 << 10) + 8 * len(fingerprint))
        limit += self._planes.header_bytes
        self._entries = Entries(blobs, key, limit)
        self._space = self._space_of(salt)
        self._requested, self._otherwise = chunk_tokens, new_chunk_tokens
        self._chunk_tokens = stored_chunk_tokens(blobs, chunk_tokens, new_chunk_tokens)
        self._planes.check_chunks(self.chunk_tokens)

    def salted(self, salt: str) -> Self:
        """The same store for sequences with this salt."""
        other = copy.copy(self)
        other._space = self._space_of(salt)
        return other

    def _space_of(self, salt: str) -> str:
        return space_of(
            self._fingerprint, self._shape, salt, self._signer, self._planes.kinds, self._lossy
        )

    @property
    def is_lossy(self) -> bool:
        """Whether values are rounded when they are stored here."""
        return bool(self._lossy)

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a full chunk."""
        if self._chunk_tokens is None:
            self._chunk_tokens = stored_chunk_tokens(self._blobs, self._requested, self._otherwise)
        return self._chunk_tokens or self._requested or self._otherwise

    @property
    def carried(self) -> Precision:
        """The coarsest precision that was loaded here and is coarser than this cache's own."""
        return self._carried.precision

    def carry(self, precision: Precision) -> None:
        """Makes all that is captured from now on count as at most this precise.

        A process that gets what another one has loaded passes the other's `carried`.
        """
        self._carried.take(precision)

    @property
    def _finder(self) -> Finder:
        return Finder(
            self._entries,
            self._space,
            self._shape,
            self.chunk_tokens,
            self._precision,
            self._accept,
            whole=self._planes.have_states,
        )

    def nodes(self, tokens: Sequence[int] | npt.NDArray[Any]) -> list[str]:
        """The key of the tokens before each chunk: the argument `node` of capture and missing."""
        ids, step = token_ids(tokens), self.chunk_tokens
        nodes = [self._space]
        for at in range(0, len(ids) - step + 1, step):
            nodes.append(chain(nodes[-1], ids[at : at + step]))
        return nodes

    def spans(self, num_tokens: int, start: int = 0) -> list[tuple[int, int]]:
        """The chunks (start, stop) that tokens `start` to `num_tokens` lie in, the last one cut."""
        step = self.chunk_tokens
        first = start // step * step if start < num_tokens else num_tokens
        return [(at, min(at + step, num_tokens)) for at in range(first, num_tokens, step)]

    def lookup(self, tokens: Sequence[int] | npt.NDArray[Any]) -> Match:
        """The longest prefix of `tokens` that is stored, exact to the token.

        An entry counts if accepted files together hold all its layers and heads; the most precise
        files are chosen. Corrupt files do not count, and are deleted. Files that cannot be read
        now, or are not signed with the store's key, do not count. Of entries that begin like the
        prompt and continue differently, a lookup opens at most 64 that were not opened before;
        where the model has states, of one prefix each, such entries do not count. Reads no keys or
        values.
        Raises InvalidArgumentError if `tokens` are no integers.
        """
        ids, step = token_ids(tokens), self.chunk_tokens
        node, at, spans = self._space, 0, list[StoredSpan]()
        while at < len(ids):
            rest = ids[at : at + step]
            shared, files = self._finder.longest(node, rest)
            if not shared:
                break
            names = tuple(file.name for file in files)
            spans.append(StoredSpan(at, at + shared, files[0].num_tokens, names))
            at += shared
            if shared < step:
                break
            node = chain(node, rest)
        return Match(at, tuple(spans))

    def missing(
        self,
        tokens: Sequence[int] | npt.NDArray[Any],
        start: int,
        stop: int,
        layers: Iterable[int],
        heads: tuple[int, int],
        *,
        node: str | None = None,
    ) -> bool:
        """Whether some of these layers and heads of the entry tokens[start:stop) are not stored
        with the precision that they have here.

        start, stop: as `spans` has them
        heads:       first, and one past the last
        node:        nodes(tokens)[start // chunk_tokens], if it is known; then only
                     tokens[start:stop) is read
        Looks at names only. Raises InvalidArgumentError.
        """
        node, ids = self._span(tokens, start, stop, node)
        own = self._precision.meet(self.carried)
        key = entry_of(node, ids)
        files = [
            file
            for file in self._finder.parsed(f"{self._space}/{node}/{opening_of(node, ids)}")
            if file.entry == key and file.precision.includes(own)
        ]
        return not self._finder.cover(files)[0][list(layers), slice(*heads)].all()

    def capture(
        self,
        tokens: Sequence[int] | npt.NDArray[Any],
        start: int,
        stop: int,
        sections: Sequence[Section],
        *,
        node: str | None = None,
    ) -> Snapshot | None:
        """Copies tokens `start` to `stop` of a sequence out of caches, into new memory of the host.

        tokens, start, stop, node: as for `missing`
        sections: what is held here of the sequence; all hold the same heads
        Returns when the caches may change again; None if a block of these tokens is null.
        Raises InvalidArgumentError, UnsupportedError, OutOfRangeError.
        """
        snapshot = self.reserve(tokens, start, stop, sections, node=node)
        if snapshot is not None:
            for section in sections:
                snapshot.fill(section)
            snapshot.settle(sections)
        return snapshot

    def reserve(
        self,
        tokens: Sequence[int] | npt.NDArray[Any],
        start: int,
        stop: int,
        sections: Sequence[Section],
        *,
        node: str | None = None,
    ) -> Snapshot | None:
        """Makes the snapshot that `capture` returns, without copying: see Snapshot.reserve."""
        node, ids = self._span(tokens, start, stop, node)
        sections = [self._of_model(section) for section in sections]
        for section in sections:
            self._check_exact(section)
        precision = self.carried
        if not all(_says_precision(section) for section in sections):
            precision = precision.meet(self._precision)
        return Snapshot.reserve(
            ids, sections, start=start, prefix=node, precision=precision, format=self.format
        )

    def commit(self, snapshot: Snapshot) -> int:
        """Stores what `capture` of this store returned. May be called from any thread.

        Returns the bytes of its file; 0 if the file existed already. snapshot.cache_bytes is what K
        and V take without a format.
        Raises StoreError if nothing was stored.
        """
        header, num_bytes = snapshot.header, 0

        def write(file: BinaryIO) -> None:
            nonlocal num_bytes
            snapshot.save(file, key=self._entries.key)
            num_bytes = file.tell()

        name = name_of(
            self._space,
            header.prefix,
            snapshot.tokens,
            header.layers,
            header.heads,
            header.precision,
        )
        return num_bytes if self._blobs.put(name, write) else 0

    def load(
        self,
        match: Match,
        start: int,
        stop: int,
        sections: Sequence[Section],
        *,
        stream: int | None = None,
    ) -> int:
        """Copies tokens `start` to `stop` of a match into caches.

        match:    what `lookup` found, here or in another process
        sections: where the sequence lies; its null blocks are skipped
        All of a span is read and checked before the first byte of it is written. A corrupt file is
        deleted. Waits for devices.
        Mutates the caches. Returns the bytes of these tokens as the sections store them.
        Raises StoreError naming the file, InvalidArgumentError, UnsupportedError, OutOfRangeError.
        """
        if not 0 <= start <= stop <= match.num_tokens:
            raise InvalidArgumentError(
                f"start is {start}, stop is {stop}, expected 0 <= start <= stop <= "
                f"{match.num_tokens}, the tokens of the match"
            )
        ends = {span.start + span.num_entry_tokens for span in match.spans}
        if start < stop:
            self._planes.check_stop(stop, ends)
        sections = [self._of_model(section) for section in sections]
        pinned = any(s.first_tensor.memory is not Memory.HOST for s in sections)
        memory = host_memory(0)
        num_bytes = 0
        for span in match.spans:
            lo, hi = max(start, span.start), min(stop, span.stop)
            if lo >= hi:
                continue
            takers = [section for section in sections if not section.is_null(lo, hi)]
            with ExitStack() as opened:
                sources = self._sources(span, takers, opened)
                need = sum(source.num_bytes for source in sources)
                if need > len(memory):
                    memory = host_memory(need, pinned=pinned)
                rest, read = memory, []
                for source in sources:
                    with self._entries.discarding(source.name):
                        read.append(source.snapshot.read(source.layers, rest))
                    rest = rest[source.num_bytes :]
            # Files that only other ranks load count too: later tokens depend on them.
            for file in map(self._finder.file, span.names):
                if not file.precision.includes(self._precision):
                    self._carried.take(file.precision)
            for source, snapshot in zip(sources, read, strict=True):
                for section in source.takers:
                    num_bytes += snapshot.restore(section, lo, hi, stream=stream)
        return num_bytes

    def _sources(
        self, span: StoredSpan, sections: Sequence[Section], opened: ExitStack
    ) -> list[Source]:
        """The files that the sections need, opened; everything except their data is checked."""
        files = []
        sources = []
        for file in map(self._finder.file, span.names):
            takers = [
                section
                for section in sections
                if set(file.layers) & set(section.layers) and _meet(file.heads, section.heads)
            ]
            if not takers:
                continue
            raw = opened.enter_context(self._entries.opened(file.name))
            snapshot = self._entries.snapshot(file, raw)
            if snapshot.header.start != span.start or file.num_tokens < span.stop - span.start:
                raise StoreError(
                    f"{file.name} holds {file.num_tokens} tokens from {snapshot.header.start}, "
                    f"expected {span.start} to {span.stop}"
                )
            for section in takers:
                reasons = snapshot.mismatch(section) or self._too_coarse(snapshot, section)
                if reasons:
                    raise StoreError(f"{file.name}: {'; '.join(reasons)}")
            files.append(file)
            sources.append(Source(file.name, snapshot, takers))
        held, _ = self._finder.cover(files)
        for section in sections:
            if not held[list(section.layers), slice(*section.heads)].all():
                raise StoreError(
                    f"{', '.join(span.names)} do not hold all of layers {section.layers}, heads "
                    f"{section.heads}"
                )
        return sources

    def _check_exact(self, section: Section) -> None:
        """Raises UnsupportedError if the format rounds a section and the store is an exact one."""
        if not self._lossy and self.format.rounds(section):
            raise UnsupportedError(
                f"format is {self.format.name!r} and rounds K or V of layers {section.layers}, "
                "expected numbers that it holds: the precision of this store says so, and its "
                "entries are shared with exact ones. Choose a format that holds them all, or none. "
                "If they are such numbers in a wider dtype, set facts.compute_dtype of the section"
            )

    def _too_coarse(self, snapshot: Snapshot, section: Section) -> list[str]:
        """Why values of this precision may not be loaded into the section: a sentence each."""
        if self._accept == "lossy":
            return []
        own = section.precision.meet(self.format.precision)
        if not _says_precision(section):
            own = own.meet(self._precision)
        return [
            f"layers {part.layers} are stored as {part.precision}, expected numbers that include "
            f"those of {own.name}. Set accept to 'lossy' to load them all the same"
            for part in snapshot.header.parts
            if set(part.layers) & set(section.layers)
            and not Precision.parse(part.precision).includes(own)
        ]

    def _span(
        self,
        tokens: Sequence[int] | npt.NDArray[Any],
        start: int,
        stop: int,
        node: str | None,
    ) -> tuple[str, Ids]:
        """The node of a chunk, and its tokens."""
        step = self.chunk_tokens
        if start % step or not 0 <= start < stop <= min(start + step, len(tokens)):
            raise InvalidArgumentError(
                f"tokens {start} to {stop} of {len(tokens)} are not a chunk of at most {step} "
                f"tokens, expected what spans() returned"
            )
        if node is None:
            node = self.nodes(tokens[:start])[-1]
        return node, token_ids(tokens[start:stop])

    def _of_model(self, section: Section) -> Section:
        """The section with the fingerprint and heads of this store's model filled in.

        Raises InvalidArgumentError if it is of another model.
        """
        num_layers, total_kv_heads = self._shape
        if max(section.layers) >= num_layers or section.heads[1] > total_kv_heads:
            raise InvalidArgumentError(
                f"section has layers {section.layers} and heads {section.heads}, expected them "
                f"within the {num_layers} layers and {total_kv_heads} heads of the store"
            )
        view, facts = section.view, section.view.facts
        self._planes.check_section(section)
        for name, expected in (
            ("total_kv_heads", total_kv_heads),
            ("fingerprint", self._fingerprint),
        ):
            if getattr(facts, name) not in (None, expected):
                raise InvalidArgumentError(
                    f"section.view.facts.{name} is {getattr(facts, name)!r}, expected {expected!r} "
                    "as the store has"
                )
        if facts.fingerprint is not None and facts.total_kv_heads is not None:
            return section
        facts = replace(facts, fingerprint=self._fingerprint, total_kv_heads=total_kv_heads)
        return replace(section, view=replace(view, facts=facts))


def _says_precision(section: Section) -> bool:
    """Whether Section.precision is known to be that of its values."""
    return section.encoding != VALUES or section.view.facts.compute_dtype is not None


def _meet(one: tuple[int, int], two: tuple[int, int]) -> bool:
    return max(one[0], two[0]) < min(one[1], two[1])
