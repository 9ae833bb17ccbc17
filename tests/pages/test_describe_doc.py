"""docs/describe.md: its snippets run one after the other, and print what it says."""

from __future__ import annotations

import pytest
import torch

from kvx_core import InvalidArgumentError, Layout
from tests.documents import Document

PAGE = Document("describe.md")


def test_the_snippets(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    PAGE.run({})
    said, refused = capsys.readouterr().out.splitlines()
    assert [said] == PAGE.prints()
    assert "head" in refused


def test_a_fact_that_differs_is_refused() -> None:
    names = PAGE.run({}, *PAGE.snippets()[:-3])
    other = names["CacheFacts"](
        fingerprint="llama-3.1-8b", rotary="interleaved", rotary_dim=64, rope_applied=True
    )
    wrong = names["CacheView"](layers=(names["dense"],), facts=other, dense=True)
    with pytest.raises(InvalidArgumentError, match="rotary"):
        names["migrate"](names["here"], wrong.at(), [40, 20])


def test_the_table_has_every_layout() -> None:
    for layout in Layout:
        if layout not in (Layout.INVALID, Layout.BLOCK_CUSTOM):
            assert f"| `{layout.name}` |" in PAGE.text
