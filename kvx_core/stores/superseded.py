"""Drops entries that a longer one has made useless: it begins with the same tokens.

A conversation that is stored after each turn leaves an entry of its last tokens each time, and
readers take any part of the longest. Names tell which are useless, so that no file is read.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock

from kvx_core.snapshot import StoreError
from kvx_core.stores.blob_store import BlobStore
from kvx_core.stores.finder import Finder
from kvx_core.stores.index import Index
from kvx_core.stores.keys import OPENING_TOKENS, EntryFile, Ids, entry_of, opening_of

_MOST = 4096  # folders that are remembered
_SECONDS = 30.0  # a reader that has just found an entry loads it meanwhile


@dataclass(frozen=True, slots=True)
class _Useless:
    """Files of shorter entries, and those of the longer one, by their last words."""

    due: float
    folder: str
    shorter: tuple[str, ...]
    longer: frozenset[str]


class Superseded:
    """The useless entries that writers of this process have found. Threads may share it."""

    def __init__(
        self,
        blobs: BlobStore,
        index: Index,
        seconds: float = _SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """seconds: that an entry stays after a longer one was written"""
        self._blobs, self._index = blobs, index
        self._seconds, self._clock = seconds, clock
        self._lock = Lock()
        self._found: deque[_Useless] = deque(maxlen=_MOST)

    def wrote(self, finder: Finder, node: str, ids: Ids) -> None:
        """An entry of `ids` below a node was written: remembers the entries that it makes useless,
        and drops those that are due.

        None while layers or heads of this one are missing. For stores of K and V alone, of whose
        entries readers take any part. A store that fails now costs no more than room.
        """
        with suppress(StoreError):  # the entry is stored: what cannot be listed now stays
            found = self._useless(finder, node, ids) if len(ids) > OPENING_TOKENS else None
            if found is not None:
                with self._lock:
                    self._found.append(found)
            self.drop()

    def drop(self) -> None:
        """Deletes what is due, unless the longer entry has gone meanwhile."""
        while True:
            with self._lock:
                if not self._found or self._found[0].due > self._clock():
                    return
                found = self._found.popleft()
            if not found.longer <= set(self._blobs.names(found.folder)):
                continue
            for word in found.shorter:
                name = f"{found.folder}/{word}"
                with suppress(StoreError):  # of a store that may only be read, say
                    self._blobs.delete(name)
                    self._index.missed(name)

    def _useless(self, finder: Finder, node: str, ids: Ids) -> _Useless | None:
        folder, own = f"{finder.space}/{node}/{opening_of(node, ids)}", entry_of(node, ids)
        lately = self._index.lately(folder)
        if lately is not None and all(name.startswith(f"{own}.") for name in lately):
            return None
        by_precision: dict[object, list[EntryFile]] = {}
        for file in finder.parsed(folder):
            by_precision.setdefault(file.precision, []).append(file)
        entries = {len(ids): own}
        shorter: list[EntryFile] = []
        longer: list[EntryFile] = []
        for files in by_precision.values():
            of_own = [file for file in files if file.entry == own]
            held, chosen = finder.cover(of_own)
            if not held.all():
                continue
            longer += chosen
            for file in files:
                length = file.num_tokens
                if length >= len(ids):
                    continue
                if length not in entries:
                    entries[length] = entry_of(node, ids[:length])
                if file.entry == entries[length]:
                    shorter.append(file)
        if not shorter:
            return None
        return _Useless(
            self._clock() + self._seconds,
            folder,
            tuple(_last_word(file) for file in shorter),
            frozenset(_last_word(file) for file in longer),
        )


def _last_word(file: EntryFile) -> str:
    return file.name.rpartition("/")[2]
