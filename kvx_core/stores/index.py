"""Index: remembers which files of a store exist and are good.

Lookups can then answer without asking the disk.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from threading import Lock
from typing import Any

from kvx_core.snapshot import StoreError

_MAX_NAMES = 1 << 18  # remembered in each of the four dicts: at most 100 MB
_MAX_FAILURES = 16  # remembered


class NotCached(Exception):
    """Memory has no answer, or one that is too old. Never leaves kvx_core."""


class Index:
    """Remembers the files that lookups and writers have seen. Threads may share an Index.

    Other processes write and delete files of the same store. So a file that was seen more than
    `fresh_seconds` ago counts as unknown, except in `is_held` and `is_good`. Memory is bounded: the
    least recently seen file is forgotten first.
    """

    def __init__(
        self, fresh_seconds: float = 0.25, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.fresh_seconds = fresh_seconds
        self._clock = clock
        self._lock = Lock()
        self._files: OrderedDict[str, float] = OrderedDict()  # time when each file was last seen
        self._absent: OrderedDict[str, float] = OrderedDict()  # time when each file was missing
        self._good: OrderedDict[str, None] = OrderedDict()  # content agrees with the name
        self._held: OrderedDict[str, None] = OrderedDict()  # see `held`
        self._expected = set[str]()  # files in _held that are being written
        self._doubted: dict[str, None] = {}  # files in _held to ask the disk about
        self._num_corrupt = 0
        self._failures: deque[StoreError] = deque(maxlen=_MAX_FAILURES)

    # ---- updates ----

    def mark_present(self, name: str) -> None:
        """Notes that a file existed just now."""
        with self._lock:
            self._saw(name)

    def found_good(self, name: str) -> None:
        """Notes that a file existed just now, and that its content agreed with its name."""
        with self._lock:
            self._saw(name)
            _remember(self._good, name, None)

    def held(self, *names: str) -> None:
        """Notes that this process has just read or written these files, and that they are good."""
        with self._lock:
            now = self._clock()
            for name in names:
                _remember(self._files, name, now)
                _remember(self._held, name, None)
                self._absent.pop(name, None)
            self._expected.difference_update(names)

    def expect(self, name: str) -> None:
        """Notes that this process is about to write a file, until `wrote` or `not_written`."""
        with self._lock:
            _remember(self._held, name, None)
            self._expected.add(name)

    def wrote(self, name: str) -> None:
        """Notes that this process has just stored a file."""
        self.held(name)

    def not_written(self, name: str) -> None:
        """Notes that this process does not write a file any more: it failed, or the file exists."""
        with self._lock:
            self._expected.discard(name)
            self._forget(name)

    def now(self) -> float:
        """Returns the time, for `mark_absent`."""
        return self._clock()

    def mark_absent(self, name: str, asked: float | None = None) -> None:
        """Notes that a file was missing just now, or was not good.

        asked: `now` before the disk was asked. A file that another thread has seen or written since
               counts as present
        """
        with self._lock:
            if asked is not None and self._files.get(name, asked) > asked:
                return
            self._forget(name)
            self._good.pop(name, None)
            _remember(self._absent, name, self._clock())

    def corrupt(self, name: str) -> None:
        """Notes that a file was corrupt just now, and counts it. The caller deletes it."""
        self.mark_absent(name)
        with self._lock:
            self._num_corrupt += 1

    @property
    def num_corrupt(self) -> int:
        """The number of calls of `corrupt` so far."""
        return self._num_corrupt

    def failed(self, error: StoreError) -> None:
        """Notes that a file that may exist could not be opened or read just now.

        Keeps only errors that an OSError of the file system caused. A missing file, or a file of
        another version, is no failure.
        """
        if isinstance(error.__cause__ or error.__context__, OSError):
            with self._lock:
                self._failures.append(error)

    def take_failures(self) -> list[StoreError]:
        """Returns the errors that `failed` has kept since the last call, at most the last 16."""
        with self._lock:
            failures = list(self._failures)
            self._failures.clear()
        return failures

    def mark_uncertain(self, name: str) -> None:
        """Forgets whether a file exists: it may be missing or bad."""
        with self._lock:
            self._forget(name)

    # ---- queries ----

    def is_good(self, name: str) -> bool:
        """True if the content of a file agreed with its name. This stays true while it exists."""
        with self._lock:
            return name in self._good

    def is_seen(self, name: str) -> bool:
        """True if a file existed when it was last asked for, less than `fresh_seconds` ago."""
        with self._lock:
            seen = self._files.get(name)
            return seen is not None and self._is_fresh(seen)

    def is_held(self, name: str) -> bool:
        """True if this process has loaded or written a file, however long ago, or is about to write
        it.

        Other processes may have deleted the file: see `take_doubted`.
        """
        with self._lock:
            if name in self._expected:  # the disk does not have it yet
                return True
            if name not in self._held:
                return False
            if not self._is_fresh(self._files.get(name, float("-inf"))):
                self._doubted[name] = None
            return True

    @property
    def has_doubted(self) -> bool:
        """True if `take_doubted` has files to return."""
        return bool(self._doubted)

    def take_doubted(self) -> list[str]:
        """Returns the files for which `is_held` was True since the last call, although they had not
        been seen within `fresh_seconds`.
        """
        with self._lock:
            doubted, self._doubted = self._doubted, {}
        return list(doubted)

    def is_there(self, name: str) -> bool:
        """True if a file exists, False if it does not. Raises NotCached if memory does not know."""
        with self._lock:
            seen = self._files.get(name)
            if seen is not None and self._is_fresh(seen):
                return True
            missed = self._absent.get(name)
            if missed is not None and self._is_fresh(missed):
                return False
        raise NotCached

    def has(self, name: str) -> bool:
        """True if a file counts as stored: `is_held` or `is_seen`."""
        return self.is_held(name) or self.is_seen(name)

    def _is_fresh(self, seen: float) -> bool:
        return self._clock() - seen < self.fresh_seconds

    def _saw(self, name: str) -> None:
        _remember(self._files, name, self._clock())
        self._absent.pop(name, None)

    def _forget(self, name: str) -> None:
        self._files.pop(name, None)
        self._absent.pop(name, None)
        if name not in self._expected:
            self._held.pop(name, None)


def _remember(known: OrderedDict[str, Any], name: str, value: Any) -> None:
    known[name] = value
    known.move_to_end(name)
    if len(known) > _MAX_NAMES:
        known.popitem(last=False)
