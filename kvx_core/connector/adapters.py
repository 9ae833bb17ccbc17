"""Adapters, such as LoRA's: which ones the ranks of an engine have loaded, by their content.

Requests name an adapter by a number, and an engine may load other content under the same number at
any time. So each process with a part of the model notes every load, a thread digests the files, and
the scheduler's half shares requests of a number once all ranks have told the same digest.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvx_core.connector.threads import Workers

_MOST = 4096  # numbers that are remembered


class Adapter(NamedTuple):
    """What an engine has loaded under a number.

    name:    a digest of the adapter and of how the engine applies it; "": requests have no adapter
    changes: how often the number has got other content
    """

    number: int = 0
    name: str = ""
    changes: int = 0


NO_ADAPTER = Adapter()


class AdapterReport(NamedTuple):
    """A rank's knowledge of its adapters.

    asked:   the last number of `LoadedAdapters.asks` that the rank has seen in a plan
    known:   adapters whose digest is known, by number
    sources: what these were loaded from, by number: see Adapters.loaded
    pending: numbers of adapters that are being digested
    """

    asked: int = 0
    known: Mapping[int, Adapter] = {}
    sources: Mapping[int, Hashable] = {}
    pending: frozenset[int] = frozenset()


NOTHING_LOADED = AdapterReport()


@dataclass(slots=True)
class _Loaded:
    source: Hashable  # None: unknown
    changes: int = 0
    name: str | None = None
    is_pending: bool = False


class Adapters:
    """The adapters that one process has loaded. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loaded: dict[int, _Loaded] = {}
        self._workers: Workers | None = None
        self._report = NOTHING_LOADED

    def loaded(self, number: int, source: Hashable, name: Callable[[], str | None]) -> None:
        """Notes that the engine has loaded an adapter under a number.

        source: equal only if the content is the same, such as the state of its files; None: unknown
        name:   names the adapter; runs in a thread. Returns None if it cannot
        """
        with self._lock:
            before = self._loaded.pop(number, None)
            if before is not None and source is not None and before.source == source:
                self._loaded[number] = before
                return
            found = _Loaded(source)
            if before is not None:
                found.changes = before.changes + 1
            if len(self._loaded) >= _MOST:
                del self._loaded[next(iter(self._loaded))]
            self._loaded[number] = found
            if source is not None:
                if self._workers is None:
                    self._workers = Workers(1, "kvx-adapters", exit_seconds=0)
                found.is_pending = True
                self._workers.submit(lambda: self._name(found, name))
            self._tell()

    def report(self, asked: int) -> AdapterReport:
        """Returns what this rank knows. asked: see AdapterReport"""
        with self._lock:
            if self._report.asked != asked:
                self._report = self._report._replace(asked=asked)
            return self._report

    def has(self, adapter: Adapter) -> bool:
        """True if the engine has this very adapter loaded, or requests have none."""
        return not adapter.number or self._report.known.get(adapter.number) == adapter

    def _name(self, found: _Loaded, name: Callable[[], str | None]) -> None:
        """Runs in a thread."""
        named = None
        try:
            named = name()
        finally:
            with self._lock:
                found.name, found.is_pending = named, False
                self._tell()

    def _tell(self) -> None:
        known = {
            number: Adapter(number, each.name, each.changes)
            for number, each in self._loaded.items()
            if each.name is not None
        }
        sources = {number: self._loaded[number].source for number in known}
        pending = frozenset(number for number, each in self._loaded.items() if each.is_pending)
        self._report = AdapterReport(self._report.asked, known, sources, pending)


@dataclass(slots=True)
class _Blocks:
    """The adapters that have computed an engine's blocks of one key since they were dropped."""

    resets: int  # how often the engine had dropped its blocks
    adapters: set[Adapter] = field(default_factory=set)
    numbers: set[int] = field(default_factory=set)  # their adapters were not known at that time
    are_mixed: bool = False  # different adapters, or too many


@dataclass(slots=True)
class LoadedAdapters:
    """The adapters that all ranks have loaded. Runs in the scheduler's half, in one thread.

    num_ranks: the number of ranks that report
    asks:      goes into each plan. A rank answers with a report if it has changed
    """

    num_ranks: int = 1
    asks: int = 0
    _reports: dict[int, AdapterReport] = field(default_factory=dict)
    _asked: dict[int, tuple[int, float]] = field(default_factory=dict)  # by number: ask, time
    _blocks: dict[Hashable, _Blocks] = field(default_factory=dict)

    def take(self, reports: Mapping[int, AdapterReport]) -> None:
        """Takes new reports by rank, which replace the earlier reports of these ranks."""
        self._reports |= reports

    def get(self, number: int) -> Adapter | None:
        """Returns the adapter with this number; None: the ranks have not told the same one."""
        if len(self._reports) < self.num_ranks:
            return None
        found = {report.known.get(number) for report in self._reports.values()}
        return found.pop() if len(found) == 1 else None

    def sources(self, number: int) -> set[Any]:
        """Returns what ranks have loaded an adapter from whose digest they know."""
        found = (report.sources.get(number) for report in self._reports.values())
        return {source for source in found if source is not None}

    def may_be_told(self, number: int, seconds: float) -> bool:
        """True if ranks may soon tell what this number is, which they have not yet told.

        seconds: requests of a number wait no longer than this, in all
        """
        asked = self._asked.get(number)
        if asked is None:
            self._ask(number)
            return True
        ask, since = asked
        if time.monotonic() - since > seconds:
            return False
        if len(self._reports) < self.num_ranks:
            return True
        return any(r.asked < ask or number in r.pending for r in self._reports.values())

    def computes(self, number: int, key: Hashable, num_resets: int) -> None:
        """Notes that a request of this number gets blocks.

        key:        names these blocks: the engine gives them to later requests with the same key
        num_resets: how often the engine has dropped all blocks
        """
        found, blocks = self.get(number), self._blocks_of(key, num_resets)
        if found is None:
            self._ask(number)  # this step may load it
            blocks.numbers.add(number)
        elif not self.has_computed(found, key, num_resets):
            blocks.are_mixed = True
        else:
            blocks.adapters.add(found)
        if len(blocks.adapters) + len(blocks.numbers) > _MOST:
            blocks.are_mixed = True
        if blocks.are_mixed:
            blocks.adapters.clear()
            blocks.numbers.clear()

    def has_computed(self, adapter: Adapter, key: Hashable, num_resets: int) -> bool:
        """True if only this adapter can have computed the blocks with this key."""
        blocks = self._blocks_of(key, num_resets)
        first = {Adapter(number, adapter.name) for number in blocks.numbers}
        return not blocks.are_mixed and all(
            each.name == adapter.name and self.get(each.number) == each
            for each in blocks.adapters | first
        )

    def _blocks_of(self, key: Hashable, num_resets: int) -> _Blocks:
        found = self._blocks.get(key)
        if found is None or found.resets != num_resets:
            if len(self._blocks) >= _MOST:
                self._blocks = {k: b for k, b in self._blocks.items() if b.resets == num_resets}
            if len(self._blocks) >= _MOST:
                return _Blocks(num_resets, are_mixed=True)
            found = self._blocks[key] = _Blocks(num_resets)
        return found

    def _ask(self, number: int) -> None:
        _, since = self._asked.pop(number, (0, time.monotonic()))
        if len(self._asked) >= _MOST:
            del self._asked[next(iter(self._asked))]
        self.asks += 1
        self._asked[number] = self.asks, since
