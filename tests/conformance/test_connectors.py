"""The suite's cases for connectors, in real vLLM: KVXConnector passes, each fault is found."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from kvx_conformance import runner
from kvx_conformance.case import Outcome
from kvx_conformance.subjects import cases_of
from tests.conformance import small_stores
from tests.conformance.test_stores import GOOD, not_good
from tests.fakes.vllm import needs_cpu_op
from tests.native import ROOT

pytestmark = [needs_cpu_op, pytest.mark.slow]

CASES = {case.name: case for case in cases_of("connector")}
THEMES = sorted({name.partition(".")[0] for name in CASES})
NEED_AVX512 = {  # vLLM's FP8 caches on CPU do
    "settings.a_rounded_cache_is_not_taken_for_an_exact_one",
    "settings.precision_is_compared_layer_by_layer",
}
_FAULTY = "tests.conformance.faulty_connectors"
# What a store alone cannot fail, each case with a connector that must. vLLM's own for files stores
# what another connector has not loaded.
FAULTS = [
    ("faults.a_disk_that_does_not_answer", f"{_FAULTY}:WaitsForTheDisk"),
    (
        "schedules.a_second_connector_that_fails_poisons_nothing",
        "kvx_conformance.connectors.vllm_files:Connector",
    ),
    ("schedules.aborted_requests", f"{_FAULTY}:SavesWhatWasNotComputed"),
    ("schedules.blocks_are_given_back", f"{_FAULTY}:NeverLetsGo"),
    ("schedules.preempted_requests", f"{_FAULTY}:KeepsOldBlocks"),
    ("schedules.resets_in_mid_run", f"{_FAULTY}:KeepsOldBlocks"),
    ("weights.sleep_loses_nothing", f"{_FAULTY}:ForgetsInItsSleep"),
]


@pytest.mark.parametrize("theme", THEMES)
def test_kvx_passes(theme: str) -> None:
    """In a process of its own, as the command runs it."""
    subject = "kvx_conformance.connectors.kvx:Connector"
    cases = [case for name, case in CASES.items() if name.partition(".")[0] == theme]
    results = list(runner.run("connector", subject, cases))
    assert not_good(results) == {}
    left_out = {one.case.name for one in results if one.outcome is Outcome.NOT_APPLICABLE}
    assert left_out <= NEED_AVX512


@pytest.mark.parametrize(("case", "fault"), FAULTS)
def test_a_fault_is_found(case: str, fault: str) -> None:
    cases = [replace(CASES[case], seconds=60)]
    (result,) = runner.run("connector", fault, cases)
    assert result.outcome not in {*GOOD, Outcome.REFUSED}, result.why


def test_each_case_finds_a_fault() -> None:
    assert {*CASES} == {case for case, _ in (*small_stores.FAULTS, *FAULTS)}


def test_the_page_has_each_case() -> None:
    """With its promise and source as `--list` prints them."""
    page = (ROOT / "docs" / "conformance.md").read_text()
    rows = {f"| `{one.name}` | {one.says} | {one.source} |" for one in CASES.values()}
    assert rows <= set(page.splitlines())


def test_the_connector_of_the_page_starts() -> None:
    """docs/conformance.md: a connector of one's own in ten lines."""
    page = (ROOT / "docs" / "conformance.md").read_text()
    (code,) = re.findall(r"```python\n# my_connector\.py\n(.*?)```", page, re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    names: dict[str, type] = {}
    exec(code, names)
    assert names["MyConnector"]().transfer("store")["kv_connector_extra_config"]
