"""Usage: counts the files of a directory, as far as a process knows, and those it has evicted.

The counts are kept in memory: nothing here asks the disk.
"""

from __future__ import annotations

import os
from threading import Lock
from typing import NamedTuple


class Used(NamedTuple):
    """files, num_bytes: of the directory when it was last counted, plus what this process has
                      written since, less what it has deleted; None: it was not counted yet
    evicted_files, evicted_bytes: of entries that this process has deleted to make room
    """

    files: int | None = None
    num_bytes: int | None = None
    evicted_files: int = 0
    evicted_bytes: int = 0


class Usage:
    """Counts of one Directory. Threads may share it."""

    def __init__(self) -> None:
        self._used = Used()
        self._lock, self._process = Lock(), os.getpid()

    @property
    def now(self) -> Used:
        """The counts now, as a tuple that does not change."""
        return self._used

    def counted(self, files: int, num_bytes: int) -> None:
        """Takes the counts of a walk over the directory."""
        with self._own_lock():
            self._used = self._used._replace(files=files, num_bytes=num_bytes)

    def changed(self, files: int, num_bytes: int) -> None:
        """Counts a file that was written (1, its bytes) or deleted (-1, minus its bytes)."""
        with self._own_lock():
            used = self._used
            if used.files is not None and used.num_bytes is not None:
                self._used = used._replace(
                    files=max(0, used.files + files),
                    num_bytes=max(0, used.num_bytes + num_bytes),
                )

    def evicted(self, num_bytes: int) -> None:
        """Counts a file of an entry that was deleted to make room; call `changed` as well."""
        with self._own_lock():
            used = self._used
            self._used = used._replace(
                evicted_files=used.evicted_files + 1,
                evicted_bytes=used.evicted_bytes + num_bytes,
            )

    def _own_lock(self) -> Lock:
        """Returns this process's lock. A forked child makes one: the copy may be held for ever."""
        if self._process != os.getpid():
            self._lock, self._process = Lock(), os.getpid()
        return self._lock
