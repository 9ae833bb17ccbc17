"""StaleEntries: deletes an entry after a longer entry that begins with the same tokens is stored.

A conversation that is stored after each turn leaves an entry of its last tokens each time, and
readers can take any part of the longest entry. The longer entry takes the mark of the shorter one
(see Marks.publish), so no folder is listed. An entry with states stays: no longer entry has them.
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
_SECONDS = 30.0  # for so long a reader that has found an entry can still load it


class _Useless(NamedTuple):
    due: float
    space: str
    shorter: Mark
    longer: Mark
    chunk_tokens: int


class StaleEntries:
    """The useless entries that writers of this process know. Threads may share it."""

    def __init__(
        self,
        blobs: BlobStore,
        marks: Marks,
        index: Index,
        seconds: float = _SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """seconds: for how long an entry stays after a longer entry has taken its mark"""
        self._blobs, self._marks, self._index = blobs, marks, index
        self._seconds, self._clock = seconds, clock
        self._lock = Lock()
        self._found: deque[_Useless] = deque(maxlen=_MOST)

    def found(self, space: str, shorter: Mark, longer: Mark, chunk_tokens: int) -> None:
        """Remembers a shorter entry whose mark a longer one has taken; `drop` deletes it later."""
        due = self._clock() + self._seconds
        with self._lock:
            self._found.append(_Useless(due, space, shorter, longer, chunk_tokens))

    def drop(self) -> None:
        """Deletes the files of the entries that are due.

        Keeps an entry if the longer one does not have files of all its kinds: a rank may not have
        written its file, the longer entry is gone, or the shorter one has got states. If the store
        fails now, the files stay and take space, and no more.
        """
        while True:
            with self._lock:
                if not self._found or self._found[0].due > self._clock():
                    return
                found = self._found.popleft()
            with suppress(StoreError):  # for example, the store may be read-only
                self._drop(found)

    def _drop(self, found: _Useless) -> None:
        space, shorter, longer, chunk_tokens = found[1:]
        is_useless = self._marks.has_kinds(space, longer, shorter)
        needed = longer if is_useless else shorter
        if is_useless or self._marks.has_tokens(space, shorter):
            # Another writer may have taken the entry's mark, or the mark may be gone.
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
            self._index.mark_absent(name)
