"""docs/deepseek_v4.md: its snippets print what it says; table and plot are those of the layers."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import hybrid_bytes
from kvx_core.hybrid import (
    DSV4Config,
    LayerSpec,
    StateCache,
    build_schema,
    bytes_per_request,
    schedule_of,
)
from tests.documents import Document

PAGE = Document("deepseek_v4.md")
AGAIN = "run python -m benchmarks.hybrid_bytes, and commit what it writes"


def test_the_snippets(capsys: pytest.CaptureFixture[str]) -> None:
    PAGE.run({"__name__": "snippet"})
    assert capsys.readouterr().out.splitlines() == PAGE.prints()


def test_table_and_plot(tmp_path: Path) -> None:
    assert f"<!-- table -->\n{hybrid_bytes.table()}<!-- end" in PAGE.text, AGAIN
    assert f"<!-- contexts -->\n{hybrid_bytes.contexts()}<!-- end" in PAGE.text, AGAIN
    plot = hybrid_bytes.PLOT.read_text()
    for name, size in hybrid_bytes.bars():
        assert f">{name}<" in plot, AGAIN
        assert f">{size:,.2f}<".replace(".00<", "<") in plot, AGAIN
    hybrid_bytes.draw(tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").read_text() == plot, AGAIN
    assert f"]({hybrid_bytes.PLOT.name})" in PAGE.text


def test_the_headline() -> None:
    """5031.44 and 3514.25 bytes per token, 9.55 and 13.68 times smaller than DeepSeek-V3.2."""
    first = hybrid_bytes.table().splitlines()[2]
    assert "| 5031.44 | 3514.25 | 9.55 x / 13.68 x | 2.01 / 2.00 % |" in first


def test_what_the_headline_does_not_count() -> None:
    """9.55 is of long contexts. Pages, windows and tails, as both pages say."""
    pro, flash = hybrid_bytes.PRO, hybrid_bytes.FLASH
    # 31 HCA pages of 2 entries, 30 CSA pages of 64 and as many of 64 keys hold 256 tokens.
    paged = (31 * 1728 + 30 * 37440 + 30 * 4608) / 256
    assert hybrid_bytes.paged_bytes(pro) == paged == 5136.75
    # A window of 128 rows of 584 bytes per layer, and float32 tails of values and scores: of HCA
    # 128 rows of 512, of CSA 8 rows of 1024, and 8 of 256 for its indexer; counters of 4 bytes.
    tails = 31 * 2 * 128 * 512 * 4 + 30 * 2 * 8 * (1024 + 256) * 4
    fixed = 61 * (128 * 584 + 4) + tails + 4 * (31 + 2 * 30)
    slots = [layer.attn for layer in schedule_of(pro, 61)]
    states = (StateCache(build_schema(DSV4Config(), LayerSpec(0, attn)), 1) for attn in slots)
    assert bytes_per_request(schedule_of(pro, 61)) == fixed == sum(s.memory_bytes() for s in states)
    v32, entries = 61 * (656 + 132), 30 * (584 + 68) / 4 + 31 * 584 / 128
    times = {"entries": v32 / entries, "pages": v32 / paged}
    times |= {n: v32 * n / (entries * n + fixed) for n in hybrid_bytes.CONTEXTS}
    say = {name: f"{number:.2f}" for name, number in times.items()}
    features = (hybrid_bytes.PAGE.parent / "compatibility.md").read_text()
    assert (
        f"5031 bytes per token of a long context for Pro, {say['entries']} times fewer than V3.2; "
        f"{say['pages']} in vLLM's pages; with windows and tails {say[8192]} at 8k tokens, "
        f"{say[4096]} at 4k (" in features
    )
    assert (
        f"Pro takes {paged} bytes per token with MXFP4 keys, {say['pages']} times fewer"
        in PAGE.text
    )
    sizes = [bytes_per_request(schedule_of(ratios, len(ratios))) for ratios in (pro, flash)]
    mib = [f"{size / 2**20:.2f} MiB" for size in sizes]
    assert f"tails take\n{mib[0]} per request for Pro and {mib[1]} for Flash" in PAGE.text
    row = " | ".join(f"{say[n]} x" for n in hybrid_bytes.CONTEXTS)
    assert f"| Pro | {row} |" in hybrid_bytes.contexts()
