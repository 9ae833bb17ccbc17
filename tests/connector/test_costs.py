"""Costs: what is sooner, after what was seen."""

from __future__ import annotations

import random

import pytest

from kvx_core.connector.costs import Costs


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def costs_of(per_token: float = 0.001, steps: int = 5) -> Costs:
    """Of an engine whose steps have taken so long."""
    clock = Clock()
    found = Costs(clock)
    for _ in range(steps):
        found.step(100)
        clock.now += 100 * per_token
        found.step(1)
        clock.now += 0.01
    return found


def test_what_is_not_known_is_tried() -> None:
    costs = Costs()
    assert costs.computing(100) is None
    assert costs.loading("far", 100) is None
    assert costs.pays("far", 100)
    assert costs.limit(100) is None
    costs = costs_of(steps=1)
    costs.loaded("far", 10, 1e9)
    assert costs.pays("far", 100)


def test_steps_say_what_a_token_costs() -> None:
    costs = costs_of(0.002)
    assert costs.computing(1000) == pytest.approx(2.0)
    assert costs.limit(1000) == pytest.approx(2.0)
    assert costs.limit(1) == 0.02


def test_pauses_between_steps_do_not_count() -> None:
    clock = Clock()
    costs = Costs(clock)
    for i in range(12):
        costs.step(100)
        clock.now += 0.1 if i % 2 else 50.0  # nothing to do after every other one
    assert costs.computing(1000) == pytest.approx(1.0)


@pytest.mark.parametrize("seed", range(3))
def test_latency_and_rate_are_told_apart(seed: int) -> None:
    chance, costs = random.Random(seed), costs_of()
    for _ in range(16):
        count = chance.choice([64, 512, 4096])
        costs.loaded("far", count, (0.06 + 1e-5 * count) * chance.uniform(0.95, 1.05))
    assert costs.loading("far", 1) == pytest.approx(0.06, rel=0.2)
    assert costs.loading("far", 100_000) == pytest.approx(1.06, rel=0.2)
    assert not costs.pays("far", 40)  # 0.04 s to compute
    assert costs.pays("far", 100)
    assert costs.pays("near", 40)


def test_a_place_that_turns_slow_is_left() -> None:
    costs = costs_of()
    for _ in range(16):
        costs.loaded("far", 1000, 0.01)
    assert costs.pays("far", 1000)
    costs.gave_up("far", 1000, 1.0)
    assert not costs.pays("far", 1000)
    assert costs.loading("far", 1000) == pytest.approx(4.0)
    costs.replaced("far", 100, 0.01)  # a probe
    assert costs.pays("far", 1000)


def test_one_length_tells_little_of_others() -> None:
    costs = costs_of()
    for _ in range(3):
        costs.loaded("far", 100, 0.1)
    assert costs.loading("far", 100) == pytest.approx(0.1)
    assert costs.loading("far", 1000) == pytest.approx(0.55)
    assert costs.loading("far", 10) == pytest.approx(0.055)


def test_noise_gives_no_negative_times() -> None:
    costs = costs_of()
    costs.loaded("far", 100, 1.0)
    costs.loaded("far", 1000, 0.1)
    assert costs.loading("far", 10**6) == pytest.approx(0.1 + 0.9 * 0.7 / 1.7)
    costs.replaced("far", 100, 0.001)
    costs.loaded("far", 1000, 1.0)
    found = costs.loading("far", 1)
    assert found is not None
    assert found > 0
