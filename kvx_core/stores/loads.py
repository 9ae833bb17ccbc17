"""Loads: reads the files of a match, checks them, and copies their tokens into caches."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

from kvx_core.snapshot import (
    VALUES,
    Alike,
    Nulls,
    Part,
    Precision,
    Room,
    Section,
    Snapshot,
    StorageFormat,
    StoreError,
    can_join,
    restore_all,
)
from kvx_core.stores.entries import Carried, Entries
from kvx_core.stores.finder import Finder
from kvx_core.stores.kept import Kept
from kvx_core.stores.keys import EntryFile
from kvx_core.stores.match import StoredSpan
from kvx_core.stores.source import Source
from kvx_core.types import Memory

_TOGETHER = 16 << 20  # bytes of files that are copied together
_MAX_FITTING = 32  # kinds of files that a view is known to take


@dataclass(slots=True)
class Progress:
    """How far a load is, for those who watch it from another thread."""

    stop: int = 0  # tokens before this are loaded, those before the load's start included
    is_cancelled: bool = False  # set it, and the load ends with a StoreError after its chunk


@dataclass(frozen=True, slots=True)
class Loads:
    """Loads of one store: see PrefixStore.load."""

    entries: Entries
    finder: Finder
    carried: Carried
    format: StorageFormat
    kept: Kept

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
        progress.stop = max(progress.stop, start)
        needed = [span for span in spans if max(start, span.start) < min(stop, span.stop)]
        pinned = any(s.first_tensor.memory is not Memory.HOST for s in sections)
        with self.kept.room(self.finder.chunk_tokens, pinned=pinned) as room:
            load = _Load(self, sections, start, stop, stream, progress, room)
            load.run(needed)
        return load.num_bytes

    def is_for(self, alike: Alike, file: EntryFile, takers: Sequence[Section]) -> bool:
        """Whether such files have all that the sections need and nothing else, and these may take
        it.
        """
        for section in takers:
            lo, hi = section.heads
            if not file.heads[0] <= lo < hi <= file.heads[1] or self._unfit(alike.known, section):
                return False
        wanted = {layer for section in takers for layer in section.layers}
        return wanted == set(file.layers)

    def sources(
        self,
        span: StoredSpan,
        files: Sequence[EntryFile],
        sections: Sequence[Section],
        opened: ExitStack,
    ) -> list[Source]:
        """The files that the sections need, opened; everything except their data is checked."""
        taken = []
        sources = []
        for file in files:
            takers = [
                section
                for section in sections
                if set(file.layers) & set(section.layers) and _meet(file.heads, section.heads)
            ]
            if not takers:
                continue
            raw = opened.enter_context(self.entries.opened(file))
            snapshot = self.entries.snapshot(file, raw)
            if snapshot.header.start != span.start or file.num_tokens < span.stop - span.start:
                raise StoreError(
                    f"{file.name} holds {file.num_tokens} tokens from {snapshot.header.start}, "
                    f"expected {span.start} to {span.stop}"
                )
            for section in takers:
                if reasons := self._unfit(snapshot, section):
                    raise StoreError(f"{file.name}: {'; '.join(reasons)}")
            taken.append(file)
            sources.append(Source(file, snapshot, takers))
        held, _ = self.finder.cover(taken)
        for section in sections:
            if not held[list(section.layers), slice(*section.heads)].all():
                raise StoreError(
                    f"{', '.join(span.names)} do not hold all of layers {section.layers}, heads "
                    f"{section.heads}"
                )
        return sources

    def _unfit(self, snapshot: Snapshot, section: Section) -> list[str]:
        """Why the section may not take its layers from a file: a sentence each.

        Found once for the files of a prompt, whose parts are one object.
        """
        own = self.finder.accept, self.finder.precision, self.format.precision
        key, parts = ("fitting", own, section.layers, section.encoding), snapshot.header.parts
        fitting: dict[int, tuple[Part, ...]] = section.view.memo.setdefault(key, {})
        if fitting.get(id(parts)) is parts:
            return []
        reasons = snapshot.mismatch(section) or self._too_coarse(snapshot, section)
        if not reasons:
            if len(fitting) >= _MAX_FITTING:
                fitting.clear()
            fitting[id(parts)] = parts
        return reasons

    def _too_coarse(self, snapshot: Snapshot, section: Section) -> list[str]:
        """Why values of this precision may not be loaded into the section: a sentence each."""
        if self.finder.accept == "lossy":
            return []
        own = section.precision.meet(self.format.precision)
        if self.finder.precision.layers:
            own = self.finder.precision  # a section does not say which of its layers are finer
        elif not says_precision(section):
            own = own.meet(self.finder.precision)
        return [
            f"layers {part.layers} are stored as {part.precision}, expected numbers that include "
            f"those of {own.name}. Set accept to 'lossy' to load them all the same"
            for part in snapshot.header.parts
            if set(part.layers) & set(section.layers)
            and not Precision.parse(part.precision).includes(own)
        ]


@dataclass(slots=True)
class _Load:
    """A load that is under way."""

    of: Loads
    sections: list[Section]
    start: int
    stop: int
    stream: int | None
    progress: Progress
    room: Room
    num_bytes: int = 0  # that are loaded
    # Snapshots in the room that wait to be copied together, and which sections take them.
    _waiting: list[Snapshot] = field(default_factory=list)
    _takers: list[Section] = field(default_factory=list)
    _first: int = 0  # token of the sequence that is copied from them
    _last: int = 0  # one past the last
    # What the file before was like, and the sections that take such files.
    _known: tuple[Alike, list[Section]] | None = None
    _tried: Alike | None = None  # what the file of this span is not like

    def run(self, spans: Sequence[StoredSpan]) -> None:
        nulls = [Nulls(section, self.start, self.stop) for section in self.sections]
        for i, span in enumerate(spans):
            self._raise_if_cancelled()
            try:
                files = [self.of.finder.file(name) for name in span.names]
                read = self._read_span(span, files, nulls)
            except StoreError:
                self._restore()
                self._check(spans[i + 1 :], nulls)
                raise
            # Files that only other ranks load count too: later tokens depend on them.
            for file in files:
                if not file.precision.includes(self.of.finder.precision):
                    self.of.carried.take(file.precision)
            self._add(read, max(self.start, span.start), min(self.stop, span.stop))
        self._restore()

    def _read_span(
        self, span: StoredSpan, files: Sequence[EntryFile], nulls: Sequence[Nulls]
    ) -> list[tuple[Snapshot, list[Section]]]:
        """Reads and checks what the sections need that have some of these tokens."""
        lo, hi = max(self.start, span.start), min(self.stop, span.stop)
        held = zip(self.sections, nulls, strict=True)
        takers = [section for section, null in held if not null.all(lo, hi)]
        return self._read_alike(span, files, takers) or self._read(span, files, takers)

    def _read_alike(
        self, span: StoredSpan, files: Sequence[EntryFile], takers: list[Section]
    ) -> list[tuple[Snapshot, list[Section]]]:
        """Reads the only file of a span, and checks it, if it is like one that was read before."""
        self._tried = None
        if len(files) != 1 or not takers:
            return []
        (file,) = files
        alike = self.of.kept.alike(file, self.room)
        if alike is None or file.num_tokens < span.stop - span.start:
            return []
        if (
            self._known is None
            or self._known[0] is not alike
            or not _are_same(self._known[1], takers)
        ):
            if not self.of.is_for(alike, file, takers):
                return []
            self._known = alike, takers
        self._make_room(alike.place.num_bytes)
        snapshot = self.of.entries.read_alike(file, alike, span.start, self.room)
        if snapshot is None:
            self._tried = alike
            return []
        self.of.entries.index.held(file.name)
        return [(snapshot, takers)]

    def _read(
        self, span: StoredSpan, files: Sequence[EntryFile], takers: Sequence[Section]
    ) -> list[tuple[Snapshot, list[Section]]]:
        """Reads and checks what the sections need."""
        read = []
        with ExitStack() as opened:
            sources = self.of.sources(span, files, takers, opened)
            self._make_room(sum(source.memory_for(self.room.num_tokens) for source in sources))
            for source in sources:
                with self.of.entries.discarding(source.file.name):
                    snapshot = source.snapshot.read(source.layers, self.room)
                self.of.entries.index.held(source.file.name)
                self.of.kept.saw(source.file, source.snapshot, self.room, self._tried)
                read.append((snapshot, source.takers))
        return read

    def _make_room(self, num_bytes: int) -> None:
        """Makes room for snapshots; those that wait are copied if there is none."""
        if not self._waiting or not self.room.has(num_bytes):
            self._restore()
            self.room.clear(num_bytes, _TOGETHER // max(num_bytes, 1))

    def _add(self, read: Sequence[tuple[Snapshot, list[Section]]], lo: int, hi: int) -> None:
        """Has tokens `lo` to `hi` copied: now, or together with those that follow."""
        if len(read) == 1:
            ((snapshot, takers),) = read
            is_next = self._last == lo and _are_same(takers, self._takers)
            if self._waiting and not (is_next and can_join([self._waiting[-1], snapshot])):
                self._restore()
            if not self._waiting:
                self._first, self._takers = lo, takers
            self._waiting.append(snapshot)
            self._last = hi
            return
        self._restore()
        restored, served = 0, dict[int, Section]()
        for snapshot, takers in read:
            for section in takers:
                served[id(section)] = section
                restored += snapshot.restore(section, lo, hi, stream=self.stream)
        # Files of other ranks may have the same heads.
        needed = sum(section.num_bytes(hi - lo) for section in served.values())
        self.num_bytes += min(restored, needed)
        self.progress.stop = hi

    def _restore(self) -> None:
        """Copies what waits."""
        waiting, self._waiting = self._waiting, []
        if waiting:
            for section in self._takers:
                self.num_bytes += restore_all(
                    waiting, section, self._first, self._last, stream=self.stream, is_checked=True
                )
            self.progress.stop = self._last

    def _check(self, spans: Sequence[StoredSpan], nulls: Sequence[Nulls]) -> None:
        """Reads files that are not loaded any more; corrupt ones are deleted."""
        for span in spans:
            if self.progress.is_cancelled:
                return
            with suppress(StoreError):
                files = [self.of.finder.file(name) for name in span.names]
                self._read_span(span, files, nulls)

    def _raise_if_cancelled(self) -> None:
        if self.progress.is_cancelled:
            raise StoreError(f"the load was cancelled after {self.progress.stop} tokens")


def says_precision(section: Section) -> bool:
    """Whether Section.precision is known to be that of its values."""
    return section.encoding != VALUES or section.view.facts.compute_dtype is not None


def _meet(one: tuple[int, int], two: tuple[int, int]) -> bool:
    return max(one[0], two[0]) < min(one[1], two[1])


def _are_same(one: Sequence[object], other: Sequence[object]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))
