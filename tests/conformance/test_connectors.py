"""The suite's cases for connectors, in real vLLM: KVXConnector passes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing

import pytest

from kvx_conformance import runner
from kvx_conformance.case import Outcome
from kvx_conformance.subjects import cases_of
from tests.fakes.vllm import needs_cpu_op
from tests.native import ROOT

pytestmark = [needs_cpu_op, pytest.mark.slow]

CASES = {case.name: case for case in cases_of("connector")}
NEED_AVX512 = {  # vLLM's FP8 caches on CPU do
    "settings.a_rounded_cache_is_not_taken_for_an_exact_one",
    "settings.precision_is_compared_layer_by_layer",
}


@pytest.fixture(scope="module")
def kvx() -> Iterator[runner.Runner]:
    with closing(runner.Runner("connector")) as found:
        yield found


@pytest.mark.parametrize("case", CASES)
def test_kvx_passes(case: str, kvx: runner.Runner) -> None:
    result = kvx.run(CASES[case], "kvx_conformance.connectors.kvx:Connector")
    may_not_run = result.outcome is Outcome.NOT_APPLICABLE and case in NEED_AVX512
    assert may_not_run or result.outcome is Outcome.PASS, result.why


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
