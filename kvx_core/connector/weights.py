"""Weights: which changes of an engine's weights a process has seen, and what its ranks report.

Keys name the weights by the model's files. An engine may replace its weights while it runs, so
whatever may write them is counted: nothing that was planned before a change passes for current.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Files:
    """Files that all weights were loaded from."""

    model: str  # a directory, or a model of the hub
    revision: str | None
    state: str  # tells apart what the files were at different times


@dataclass(frozen=True, slots=True)
class Unknown:
    """Weights that no files are known to hold."""


@dataclass(frozen=True, slots=True)
class AsRanksSay:
    """What a call has done in other processes, which know it better."""


Origin = Files | Unknown | AsRanksSay


@dataclass(slots=True, eq=False, weakref_slot=True)
class Weights:
    """The weights of an engine, as far as one of its processes knows. Threads may share it."""

    generation: int = 0  # changes that have begun
    origin: Origin = field(default_factory=AsRanksSay)  # after the last change
    said: tuple[str, int] | None = None  # a name that the user gave them, in which generation
    is_lost: bool = False  # a change may have gone unseen: nothing is shared any more
    num_resets: int = 0  # how often the engine has dropped the blocks that it could use again
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _depth: int = 0
    _is_held: bool = False

    @property
    def is_changing(self) -> bool:
        return self._depth > 0 or self._is_held or self.is_lost

    @contextmanager
    def change(self) -> Iterator[None]:
        """A change, from its beginning to its end. `came_from` says what it has loaded."""
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
        """Whether a change goes on after its call: an update in several calls."""
        with self._lock:
            self._is_held = is_held

    def came_from(self, origin: Origin) -> None:
        with self._lock:
            self.origin = origin

    def say(self, version: str) -> None:
        """The user names the weights of this moment."""
        with self._lock:
            self.said = version, self.generation


@dataclass(frozen=True, slots=True)
class Report:
    """What a rank knows of its weights."""

    seen: int  # the scheduler's generation in the last plan that the rank has got
    generation: int
    is_changing: bool
    origin: Origin


@dataclass(frozen=True, slots=True)
class Stamp:
    """The generations of a plan. A rank whose own differ loads and saves nothing of it."""

    scheduler: int = 0
    ranks: int = 0


START = Stamp()  # no weights have changed


@dataclass(slots=True)
class Agreement:
    """The generation of all ranks, in the scheduler's half."""

    weights: Weights  # of this process
    num_ranks: int
    _reports: dict[int, Report] = field(default_factory=dict)

    def take(self, reports: dict[int, Report]) -> None:
        """Takes the reports of ranks, which replace their earlier ones."""
        self._reports |= reports

    @property
    def stamp(self) -> Stamp | None:
        """None while weights change, or until all ranks have reported the same generation."""
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
        """What the weights of all ranks were loaded from."""
        if not isinstance(self.weights.origin, AsRanksSay):
            return self.weights.origin
        origins = {report.origin for report in self._reports.values()}
        return origins.pop() if len(origins) == 1 else Unknown()
