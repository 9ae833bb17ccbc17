"""Charts as SVG: bars, and points in panels side by side. A text lies on nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

from docs import drawing

WIDTH, MARGIN = 920, 20  # pixels
BLUE, ORANGE, GREY, GREEN, RED = "#1f5f8b", "#e09a2b", "#8795a1", "#3a7d44", "#a8324f"
_MUTED, _GRID = "#5a6775", "#d5dde4"
_LETTER = 0.62  # of a size, that a letter takes at most on average
_BAR, _GAP = 13, 9  # pixels: a bar, between rows


class Bar(NamedTuple):
    """One bar: its length, what is written behind it, ticks where goals lie."""

    value: float
    text: str
    colour: str = BLUE
    goals: tuple[float, ...] = ()


class Box(NamedTuple):
    """Where something lies, in pixels."""

    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: Box) -> bool:
        """Whether two boxes share a point."""
        return (
            self.left < other.right
            and other.left < self.right
            and self.top < other.bottom
            and other.top < self.bottom
        )


def width_of(words: str, size: float) -> float:
    """Pixels that a text takes at most."""
    return len(words) * size * _LETTER


def text(x: float, y: float, words: str, size: float = 12, more: str = "") -> str:
    """A text; more: attributes."""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}"{more}>{escape(words)}</text>'


def bars(
    path: Path,
    title: str,
    notes: Sequence[str],
    rows: Mapping[str, Sequence[Sequence[Bar]]],
    panels: Sequence[str],
    *,
    legend: Mapping[str, str] | None = None,
    base: float | None = None,
) -> None:
    """Draws rows of bars: in row `name`, rows[name][i] are those of panel i, one under the other.

    notes:  lines under the chart: where the figures are from
    legend: colours by what they mean
    base:   bars begin here on a logarithmic scale, and go to the left if their value is less; None:
            at 0 on a linear one
    """
    left = MARGIN + 12 + max(width_of(name, 12) for name in rows)
    room = (WIDTH - MARGIN - left) / len(panels)
    parts, top = _head(title, legend or {})
    scales = [
        _scale([bar for row in rows.values() for bar in row[i]], left + i * room, room - 16, base)
        for i in range(len(panels))
    ]
    for i, words in enumerate(panels):
        parts.append(text(left + i * room, top, words, 12, f' fill="{_MUTED}"'))
    y = first = top + 14
    for name, row in rows.items():
        height = _BAR * max(map(len, row))
        more = ' text-anchor="end"'
        parts.append(text(left - 12, y + height / 2 + 4, name, 12, more))
        for scale, members in zip(scales, row, strict=True):
            for i, bar in enumerate(members):
                parts += _bar(bar, scale, y + i * _BAR, base)
        y += height + _GAP
    for scale in scales:
        x = scale(base or 0)
        parts.append(_line(x, first - 4, x, y - _GAP + 4, _MUTED))
    y += 4
    for words in notes:
        y += 15
        parts.append(text(MARGIN, y, words, 10.5, f' fill="{_MUTED}"'))
    drawing.write(path, parts, WIDTH, y + 15, escape(title))


@dataclass(frozen=True)
class _Scale:
    """From values to pixels."""

    left: float
    per_unit: float
    first: float
    log: bool

    def __call__(self, value: float) -> float:
        value = math.log(value) if self.log else value
        return self.left + (value - self.first) * self.per_unit


def _scale(members: Sequence[Bar], left: float, room: float, base: float | None) -> _Scale:
    values = [v for bar in members for v in (bar.value, *bar.goals)] + [base or 0]
    if base is not None:
        values = [math.log(value) for value in values]
    first, last = min(values), max(values)
    behind = max(width_of(bar.text, 11) for bar in members) + 14
    return _Scale(left, (room - behind) / (last - first), first, base is not None)


def _bar(bar: Bar, scale: _Scale, y: float, base: float | None) -> Iterator[str]:
    begin, end = sorted((scale(base or 0), scale(bar.value)))
    yield (
        f'<rect x="{begin:.1f}" y="{y + 1:.1f}" width="{max(end - begin, 0.5):.1f}" '
        f'height="{_BAR - 2}" fill="{bar.colour}"/>'
    )
    ticks = sorted(scale(goal) for goal in bar.goals)
    for x in ticks:
        yield _line(x, y, x, y + _BAR, "#1f2733", 2)
    for x in ticks:  # a text begins behind the ticks that would cross it
        if end <= x < end + width_of(bar.text, 11) + 8:
            end = x
    yield text(end + 5, y + _BAR - 3, bar.text, 11)


def _line(x: float, y: float, x2: float, y2: float, colour: str, width: float = 1) -> str:
    ends = f'x1="{x:.1f}" y1="{y:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{width:g}"/>'


def _head(title: str, legend: Mapping[str, str]) -> tuple[list[str], float]:
    parts, x, y = [text(MARGIN, 28, title, 15, ' font-weight="bold"')], float(MARGIN), 50
    for words, colour in legend.items():
        parts.append(f'<rect x="{x:.1f}" y="{y - 10}" width="11" height="11" fill="{colour}"/>')
        parts.append(text(x + 17, y, words, 12))
        x += 17 + width_of(words, 12) + 18
    return parts, y + 24 if legend else y + 4


# ---- Points ----


class Point(NamedTuple):
    """A point of a panel."""

    x: float
    y: float
    colour: str


class Panel(NamedTuple):
    """Points over a linear and a logarithmic axis, and the names of some."""

    title: str
    points: Sequence[Point]
    labels: Sequence[tuple[str, float, float]]  # text, x, y
    line: Sequence[tuple[float, float]] = ()  # dashed, of two points


_RADIUS, _LABEL = 3.2, 10  # pixels


def points(
    path: Path,
    title: str,
    note: str,
    panels: Sequence[Panel],
    *,
    legend: Mapping[str, str],
    x_title: str,
) -> None:
    """Draws panels side by side."""
    parts, top = _head(title, legend)
    room, height = (WIDTH - MARGIN) / len(panels), 560.0
    for i, panel in enumerate(panels):
        area = Box(MARGIN + 34 + i * room, top + 14, (i + 1) * room - 4, top + 14 + height)
        parts.append(text(area.left, top, panel.title, 12, f' fill="{_MUTED}"'))
        parts += _panel(panel, area)
        more = f' text-anchor="middle" fill="{_MUTED}"'
        parts.append(text((area.left + area.right) / 2, area.bottom + 34, x_title, 11, more))
    bottom = top + height + 74
    parts.append(text(MARGIN, bottom, note, 10.5, f' fill="{_MUTED}"'))
    drawing.write(path, parts, WIDTH, bottom + 16, escape(title))


def _panel(panel: Panel, area: Box) -> Iterator[str]:
    xs = [p.x for p in panel.points]
    ys = [math.log10(y) for y in [p.y for p in panel.points] + [y for _, y in panel.line]]
    x_low, x_high = math.floor(min(xs)) - 1, math.ceil(max(xs)) + 3
    y_low, y_high = min(ys) - 0.15, max(ys) + 0.15

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            area.left + (x - x_low) / (x_high - x_low) * (area.right - area.left),
            area.bottom - (math.log10(y) - y_low) / (y_high - y_low) * (area.bottom - area.top),
        )

    more = f' fill="{_MUTED}"'
    for bits in range(x_low, x_high + 1, 2):
        x, _ = at(bits, 1)
        yield _line(x, area.top, x, area.bottom, _GRID)
        yield text(x, area.bottom + 16, f"{bits}", 11, f'{more} text-anchor="middle"')
    for power in range(math.ceil(y_low), math.floor(y_high) + 1):
        _, y = at(0, 10.0**power)
        yield _line(area.left, y, area.right, y, _GRID)
        yield text(area.left - 6, y + 4, f"1e{power}", 11, f'{more} text-anchor="end"')
    taken = []
    if panel.line:
        (x, y), (x2, y2) = (at(*end) for end in panel.line)
        dashed = _line(x, y, x2, y2, _MUTED)
        yield dashed.replace("/>", ' stroke-dasharray="5 4"/>')
        steps = [i / 100 for i in range(101)]
        taken = [_around(x + t * (x2 - x), y + t * (y2 - y)) for t in steps]
    places = [at(p.x, p.y) for p in panel.points]
    for (x, y), point in zip(places, panel.points, strict=True):
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{_RADIUS}" fill="{point.colour}"/>'
    taken += [_around(x, y) for x, y in places]
    for words, x, y in sorted(panel.labels, key=lambda label: -label[2]):
        x, y = at(x, y)
        box = _free(words, x, y, taken, area)
        taken.append(box)
        if math.dist((x, y), (box.left, box.bottom - 4)) > 16:
            near = min(max(x, box.left), box.right), min(max(y, box.top), box.bottom)
            yield _line(x, y, *near, _MUTED, 0.7)
        yield text(box.left + 1, box.bottom - 2.5, words, _LABEL)


def _around(x: float, y: float) -> Box:
    """The place of a point."""
    return Box(x - _RADIUS - 1, y - _RADIUS - 1, x + _RADIUS + 1, y + _RADIUS + 1)


def _free(words: str, x: float, y: float, taken: Iterable[Box], area: Box) -> Box:
    """The nearest place for a text that nothing else has."""
    taken = list(taken)
    width, height = width_of(words, _LABEL) + 2, _LABEL + 2
    places = [
        Box(left, middle - height / 2, left + width, middle + height / 2)
        for left in [x + step for step in range(6, 200, 6)] + [x - width - s for s in (6, 12, 24)]
        for middle in [y + step for step in range(-150, 151, 3)]
    ]

    def far(box: Box) -> float:
        across = min(abs(box.left - x), abs(box.right - x))
        return math.hypot(across, (box.top + box.bottom) / 2 - y)

    for box in sorted(places, key=far):
        if area.left < box.left and box.right < area.right and not any(map(box.meets, taken)):
            return box
    raise ValueError(f"no room for {words!r} in {area}")
