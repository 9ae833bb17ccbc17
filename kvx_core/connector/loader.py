"""Loader: copies tokens from the store into an engine's blocks, in threads or in the call."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

from kvx_core.connector.boundary import Boundary, Guard
from kvx_core.connector.counts import Counts
from kvx_core.connector.plan import Load, RequestId, ScopedStores
from kvx_core.connector.saver import Sections
from kvx_core.connector.settings import StoreSettings
from kvx_core.connector.threads import Workers
from kvx_core.snapshot import StoreError
from kvx_core.stores.loads import Progress

# Waits until the device no longer uses the blocks; returns the context in which the load runs.
Streams = Callable[[], AbstractContextManager[object]]
# Returns a value that differs after the engine's weights or a load's adapter have changed.
Era = Callable[[Load], object]


@dataclass(slots=True)
class Results:
    """The loads since the last call: loads beside steps that ended, and all loads that failed."""

    loaded: set[RequestId] = field(default_factory=set)
    failed: list[tuple[Load, int]] = field(default_factory=list)  # load, first token not loaded


@dataclass(slots=True, eq=False)
class _Work:
    """A load that is under way."""

    load: Load
    era: object  # at the load's beginning
    progress: Progress | None = None  # None: not made, because of an error
    context: AbstractContextManager[object] = field(default_factory=nullcontext)
    limit: threading.Timer | None = None  # gives it up

    @property
    def first(self) -> int:
        """The first token not loaded. With states it is the load's start: a part is of no use."""
        if self.load.match.states:
            return self.load.start
        return max(self.load.start, 0 if self.progress is None else self.progress.stop)


class Loader:
    """Runs the loads of one worker, the oldest first. A failed load does not affect others.

    A failed load still loads the tokens before its first bad file, unless they have states. It
    deletes all its corrupt files, so that the tokens that the engine computes are stored again.
    """

    def __init__(
        self,
        stores: ScopedStores,
        settings: StoreSettings,
        boundary: Boundary,
        counts: Counts,
        sections: Sections,
        streams: Streams = nullcontext,
        era: Era = lambda load: None,
    ) -> None:
        """streams: called in the engine's thread for each load beside steps; the thread that loads
        enters the context that it returns
        era:     a load has failed if `era` returns another value for it afterwards
        """
        self._stores, self._settings, self._boundary = stores, settings, boundary
        self._counts, self._sections, self._streams = counts, sections, streams
        self._era = era
        self._workers = Workers(
            settings.loader_threads, "kvx-load", exit_seconds=settings.shutdown_seconds
        )
        self._lock = threading.Lock()  # guards the fields below
        self._load_is_over = threading.Condition(self._lock)
        self._waiting: dict[RequestId, _Work] = {}  # loads beside steps that have not ended
        self._over: list[tuple[_Work, bool]] = []  # load, True if it loaded all

    @property
    def num_loading(self) -> int:
        """The number of loads beside steps that have not ended."""
        return len(self._waiting)

    def start(self, load: Load) -> None:
        """Starts a load beside steps. `take_results` reports its end, even if an error occurs."""
        work = _Work(load, self._era(load))
        with self._lock:
            self._waiting[load.request_id] = work
        with self._loading(load) as guard:
            work.progress = Progress()
            work.context = self._streams()
            self._workers.submit(partial(self._load_beside, work), load.request_id)
            if load.seconds is not None:
                work.limit = threading.Timer(load.seconds, self._give_up, (work,))
                work.limit.daemon = True
                work.limit.start()
        if guard.failed:
            self._is_over(work, good=False)

    def _give_up(self, work: _Work) -> None:
        """Ends a load that takes longer than computing its tokens would. Runs in a thread."""
        assert work.progress is not None  # it has started
        work.progress.cancel()  # from now on it writes to no block
        self._is_over(work, good=False)

    def load(self, load: Load) -> bool:
        """Loads tokens that this step's forward pass reads; returns True if it loaded all."""
        work = _Work(load, self._era(load))
        with self._loading(load) as guard:
            work.progress = Progress()
        good = not guard.failed and self._load(work)
        with self._lock:
            self._over.append((work, good))
        return good

    def refuse(self, load: Load, reason: str) -> None:
        """Reports a load as failed without starting it."""
        with self._loading(load):
            raise StoreError(reason)
        with self._lock:
            self._over.append((_Work(load, self._era(load)), False))

    def cancel(self, request_ids: Collection[RequestId]) -> None:
        """Cancels the loads of ended requests. A load that already runs ends after a chunk."""
        for request_id in request_ids:
            with self._lock:
                found = self._waiting.get(request_id)
            if found is not None:
                if found.progress is not None:
                    found.progress.is_cancelled = True
                if self._workers.cancel(request_id):
                    self._is_over(found, good=False)

    def wait(self, seconds: float) -> None:
        """Waits until a load beside steps has ended, if any runs, for at most `seconds`."""
        with self._lock:
            if self._waiting and not self._over:
                self._load_is_over.wait(seconds)

    def take_results(self) -> Results:
        """Returns the loads that have ended since the last call.

        The engine assumes that a load succeeded unless it is reported as failed.
        """
        with self._lock:
            over, self._over = self._over, []
        results = Results()
        for work, good in over:
            is_current = work.era == self._era(work.load)
            if good and not is_current:
                with self._loading(work.load):
                    raise StoreError("the model's weights or its adapter changed while it ran")
            if not work.load.wait:
                results.loaded.add(work.load.request_id)
            if not good or not is_current:
                results.failed.append((work.load, work.first if is_current else work.load.start))
        return results

    def shutdown(self) -> None:
        """Cancels all loads, and waits at most shutdown_seconds for those that run."""
        self.cancel(tuple(self._waiting))
        self._workers.shutdown(self._settings.shutdown_seconds)

    def _load_beside(self, work: _Work) -> None:
        """Runs in a thread."""
        self._is_over(work, good=self._load(work))

    def _is_over(self, work: _Work, *, good: bool) -> None:
        """Reports the end of a load beside steps. The engine waits for the report."""
        request_id = work.load.request_id
        with self._lock:
            if self._waiting.get(request_id) is not work:
                return
            del self._waiting[request_id]
            self._over.append((work, good))
            self._load_is_over.notify_all()
        if work.limit is not None:
            work.limit.cancel()

    def _load(self, work: _Work) -> bool:
        load, progress = work.load, work.progress
        if progress is not None and progress.is_cancelled:
            return False
        with self._loading(load) as guard:
            begin = time.perf_counter()
            if load.stop > load.match.num_tokens:  # before anything is prepared for it
                raise StoreError(
                    f"tokens {load.start} to {load.stop} are to be loaded, expected at most "
                    f"{load.match.num_tokens}: the engine computes the rest"
                )
            with work.context:
                sections = self._sections(load.block_ids, load.stop)
                store = self._stores[load.scope]
                try:
                    loaded = store.load(
                        load.match, load.start, load.stop, sections, progress=progress
                    )
                except StoreError:
                    if progress is not None and progress.is_cancelled:
                        return False  # a cancelled load does not count as a failure
                    raise
            self._counts.add(
                loaded_tokens=load.stop - load.start,
                loaded_bytes=loaded,
                load_seconds=time.perf_counter() - begin,
            )
        return not guard.failed

    def _loading(self, load: Load) -> Guard:
        return self._boundary.guard(
            "could not load", f"request {load.request_id}", count="load_failures"
        )
