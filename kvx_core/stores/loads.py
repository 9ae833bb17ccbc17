"""Loads: reads the files of a match, checks them, and copies their tokens into caches."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, repeat
from typing import NamedTuple

import numpy as np

from kvx_core.desc.by_view import ByView
from kvx_core.snapshot import (
    VALUES,
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
from kvx_core.snapshot.chunk_file import Wanted
from kvx_core.snapshot.chunk_reads import LazySnapshots, ToRead
from kvx_core.snapshot.contents import Header
from kvx_core.snapshot.file_layout import MOST_FILES
from kvx_core.snapshot.kind import Kind
from kvx_core.snapshot.memory import Bytes
from kvx_core.snapshot.threaded import Job
from kvx_core.stores.entries import Entries, LoadedPrecision
from kvx_core.stores.kinds import Kinds
from kvx_core.stores.match import Progress as Progress
from kvx_core.stores.match import StoredSpan
from kvx_core.stores.names import parse_entry
from kvx_core.stores.rooms import Rooms
from kvx_core.types import Memory

_TOGETHER = 16 << 20  # bytes of files that are copied together
_TOGETHER_ON_DEVICE = 32 << 20  # the same on a device, where starting a copy takes longer
_LARGE = 1 << 20  # bytes of a file; a thread reads several smaller files at a time
_MAX_FITTING = 32  # kinds of files that are known to fit a view

# For each view and by layers and encoding of a section: the parts that fit it, by their id.
Fitting = ByView[tuple[object, ...], dict[int, tuple[Part, ...]]]


class _Source(NamedTuple):
    """A file of a span, and the sections that take layers from it."""

    number: int  # of the file in the span
    kind: Kind
    takers: list[Section]
    wanted: Wanted  # the data of the layers that the sections take


class _Plan(NamedTuple):
    """The data to read of a span: the same for all spans with files of the same kinds."""

    sources: tuple[_Source, ...]
    num_bytes: int  # bytes of memory for this data
    coarser: frozenset[Precision]  # precisions of the span's files below what is asked for


@dataclass(frozen=True, slots=True)
class Loads:
    """Loads of one store: see PrefixStore.load."""

    entries: Entries
    kinds: Kinds
    chunk_tokens: int
    carried: LoadedPrecision
    format: StorageFormat
    rooms: Rooms
    fitting: Fitting

    def load(
        self,
        spans: Sequence[StoredSpan],
        start: int,
        stop: int,
        sections: list[Section],
        stream: int | None,
        progress: Progress | None = None,
    ) -> int:
        """Loads tokens `start` to `stop`. Returns their bytes.

        After a bad file, all later files are checked too, so that corrupt ones are deleted at once.
        """
        progress = progress or Progress()
        progress.stop = max(progress.stop, start)
        needed = [span for span in spans if max(start, span.start) < min(stop, span.stop)]
        pinned = any(s.first_tensor.memory is not Memory.HOST for s in sections)
        together = _TOGETHER_ON_DEVICE if pinned else _TOGETHER
        with ExitStack() as taken:

            def room() -> Room:
                return taken.enter_context(self.rooms.room(self.chunk_tokens, pinned=pinned))

            load = _Load(self, sections, start, stop, stream, progress, room, together)
            load.run(needed)
        return load.num_bytes

    def file(self, name: str) -> tuple[str, Kind]:
        """Returns the key and the kind of a file of a match.

        Raises StoreError if `name` is not the name of a file of this store.
        """
        found = parse_entry(name)
        kind = None
        if found is not None and found.space == self.kinds.record.name:
            kind = self.kinds.get(found.kind)
        if found is None or kind is None:
            raise StoreError(f"{name!r} is not the name of a file of this store")
        return found.key, kind

    def sources(
        self,
        span: StoredSpan,
        kinds: Sequence[Kind],
        sections: Sequence[Section],
        room: Room,
    ) -> tuple[_Source, ...]:
        """Returns the files that the sections need. Checks all that it can without opening them.

        kinds: the kind of each file of the span
        room:  the room that the files are read into
        Raises StoreError.
        """
        sources: list[_Source] = []
        for i, kind in enumerate(kinds):
            takers = [section for section in sections if _meet(kind, section)]
            if not takers:
                continue
            num_tokens, fingerprint = span.num_entry_tokens, self.kinds.record.fingerprint
            blank = _blank(kind, num_tokens, fingerprint)
            for section in takers:
                if reasons := self._unfit(blank, section):
                    raise StoreError(f"{span.names[i]}: {'; '.join(reasons)}")
            wanted = {layer for section in takers for layer in section.layers}
            layers = tuple(layer for layer in kind.layers if layer in wanted)
            part = Wanted.of(kind, num_tokens, layers, room, fingerprint)
            sources.append(_Source(i, kind, takers, part))
        taken = [source.kind for source in sources]
        for section in sections:
            for layer in section.layers:
                if not _hold(taken, layer, section.heads):
                    raise StoreError(
                        f"{', '.join(span.names)} do not hold all of layer {layer}, heads "
                        f"{section.heads}"
                    )
        return tuple(sources)

    def _unfit(self, snapshot: Snapshot, section: Section) -> list[str]:
        """Returns the reasons why the section may not take its layers from a file, a sentence each.

        A file that fits is remembered by its parts, which are one object for all files of a kind.
        """
        parts = snapshot.header.parts
        fitting = self.fitting.of(section.view).setdefault((section.layers, section.encoding), {})
        if fitting.get(id(parts)) is parts:
            return []
        reasons = snapshot.mismatch(section) or self._too_coarse(snapshot, section)
        if not reasons:
            if len(fitting) >= _MAX_FITTING:
                fitting.clear()
            fitting[id(parts)] = parts
        return reasons

    def _too_coarse(self, snapshot: Snapshot, section: Section) -> list[str]:
        """Returns the reasons why a file is too coarse for the section, a sentence each."""
        if self.kinds.accept == "lossy":
            return []
        demand, wanted = self.kinds.demand, section.precisions
        has_states = section.tokens is None
        for layer, found in wanted.items():
            least = self.format.precision if says_precision(section) else demand[layer]
            if has_states:  # a state is computed from all layers before it
                least = self.kinds.states.coarsest
            wanted[layer] = found.meet(least)
        return [
            f"layer {layer} is stored as {part.precision}, expected numbers that include those of "
            f"{wanted[layer].name}. Set accept to 'lossy' to load them all the same"
            for part in snapshot.header.parts
            for layer in part.layers
            if layer in wanted and not Precision.parse(part.precision).includes(wanted[layer])
        ]


class _Part(NamedTuple):
    """Files that one thread reads one after another."""

    files: list[ToRead]
    room: Room
    at: int  # where `memory` begins in the room
    memory: Bytes


# A snapshot of a run by its number, and the sections that take layers from it
_File = tuple[Sequence[Snapshot], int, list[Section]]


class _Planned(NamedTuple):
    """A span whose files are read."""

    first: int  # the first token of the sequence that is loaded from the span
    last: int  # one past the last
    plan: _Plan | StoreError  # the error says why no file of the span is read


class _Batch(NamedTuple):
    """Spans that are read together into one room."""

    spans: list[_Planned]
    job: Job[_Part, list[Sequence[Snapshot] | StoreError]]


class _Waiting(LazySnapshots):
    """Snapshots of a room that are going to be copied together: each by its run and number."""

    def __init__(self) -> None:
        self.of = list[tuple[Sequence[Snapshot], int]]()

    def __len__(self) -> int:
        return len(self.of)

    def _make(self, number: int) -> Snapshot:
        run, of_run = self.of[number]
        return run[of_run]

    def is_next(self, run: Sequence[Snapshot], number: int) -> bool:
        """True if `can_join` stays true with this one behind the others."""
        last, of_last = self.of[-1]
        return (run is last and number == of_last + 1) or can_join([last[of_last], run[number]])


@dataclass(slots=True)
class _Load:
    """A load that is under way."""

    of: Loads
    sections: list[Section]
    start: int
    stop: int
    stream: int | None
    progress: Progress
    new_room: Callable[[], Room]
    together: int  # bytes of files that are copied together
    num_bytes: int = 0  # loaded so far
    _waiting: _Waiting = field(default_factory=_Waiting)
    # The sections that take what waits.
    _takers: list[Section] = field(default_factory=list)
    _first: int = 0  # the first token of the sequence that is copied from them
    _last: int = 0  # one past the last
    _nulls: list[Nulls] = field(default_factory=list)
    _takes: tuple[bool, ...] = ()  # True for each section; empty if they may have null blocks
    # Each key: the number of tokens of an entry, `takes` as in _plan, and the kinds of the files.
    _plans: dict[tuple[object, ...], _Plan] = field(default_factory=dict)

    def run(self, spans: Sequence[StoredSpan]) -> None:
        self._raise_if_cancelled()
        for section in self.sections:  # spans are copied one after another
            section.check_apart(self.start, self.stop)
        self._nulls = [Nulls(section, self.start, self.stop) for section in self.sections]
        if not any(null.may_be_any for null in self._nulls):
            self._takes = (True,) * len(self._nulls)
        if self.of.entries.blobs.takes_hints:
            self._expect(spans)
        left, room, other = deque(spans), self.new_room(), None
        batch = self._begin(left, room)
        try:
            while batch.spans:
                full, read = batch, batch.job.results()
                is_ahead = bool(left) and batch.job.num_helpers > 0
                if is_ahead:  # helpers read into one room while this thread copies the other one
                    room, other = other or self.new_room(), room
                    batch = self._begin(left, room)
                self._copy(full, read)
                if not is_ahead:
                    batch = self._begin(left, room)
        except StoreError:
            self._check(batch, left, room)
            raise
        finally:
            batch.job.stop()  # until then, helpers may write to the room

    def _expect(self, spans: Sequence[StoredSpan]) -> None:
        """Tells the store of the files that sections take layers from."""
        names, most = list[str](), 0
        for span in spans:
            with suppress(StoreError):  # it is raised where the span is planned
                for name in span.names:
                    kind = self.of.file(name)[1]
                    if any(_meet(kind, section) for section in self.sections):
                        most = max(most, kind.layout(span.num_entry_tokens).most_bytes)
                        names.append(name)
        self.of.entries.blobs.expect(names, most, whole=True)

    def _begin(self, left: deque[StoredSpan], room: Room) -> _Batch:
        """Returns a batch of the next spans that fit into the room together, removed from `left`.

        Helpers may begin to read the batch at once. The room loses its earlier content.
        """
        planned, files, num_bytes, most = list[_Planned](), list[ToRead](), 0, 0
        while left:
            span = left[0]
            lo, hi = max(self.start, span.start), min(self.stop, span.stop)
            try:
                plan, keys = self._plan_of(span, lo, hi, room)
                if not files:
                    room.clear(plan.num_bytes, self.together // max(plan.num_bytes, 1))
                    most = room.num_bytes
                elif num_bytes + plan.num_bytes > most:
                    break
            except StoreError as error:
                planned.append(_Planned(lo, hi, error))
            else:
                planned.append(_Planned(lo, hi, plan))
                for i, _, _, wanted in plan.sources:
                    files.append(ToRead(span.names[i], keys[i], wanted, span.start, num_bytes))
                    num_bytes += wanted.selection.place.num_bytes
            left.popleft()
        if not files:
            return _Batch(planned, Job(self._read, [], 0))
        at, memory = room.take(num_bytes)
        each = max(1, min(MOST_FILES, _LARGE * len(files) // max(num_bytes, 1)))
        parts = [_Part(files[i : i + each], room, at, memory) for i in range(0, len(files), each)]
        # Without C, small files cost more time in Python than on the disk: threads do not help.
        are_shared = num_bytes >= _LARGE * len(files) or all(
            file.wanted.selection.plan is not None for file in files
        )
        return _Batch(planned, Job(self._read, parts, num_bytes if are_shared else 0))

    def _plan_of(self, span: StoredSpan, lo: int, hi: int, room: Room) -> tuple[_Plan, list[str]]:
        """Returns the plan for tokens `lo` to `hi` of a span, and the keys of the span's files.

        Raises StoreError.
        """
        num_tokens = span.num_entry_tokens
        if not span.stop - span.start <= num_tokens <= self.of.chunk_tokens:
            raise StoreError(
                f"{', '.join(span.names)} hold {num_tokens} tokens, expected tokens {span.start} "
                f"to {span.stop} of a chunk"
            )
        keys, kinds = list[str](), list[Kind]()
        for name in span.names:
            key, kind = self.of.file(name)
            keys.append(key)
            kinds.append(kind)
        takes = self._takes or tuple(not null.all(lo, hi) for null in self._nulls)
        like = num_tokens, takes, *kinds
        plan = self._plans.get(like)
        if plan is None:
            plan = self._plans[like] = self._plan(span, kinds, takes, room)
        return plan, keys

    def _plan(
        self, span: StoredSpan, kinds: Sequence[Kind], takes: Sequence[bool], room: Room
    ) -> _Plan:
        """Makes the plan for spans like this one. Raises StoreError.

        takes: for each section, False if the tokens of the span lie in null blocks alone
        """
        takers = [section for section, is_one in zip(self.sections, takes, strict=True) if is_one]
        sources = self.of.sources(span, kinds, takers, room)
        num_bytes = sum(one.wanted.selection.place.num_bytes for one in sources)
        coarser = frozenset(each for kind in kinds for each in self.of.kinds.coarser(kind))
        return _Plan(sources, num_bytes, coarser)

    def _read(self, part: _Part) -> list[Sequence[Snapshot] | StoreError]:
        """Returns snapshots of all files as Entries.read_all does. Deletes corrupt files."""
        files, room, at, memory = part
        try:
            self._raise_if_cancelled()
        except StoreError as error:
            return [error] * len(files)
        return self.of.entries.read_all(files, room, at, memory)

    def _copy(self, batch: _Batch, read: Sequence[list[Sequence[Snapshot] | StoreError]]) -> None:
        """Copies a batch in order. Raises the StoreError of the first span that is not loaded."""
        files = chain.from_iterable(map(_each, chain.from_iterable(read)))
        for lo, hi, plan in batch.spans:
            self._raise_if_cancelled()
            if isinstance(plan, StoreError):
                self._restore()
                raise plan
            found: list[_File] = []
            for source in plan.sources:
                run, number = next(files)
                if isinstance(run, StoreError):
                    self._restore()
                    raise run
                found.append((run, number, source.takers))
            # Files that only other ranks load count too: later tokens are computed from them.
            for precision in plan.coarser:
                self.of.carried.take(precision)
            self._add(found, lo, hi)
        self._restore()

    def _add(self, read: Sequence[_File], lo: int, hi: int) -> None:
        """Copies tokens `lo` to `hi` now, or later together with the tokens that follow."""
        if len(read) == 1:
            ((run, number, takers),) = read
            is_next = self._last == lo and _are_same(takers, self._takers)
            if self._waiting.of and not (is_next and self._waiting.is_next(run, number)):
                self._restore()
            if not self._waiting.of:
                self._first, self._takers = lo, takers
            self._waiting.of.append((run, number))
            self._last = hi
            return
        self._restore()
        restored, served = 0, dict[int, Section]()
        with self.progress.lock:
            self._raise_if_cancelled()
            for run, number, takers in read:
                for section in takers:
                    served[id(section)] = section
                    restored += run[number].restore(section, lo, hi, stream=self.stream)
            self.progress.stop = hi
        # Files of several ranks may hold the same heads.
        needed = sum(section.num_bytes(hi - lo) for section in served.values())
        self.num_bytes += min(restored, needed)

    def _restore(self) -> None:
        """Copies the snapshots in `_waiting`."""
        waiting, self._waiting = self._waiting, _Waiting()
        if not waiting.of:
            return
        are_joined = len(waiting) > 1 or can_join(waiting)
        with self.progress.lock:
            self._raise_if_cancelled()
            for section in self._takers:
                self.num_bytes += restore_all(
                    *(waiting, section, self._first, self._last),
                    stream=self.stream,
                    is_checked=are_joined,
                )
            self.progress.stop = self._last

    def _check(self, batch: _Batch, left: deque[StoredSpan], room: Room) -> None:
        """Reads the files that will not be loaded, so that corrupt ones are deleted."""
        while batch.spans and not self.progress.is_cancelled:
            batch.job.results()
            batch = self._begin(left, room)

    def _raise_if_cancelled(self) -> None:
        if self.progress.is_cancelled:
            raise StoreError(f"the load was cancelled after {self.progress.stop} tokens")


@lru_cache(maxsize=512)
def _blank(kind: Kind, num_tokens: int, fingerprint: str) -> Snapshot:
    """Returns a snapshot like that of a file of this kind, but without data.

    Raises StoreError if such a file is too long.
    """
    header = Header(0, "", kind.with_fingerprint(fingerprint))
    return Snapshot(header, np.zeros(num_tokens, np.int64), kind.layout(num_tokens).tensors)


def says_precision(section: Section) -> bool:
    """True if Section.precision is known to be the precision of the section's values."""
    return section.encoding != VALUES or section.view.facts.compute_dtype is not None


def _meet(kind: Kind, section: Section) -> bool:
    """True if files of this kind hold some heads of some layers of the section."""
    first, last = section.heads
    return any(
        max(first, kind.heads_of(layer)[0]) < min(last, kind.heads_of(layer)[1])
        for layer in set(kind.layers) & set(section.layers)
    )


def _hold(kinds: Sequence[Kind], layer: int, heads: tuple[int, int]) -> bool:
    """True if the kinds together hold all these heads of a layer."""
    ranges = sorted(kind.heads_of(layer) for kind in kinds if layer in kind.layers)
    at = heads[0]
    for first, last in ranges:
        if first <= at:
            at = max(at, last)
    return at >= heads[1]


def _are_same(one: Sequence[object], other: Sequence[object]) -> bool:
    return one is other or (len(one) == len(other) and all(map(operator.is_, one, other)))


def _each(
    run: Sequence[Snapshot] | StoreError,
) -> Iterable[tuple[Sequence[Snapshot] | StoreError, int]]:
    """Yields the run once for each snapshot, with the snapshot's number."""
    return [(run, 0)] if isinstance(run, StoreError) else zip(repeat(run), range(len(run)))
