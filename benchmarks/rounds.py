"""Interleaved timing: every contestant once per round, so that a disturbance hits all.

A ratio is the median over rounds of the ratio within a round, never a ratio of two medians taken at
different times.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from math import inf
from statistics import median

FEWEST_ROUNDS = 5  # for a median
SPIN_SECONDS = 0.01  # for which torch's threads keep their cores busy after their work has ended

Contestant = Callable[[], float]  # works, and returns the seconds that one call took


@dataclass(frozen=True)
class Goal:
    """KVX is to be at least `at_least` times as fast as `versus`."""

    versus: str
    at_least: float


@dataclass(frozen=True)
class Timing:
    """Seconds per call of each contestant, one number per round."""

    samples: Mapping[str, list[float]]

    def median(self, name: str) -> float:
        """Seconds of the median round."""
        return median(self.samples[name])

    def speedup(self, versus: str, name: str = "kvx") -> float:
        """How many times as fast as `versus` the contestant `name` is: the median round's ratio."""
        pairs = zip(self.samples[versus], self.samples[name], strict=True)
        return median(other / own for other, own in pairs)


def _at_once(case: str, name: str, work: Contestant) -> float:
    return work()


_turn: Callable[[str, str, Contestant], float] = _at_once
_left_out: Container[str] = ()


def take_turns(turn: Callable[[str, str, Contestant], float], left_out: Container[str]) -> None:
    """From now on `turn(case, contestant, work)` times what `compete` times, but for `left_out`."""
    global _turn, _left_out
    _turn, _left_out = turn, left_out


def compete(
    contestants: Mapping[str, Contestant],
    rounds: int,
    *,
    case: str = "",
    before: Callable[[str], object] = lambda name: None,
    seconds: float | None = None,
) -> Timing:
    """Times every contestant once per round; each round begins with another of them.

    case:    what they do, in words
    before:  called with the contestant's name ahead of every timing, untimed
    seconds: no round begins later than this, but for FEWEST_ROUNDS
    """
    names = [name for name in contestants if name not in _left_out]
    samples: dict[str, list[float]] = {name: [] for name in names}
    for name in names:  # first touches, lazy set-up, thread start
        before(name)
        contestants[name]()
    gc.collect()
    gc.disable()
    end = time.monotonic() + (inf if seconds is None else seconds)
    try:
        for r in range(rounds):
            if r >= FEWEST_ROUNDS and time.monotonic() > end:
                break
            for i in range(len(names)):
                name = names[(r + i) % len(names)]

                def work(name: str = name) -> float:
                    before(name)
                    return contestants[name]()

                samples[name].append(_turn(case, name, work))
    finally:
        gc.enable()
    return Timing(samples)


def once(call: Callable[[], object]) -> Contestant:
    """One call, timed from Python."""

    def run() -> float:
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    return run


def repeated(call: Callable[[], object], seconds: float = 2e-3) -> Contestant:
    """As many calls as take about `seconds`, timed together from Python."""

    def several(repeats: int) -> float:
        begin = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - begin) / repeats

    return batched(several, seconds)


def batched(several: Callable[[int], float], seconds: float = 2e-3) -> Contestant:
    """`several(n)` with an n that takes about `seconds`; it times itself, per call."""
    several(2)
    repeats = max(1, round(seconds / several(8)))

    def run() -> float:
        several(1 + repeats // 8)  # caches and clock as in the midst of such calls
        return several(repeats)

    return run
