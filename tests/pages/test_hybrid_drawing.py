"""docs/hybrid.svg is that of the descriptors, and they are where vLLM's own indexing stores."""

from __future__ import annotations

import torch

from docs import draw_hybrid
from docs.draw_hybrid import ATTENTION, BLOCK, STATE, Hybrid, Run
from tests.native import ROOT


def stored(cache: Hybrid, block: int, run: Run, dtype: torch.dtype) -> torch.Tensor:
    """The numbers of a run."""
    return cache.pool[block, run.begin : run.end].view(dtype)


def test_the_committed_drawing_is_that_of_the_descriptors() -> None:
    assert draw_hybrid.FILE.read_text() == draw_hybrid.draw(), "run: python -m docs.draw_hybrid"
    assert "](hybrid.svg)" in (ROOT / "docs" / "hybrid.md").read_text()


def test_tokens_are_where_they_are_written() -> None:
    cache = Hybrid()
    cache.kv[:] = torch.arange(cache.kv.numel()).view(cache.kv.shape) % 251
    for block in ATTENTION:
        runs = draw_hybrid.runs_of_tokens(cache, block, BLOCK)
        assert len(runs) == 2 * BLOCK
        for run in runs:
            expected = cache.kv[block, "KV".index(run.name), run.number].flatten()
            assert stored(cache, block, run, torch.bfloat16).equal(expected), run


def test_parts_of_a_state_are_where_they_are_written() -> None:
    cache = Hybrid()
    cache.conv[STATE] = torch.arange(cache.conv[STATE].numel()).view(cache.conv[STATE].shape)
    cache.state[STATE] = torch.arange(cache.state[STATE].numel()).view(cache.state[STATE].shape)
    runs = draw_hybrid.runs_of_state(cache)
    sections = {"q": slice(0, 16), "k": slice(16, 32), "v": slice(32, 64)}
    assert [run.name for run in runs] == [*sections] * 3 + ["heads"] * 4
    for run in runs:
        if run.name == "heads":
            dtype, expected = torch.float32, cache.state[STATE, run.number]
        else:
            dtype, expected = torch.bfloat16, cache.conv[STATE, run.number, sections[run.name]]
        assert stored(cache, STATE, run, dtype).equal(expected.flatten()), run
