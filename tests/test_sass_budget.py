"""The machine code of the kernels, executed on the CPU: what it copies, and how much it executes.

The budget is the code of commit 60ba435: benchmarks/results/sass.json, which `python -m tests.sass`
makes. A count is exact: the same code executes the same instructions everywhere.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.native import ROOT, hostgrid_library, run
from tests.sass import budget

slow = pytest.mark.slow  # it builds for minutes

# Cases, by a part of their names: one or more of every kernel.
COPIED = ("gather: split, fp8", "5 tokens, LBNHC", "packed-x", "transposed V", "LBNHC to LBHNC")
COUNTED = (
    "write: 1 tokens, split",
    "LBNHC, fp8, scales found",
    "gather: LBNHC, fp8",
    "gather: packed-x",
    "migrate: LBNHC to LBHNC",
    "migrate: split to transposed V",
)


@pytest.fixture(scope="module")
def libraries(release_library: Path) -> list[str | Path]:
    return ["--library", release_library, "--hostgrid", hostgrid_library()]


@slow
@pytest.mark.of_csrc
@pytest.mark.parametrize("case", COPIED)
def test_the_machine_code_copies_what_torch_copies(case: str, libraries: list[str | Path]) -> None:
    said = run([sys.executable, "-m", "tests.sass", *libraries, "--check", "--only", case])
    assert "launches  " in said


@slow
@pytest.mark.of_csrc
@pytest.mark.parametrize("case", COUNTED)
def test_instructions_per_512_bytes(case: str, libraries: list[str | Path], tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    run([sys.executable, "-m", "tests.sass", *libraries, "--only", case, "--out", out])
    found = json.loads(out.read_text())["now"]["cases"]
    compared = budget.ratios(found, budget.read_results()["before"]["cases"])
    assert compared
    over = {name: ratio for name, ratio in compared.items() if ratio > budget.MOST}
    assert not over
    for kernel, executed in budget.executed(found).items():
        assert executed <= budget.BOUNDS[kernel].most, kernel
    assert all(share >= budget.LEAST_WIDE for share in budget.wide_loads(found).values())


def test_the_committed_figures_are_within_the_budget() -> None:
    results = budget.read_results()
    compared = budget.ratios(results["now"]["cases"], results["before"]["cases"])
    assert len(compared) > 40
    assert max(compared.values()) <= budget.MOST
    assert budget.mean(compared) <= budget.MOST_MEAN


def test_conversions_from_fp8_load_whole_vectors() -> None:
    results = budget.read_results()
    before, now = (budget.wide_loads(results[name]["cases"]) for name in ("before", "now"))
    assert set(before.values()) == {0.0}
    assert now.keys() == before.keys()
    assert min(now.values()) >= budget.LEAST_WIDE


def test_every_kernel_is_within_its_bound() -> None:
    executed = budget.executed(budget.read_results()["now"]["cases"])
    assert executed.keys() == budget.BOUNDS.keys()
    for kernel, most in executed.items():
        bound = budget.BOUNDS[kernel]
        assert most <= bound.most, kernel
        # A bound that has become loose is to follow the code.
        assert most > 0.9 * bound.most or bound.most == bound.goal, kernel


def test_the_documentation_has_the_bounds() -> None:
    executed = budget.executed(budget.read_results()["now"]["cases"])
    text = (ROOT / "docs/kernels.md").read_text()
    for kernel, bound in budget.BOUNDS.items():
        row = f"| `{kernel.removesuffix('_kernel')}` | {executed[kernel]:.0f} | {bound.goal} |"
        assert row in text, row
