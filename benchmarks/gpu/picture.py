"""Draws the shares of a plain copy's speed as an SVG, written as text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from xml.sax.saxutils import escape

from benchmarks.gpu import families

_LEFT, _WIDTH, _RIGHT = 360, 520, 60  # pixels: names, bars up to _MOST, numbers behind them
_LINE, _GAP, _HEAD = 17, 14, 58
_MOST = 1.2  # the longest bar
_FILL = {True: "#1f5f8b", False: "#c0392b", None: "#8795a1"}  # goals met, missed, none


def draw(rows: Sequence[dict[str, Any]], title: str) -> str:
    """The SVG: a bar for each case, a tick where its goal lies."""
    parts, y = [], _HEAD
    for family, members in families.by_family(rows).items():
        parts.append(_text(16, y + 12, family, "font-weight='bold'"))
        y += _LINE + 4
        for row in members:
            parts += _bar(row, y)
            y += _LINE
        y += _GAP
    height, width = y + 10, _LEFT + _WIDTH + _RIGHT
    one = _x(1.0)
    frame = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' "
        f"viewBox='0 0 {width} {height}' font-family='sans-serif' font-size='12'>",
        f"<rect width='{width}' height='{height}' fill='#ffffff'/>",
        _text(16, 24, title, "font-size='15' font-weight='bold'"),
        _text(16, 42, "share of the speed of a plain copy of as many bytes; a tick is the goal"),
        f"<line x1='{one}' y1='{_HEAD - 6}' x2='{one}' y2='{height - 10}' stroke='#b0b8bf'/>",
    ]
    return "\n".join([*frame, *parts, "</svg>"]) + "\n"


def _bar(row: dict[str, Any], y: int) -> Iterator[str]:
    yield _text(_LEFT - 8, y + 12, row["case"], "text-anchor='end'")
    share = families.share_of(row)
    if share is None:
        yield _text(_LEFT, y + 12, "failed", "fill='#c0392b'")
        return
    goals = row["goals"]
    fill = _FILL[all(goal["met"] for goal in goals) if goals else None]
    width = _x(share) - _LEFT
    yield f"<rect x='{_LEFT}' y='{y + 2}' width='{width}' height='{_LINE - 5}' fill='{fill}'/>"
    ticks = [_x(goal["at_least"]) for goal in goals if goal["versus"] == "copy"]
    end = y + _LINE - 2
    for x in ticks:
        yield f"<line x1='{x}' y1='{y}' x2='{x}' y2='{end}' stroke='#000' stroke-width='2'/>"
    yield _text(max(_x(share), *ticks, 0) + 5, y + 12, f"{share:.2f}")


def _x(share: float) -> int:
    return _LEFT + round(_WIDTH * min(share, _MOST) / _MOST)


def _text(x: int, y: int, text: str, attributes: str = "") -> str:
    return f"<text x='{x}' y='{y}' {attributes}>{escape(text)}</text>"


def rows_of(results: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cases of several benchmarks, each named after its own."""
    return [
        {**row, "case": f"{result['benchmark']}: {row['case']}"}
        for result in results
        for row in result["results"]
    ]
