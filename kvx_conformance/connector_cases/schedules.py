"""Schedules: requests that end early, lose their blocks or share them, and others' failed loads."""

from __future__ import annotations

import random
from dataclasses import replace

from kvx_conformance.case import Lost, case
from kvx_conformance.connector import Answer, Request, Setup
from kvx_conformance.connector_probe import LENGTH, Probe, prompts, reused, some_are_reused

_SECONDS = 300.0
_NEW = 30  # tokens: so many that requests need more blocks while they run
_ABORT_AT = (0, 1, 60, 150, LENGTH - 1, LENGTH + 9)  # tokens that are computed
_TIGHT = Setup(num_blocks=24, step_tokens=128)  # fewer blocks than eight prompts need


def _requests(seed: int, count: int = 24) -> list[Request]:
    """Prompts of 1 to 150 tokens, some of which begin alike or are the same."""
    chance = random.Random(seed)
    beginnings = prompts(6, 90, seed=seed)
    ends = prompts(8, 60, seed=seed + 1)
    return [
        Request(
            chance.choice(beginnings).tokens[: chance.randrange(1, 90)]
            + chance.choice(ends).tokens[: chance.randrange(60)]
        )
        for _ in range(count)
    ]


def _run(probe: Probe, setup: Setup, *, aborts: bool = False, resets: bool = False) -> None:
    """Runs requests twice on a store, as `setup` schedules them; then a calm engine reads it.

    aborts: six long ones end, each after another number of tokens
    """
    store, asked = probe.folder(), []
    for seed in (1, 2):
        requests, abort_at = _requests(seed), dict[int, int]()
        if aborts:
            requests = requests[:10] + prompts(6, seed=seed + 30)
            abort_at = dict(zip(range(10, 16), _ABORT_AT, strict=True))
        with probe.engine(setup, store) as engine:
            before = engine.free_blocks()
            answers = engine.ask(
                requests,
                new_tokens=_NEW,
                abort_at=abort_at,
                reset_at=[5, 12, 13, 30] if resets else (),
            )
            after = engine.free_blocks()
            engine.settle()
        if after != before:
            raise Lost(f"{before - after} blocks are held by requests that have ended")
        probe.check(answers, requests, setup, _NEW, aborted=abort_at)
        asked.append(requests)
    for requests in asked:
        probe.read(store, requests, Setup(family=setup.family, block_size=64))


@case("preempted requests are computed again: vLLM", seconds=_SECONDS)
def preempted_requests(probe: Probe) -> None:
    """Requests that lose their blocks to others, and come back, are answered right; so are those
    that read what was stored meanwhile.
    """
    _run(probe, _TIGHT)
    _run(probe, replace(_TIGHT, prefix_caching=False))
    _run(probe, replace(_TIGHT, family="windows", num_blocks=48))


@case("LMCache #4385, vLLM: aborts while blocks are loaded or saved", seconds=_SECONDS)
def aborted_requests(probe: Probe) -> None:
    """Requests that are aborted at any step leave no block held, and nothing wrong stored."""
    _run(probe, Setup(step_tokens=72), aborts=True)  # no multiple of a block
    _run(probe, replace(_TIGHT, step_tokens=72), aborts=True)


@case("reset_prefix_cache(reset_running_requests=True)", seconds=_SECONDS)
def resets_in_mid_run(probe: Probe) -> None:
    """Requests whose blocks are taken from all of them in mid-run are answered right."""
    _run(probe, Setup(step_tokens=128), resets=True)


@case("MultiConnector: another connector's failed load is stored as good", seconds=_SECONDS)
def a_second_connector_that_fails_poisons_nothing(probe: Probe) -> None:
    """What a second connector was to load, and has not loaded, is not stored as if it were good."""
    setups = (
        Setup(beside="before"),
        Setup(beside="behind", prefix_caching=False),
        Setup(beside="apart"),
    )
    for setup in setups:
        store, requests = probe.folder(), prompts(3, 150)
        follow = [Request(one.tokens[:120] + prompts(1, 60, seed=8)[0].tokens) for one in requests]
        with probe.engine(setup, store) as engine:
            probe.check(engine.ask(requests), requests)
            probe.check(engine.ask(follow), follow)
            engine.settle()
        probe.read(store, requests)
        probe.read(store, follow, Setup(block_size=64))


@case("a request that ends while it is saved", seconds=_SECONDS)
def blocks_are_given_back(probe: Probe) -> None:
    """After all requests have ended, loaded or computed, no block is held."""
    store, requests = probe.folder(), prompts(4)
    for setup in (Setup(), Setup(block_size=64), Setup(prefix_caching=False)):
        with probe.engine(setup, store) as engine:
            before = engine.free_blocks()
            for _ in range(2):
                answers: list[Answer] = engine.ask(requests)
                probe.check(answers, requests, setup)
                engine.forget()
            after = engine.free_blocks()
            engine.settle()
        if after != before:
            raise Lost(f"{before - after} blocks are held by requests that have ended")


@case("one engine, many requests of one prompt at once", seconds=_SECONDS)
def a_load_that_many_wait_for(probe: Probe) -> None:
    """Requests of one stored prompt that come at once are all answered right."""
    store, (one,) = probe.folder(), prompts(1)
    probe.write(store, [one])
    some_are_reused(probe.read(store, [one] * 6), "the prompt is stored")
    counts = reused(probe.read(store, [one] * 6, Setup(prefix_caching=False)))
    if not any(counts):
        raise Lost("none of six requests has reused the stored prompt")
