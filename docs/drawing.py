"""The colours of a drawing by day and by night.

A drawing names its colours in attributes. A style that both_schemes adds gives each of them another
one where the reader's scheme is dark: GitHub's pages and those of the site, whose switch counts.

    python -m docs.drawing      # brings the styles of docs/*.svg up to date
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from colorsys import hls_to_rgb, rgb_to_hls
from pathlib import Path

FOLDER = Path(__file__).parent
PAPER = "#ffffff", "#1e2129"  # by night as the site's own
_STYLE = re.compile(r"<style>.*?</style>\n", re.S)
_COLOUR = re.compile(r'\b(fill|stroke)="(#\w+)"')


def rgb(colour: str) -> tuple[float, float, float]:
    """Red, green and blue from 0 to 1 of "#rgb" or "#rrggbb"."""
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    red, green, blue = (int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4))
    return red, green, blue


def dark(colour: str) -> str:
    """The colour by night: the same hue and chroma, light where it was dark."""
    if rgb(colour) == (1, 1, 1):
        return PAPER[1]
    hue, lightness, saturation = rgb_to_hls(*rgb(colour))
    chroma = saturation * (1 - abs(2 * lightness - 1))
    lightness = 0.95 - 0.82 * lightness
    parts = hls_to_rgb(hue, lightness, min(chroma / (1 - abs(2 * lightness - 1)), 0.85))
    return "#" + "".join(f"{round(255 * part):02x}" for part in parts)


def both_schemes(svg: str) -> str:
    """The drawing with a style for the dark scheme, in place of one that it has."""
    svg = _STYLE.sub("", svg)
    used = sorted(set(_COLOUR.findall(svg)))
    rules = "".join(f'[{name}="{colour}"]{{{name}:{dark(colour)}}}' for name, colour in used)
    style = f"<style>@media (prefers-color-scheme:dark){{{rules}}}</style>\n"
    head = re.match(r"<svg[^>]*>\n(?:<title>.*?</title>\n)?", svg)
    if not head:
        raise ValueError("expected an SVG whose first line is its <svg ...>")
    return head[0] + style + svg[head.end() :]


def write(path: Path, parts: Iterable[str], width: float, height: float, title: str) -> None:
    """Writes a drawing of parts on paper."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        'font-family="DejaVu Sans, Verdana, sans-serif" font-size="12" fill="#1f2733">'
    )
    paper = f'<rect width="{width:g}" height="{height:g}" rx="8" fill="{PAPER[0]}"/>'
    lines = [head, f"<title>{title}</title>", paper, *parts, "</svg>\n"]
    path.write_text(both_schemes("\n".join(lines)))


def main() -> None:
    """Brings the styles up to date."""
    for path in FOLDER.glob("*.svg"):
        path.write_text(both_schemes(path.read_text()))


if __name__ == "__main__":
    main()
