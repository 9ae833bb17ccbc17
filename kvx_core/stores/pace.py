"""Pauses in long work, for the other threads of an engine."""

from __future__ import annotations

import time
from collections.abc import Iterator

PERIOD_SECONDS = 4e-4  # between two pauses
_AT_ONCE = 1 << 10  # names: freeing them takes less than a tenth of a millisecond


class Pace:
    """Lets other threads run often: a thread that computes in Python holds the GIL for 5 ms.

    `breathe` is called between pieces of work, each of which takes much less than a millisecond.
    """

    def __init__(self, seconds: float = PERIOD_SECONDS) -> None:
        self._seconds = seconds
        self._last = time.perf_counter()

    def breathe(self) -> None:
        now = time.perf_counter()
        if now - self._last >= self._seconds:
            pause()
            self._last = time.perf_counter()


def pause() -> None:
    """Lets another thread take the GIL."""
    time.sleep(50e-6)  # sleep(0) would take the GIL back before anybody else wakes up


def drain(names: list[str]) -> Iterator[list[str]]:
    """Takes all names out of a list, a slice at a time, and lets other threads run in between.

    Freeing 65,536 names at once takes 1.5 ms.
    """
    pace = Pace()
    while names:
        part = names[-_AT_ONCE:]
        del names[-_AT_ONCE:]
        yield part
        pace.breathe()
