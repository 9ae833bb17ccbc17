"""Copies: copies files from level to level of a tiered store, in threads."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from kvx_core.errors import StoreError
from kvx_core.stores.blob_store import BlobStore, Content
from kvx_core.stores.tiers.breaker import LeftOut

_THREADS = 16
_MOST_COPIES = 1 << 16  # copies that wait; more are not made
_MOST_AGAIN = 16  # failed copies that are tried again after one that has not failed
_MOST_BYTES = 1 << 30  # of a file that is copied
_WAIT_SECONDS = 30.0  # the longest wait for a copy; calls to levels have deadlines of their own

_logger = logging.getLogger("kvx")


@dataclass(eq=False, slots=True)
class _Copy:
    """A copy that waits or runs."""

    name: str
    first: int  # the first level that it is for
    replaces: bool = False  # a level may have a file of this name with other content
    most_bytes: int = _MOST_BYTES  # of a file that is copied
    is_cancelled: bool = False
    over: threading.Event = field(default_factory=threading.Event)


class Copies:
    """The copies of one process. Threads may share it."""

    def __init__(self, levels: Sequence[BlobStore]) -> None:
        """levels: the fastest first"""
        self._levels = levels
        self._process = -1
        self._own_process()

    def down(self, name: str, first: int, *, replaces: bool = False) -> None:
        """Has a file copied to the levels from number `first` on.

        A copy that fails is made later, after one that has not failed.
        replaces: a level may have a file of this name with other content
        """
        self._own_process()
        if first < len(self._levels) and self._num_under_way < _MOST_COPIES:
            copy = _Copy(name, first, replaces)
            with self._changed:
                self._downs[name] = copy
            self._submit(copy, self._copy_down)

    def up(self, name: str, most_bytes: int, *, waits: bool) -> None:
        """Has a file copied to the first level, if it has at most so many bytes.

        waits: True: `wait_for` waits until it is there
        """
        self._own_process()
        copy = _Copy(name, 0, most_bytes=most_bytes)
        with self._changed:
            if name in self._ups:
                return
            self._ups[name] = copy if waits else None
        self._submit(copy, self._copy_up)

    def wait_for(self, name: str) -> None:
        """Waits for a file that is on its way up, and for no other."""
        self._own_process()
        copy = self._ups.get(name)
        if copy is not None:
            copy.over.wait(_WAIT_SECONDS)

    def cancel(self, name: str) -> None:
        """Cancels the last copy down of a file; waits until it is over if it runs."""
        self._own_process()
        with self._changed:
            copy = self._downs.get(name)
            if copy is not None:
                copy.is_cancelled = True
        if copy is not None and copy in self._running:
            copy.over.wait(_WAIT_SECONDS)

    def settle(self, seconds: float) -> bool:
        """Waits until all copies are made. Returns False if some are not after so many seconds."""
        self._own_process()
        with self._changed:
            self._changed.wait_for(lambda: not self._num_under_way, seconds)
            return not (self._num_under_way or self._again)

    def _copy_down(self, copy: _Copy) -> None:
        for number in range(copy.first, len(self._levels)):
            try:
                source = self._holder(copy.name, range(number))
                if source is None or copy.is_cancelled:  # it was deleted
                    return
                level, content = self._levels[number], _content(source, copy)
                put = level.replace if copy.replaces else level.put
                put(copy.name, content)
            except LeftOut:
                with self._changed:
                    self._again.append((copy.name, number, copy.replaces))
                return
            except StoreError as error:
                _logger.warning("KVX did not copy %s to another tier: %s", copy.name, error)
                return
        for _ in range(_MOST_AGAIN):
            with self._changed:
                if not self._again:
                    return
                name, first, replaces = self._again.popleft()
            self.down(name, first, replaces=replaces)

    def _copy_up(self, copy: _Copy) -> None:
        try:
            source = self._holder(copy.name, range(1, len(self._levels)))
            if source is not None:
                self._levels[0].put(copy.name, _content(source, copy), durable=False)
        except StoreError:  # who asks for the file asks the levels below
            pass
        finally:
            with self._changed:
                self._ups.pop(copy.name, None)

    def _holder(self, name: str, numbers: Sequence[int]) -> BlobStore | None:
        """Returns the first of these levels that has a file. A level that fails has none."""
        for number in numbers:
            try:
                if self._levels[number].is_there(name):
                    return self._levels[number]
            except StoreError:
                if number == numbers[-1]:
                    raise
        return None

    def _submit(self, copy: _Copy, make: Callable[[_Copy], None]) -> None:
        with self._changed:
            self._num_under_way += 1
        self._threads.submit(self._run, copy, make)

    def _run(self, copy: _Copy, make: Callable[[_Copy], None]) -> None:
        with self._changed:
            self._running.add(copy)
        try:
            if not copy.is_cancelled:
                make(copy)
        finally:
            with self._changed:
                self._running.discard(copy)
                if self._downs.get(copy.name) is copy:
                    del self._downs[copy.name]
                self._num_under_way -= 1
                self._changed.notify_all()
            copy.over.set()

    def _own_process(self) -> None:
        """Makes threads of this process: a forked child has none of its parent's."""
        if self._process != os.getpid():
            self._process, self._changed = os.getpid(), threading.Condition()
            self._threads = ThreadPoolExecutor(_THREADS, "kvx-copy")
            self._num_under_way = 0
            self._running = set[_Copy]()
            self._downs: dict[str, _Copy] = {}  # the last copy of each file
            self._again: deque[tuple[str, int, bool]] = deque(maxlen=_MOST_COPIES)
            self._ups: dict[str, _Copy | None] = {}  # None: nobody waits for it


def _content(level: BlobStore, copy: _Copy) -> Content:
    """Returns the content of a file of a level, which is read when it is written elsewhere."""

    def parts() -> Sequence[memoryview]:
        found = level.read(copy.name, copy.most_bytes)
        if found is None:
            raise StoreError(f"{level.path_of(copy.name)} was deleted before it was copied")
        return [memoryview(found)]

    return Content(parts)
