"""The suite's cases for connectors, in real vLLM: each fault is found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest

from kvx_conformance import runner
from kvx_conformance.case import Outcome
from tests.conformance import small_stores
from tests.conformance.test_connectors import CASES
from tests.conformance.test_stores import GOOD
from tests.fakes.vllm import needs_cpu_op

pytestmark = [needs_cpu_op, pytest.mark.slow]

_FAULTY = "tests.conformance.faulty_connectors"
_HYBRID = "tests.conformance.faulty_hybrids"
# What a store alone cannot fail, each case with a connector that must. vLLM's own for files stores
# what another connector has not loaded.
FAULTS = [
    ("faults.a_disk_that_does_not_answer", f"{_FAULTY}:WaitsForTheDisk"),
    (
        "schedules.a_second_connector_that_fails_poisons_nothing",
        "kvx_conformance.connectors.vllm_files:Connector",
    ),
    ("hybrids.a_conversation_goes_on", f"{_HYBRID}:CountsAStateShort"),
    ("hybrids.a_pool_that_was_used", f"{_HYBRID}:LeavesTheRestOfABlock"),
    ("hybrids.gone_between_lookup_and_load", f"{_HYBRID}:TakesFailedLoadsForGood"),
    ("hybrids.one_half_that_is_gone", f"{_HYBRID}:AsksForNoStates"),
    ("hybrids.prompts_that_go_on", f"{_HYBRID}:CountsAStateShort"),
    ("hybrids.prompts_that_part", f"{_HYBRID}:CountsAStateShort"),
    ("hybrids.ranks_that_share", f"{_HYBRID}:TakesTheOthersSlice"),
    ("hybrids.the_same_prompt_twice", f"{_HYBRID}:CountsAStateShort"),
    ("schedules.aborted_requests", f"{_FAULTY}:SavesWhatWasNotComputed"),
    ("schedules.blocks_are_given_back", f"{_FAULTY}:NeverLetsGo"),
    ("schedules.preempted_requests", f"{_FAULTY}:KeepsOldBlocks"),
    ("schedules.resets_in_mid_run", f"{_FAULTY}:KeepsOldBlocks"),
    ("weights.sleep_loses_nothing", f"{_FAULTY}:ForgetsInItsSleep"),
]


@pytest.fixture(scope="module")
def faulty() -> Iterator[runner.Runner]:
    with closing(runner.Runner("connector")) as found:
        yield found


@pytest.mark.parametrize(("case", "fault"), FAULTS)
def test_a_fault_is_found(case: str, fault: str, faulty: runner.Runner) -> None:
    seconds = 120 if case == "hybrids.ranks_that_share" else 25  # of processes that start
    result = faulty.run(replace(CASES[case], seconds=seconds), fault)
    assert result.outcome not in {*GOOD, Outcome.REFUSED}, result.why


def test_each_case_finds_a_fault() -> None:
    assert {*CASES} == {case for case, _ in (*small_stores.FAULTS, *FAULTS)}
