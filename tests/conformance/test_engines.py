"""The suite's cases for engines: sound engines pass all of them, each fault fails the one meant."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvx_conformance import memory
from kvx_conformance.case import Outcome
from kvx_conformance.subjects import cases_of
from kvx_conformance.worker import outcome_of
from kvx_core import CacheView, Verification, migrate
from tests.conformance import doubles, faults_of_meaning, faults_of_places
from tests.native import hostgrid_library

ROOT = Path(__file__).parents[2]
CASES = {case.name: case for case in cases_of("engine")}
FAULTS = doubles.FAULTS  # of these two modules
assert faults_of_places.__doc__
assert faults_of_meaning.__doc__
GOOD = {Outcome.PASS, Outcome.NOT_APPLICABLE}


@pytest.mark.parametrize("engine", doubles.SOUND, ids=lambda engine: engine.__name__)
def test_a_sound_engine_fails_no_case(engine: Any) -> None:
    for case in CASES.values():
        outcome, why = outcome_of(case, engine())
        assert outcome in GOOD, f"{case.name}: {why}"


def test_each_case_is_run_by_a_sound_engine() -> None:
    for case in CASES.values():
        assert Outcome.PASS in {outcome_of(case, engine())[0] for engine in doubles.SOUND}, (
            case.name
        )


@pytest.mark.parametrize(
    ("case", "engine"), FAULTS, ids=[f"{engine.__name__}-{case}" for case, engine in FAULTS]
)
def test_a_fault_is_found(case: str, engine: Any) -> None:
    outcome, why = outcome_of(CASES[case], engine())
    assert outcome in {Outcome.WRONG, Outcome.LOST, Outcome.REFUSED}, why
    assert engine.__name__ in why


def _takes_all(*arguments: Any, **options: Any) -> int:
    """A migrate that refuses nothing: what cannot be moved is left."""
    try:
        return migrate(*arguments, **options)
    except (ValueError, IndexError):
        return 0


def _moves_nothing(*arguments: Any, **options: Any) -> int:
    return 0


def _moves_a_token_more(src: Any, dst: Any, seq_lens: Any, **options: Any) -> int:
    return migrate(src, dst, [length + 1 for length in seq_lens], **options)


def _finds_nothing(*arguments: Any, **options: Any) -> Verification:
    return Verification(True, sum(arguments[2]), 0, None)


def _moves_more_behind(src: Any, dst: Any, seq_lens: Any, **options: Any) -> int:
    """As if a copy ended at blocks: the source's tokens behind are zeros."""
    if dst.view.facts.engine != "a plain cache" and [*seq_lens] == [4]:
        for tensor in memory.tensors(dst.view).values():
            memory.elements(tensor)[...] = 0
    return migrate(src, dst, seq_lens, **options)


# What a copy engine, not a description, would have to get wrong: put in its place.
COPIES = [
    ("tables.a_short_table_is_refused", "migrate", _takes_all),
    ("tables.hostile_ids_are_refused", "migrate", _takes_all),
    ("tables.duplicates_are_refused_to_write", "migrate", _takes_all),
    ("tables.the_null_block_is_refused", "migrate", _takes_all),
    ("tables.padding_is_not_read", "migrate", _moves_nothing),
    ("lengths.more_than_is_held_is_refused", "migrate", _takes_all),
    ("lengths.no_tokens_move_nothing", "migrate", _moves_a_token_more),
    ("facts.another_model_is_refused", "migrate", _moves_nothing),
    ("scales.fp8_goes_and_comes_back", "migrate", _moves_nothing),
    ("moves.tokens_come_back", "migrate", _moves_nothing),
    ("moves.tokens_behind_stay", "migrate", _moves_more_behind),
    ("moves.verify_finds_a_byte", "verify", _finds_nothing),
]


@pytest.mark.parametrize(("case", "name", "instead"), COPIES)
def test_a_copy_that_is_wrong_is_found(
    case: str, name: str, instead: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"kvx_conformance.engine_cases.{case.partition('.')[0]}.{name}", instead)
    found = [outcome_of(CASES[case], engine())[0] for engine in doubles.SOUND]
    assert Outcome.PASS not in found
    assert set(found) - {Outcome.NOT_APPLICABLE}


def test_each_case_finds_a_fault() -> None:
    assert set(CASES) == {case for case, _ in FAULTS} | {case for case, *_ in COPIES}


def test_each_case_says_its_promise_and_its_source() -> None:
    for case in CASES.values():
        assert case.says.endswith("."), case.name
        assert len(case.source) > 3, case.name


def run_suite(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    return subprocess.run(
        [sys.executable, "-m", "kvx_conformance", "engine", *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def test_the_engine_of_the_page_passes(tmp_path: Path) -> None:
    """docs/conformance.md: an engine of one's own in at most 40 lines."""
    page = (ROOT / "docs" / "conformance.md").read_text()
    (code,) = re.findall(r"```python\n(# my_engine\.py\n.*?)```", page, re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 40
    (tmp_path / "my_engine.py").write_text(code)
    (command,) = re.findall(r"^python -m kvx_conformance engine (my_engine:\w+)$", page, re.M)
    assert f"- run: python -m kvx_conformance engine {command} --json " in page  # in CI
    found = run_suite(command, "--json", "found.json", cwd=tmp_path)
    assert found.returncode == 0, found.stdout
    (results,) = json.loads((tmp_path / "found.json").read_text()).values()
    assert sum(result["outcome"] == "pass" for result in results) >= 20


SLOW = pytest.mark.slow  # two quicker ones run always


@pytest.mark.parametrize(
    "name",
    [
        "llama_cpp",
        pytest.param("mlx", marks=SLOW),
        "onnxruntime",
        pytest.param("hf", marks=SLOW),
        pytest.param("hf_hybrids", marks=SLOW),
        pytest.param("mlx_hybrids", marks=SLOW),
        pytest.param("openvino", marks=SLOW),
        pytest.param("vllm", marks=SLOW),
    ],
)
def test_a_real_engine_passes(name: str, tmp_path: Path) -> None:
    """In a process of its own, as the command runs it; vLLM computes requests step by step."""
    if name == "vllm":
        pytest.importorskip("vllm")
    subject = f"kvx_conformance.engines.{name}"
    found = run_suite(subject, "--json", str(tmp_path / "found.json"))
    results = json.loads((tmp_path / "found.json").read_text())[subject]
    wrong = {one["case"]: one["why"] for one in results if one["outcome"] not in GOOD}
    assert not wrong
    assert found.returncode == 0
    assert sum(one["outcome"] == "pass" for one in results) >= 28


@SLOW
def test_an_engine_on_a_device_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """HF's caches where kernels run on the CPU: what the suite and KVX do with them there."""
    monkeypatch.setenv("KVX_LIBRARY", str(hostgrid_library()))
    found = run_suite("tests.conformance.on_hostgrid", "-k", "moves tables lengths room_is another")
    assert found.returncode == 0, found.stdout
    assert " 21 pass" in found.stdout, found.stdout


@SLOW
def test_states_that_stay_behind_are_found() -> None:
    """In a hybrid model of HF transformers."""
    from kvx_adapters import transformers as adapter
    from kvx_conformance.engines import hf_hybrids

    class LosesStates(hf_hybrids.ShortConvolution):
        def state_view(self) -> CacheView:
            """Of a copy: what is restored goes there."""
            copied = copy.deepcopy(self.dynamic)
            return adapter.state_view(copied, self.model(), self.facts(), num_tokens=len(self.ids))

    outcome, why = outcome_of(CASES["states.a_state_goes_on_alike"], LosesStates())
    assert outcome is Outcome.WRONG, why


def test_the_page_has_each_case() -> None:
    """With its promise and source as `--list` prints them."""
    page = (ROOT / "docs" / "conformance.md").read_text()
    rows = {f"| `{one.name}` | {one.says} | {one.source} |" for one in CASES.values()}
    assert rows <= set(page.splitlines())
    named = set(re.findall(r"^\| `(\w+\.\w+)` \|", page, re.M))
    assert set(CASES) <= named
