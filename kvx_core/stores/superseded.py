"""Drops entries that a longer one has made useless: it begins with the same tokens.

A conversation that is stored after each turn leaves an entry of its last tokens each time, and
readers take any part of the longest. The longer one has taken the mark of the shorter one: see
Marks.publish. Nothing is listed. An entry with states stays: no longer one has them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from typing import NamedTuple

from kvx_core.snapshot import StoreError
from kvx_core.stores.blob_store import BlobStore
from kvx_core.stores.index import Index
from kvx_core.stores.marks import Mark, Marks
from kvx_core.stores.names import entry_name

_MOST = 4096  # entries that are remembered
_SECONDS = 30.0  # a reader that has just found an entry loads it meanwhile


class _Useless(NamedTuple):
    due: float
    space: str
    shorter: Mark
    longer: Mark
    chunk_tokens: int


class StaleEntries:
    """The useless entries that writers of this process have found. Threads may share it."""

    def __init__(
        self,
        blobs: BlobStore,
        marks: Marks,
        index: Index,
        seconds: float = _SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """seconds: that an entry stays after a longer one has its mark"""
        self._blobs, self._marks, self._index = blobs, marks, index
        self._seconds, self._clock = seconds, clock
        self._lock = Lock()
        self._found: deque[_Useless] = deque(maxlen=_MOST)

    def found(self, space: str, shorter: Mark, longer: Mark, chunk_tokens: int) -> None:
        """A longer entry has taken the mark of a shorter one, which is dropped later."""
        due = self._clock() + self._seconds
        with self._lock:
            self._found.append(_Useless(due, space, shorter, longer, chunk_tokens))

    def drop(self) -> None:
        """Deletes the files that are due.

        None of an entry if the longer one does not have all of its kinds: a rank may not have
        written it, it has gone, or the shorter one has got states. A store that fails now costs no
        more than room.
        """
        while True:
            with self._lock:
                if not self._found or self._found[0].due > self._clock():
                    return
                found = self._found.popleft()
            with suppress(StoreError):  # of a store that may only be read, say
                self._drop(found)

    def _drop(self, found: _Useless) -> None:
        space, shorter, longer, chunk_tokens = found[1:]
        is_useless = self._marks.has_kinds(space, longer, shorter)
        needed = longer if is_useless else shorter
        if is_useless or self._marks.has_tokens(space, shorter):
            # Another writer may have taken its mark at the same time; or it has none any more.
            more = self._marks.publish(
                space, needed.parent, needed.ids, chunk_tokens, from_memory=False
            )
            if more is not None:
                self.found(space, more, needed, chunk_tokens)
        if not is_useless:
            return
        for kind in self._marks.kinds_of(space, shorter):
            name = entry_name(space, shorter.key, kind)
            self._blobs.delete(name)
            self._index.missed(name)
