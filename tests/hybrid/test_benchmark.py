"""benchmarks/hybrid.py: what is timed leaves the same bytes, whoever does it."""

from __future__ import annotations

import pytest
import torch

from benchmarks.hybrid import CASES


@pytest.mark.parametrize("tokens", [1, 70])
@pytest.mark.parametrize("name", CASES)
def test_ways_leave_the_same_bytes(name: str, tokens: int) -> None:
    """KVX, torch and, where the processor runs them, vLLM's CPU ops; 70 are in two pages."""
    with torch.inference_mode():
        work = CASES[name](tokens)
        assert {"kvx", "torch"} <= work.ways.keys()
        work.verify()
