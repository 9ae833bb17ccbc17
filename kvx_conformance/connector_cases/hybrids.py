"""Hybrids: models that keep a state beside keys and values. It stands for exactly its tokens."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace

from kvx_conformance.case import Wrong, case
from kvx_conformance.connector import Request, Setup
from kvx_conformance.connector_probe import SEEDS, Probe, prompts, some_are_reused
from kvx_conformance.damage import delete_half

_SECONDS = 300.0
_HYBRIDS = (
    Setup(family="convolutions"),
    Setup(family="states", prefix_caching=False),  # with it vLLM 0.32 itself fails on CPU
)
_LENGTHS = (96, 128, 201, 300)  # ends of blocks, and inside of them


def _stored_and_longer() -> tuple[list[Request], list[Request]]:
    """Prompts of some lengths, and prompts that go on behind them."""
    stored = [prompts(1, length, seed=length)[0] for length in _LENGTHS]
    new = prompts(len(stored), 40, seed=50)
    both = zip(stored, new, strict=True)
    return stored, [Request(one.tokens + more.tokens) for one, more in both]


@case("vLLM: what a load within a step writes is overwritten at a block's end", seconds=_SECONDS)
def prompts_that_go_on(probe: Probe) -> None:
    """Prompts that go on behind stored ones, wherever these end in a block, are answered right and
    reuse them, in engines of other block sizes too.
    """
    stored, longer = _stored_and_longer()
    for setup in _HYBRIDS:
        store = probe.folder()
        probe.write(store, stored, setup)
        for block_size in (32, 64):
            answers = probe.read(store, longer, replace(setup, block_size=block_size))
            some_are_reused(answers, "what they begin with is stored")


@case("a state is not cut: one after more tokens is another", seconds=_SECONDS)
def prompts_that_part(probe: Probe) -> None:
    """Prompts that part from a stored one at any token are right, and reuse no token behind."""
    (stored,), (other,) = prompts(1), prompts(1, seed=9)
    places = (1, 64, 128, 200, 256, 298, 299)
    forks = [Request(stored.tokens[:at] + other.tokens[: 310 - at]) for at in places]
    for setup in _HYBRIDS:
        store = probe.folder()
        probe.write(store, [stored], setup)
        for at, answer in zip(places, probe.read(store, forks, setup), strict=True):
            if answer.reused > at:
                raise Wrong(f"{answer.reused} tokens were reused of {at} common ones")


@case("vLLM: blocks whose state a load has spoilt stay in its prefix cache", seconds=_SECONDS)
def the_same_prompt_twice(probe: Probe) -> None:
    """A prompt is answered right again and again, by its own engine and by another: its last token
    is computed, and the state after all of it is of no use.
    """
    requests = prompts(2)
    for setup in _HYBRIDS:
        store = probe.folder()
        with probe.engine(setup, store) as engine:
            for _ in range(3):
                probe.check(engine.ask(requests), requests, setup)
                engine.settle()
                engine.forget()
        probe.read(store, requests, setup)


@case("vLLM: boundaries of blocks in an answer are not offered to connectors", seconds=_SECONDS)
def a_conversation_goes_on(probe: Probe) -> None:
    """A prompt behind a stored one and its answer is answered right and reuses some of it."""
    requests, new = prompts(2, 150), prompts(2, 20, seed=40)
    for setup in _HYBRIDS:
        store = probe.folder()
        answers = probe.write(store, requests, setup)
        turns = [
            Request(one.tokens + answer.tokens + more.tokens)
            for one, answer, more in zip(requests, answers, new, strict=True)
        ]
        some_are_reused(probe.read(store, turns, setup), "the turn before is stored")


@case("vLLM: invalid_block_ids ends an engine with several groups of blocks", seconds=_SECONDS)
def gone_between_lookup_and_load(probe: Probe) -> None:
    """A prompt whose files are deleted after they were found is computed."""
    (stored,) = prompts(1)
    longer = [Request(stored.tokens + more.tokens) for more in prompts(2, 20, seed=41)]
    for setup in _HYBRIDS:
        store = probe.folder()
        probe.write(store, [stored], setup)
        with probe.engine(setup, store) as engine:
            engine.lose(store)
            probe.check(engine.ask(longer), longer, setup)


@case(
    "vLLM: a load beside steps leaves the rest of a block as other groups had it", seconds=_SECONDS
)
def a_pool_that_was_used(probe: Probe) -> None:
    """Prompts are loaded into blocks that hold bytes which are no numbers, and answered right."""
    stored, longer = _stored_and_longer()
    for setup in _HYBRIDS:
        store = probe.folder()
        probe.write(store, stored, setup)
        with probe.engine(setup, store) as engine:
            engine.scribble()
            answers = engine.ask(longer)
            probe.check(answers, longer, setup)
            some_are_reused(answers, "what they begin with is stored")


@case("keys and values alone are no hit, and neither is a state alone", seconds=_SECONDS)
def one_half_that_is_gone(probe: Probe) -> None:
    """Prompts are answered right where half of all files are gone, any of them, for three seeds."""
    stored, longer = _stored_and_longer()
    for setup in _HYBRIDS:
        filled = probe.folder()
        probe.write(filled, stored, setup)
        for seed in SEEDS:
            store = probe.folder() / "store"
            shutil.copytree(filled, store)
            delete_half(store, random.Random(seed))
            probe.read(store, longer, setup)


@case(
    "Q, K and V, or x, B and C, are split one by one; equal slices of all are wrong",
    seconds=_SECONDS,
)
def ranks_that_share(probe: Probe) -> None:
    """Two ranks go on behind what one has stored, and one behind what two have."""
    stored, longer = _stored_and_longer()
    for setup in _HYBRIDS:
        for writers, readers in ((1, 2), (2, 1)):
            store = probe.folder()
            probe.write(store, stored, replace(setup, ranks=writers))
            answers = probe.read(store, longer, replace(setup, ranks=readers))
            some_are_reused(answers, "what they begin with is stored")
