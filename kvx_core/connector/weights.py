"""Weights: counts the changes of an engine's weights, and compares the counts of its ranks.

Keys name the weights by the model's files, but an engine may replace its weights while it runs. So
each process counts every call that may write weights. A plan from before a change is then known to
be outdated.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvx_core.connector.adapters import NOTHING_LOADED, AdapterReport, Adapters


@dataclass(frozen=True, slots=True)
class Files:
    """The files that all weights were loaded from."""

    model: str  # a directory, or a model of the hub
    revision: str | None
    state: str  # differs if the files have changed


@dataclass(frozen=True, slots=True)
class Unknown:
    """The origin of weights that may be in no files."""


@dataclass(frozen=True, slots=True)
class AsRanksSay:
    """The origin is the one that the ranks report: they, not this process, made the change."""


Origin = Files | Unknown | AsRanksSay


@dataclass(slots=True, eq=False, weakref_slot=True)
class Weights:
    """The weights of an engine as one of its processes knows them. Threads may share it."""

    generation: int = 0  # the number of changes that have begun
    origin: Origin = field(default_factory=AsRanksSay)  # of the weights after the last change
    said: tuple[str, int] | None = None  # the user's name, its generation
    is_lost: bool = False  # a change may have been missed: share nothing
    num_resets: int = 0  # how often the engine has dropped its reusable blocks
    encoders: int = 0  # the generation that has encoded all images which the engine keeps
    adapters: Adapters = field(default_factory=Adapters)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _depth: int = 0
    _is_held: bool = False

    @property
    def is_changing(self) -> bool:
        return self._depth > 0 or self._is_held or self.is_lost

    @contextmanager
    def change(self) -> Iterator[None]:
        """Returns a context for a change. `came_from` says where the new weights come from."""
        with self._lock:
            if not self.is_changing:
                self.generation += 1
                self.origin = Unknown()
            self._depth += 1
        try:
            yield
        except BaseException:
            self.came_from(Unknown())
            raise
        finally:
            with self._lock:
                self._depth -= 1

    def hold(self, is_held: bool) -> None:
        """True: a change goes on after its call, as an update in several calls. False: it ends."""
        with self._lock:
            self._is_held = is_held

    def came_from(self, origin: Origin) -> None:
        with self._lock:
            self.origin = origin

    def say(self, version: str) -> None:
        """Gives the current weights a name that the user chose."""
        with self._lock:
            self.said = version, self.generation


@dataclass(frozen=True, slots=True)
class Report:
    """A rank's knowledge of its weights and adapters."""

    seen: int  # the scheduler's generation, from the last plan that the rank got
    generation: int
    is_changing: bool
    origin: Origin
    adapters: AdapterReport = NOTHING_LOADED


@dataclass(frozen=True, slots=True)
class Stamp:
    """The generations that a plan was made for. A rank with others skips its loads and saves."""

    scheduler: int = 0
    ranks: int = 0


START = Stamp()  # no weights have changed


@dataclass(slots=True)
class Agreement:
    """Finds out if all ranks have the same weights. Runs in the scheduler's half."""

    weights: Weights  # of this process
    num_ranks: int
    _reports: dict[int, Report] = field(default_factory=dict)

    def take(self, reports: dict[int, Report]) -> None:
        """Takes new reports by rank, which replace the earlier reports of these ranks."""
        self._reports |= reports

    @property
    def stamp(self) -> Stamp | None:
        """The stamp; None while weights change, or until all ranks report the same generation."""
        own = self.weights.generation
        if self.weights.is_changing:
            return None
        if not self._reports:  # no rank has seen a change
            return START if own == 0 else None
        found = {(r.generation, r.seen, r.is_changing) for r in self._reports.values()}
        if len(self._reports) < self.num_ranks or len(found) > 1:
            return None
        generation, seen, is_changing = found.pop()
        return None if is_changing or seen != own else Stamp(own, generation)

    @property
    def origin(self) -> Origin:
        """The origin of the weights of all ranks; Unknown if their reports differ."""
        if not isinstance(self.weights.origin, AsRanksSay):
            return self.weights.origin
        origins = {report.origin for report in self._reports.values()}
        return origins.pop() if len(origins) == 1 else Unknown()
