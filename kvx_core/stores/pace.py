"""Pauses in long work, for the other threads of an engine."""

from __future__ import annotations

import time

PERIOD_SECONDS = 4e-4  # between two pauses
REST_SECONDS = 5e-5  # of a pause


class Pace:
    """Lets other threads run often: a thread that computes in Python holds the GIL for 5 ms.

    `breathe` is called between pieces of work, each of which takes much less than a millisecond.
    """

    def __init__(self, seconds: float = PERIOD_SECONDS, rest_seconds: float = REST_SECONDS) -> None:
        """seconds: of work between two pauses; rest_seconds: of a pause"""
        self._seconds, self._rest_seconds = seconds, rest_seconds
        self._last = time.perf_counter()

    @classmethod
    def gentle(cls) -> Pace:
        """For work that nobody waits for: it takes a fifth of the time.

        An engine takes the GIL back after each of its operators, and waits each time for who has
        taken it meanwhile: a step beside a thread that hardly pauses takes three times as long.
        """
        return cls(1e-4, 4e-4)

    def yield_gil(self) -> None:
        """Pauses if it is time to."""
        if time.perf_counter() - self._last >= self._seconds:
            self.rest()

    def rest(self) -> None:
        """Pauses."""
        pause(self._rest_seconds)
        self._last = time.perf_counter()


def pause(seconds: float = REST_SECONDS) -> None:
    """Lets another thread take the GIL."""
    time.sleep(seconds)  # sleep(0) would take the GIL back before anybody else wakes up
