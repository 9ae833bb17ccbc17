"""Choices of a policy: what is found is loaded, computed or given up, as it was seen to pay."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from kvx_core.connector.choices import Choices
from kvx_core.stores.match import Match, StoredSpan

NEAR = Match(512, (StoredSpan(0, 512, 512, ("a",)),))
FAR = Match(512, NEAR.spans, is_far=True)


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Finder:
    """Whose files take so long to read."""

    seconds: float
    probed: list[Match] = field(default_factory=list)

    def probe(self, match: Match) -> tuple[int, float]:
        self.probed.append(match)
        return 128, self.seconds


def choices_of(clock: Clock, gives_up: bool = True) -> Choices:
    """Of an engine that computes a token in a millisecond."""
    found = Choices(gives_up, clock=clock)
    found.costs._clock = clock
    for _ in range(4):
        found.costs.step(100)
        clock.now += 0.1
        found.costs.step(0)
    return found


def load(choices: Choices, clock: Clock, match: Match, seconds: float, *, good: bool = True) -> Any:
    limit = choices.begins("r", match, match.num_tokens)
    clock.now += seconds
    choices.ended("r", good=good)
    return limit


def test_a_place_that_is_slow_is_left_and_probed() -> None:
    clock = Clock()
    choices = choices_of(clock)
    assert choices.pays(FAR, 512)
    load(choices, clock, FAR, 2.0)
    assert not choices.pays(FAR, 512)
    assert choices.pays(NEAR, 512)
    assert choices.is_due(FAR)
    assert not choices.is_due(FAR)
    slow = Finder(0.5)
    choices.probe(slow, FAR)  # type: ignore[arg-type]
    assert slow.probed == [FAR]
    assert not choices.pays(FAR, 512)
    clock.now += 1.1
    assert choices.is_due(FAR)
    choices.probe(Finder(0.01), FAR)  # type: ignore[arg-type]
    assert choices.pays(FAR, 512)


def test_a_load_that_turns_slow_is_given_up_once() -> None:
    clock = Clock()
    choices = choices_of(clock)
    for _ in range(5):
        assert load(choices, clock, FAR, 0.01) == pytest.approx(0.512)
    limit = load(choices, clock, FAR, 0.52, good=False)
    assert limit == pytest.approx(0.512)
    assert not choices.pays(FAR, 512)


def test_another_failure_says_nothing_of_time() -> None:
    clock = Clock()
    choices = choices_of(clock)
    load(choices, clock, FAR, 0.1, good=False)
    assert choices.pays(FAR, 512)
    choices.ended("unknown", good=True)
    assert choices.costs.loading("far", 512) is None


def test_nothing_is_given_up_where_a_failed_load_ends_the_request() -> None:
    clock = Clock()
    choices = choices_of(clock, gives_up=False)
    assert load(choices, clock, FAR, 5.0) is None
    assert not choices.pays(FAR, 512)


@pytest.mark.parametrize("seed", range(3))
def test_regret(seed: int) -> None:
    """Of random places: after twenty requests the time is at most 1.1 of the better way, for all
    but one in forty, and a load that is given up costs no more than computing twice.
    """
    import random

    chance, clock = random.Random(seed), Clock()
    choices = choices_of(clock)
    for _ in range(12):
        latency, rate = chance.choice([(0.005, 1e-6), (0.05, 1e-4), (0.2, 5e-3), (1e6, 0.0)])
        worst = []
        for i in range(60):
            count = chance.choice([200, 500, 1000, 4000])
            match = Match(count, (StoredSpan(0, count, count, ("a",)),), is_far=True)
            computing, loading = 0.001 * count, latency + rate * count
            clock.now += 0.3
            if choices.pays(match, count):
                limit = choices.begins("r", match, count)
                assert limit == pytest.approx(computing)
                took = loading if loading <= limit else limit + computing
                clock.now += min(loading, limit)
                choices.ended("r", good=loading <= limit)
            else:
                took = computing
                clock.now += took
                if choices.is_due(match):
                    file = latency + rate * min(count, 128)
                    if file < 10:
                        choices.probe(Finder(file), match)  # type: ignore[arg-type]
            assert took <= 2 * max(computing, loading)
            if i >= 20:
                worst.append(took / min(computing, loading))
        worst.sort()
        assert worst[-2] <= 1.1, (latency, rate, worst[-5:])
