"""Sequences of three families of hybrid models move between vLLM, transformers and mlx-lm.

The models have learned a text. Wherever a prompt is cut, the engine that goes on says what each
engine says alone, 36 of 36 tokens of each of five prompts: they move in one call, into room full of
wrong numbers. Controls without states, and of zeros, must say something else.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from importlib.util import find_spec
from itertools import permutations
from typing import Any

import pytest
import torch

from tests.native import ROOT, run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("vllm") is None or find_spec("mlx_lm") is None,
        reason="vllm and mlx-lm are not installed",
    ),
    pytest.mark.skipif(
        torch.cpu._is_amx_tile_supported(),
        reason="keys in bfloat16 are AMX tiles there, which live_hybrid_span refuses",
    ),
]
FAMILIES = ("Qwen3Next", "GraniteMoeHybrid", "Lfm2")
NAMES = ("vllm", "transformers", "mlx")
POSITIONS = (40, 100, 119)  # of prompts of 120 tokens: within a block, and before the last token
PROMPT, ANSWER = 120, 36
TEXT = (ROOT / "LICENSE").read_bytes()
SAID = [list(TEXT[160 * i :][PROMPT : PROMPT + ANSWER]) for i in range(5)]


@cache
def answers() -> dict[str, dict[str, Any]]:
    """What tests/engines/hybrid_pairs.py finds, whose models learn and whose engines start once."""
    script = [sys.executable, "-m", "tests.engines.hybrid_pairs", *map(str, POSITIONS)]
    said = run(script, env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    line = next(line for line in said.splitlines() if line.startswith(f'{{"{FAMILIES[0]}"'))
    found: dict[str, dict[str, Any]] = json.loads(line)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_engines_alone_say_the_text(family: str) -> None:
    for name in NAMES:
        assert answers()[family][f"{name} alone"] == SAID
        assert all_differ(answers()[family][f"{name}, zeros"])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("src", "dst"), list(permutations(NAMES, 2)))
def test_rows_go_on_in_another_engine(src: str, dst: str, family: str) -> None:
    found = answers()[family]
    for position in POSITIONS:
        assert found[f"{src} -> {dst}, {position}"] == SAID, position
    assert all_differ(found[f"{src} -> {dst}, no states"])


def all_differ(rows: list[list[int]]) -> bool:
    return all(row != right for row, right in zip(rows, SAID, strict=True))
