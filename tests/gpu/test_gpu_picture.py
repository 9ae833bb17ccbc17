"""The table of families and the drawing, from results whose numbers are known."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from typing import Any

from benchmarks.gpu import families, picture

SVG = "{http://www.w3.org/2000/svg}"


def row(case: str, family: families.Family, share: float | None, *goals: tuple[str, float]) -> Any:
    """A case that reaches `share` of a copy, and its goals against others by the same measure."""
    measured = share or 0.0
    return {
        "case": case,
        "family": family.name,
        "kvx_speedup": {} if share is None else {"copy": share},
        "goals": [
            {"versus": versus, "at_least": least, "measured": measured, "met": measured >= least}
            for versus, least in goals
        ],
    }


ROWS = [
    row("split", families.ROWS, 0.95, ("copy", 0.9)),
    row("fp8 & found", families.CONVERT, 0.5, ("copy", 0.8), ("torch", 3.0)),
    row("1 head", families.ROWS, 0.85, ("copy", 0.9)),
    row("LBNHC", families.ROWS, 1.5, ("copy", 0.9)),
    row("4 tokens", families.DECODE, None),
]


def test_the_table_has_a_line_for_each_family() -> None:
    assert families.table(ROWS).splitlines()[2:] == [
        "| rows: long contiguous runs | 3 | 0.85 | 0.95 | 0.90 | 2 of 3 |",
        "| convert: another dtype | 1 | 0.50 | 0.50 | 0.80 | 0 of 2 |",
        "| decode: a step's writes | 1 |  |  |  | none here |",
    ]


def test_the_drawing_has_every_case_and_every_goal() -> None:
    drawn = ElementTree.fromstring(picture.draw(ROWS, "A GPU <1>"))
    words = [text.text for text in drawn.iter(f"{SVG}text")]
    assert words[0] == "A GPU <1>"
    for of_row in ROWS:
        assert of_row["case"] in words
        assert of_row["family"] in words
    assert {"0.95", "0.50", "0.85", "1.50", "failed"} <= set(words)

    background, *bars = drawn.iter(f"{SVG}rect")
    met, missed = "#1f5f8b", "#c0392b"
    of_rows, of_convert = [met, missed, met], [missed]
    assert [bar.attrib["fill"] for bar in bars] == of_rows + of_convert
    line_at_one, *ticks = drawn.iter(f"{SVG}line")
    assert len(ticks) == 4  # the goal against torch is none of a copy's
    begin = int(bars[0].attrib["x"])
    widths = [int(bar.attrib["width"]) for bar in bars]
    unit = int(line_at_one.attrib["x1"]) - begin  # pixels of a share of 1
    for width, share in zip(widths, (0.95, 0.85), strict=False):
        assert abs(width - share * unit) <= 1
    goals = [0.9, 0.9, 0.9, 0.8]
    for tick, goal in zip(ticks, goals, strict=True):
        assert abs(int(tick.attrib["x1"]) - begin - goal * unit) <= 1
    assert begin + max(widths) < int(background.attrib["width"])
