"""Index: what is known of a store's files without asking its disk."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from threading import Lock
from typing import Any

from kvx_core.snapshot import StoreError

_MAX_NAMES = 1 << 18  # of each sort that is remembered: at most 100 MB
_MAX_FAILURES = 16  # that are remembered


class NotCached(Exception):
    """Memory does not have the answer, or had it too long ago. Never leaves kvx_core."""


class Index:
    """Remembers what lookups have seen. Threads may share one.

    Other processes write and delete in the same store: what was seen more than `fresh_seconds` ago
    counts as unknown, except for `is_held`. Bounded: the least recently seen is forgotten first.
    """

    def __init__(
        self, fresh_seconds: float = 0.25, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.fresh_seconds = fresh_seconds
        self._clock = clock
        self._lock = Lock()
        self._files: OrderedDict[str, float] = OrderedDict()  # when each was last seen
        self._absent: OrderedDict[str, float] = OrderedDict()  # when each was not there
        self._good: OrderedDict[str, None] = OrderedDict()  # whose content is what the name says
        self._held: OrderedDict[str, None] = OrderedDict()  # see `held`
        self._doubted: dict[str, None] = {}  # of these, what to ask the disk about
        self._num_corrupt = 0
        self._failures: deque[StoreError] = deque(maxlen=_MAX_FAILURES)

    # ---- what lookups see ----

    def saw(self, name: str) -> None:
        """A file was there just now."""
        with self._lock:
            self._saw(name)

    def found_good(self, name: str) -> None:
        """A file was there just now, and its content was what its name says."""
        with self._lock:
            self._saw(name)
            _remember(self._good, name, None)

    def held(self, *names: str) -> None:
        """This process has read all of these files just now, and they were good."""
        with self._lock:
            for name in names:
                self._saw(name)
                _remember(self._held, name, None)

    def expect(self, name: str) -> None:
        """This process is about to write a file: `wrote`, `missed` or `doubt` follows."""
        with self._lock:
            _remember(self._held, name, None)

    def wrote(self, name: str) -> None:
        """This process has stored a file just now."""
        self.held(name)

    def missed(self, name: str) -> None:
        """A file was not there just now, or was not good."""
        with self._lock:
            self._forget(name)
            self._good.pop(name, None)
            _remember(self._absent, name, self._clock())

    def corrupt(self, name: str) -> None:
        """A file was corrupt just now, and is deleted."""
        self.missed(name)
        with self._lock:
            self._num_corrupt += 1

    @property
    def num_corrupt(self) -> int:
        """How many files were found corrupt until now."""
        return self._num_corrupt

    def failed(self, error: StoreError) -> None:
        """A file that may be there could not be opened or read just now. For what the file system
        did: a file that has gone, or that is of another version, is no failure.
        """
        if isinstance(error.__cause__ or error.__context__, OSError):
            with self._lock:
                self._failures.append(error)

    def take_failures(self) -> list[StoreError]:
        """What `failed` was called with since the last call: the last 16."""
        with self._lock:
            failures = list(self._failures)
            self._failures.clear()
        return failures

    def doubt(self, name: str) -> None:
        """A file may not be there or not be good: memory does not answer for it any more."""
        with self._lock:
            self._forget(name)

    # ---- what memory answers ----

    def is_good(self, name: str) -> bool:
        """Whether the content of a file was what its name says: for ever, if it is still there."""
        with self._lock:
            return name in self._good

    def is_seen(self, name: str) -> bool:
        """Whether a file was there when it was last asked for, and not too long ago."""
        with self._lock:
            seen = self._files.get(name)
            return seen is not None and self._is_fresh(seen)

    def is_held(self, name: str) -> bool:
        """Whether this process has loaded or written a file, however long ago, or is about to write
        it.

        Others may have deleted it: see `take_doubted`.
        """
        with self._lock:
            if name not in self._held:
                return False
            if not self._is_fresh(self._files.get(name, float("-inf"))):
                self._doubted[name] = None
            return True

    @property
    def has_doubted(self) -> bool:
        """Whether `take_doubted` has something to return."""
        return bool(self._doubted)

    def take_doubted(self) -> list[str]:
        """Files for which `is_held` was True since the last call although not seen lately."""
        with self._lock:
            doubted, self._doubted = self._doubted, {}
        return list(doubted)

    def is_there(self, name: str) -> bool:
        """Whether a file exists. Raises Unknown."""
        with self._lock:
            seen = self._files.get(name)
            if seen is not None and self._is_fresh(seen):
                return True
            missed = self._absent.get(name)
            if missed is not None and self._is_fresh(missed):
                return False
        raise NotCached

    def has(self, name: str) -> bool:
        """Whether a file counts as stored: `is_held`, or there not long ago."""
        return self.is_held(name) or self.is_seen(name)

    def _is_fresh(self, seen: float) -> bool:
        return self._clock() - seen < self.fresh_seconds

    def _saw(self, name: str) -> None:
        _remember(self._files, name, self._clock())
        self._absent.pop(name, None)

    def _forget(self, name: str) -> None:
        self._files.pop(name, None)
        self._held.pop(name, None)
        self._absent.pop(name, None)


def _remember(known: OrderedDict[str, Any], name: str, value: Any) -> None:
    known[name] = value
    known.move_to_end(name)
    if len(known) > _MAX_NAMES:
        known.popitem(last=False)
