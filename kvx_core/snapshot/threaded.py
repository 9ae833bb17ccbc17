"""Runs work on many bytes in several threads, which begin before the caller waits for results."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Generic, TypeVar
from weakref import ref

from kvx_core._c import abi

_LEAST_BYTES = 4 << 20  # with fewer bytes, handing work to threads costs more than it saves
_MAX_THREADS = 8  # of one job

_T = TypeVar("_T")
_R = TypeVar("_R")


def in_threads(work: Callable[[_T], _R], items: Sequence[_T], num_bytes: int) -> list[_R]:
    """Returns [work(item) for item in items], computed in several threads if num_bytes is large.

    Raises the error of the first item whose call fails. Calls for later items may be left out then.
    """
    if num_bytes < _LEAST_BYTES or len(items) < 2:
        return [work(item) for item in items]
    return Job(work, items, num_bytes).results()


class Job(Generic[_T, _R]):
    """Calls of `work` for items. The calls begin in the order of the items.

    If num_bytes is large, helper threads begin at once. The thread that calls `results` works too.
    It does not wait for helpers that have not begun: jobs may start jobs, and helpers may be busy
    for ever.
    """

    def __init__(self, work: Callable[[_T], _R], items: Sequence[_T], num_bytes: int) -> None:
        self._work, self._items = work, items
        self._results: list[Any] = [None] * len(items)
        self._next = self._running = 0  # the next item to begin; the number of calls that run
        self._error: tuple[int, BaseException] | None = None  # of the first item that failed
        self.num_helpers = 0
        if num_bytes >= _LEAST_BYTES and items:
            self._changed = threading.Condition(threading.Lock())  # guards the three above
            most = min(_num_threads(), _MAX_THREADS) - 1
            self.num_helpers = _helpers.help(self, min(most, len(items)))

    def results(self) -> list[_R]:
        """Returns the results of the calls, in the order of the items. Call it once.

        Raises the error of the first item whose call fails. Calls for later items may be left out
        then.
        """
        if not self.num_helpers:
            return [self._work(item) for item in self._items]
        self.run()
        self._wait()
        results, self._results = self._results, []
        if self._error is not None:
            _, error = self._error
            self._error = None  # its traceback has frames that refer to this job
            try:
                raise error
            finally:
                del error
        return results

    def stop(self) -> None:
        """Begins no more calls, and waits for the calls that have begun."""
        if not self.num_helpers:
            return
        with self._changed:
            self._next = len(self._items)
        self._wait()

    def _wait(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._running)

    def run(self) -> None:
        """Makes calls until all calls have begun. Raises nothing: `results` raises errors."""
        while True:
            with self._changed:
                at = self._next
                if at >= len(self._items):
                    return
                self._next += 1
                self._running += 1
            try:
                self._results[at] = self._work(self._items[at])
            except BaseException as error:
                with self._changed:
                    self._next = len(self._items)
                    if self._error is None or at < self._error[0]:
                        self._error = at, error
            finally:
                with self._changed:
                    self._running -= 1
                    self._changed.notify_all()


class _Helpers:
    """Keeps threads of this process: starting them takes as long as reading a megabyte.

    The threads are daemons: a disk that never answers does not keep the process from ending.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forgets the threads: a forked child does not have the threads of its parent."""
        self._lock = threading.Lock()
        self._jobs: SimpleQueue[ref[Job[Any, Any]]] = SimpleQueue()
        self._num_threads = 0

    def help(self, job: Job[Any, Any], most: int) -> int:
        """Hands a job to at most `most` threads. Returns the number of threads.

        A thread skips the job if nobody refers to it any more.
        """
        with self._lock:
            try:
                while self._num_threads < most:
                    name = f"kvx-bytes_{self._num_threads}"
                    own = (self._jobs,)
                    threading.Thread(target=_serve, args=own, name=name, daemon=True).start()
                    self._num_threads += 1
            except RuntimeError:  # the process is ending, or may not start more threads
                pass
            found = min(most, self._num_threads)
        for _ in range(found):
            self._jobs.put(ref(job))
        return found


def _serve(jobs: SimpleQueue[ref[Job[Any, Any]]]) -> None:
    while True:
        job = jobs.get()()
        if job is not None:
            job.run()
        del job  # else the thread would keep the job and its memory until the next job


_helpers = _Helpers()
os.register_at_fork(after_in_child=_helpers.forget)


def _num_threads() -> int:
    """Returns the number of threads that a large copy on the host uses.

    It is the number of cores of this process, or the number that the process was told to use.
    """
    info = abi.kvx_backend_info_t()
    abi.check(abi.library().kvx_backend_info(info))
    return int(info.num_threads)
