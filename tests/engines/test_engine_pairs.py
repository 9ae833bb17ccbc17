"""A prompt's keys and values move from each real engine to each other one, which then says the
greedy tokens that the first would have said, in float32. Each pair has a control, zero keys and
values, that must differ."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from itertools import permutations

import pytest

from tests.engines.live import NAMES
from tests.native import ROOT

COUNT = 8
LENGTHS = (2, 37, 100)  # a token held, an odd length, more than three of vLLM's blocks


@cache
def tokens(names: tuple[str, ...], lengths: tuple[int, ...]) -> dict[str, dict[str, list[int]]]:
    """What tests/engines/pairs.py finds, whose engines start once."""
    given = [str(COUNT), *map(str, lengths), "--", *names]
    result = subprocess.run(
        [sys.executable, "-m", "tests.engines.pairs", *given],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    found: dict[str, dict[str, list[int]]] = json.loads(result.stdout.splitlines()[-1])
    return found


def check(found: dict[str, list[int]]) -> None:
    assert len(found["alone"]) == COUNT
    assert found["moved"] == found["alone"]
    assert found["zeros"] != found["alone"]


@pytest.mark.parametrize(("src", "dst"), permutations(NAMES, 2))
def test_pairs_without_vllm(src: str, dst: str) -> None:
    check(tokens(NAMES, (37,))[f"{src} -> {dst}, 37"])


@pytest.mark.slow
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("src", "dst"), permutations((*NAMES, "vllm"), 2))
def test_all_pairs(src: str, dst: str, length: int) -> None:
    check(tokens((*NAMES, "vllm"), LENGTHS)[f"{src} -> {dst}, {length}"])
