"""Pauses in long work, for the other threads of an engine."""

from __future__ import annotations

import time


class Pace:
    """Lets other threads run often: a thread that computes in Python holds the GIL for 5 ms.

    `breathe` is called between pieces of work, each of which takes much less than a millisecond.
    """

    def __init__(self, seconds: float = 0.0005) -> None:
        self._seconds = seconds
        self._last = time.perf_counter()

    def breathe(self) -> None:
        now = time.perf_counter()
        if now - self._last >= self._seconds:
            time.sleep(50e-6)  # sleep(0) would take the GIL back before anybody else wakes up
            self._last = time.perf_counter()
