"""Conversations that move between real engines while they run say what one engine alone says."""

from __future__ import annotations

import pytest
import torch

from benchmarks.live import PAIRS, alone, converse
from tests.documents import Document
from tests.engines import tiny_model
from tests.engines.live import live


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize(("src", "dst"), PAIRS)
def test_no_token_is_lost_doubled_or_changed(src: str, dst: str) -> None:
    for num_tokens, before in ((2, 3), (16, 1), (37, 12), (100, 29)):
        moved = converse(src, dst, num_tokens, before)
        want = alone(num_tokens, 37)[: before + 8]
        assert tuple(moved.said) == want
        assert moved.report.num_tokens == num_tokens + before - 1
        copied = max(num_tokens + before - 2, 0) if before > 1 else 0
        assert moved.report.running.num_tokens == copied // 16 * 16


@pytest.mark.parametrize(("src", "dst"), PAIRS)
def test_zeros_say_something_else(src: str, dst: str) -> None:
    control = converse(src, dst, 37, 12, copies=False)
    want = alone(37, 37)[:20]
    assert tuple(control.said[:12]) == want[:12]
    assert tuple(control.said) != want


@pytest.mark.parametrize("dst", ["transformers", "llama_cpp"])
def test_the_page_runs_as_it_stands(dst: str, capsys: pytest.CaptureFixture[str]) -> None:
    ids = tiny_model.prompt(50)
    a, b = live("transformers"), live(dst)
    a.prefill(ids[:-1])
    page = Document("live_migration.md")
    names = page.run({"a": a, "b": b, "said": ids[-1:]}, page.snippets()[0])
    assert tuple(names["said"][1:]) == alone(50, 39)
    tokens, num_bytes, seconds = capsys.readouterr().out.split()
    assert int(tokens) == names["report"].num_tokens % 16
    assert int(num_bytes) == int(tokens) * b.view().view.bytes_per_token()
    assert float(seconds) > 0
