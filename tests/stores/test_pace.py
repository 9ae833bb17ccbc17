"""Long work lets other threads run: how often it pauses, and for how long."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvx_core.stores import pace
from kvx_core.stores.pace import Pace


class Clock:
    """Seconds, of which work takes some and pauses the rest."""

    def __init__(self) -> None:
        self.now, self.slept = 0.0, 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    own_time = SimpleNamespace(sleep=found.sleep, perf_counter=found.perf_counter)
    monkeypatch.setattr(pace, "time", own_time)
    return found


@pytest.mark.parametrize(("is_gentle", "share"), [(False, 8 / 9), (True, 1 / 5)])
def test_work_takes_its_share_of_the_time(clock: Clock, is_gentle: bool, share: float) -> None:
    own = Pace.gentle() if is_gentle else Pace()
    pieces, seconds = 10_000, 1e-5
    for _ in range(pieces):
        clock.now += seconds
        own.yield_gil()
    assert pieces * seconds / clock.now == pytest.approx(share, rel=0.1)


def test_a_rest_begins_a_new_period(clock: Clock) -> None:
    own = Pace()
    clock.now += 0.9 * pace.PERIOD_SECONDS
    own.rest()
    assert clock.slept == pace.REST_SECONDS
    clock.now += 0.9 * pace.PERIOD_SECONDS
    own.yield_gil()
    assert clock.slept == pace.REST_SECONDS
    clock.now += 0.2 * pace.PERIOD_SECONDS
    own.yield_gil()
    assert clock.slept == pytest.approx(2 * pace.REST_SECONDS)
