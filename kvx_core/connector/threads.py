"""Threads that run jobs beside an engine's steps."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable

_logger = logging.getLogger("kvx")


class Workers:
    """Threads that run jobs, the oldest first. An exiting process waits at most `exit_seconds`.

    The threads are daemons, so a store that never answers keeps no process from ending. A forked
    process has no such threads: there `submit` raises, and the exit does not wait.
    """

    def __init__(self, num_threads: int, name: str, *, exit_seconds: float = 60) -> None:
        """Starts the threads. Raises RuntimeError if they cannot be started."""
        self._num_threads, self._process = num_threads, os.getpid()
        lock = threading.RLock()  # guards the fields below
        self._job_added = threading.Condition(lock)
        self._job_gone = threading.Condition(lock)
        self._jobs: deque[tuple[Hashable, Callable[[], object]]] = deque()
        self._running: dict[int, float] = {}  # thread id: the time its current job began
        self._is_over = False
        try:
            for i in range(num_threads):
                threading.Thread(target=self._run, name=f"{name}_{i}", daemon=True).start()
        except BaseException:
            self.shutdown(0)
            raise
        self._exit_seconds = exit_seconds
        atexit.register(self._at_exit)

    def submit(self, job: Callable[[], object], key: Hashable = None) -> None:
        """Queues a job, which should not raise. Raises RuntimeError after `shutdown` or a fork."""
        if os.getpid() != self._process:
            raise RuntimeError(
                f"the threads run in process {self._process} and not in {os.getpid()}, which was "
                "forked off"
            )
        with self._job_added:
            if self._is_over:
                raise RuntimeError("the threads have been shut down")
            self._jobs.append((key, job))
            self._job_added.notify()

    def cancel(self, key: Hashable) -> int:
        """Drops the jobs of this key that have not begun; returns their number."""
        with self._job_gone:
            kept = deque(job for job in self._jobs if job[0] != key)
            dropped = len(self._jobs) - len(kept)
            if dropped:
                self._jobs = kept
                self._job_gone.notify_all()
        return dropped

    def stuck_seconds(self) -> float:
        """Returns for how many seconds all threads have run their jobs; 0 if a thread is free."""
        with self._job_gone:
            begun = list(self._running.values())
        return time.monotonic() - max(begun) if len(begun) == self._num_threads else 0.0

    @property
    def has_free_thread(self) -> bool:
        """True if a job that is submitted now begins at once."""
        return len(self._jobs) + len(self._running) < self._num_threads

    def wait(self, seconds: float | None = None) -> bool:
        """Waits until all jobs have ended, for at most `seconds`; returns True if they have."""
        with self._job_gone:
            return self._job_gone.wait_for(lambda: not self._jobs and not self._running, seconds)

    def shutdown(self, seconds: float | None = None) -> bool:
        """Waits at most `seconds` for all jobs, then drops those that have not begun.

        Returns True if all jobs have ended.
        """
        atexit.unregister(self._at_exit)
        with self._job_added:
            self._is_over = True
            self._job_added.notify_all()
        have_ended = self.wait(seconds)
        with self._job_gone:
            self._jobs.clear()
            self._job_gone.notify_all()
        return have_ended

    def _at_exit(self) -> None:
        if os.getpid() == self._process:
            self.shutdown(self._exit_seconds)

    def _run(self) -> None:
        own = threading.get_ident()
        while True:
            with self._job_added:
                self._job_added.wait_for(lambda: self._jobs or self._is_over)
                if not self._jobs:
                    return
                _, job = self._jobs.popleft()
                self._running[own] = time.monotonic()
            try:
                job()
            except Exception:
                _logger.exception("KVX: a job has raised")
            finally:
                del job
                with self._job_gone:
                    del self._running[own]
                    self._job_gone.notify_all()
