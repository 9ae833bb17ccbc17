"""Loads: reads the files of a match, checks them, and copies their tokens into caches."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvx_core.snapshot import (
    VALUES,
    Nulls,
    Precision,
    Section,
    Snapshot,
    StorageFormat,
    StoreError,
    host_memory,
    restore_all,
)
from kvx_core.stores.entries import Carried, Entries
from kvx_core.stores.finder import Finder
from kvx_core.stores.match import StoredSpan
from kvx_core.stores.source import Source
from kvx_core.types import Memory
from kvx_core.view import CacheView

_TOGETHER = 8 << 20  # bytes of files that are copied together: they stay in the processor's cache


@dataclass(slots=True)
class Progress:
    """How far a load is, for those who watch it from another thread."""

    stop: int = 0  # tokens before this are loaded, those before the load's start included
    is_cancelled: bool = False  # set it, and the load ends with a StoreError after its chunk


@dataclass(slots=True)
class _Memory:
    """Memory of the host that the files of a load share: taken piece after piece, then anew."""

    pinned: bool
    data: npt.NDArray[np.uint8]
    used: int = 0  # bytes
    views: dict[Any, CacheView] = field(default_factory=dict)  # see Snapshot.read

    def has_room(self, num_bytes: int) -> bool:
        return self.used + num_bytes <= len(self.data)

    def clear(self, num_bytes: int) -> None:
        """Nobody needs what has been taken; so many bytes are needed next."""
        self.used = 0
        if num_bytes > len(self.data):
            times = max(1, _TOGETHER // num_bytes)  # as much follows, most likely
            self.data = host_memory(times * num_bytes, pinned=self.pinned)
            self.views.clear()

    def take(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        self.used += num_bytes
        return self.data[self.used - num_bytes :]


@dataclass(slots=True)
class _Waiting:
    """Snapshots in memory, one of each span, that wait to be copied together."""

    start: int  # tokens of the sequence
    stop: int
    takers: list[Section]
    snapshots: list[Snapshot]

    def is_followed_by(self, start: int, sources: Sequence[Source]) -> bool:
        """Whether the only snapshot of a span can wait with them."""
        if len(sources) != 1 or self.stop != start:
            return False
        (source,) = sources
        return (
            len(source.snapshot.tokens) == len(self.snapshots[0].tokens)
            and len(source.takers) == len(self.takers)
            and all(map(operator.is_, source.takers, self.takers))
        )


@dataclass(frozen=True, slots=True)
class Loads:
    """Loads of one store: see PrefixStore.load."""

    entries: Entries
    finder: Finder
    carried: Carried
    format: StorageFormat
    # What has been compared, by ids: parts that are the same object come from the same header.
    matching: dict[tuple[int, int], tuple[object, object]] = field(default_factory=dict)

    def load(
        self,
        spans: Sequence[StoredSpan],
        start: int,
        stop: int,
        sections: list[Section],
        stream: int | None,
        progress: Progress,
    ) -> int:
        """Loads tokens `start` to `stop`. Returns their bytes.

        After a bad file, all later ones are checked too, so that bad ones are deleted at once.
        """
        memory = _Memory(any(s.first_tensor.memory is not Memory.HOST for s in sections), _NOTHING)
        progress.stop = max(progress.stop, start)
        needed = [span for span in spans if max(start, span.start) < min(stop, span.stop)]
        nulls = [Nulls(section, start, stop) for section in sections]
        num_bytes = 0
        waiting: _Waiting | None = None

        def restore() -> None:
            nonlocal num_bytes, waiting
            if waiting is not None:
                now, waiting = waiting, None
                for section in now.takers:
                    num_bytes += restore_all(
                        now.snapshots, section, now.start, now.stop, stream=stream
                    )
                progress.stop = now.stop

        for i, span in enumerate(needed):
            if progress.is_cancelled:
                raise StoreError(f"the load was cancelled after {progress.stop} tokens")
            lo, hi = max(start, span.start), min(stop, span.stop)
            takers = [s for s, null in zip(sections, nulls, strict=True) if not null.all(lo, hi)]
            try:
                with ExitStack() as opened:
                    sources = self._sources(span, takers, opened)
                    wanted = sum(source.num_bytes for source in sources)
                    if waiting and not (
                        memory.has_room(wanted) and waiting.is_followed_by(lo, sources)
                    ):
                        restore()
                    if waiting is None:
                        memory.clear(wanted)
                    read = self._read(sources, memory)
            except StoreError:
                restore()
                self._check(needed[i + 1 :], start, stop, sections, memory, progress)
                raise
            # Files that only other ranks load count too: later tokens depend on them.
            for file in map(self.finder.file, span.names):
                if not file.precision.includes(self.finder.precision):
                    self.carried.take(file.precision)
            if waiting is not None:
                waiting.snapshots += read
                waiting.stop = hi
            elif len(sources) == 1:
                waiting = _Waiting(lo, hi, sources[0].takers, read)
            else:
                for source, snapshot in zip(sources, read, strict=True):
                    for section in source.takers:
                        num_bytes += snapshot.restore(section, lo, hi, stream=stream)
                progress.stop = hi
        restore()
        return num_bytes

    def _check(
        self,
        spans: Sequence[StoredSpan],
        start: int,
        stop: int,
        sections: list[Section],
        memory: _Memory,
        progress: Progress,
    ) -> None:
        """Reads files that are not loaded any more; corrupt ones are deleted."""
        for span in spans:
            if progress.is_cancelled:
                return
            lo, hi = max(start, span.start), min(stop, span.stop)
            with suppress(StoreError), ExitStack() as opened:
                takers = [section for section in sections if not section.is_null(lo, hi)]
                sources = self._sources(span, takers, opened)
                memory.clear(sum(source.num_bytes for source in sources))
                self._read(sources, memory)

    def _read(self, sources: Sequence[Source], memory: _Memory) -> list[Snapshot]:
        """Reads and checks what the sections need."""
        read = []
        for source in sources:
            room = memory.take(source.num_bytes)
            with self.entries.discarding(source.name):
                read.append(source.snapshot.read(source.layers, room, memory.views))
            self.entries.index.held(source.name)
        return read

    def _sources(
        self, span: StoredSpan, sections: Sequence[Section], opened: ExitStack
    ) -> list[Source]:
        """The files that the sections need, opened; everything except their data is checked."""
        files = []
        sources = []
        for file in map(self.finder.file, span.names):
            takers = [
                section
                for section in sections
                if set(file.layers) & set(section.layers) and _meet(file.heads, section.heads)
            ]
            if not takers:
                continue
            raw = opened.enter_context(self.entries.opened(file.name))
            snapshot = self.entries.snapshot(file, raw)
            if snapshot.header.start != span.start or file.num_tokens < span.stop - span.start:
                raise StoreError(
                    f"{file.name} holds {file.num_tokens} tokens from {snapshot.header.start}, "
                    f"expected {span.start} to {span.stop}"
                )
            parts = snapshot.header.parts
            for section in takers:
                key = id(parts), id(section)
                if key in self.matching:  # as the files of a prompt do, that have the same parts
                    continue
                reasons = snapshot.mismatch(section) or self._too_coarse(snapshot, section)
                if reasons:
                    raise StoreError(f"{file.name}: {'; '.join(reasons)}")
                self.matching[key] = parts, section
            files.append(file)
            sources.append(Source(file.name, snapshot, takers))
        held, _ = self.finder.cover(files)
        for section in sections:
            if not held[list(section.layers), slice(*section.heads)].all():
                raise StoreError(
                    f"{', '.join(span.names)} do not hold all of layers {section.layers}, heads "
                    f"{section.heads}"
                )
        return sources

    def _too_coarse(self, snapshot: Snapshot, section: Section) -> list[str]:
        """Why values of this precision may not be loaded into the section: a sentence each."""
        if self.finder.accept == "lossy":
            return []
        own = section.precision.meet(self.format.precision)
        if not says_precision(section):
            own = own.meet(self.finder.precision)
        return [
            f"layers {part.layers} are stored as {part.precision}, expected numbers that include "
            f"those of {own.name}. Set accept to 'lossy' to load them all the same"
            for part in snapshot.header.parts
            if set(part.layers) & set(section.layers)
            and not Precision.parse(part.precision).includes(own)
        ]


def says_precision(section: Section) -> bool:
    """Whether Section.precision is known to be that of its values."""
    return section.encoding != VALUES or section.view.facts.compute_dtype is not None


def _meet(one: tuple[int, int], two: tuple[int, int]) -> bool:
    return max(one[0], two[0]) < min(one[1], two[1])


_NOTHING = host_memory(0)
