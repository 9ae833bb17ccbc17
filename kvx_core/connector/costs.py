"""Costs: estimates whether loading tokens or computing them is sooner, from what was seen so far.

A load that takes longer than computing is worse than a miss. So an engine loads what it expects to
be sooner, and gives a load up that takes longer than computing would have.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from threading import Lock

_LEAST_TOKENS = 32  # of a step whose time says what a token costs
_MOST_STEPS, _LEAST_STEPS = 16, 2  # that are remembered; that have to be
_MOST_LOADS = 16  # that are remembered, of each place
_WEIGHT = 0.7  # of a load, against the one after it
_WORSE = 4.0  # a load that was given up counts as one that took so many times as long
_LEAST_SECONDS = 0.02  # before a load is given up: a step takes about as long


class Costs:
    """What tokens have cost an engine lately. Threads may share it.

    A place is where files are: "near" or "far".
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, Lock()
        self._begun: tuple[float, int] | None = None  # the last step, and its tokens
        self._steps: deque[float] = deque(maxlen=_MOST_STEPS)  # seconds per token
        self._loads: dict[str, deque[tuple[int, float]]] = {}  # tokens and seconds, by place

    # ---- what is seen ----

    def step(self, num_tokens: int) -> None:
        """Notes that a step of the engine begins, and that the one before it is over.

        num_tokens: that it computes
        """
        now = self._clock()
        if self._begun is not None and self._begun[1] >= _LEAST_TOKENS:
            begin, count = self._begun
            self._steps.append((now - begin) / count)
        self._begun = (now, num_tokens)

    def loaded(self, place: str, num_tokens: int, seconds: float) -> None:
        """Notes a load that has ended well."""
        with self._lock:
            loads = self._loads.setdefault(place, deque(maxlen=_MOST_LOADS))
            loads.append((max(num_tokens, 1), seconds))

    def gave_up(self, place: str, num_tokens: int, seconds: float) -> None:
        """Notes a load that was given up after so many seconds: earlier ones tell nothing now."""
        self.replaced(place, num_tokens, _WORSE * seconds)

    def replaced(self, place: str, num_tokens: int, seconds: float) -> None:
        """Notes a load, or a probe, after which earlier loads of the place tell nothing."""
        with self._lock:
            self._loads[place] = deque([(max(num_tokens, 1), seconds)], maxlen=_MOST_LOADS)

    # ---- what is expected ----

    def computing(self, num_tokens: int) -> float | None:
        """Returns the seconds that so many tokens take to compute; None: it is not known yet."""
        if len(self._steps) < _LEAST_STEPS:
            return None
        # The lower quartile: a step after which nothing was to be done seems to take longer.
        return sorted(self._steps)[len(self._steps) // 4] * num_tokens

    def loading(self, place: str, num_tokens: int) -> float | None:
        """Returns the seconds that so many tokens take to load; None: it is not known yet."""
        with self._lock:
            loads = list(self._loads.get(place, ()))
        return _line(reversed(loads), num_tokens) if loads else None

    def pays(self, place: str, num_tokens: int) -> bool:
        """True if loading so many tokens is expected to be sooner than computing them, or if that
        is not known yet.
        """
        computing, loading = self.computing(num_tokens), self.loading(place, num_tokens)
        return computing is None or loading is None or loading <= computing

    def limit(self, num_tokens: int) -> float | None:
        """Returns after how many seconds a load of so many tokens is given up; None: never."""
        computing = self.computing(num_tokens)
        return None if computing is None else max(computing, _LEAST_SECONDS)


def _line(loads: Iterable[tuple[int, float]], num_tokens: int) -> float:
    """Returns the seconds for so many tokens on the line through loads: a latency, and seconds per
    token, neither of them negative.

    loads: tokens and seconds, the latest first, which weighs most
    """
    weight, w, wn, ws, wnn, wns = 1.0, 0.0, 0.0, 0.0, 0.0, 0.0
    for count, seconds in loads:
        w, wn, ws = w + weight, wn + weight * count, ws + weight * seconds
        wnn, wns = wnn + weight * count * count, wns + weight * count * seconds
        weight *= _WEIGHT
    spread = w * wnn - wn * wn
    mean = ws / w
    if math.isclose(w * wnn, wn * wn, rel_tol=1e-6):  # of one length: half of it is latency
        return 0.5 * mean * (1 + num_tokens * w / wn)
    rate = (w * wns - wn * ws) / spread
    latency = (ws - rate * wn) / w
    if rate < 0:
        return mean
    return rate * num_tokens + latency if latency >= 0 else num_tokens * wns / wnn
