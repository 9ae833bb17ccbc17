"""docs/deepseek_v4.md: its snippets print what it says; table and plot are those of the layers."""

from __future__ import annotations

import pytest

from benchmarks import hybrid_bytes
from tests.documents import Document

PAGE = Document("deepseek_v4.md")
AGAIN = "run python -m benchmarks.hybrid_bytes, and commit what it writes"


def test_the_snippets(capsys: pytest.CaptureFixture[str]) -> None:
    PAGE.run({"__name__": "snippet"})
    assert capsys.readouterr().out.splitlines() == PAGE.prints()


def test_table_and_plot() -> None:
    assert f"<!-- table -->\n{hybrid_bytes.table()}<!-- end" in PAGE.text, AGAIN
    plot = hybrid_bytes.PLOT.read_text()
    for name, size in hybrid_bytes.bars():
        assert f">{name}<" in plot, AGAIN
        assert f">{size:,.2f}<".replace(".00<", "<") in plot, AGAIN
    assert f"]({hybrid_bytes.PLOT.name})" in PAGE.text


def test_the_headline() -> None:
    """5031.44 and 3514.25 bytes per token, 9.55 and 13.68 times smaller than DeepSeek-V3.2."""
    first = hybrid_bytes.table().splitlines()[2]
    assert "| 5031.44 | 3514.25 | 9.55 x / 13.68 x | 2.01 / 2.00 % |" in first
