"""Writer: writes the chunks that a Saver has copied to the store, in threads.

It writes waiting chunks together: a disk syncs many files in hardly more time than one file.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvx_core.connector.boundary import Boundary
from kvx_core.connector.counts import Counts
from kvx_core.connector.settings import StoreSettings
from kvx_core.connector.threads import Workers
from kvx_core.snapshot import Snapshot
from kvx_core.stores.prefix import PrefixStore
from kvx_core.stores.usage import Used

TOGETHER = 128  # the most chunks that are synced together: all their files are open


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """A chunk that waits to be written."""

    store: PrefixStore
    snapshot: Snapshot
    num_bytes: int
    name: str


class Writer:
    """Threads that write chunks. A failed write costs a later cache hit, nothing else."""

    def __init__(
        self,
        settings: StoreSettings,
        boundary: Boundary,
        counts: Counts,
        is_stored: Callable[[PrefixStore, Snapshot], bool],
    ) -> None:
        """is_stored: True if another process or request has stored a chunk; asks the disk"""
        self._boundary, self._counts, self._is_stored = boundary, counts, is_stored
        self._converts = settings.format is not None
        self.threads = Workers(
            settings.writer_threads, "kvx-save", exit_seconds=settings.shutdown_seconds
        )
        self._lock = threading.Lock()  # guards the fields below
        self._waiting: list[_Waiting] = []  # oldest first
        self._num_added = 0  # since the last `start`
        self._pending_bytes = 0
        self._used = Used()  # at the last count of evictions

    @property
    def pending_bytes(self) -> int:
        """The bytes of chunks that are not written yet."""
        return self._pending_bytes

    def add(self, store: PrefixStore, snapshot: Snapshot) -> None:
        """Adds a chunk to those that `start` has threads write."""
        one = _Waiting(store, snapshot, snapshot.num_bytes, store.name_of(snapshot))
        store.index.expect(one.name)  # no other save copies the chunk meanwhile
        with self._lock:
            self._pending_bytes += one.num_bytes
            self._waiting.append(one)
            self._num_added += 1

    def start(self) -> None:
        """Has threads write the chunks that were added. Threads that began at once would take the
        GIL from the copies of the same step.

        Raises RuntimeError after a shutdown or a fork; the chunks are dropped.
        """
        with self._lock:
            count, self._num_added = self._num_added, 0
        try:
            for _ in range(count):
                self.threads.submit(self._write)
        except BaseException:
            with self._lock:
                dropped = self._waiting[-count:]  # threads take the oldest first
                del self._waiting[-count:]
                self._pending_bytes -= sum(one.num_bytes for one in dropped)
            for one in dropped:
                one.store.index.not_written(one.name)
            raise

    def commit(self, store: PrefixStore, snapshots: Sequence[Snapshot]) -> list[Exception | None]:
        """Stores the chunks that are not yet stored. Returns for each chunk its error, or None."""
        begin = time.perf_counter()
        errors: list[Exception | None] = [None] * len(snapshots)
        missing: list[int] = []
        for i, snapshot in enumerate(snapshots):
            try:
                if self._is_stored(store, snapshot):
                    # This process has not read the file.
                    store.index.not_written(store.name_of(snapshot))
                else:
                    missing.append(i)
            except Exception as error:
                errors[i] = error
        if not missing:
            return errors
        results: Sequence[int | Exception]
        try:
            results = store.commit_all([snapshots[i] for i in missing])
        except Exception as error:
            results = [error] * len(missing)
        written = spared = 0
        for i, num_bytes in zip(missing, results, strict=True):
            if isinstance(num_bytes, Exception):
                errors[i] = num_bytes
            elif num_bytes:
                written += num_bytes
                spared += max(0, snapshots[i].cache_bytes - num_bytes) if self._converts else 0
        if not all(isinstance(each, Exception) for each in results):
            self._counts.add(saved_bytes=written, write_seconds=time.perf_counter() - begin)
        if spared:
            self._counts.add(spared_bytes=spared)
        with self._boundary.guard("did not count what the store holds"):
            self._count_used(store)
        return errors

    def _write(self) -> None:
        """Runs in a thread. Writes the longest waiting chunks, all of one store."""
        with self._lock:
            together = self._waiting[:1]
            for one in self._waiting[1:TOGETHER]:
                if one.store is not together[0].store:
                    break
                together.append(one)
            del self._waiting[: len(together)]
        if not together:  # an earlier job has written this job's chunk
            return
        store = together[0].store
        errors: Sequence[Exception | None]
        try:
            errors = self.commit(store, [one.snapshot for one in together])
        except Exception as unexpected:
            errors = [unexpected] * len(together)
        finally:
            with self._lock:
                self._pending_bytes -= sum(one.num_bytes for one in together)
        for one, error in zip(together, errors, strict=True):
            if error is not None:
                self._boundary.caught(error, "could not write to its store", "", "dropped_saves")
                with self._boundary.guard("does not know what is stored"):
                    store.index.not_written(one.name)

    def _count_used(self, store: PrefixStore) -> None:
        """Counts the files deleted to make room since the last call, and the files of the store."""
        with self._lock:
            used, before = store.used, self._used
            self._used = used
        if used.evicted_files > before.evicted_files:
            self._counts.add(
                evictions=used.evicted_files - before.evicted_files,
                evicted_bytes=used.evicted_bytes - before.evicted_bytes,
            )
        if used.files is not None and used.num_bytes is not None:
            self._counts.set(store_files=used.files, store_bytes=used.num_bytes)
