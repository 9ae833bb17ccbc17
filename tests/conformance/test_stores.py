"""The suite's cases for stores, on small ones: sound stores pass, each fault is found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvx_conformance import runner
from kvx_conformance.case import Case, Outcome
from kvx_conformance.subjects import cases_of
from tests.conformance import small_stores

CASES = {case.name: case for case in cases_of("store")}
GOOD = {Outcome.PASS, Outcome.NOT_APPLICABLE}


def run(subject: str, cases: Sequence[Case]) -> list[runner.Result]:
    return list(runner.run("store", subject, cases))


def not_good(results: Sequence[runner.Result]) -> dict[str, str]:
    return {
        result.case.name: f"{result.outcome}: {result.why}"
        for result in results
        if result.outcome not in GOOD
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "subject", ["tests.conformance.small_stores:Sound", "kvx_conformance.stores.kvx:Store"]
)
def test_a_sound_store_fails_no_case(subject: str) -> None:
    results = run(subject, list(CASES.values()))
    assert not_good(results) == {}
    passed = [result.case.name for result in results if result.outcome is Outcome.PASS]
    # The others need what this engine has not: a scheduler, a second store, threads.
    assert {*CASES} - {*passed} == {
        "faults.a_disk_that_does_not_answer",
        "hybrids.a_pool_that_was_used",
        "schedules.a_second_connector_that_fails_poisons_nothing",
        "schedules.aborted_requests",
        "schedules.blocks_are_given_back",
        "schedules.preempted_requests",
        "schedules.resets_in_mid_run",
        "weights.sleep_loses_nothing",
    }


@pytest.mark.slow
@pytest.mark.parametrize("store", [*dict.fromkeys(store for _, store in small_stores.FAULTS)])
def test_a_fault_is_found(store: Any) -> None:
    """By each case that is meant for it."""
    wanted = [case for case, faulty in small_stores.FAULTS if faulty is store]
    cases = [replace(CASES[name], seconds=min(CASES[name].seconds, 12)) for name in wanted]
    results = run(f"tests.conformance.small_stores:{store.__name__}", cases)
    assert not [result.case.name for result in results if result.outcome in GOOD]


def test_each_case_of_a_store_finds_a_fault() -> None:
    """But for those of a scheduler, and of states, which the suite's own engine has not."""
    of_vllm = {name for name in CASES if name.startswith(("schedules.", "hybrids."))}
    found = {case for case, _ in small_stores.FAULTS}
    assert {*CASES} - found <= of_vllm | {
        "faults.a_disk_that_does_not_answer",
        "weights.sleep_loses_nothing",
    }
