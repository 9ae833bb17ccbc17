"""Weights and caches that change while an engine runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from kvx_conformance.case import Wrong, case
from kvx_conformance.connector import Request, Setup
from kvx_conformance.connector_probe import (
    PLAIN,
    Probe,
    none_is_reused,
    prompts,
    some_are_reused,
)
from kvx_conformance.served import Served

_SECONDS = 240.0
_OTHER = Setup(weights="layer", place="other")


@case("vLLM #42695, SGLang #27886: weights updated in place", seconds=_SECONDS)
def files_loaded_in_place_share_nothing(probe: Probe) -> None:
    """After other weights were loaded into a running engine, nothing stored before is taken."""
    store, requests = probe.folder(), prompts(2)
    with probe.engine(PLAIN, store) as engine:
        probe.check(engine.ask(requests), requests)
        engine.settle()
        engine.replace_weights("layer", "files")
        engine.forget()
        answers = engine.ask(requests)
        probe.check(answers, requests, _OTHER)
        none_is_reused(answers, "of the weights before")


@case("RL loops write tensors that no file has", seconds=_SECONDS)
def tensors_written_in_place_share_nothing(probe: Probe) -> None:
    """After tensors were written in place, nothing that was stored before is taken."""
    requests = prompts(2)
    expected = _after_tensors(probe, requests)
    store = probe.folder()
    with probe.engine(PLAIN, store) as engine:
        probe.check(engine.ask(requests), requests)
        engine.settle()
        engine.replace_weights("layer", "tensors")
        engine.forget()
        answers = engine.ask(requests)
        if [answer.tokens for answer in answers] != expected:
            raise Wrong("an engine with changed weights went on otherwise than one without a store")
        none_is_reused(answers, "of the weights before")


@case("a second engine of the old weights on the same store", seconds=_SECONDS)
def weights_in_place_poison_nobody(probe: Probe) -> None:
    """What an engine stores after its weights were replaced is not found by engines of the weights
    that it started with.
    """
    ways: tuple[Literal["files", "tensors"], ...] = ("files", "tensors")
    for how in ways:
        store, before, after = probe.folder(), prompts(1, seed=1), prompts(2, seed=2)
        with probe.engine(PLAIN, store) as engine:
            engine.ask(before)
            engine.settle()
            engine.replace_weights("layer", how)
            engine.forget()
            engine.ask(after)
            engine.settle()
        none_is_reused(probe.read(store, after), "of weights that were put in place of these")
        some_are_reused(probe.read(store, before), "these weights have stored them")


@case("vLLM: reset_prefix_cache empties the engine's own cache", seconds=_SECONDS)
def a_reset_loses_nothing_stored(probe: Probe) -> None:
    """After the engine's own prefix cache was emptied, the store still has the prompts."""
    with probe.engine(PLAIN, probe.folder()) as engine:
        _finds_after(engine.forget, engine, probe)


@case("vLLM: sleep mode; KVX lost all entries by it once (0 of 253 found)", seconds=_SECONDS)
def sleep_loses_nothing(probe: Probe) -> None:
    """After an engine has slept it finds what was stored, and so do others what it stores then."""
    store, later = probe.folder(), prompts(2, seed=5)
    with probe.engine(PLAIN, store) as engine:
        _finds_after(engine.sleep, engine, probe)
        probe.check(engine.ask(later), later)
        engine.settle()
    some_are_reused(probe.read(store, later), "they were stored after a sleep")


def _finds_after(change: Callable[[], None], engine: Served, probe: Probe) -> None:
    """What the engine has stored before a change, it finds and goes on with after it."""
    requests = prompts(2)
    engine.ask(requests)
    engine.settle()
    change()
    answers = engine.ask(requests)
    probe.check(answers, requests)
    some_are_reused(answers, "the same weights have stored them, in this engine")


def _after_tensors(probe: Probe, requests: Sequence[Request]) -> list[tuple[int, ...]]:
    """What an engine without a store answers after the same change."""
    with probe.engine(PLAIN, None, process="alone") as engine:
        engine.replace_weights("layer", "tensors")
        changed = [answer.tokens for answer in engine.ask(requests)]
    if changed == probe.alone(requests):
        raise AssertionError("the change changes no answer: tokens prove nothing here")
    return changed
