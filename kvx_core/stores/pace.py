"""Pace: pauses in long work, so that the other threads of an engine can run."""

from __future__ import annotations

import time

PERIOD_SECONDS = 4e-4  # between two pauses
REST_SECONDS = 5e-5  # of a pause


class Pace:
    """Pauses often for other threads: a thread that computes in Python holds the GIL for 5 ms.

    Call `yield_gil` between pieces of work that each take much less than a millisecond.
    """

    def __init__(self, seconds: float = PERIOD_SECONDS, rest_seconds: float = REST_SECONDS) -> None:
        """seconds: time of work between two pauses; rest_seconds: length of a pause"""
        self._seconds, self._rest_seconds = seconds, rest_seconds
        self._last = time.perf_counter()

    @classmethod
    def gentle(cls) -> Pace:
        """Returns a pace for work that nobody waits for: the work runs a fifth of the time.

        An engine takes the GIL back after each of its operators, and waits each time for the thread
        that has it: beside a thread that hardly pauses, a step takes three times as long.
        """
        return cls(1e-4, 4e-4)

    def yield_gil(self) -> None:
        """Pauses if the last pause is long enough ago."""
        if time.perf_counter() - self._last >= self._seconds:
            self.rest()

    def rest(self) -> None:
        """Pauses now."""
        pause(self._rest_seconds)
        self._last = time.perf_counter()


def pause(seconds: float = REST_SECONDS) -> None:
    """Sleeps, so that another thread can take the GIL."""
    time.sleep(seconds)  # sleep(0) would take the GIL back before another thread wakes up
