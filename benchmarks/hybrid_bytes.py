"""`python -m benchmarks.hybrid_bytes`: bytes per token of DeepSeek-V4's cache beside other caches.

Computed from the layers and the layouts; nothing is measured. Draws docs/deepseek_v4.svg and
rewrites the tables of docs/deepseek_v4.md.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from kvx_core.hybrid import (
    bytes_per_request,
    bytes_per_token,
    gqa_bytes_per_token,
    page_bytes,
    schedule_of,
)

_ROOT = Path(__file__).resolve().parent.parent
PAGE = _ROOT / "docs" / "deepseek_v4.md"
PLOT = _ROOT / "docs" / "deepseek_v4.svg"

# compress_ratios of the published config.json files, without the layer that predicts a 2nd token.
PRO = [128, 128, *[4, 128] * 29, 4]
FLASH = [0, 0, *[4, 128] * 20, 4]
# DeepSeek-V3.2: a latent of 656 bytes and an indexer key of 132 per token, in 61 layers.
V32 = 61 * (656 + 132)


class Layout(NamedTuple):
    """How entries and indexer keys are stored."""

    name: str
    entry_bytes: int
    indexer_bytes: int


LAYOUTS = (
    Layout("engines, MXFP4 indexer keys", 584, 68),
    Layout("engines, FP8 indexer keys", 584, 132),
    Layout("`PagedCache`", 580, 72),
    Layout("BF16", 1024, 256),
)


def sizes(layout: Layout) -> tuple[float, float]:
    """Bytes per token of Pro and Flash."""
    pro, flash = (
        bytes_per_token(
            schedule_of(ratios, len(ratios)),
            entry_bytes=layout.entry_bytes,
            indexer_bytes=layout.indexer_bytes,
        )
        for ratios in (PRO, FLASH)
    )
    return pro, flash


def table() -> str:
    """The table of the page."""
    lines = [
        "| layout | entry | key | Pro | Flash | smaller than V3.2 | of GQA-8 in BF16 |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    whole = gqa_bytes_per_token(len(PRO)), gqa_bytes_per_token(len(FLASH))
    for layout in LAYOUTS:
        found = sizes(layout)
        shares = " / ".join(f"{100 * a / b:.2f}" for a, b in zip(found, whole, strict=True))
        lines.append(
            f"| {layout.name} | {layout.entry_bytes} | {layout.indexer_bytes} | {found[0]:.2f} | "
            f"{found[1]:.2f} | {V32 / found[0]:.2f} x / {V32 / found[1]:.2f} x | {shares} % |"
        )
    return "\n".join(lines) + "\n"


# Tokens of a request, of which windows and tails are a share.
CONTEXTS = (4096, 8192, 32768, 131072, 1048576)


def paged_bytes(ratios: list[int]) -> float:
    """Bytes per token in vLLM's pages of 256 tokens, with MXFP4 indexer keys, padding included."""
    csa, hca = ratios.count(4), ratios.count(128)
    pages = csa * (page_bytes(64) + page_bytes(64, 68)) + hca * page_bytes(2)
    return pages / 256


def smaller(ratios: list[int], num_tokens: int) -> float:
    """How many times smaller than V3.2 the cache of one request is, its windows and tails too."""
    schedule = schedule_of(ratios, len(ratios))
    _, entry_bytes, indexer_bytes = LAYOUTS[0]
    per_token = bytes_per_token(schedule, entry_bytes=entry_bytes, indexer_bytes=indexer_bytes)
    return V32 * num_tokens / (per_token * num_tokens + bytes_per_request(schedule))


def contexts() -> str:
    """The table of whole requests."""
    lines = [
        "| tokens of a request | " + " | ".join(f"{tokens:,}" for tokens in CONTEXTS) + " |",
        "| --- |" + " --- |" * len(CONTEXTS),
    ]
    for name, ratios in (("Pro", PRO), ("Flash", FLASH)):
        found = " | ".join(f"{smaller(ratios, tokens):.2f} x" for tokens in CONTEXTS)
        lines.append(f"| {name} | {found} |")
    return "\n".join(lines) + "\n"


def bars() -> list[tuple[str, float]]:
    """What the plot shows: a name and bytes per token."""
    pro, flash = sizes(LAYOUTS[0])
    return [
        ("GQA-8, 61 layers, BF16", gqa_bytes_per_token(len(PRO))),
        ("GQA-8, 43 layers, BF16", gqa_bytes_per_token(len(FLASH))),
        ("DeepSeek-V3.2", V32),
        ("DeepSeek-V4 Pro", pro),
        ("DeepSeek-V4 Flash", flash),
    ]


def draw(path: Path) -> None:
    """Draws bytes per token."""
    from benchmarks import chart  # with docs, which a machine with a GPU need not have

    rows = {}
    for name, value in bars():
        text = f"{value:,.2f}" if value % 1 else f"{value:,.0f}"
        colour = chart.GREY if name.startswith("GQA") else chart.ORANGE
        if name.startswith("DeepSeek-V4"):
            colour = chart.BLUE
        rows[name] = [[chart.Bar(value, text, colour)]]
    title = "Bytes per token of context, all layers"
    chart.bars(
        path, title, ["computed from the layouts by benchmarks/hybrid_bytes.py"], rows, ["bytes"]
    )


def main() -> None:
    """Draws the plot and rewrites the tables."""
    draw(PLOT)
    text = PAGE.read_text()
    for name, lines in (("table", table()), ("contexts", contexts())):
        text = re.sub(
            rf"(<!-- {name} -->\n).*?(<!-- end)",
            lambda m, lines=lines: m[1] + lines + m[2],
            text,
            flags=re.S,
        )
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
