"""The drawings and plots of the pages: files that they name exist, texts have room and contrast by
day and by night, plots are those of the results.

Widths are estimates: a letter of a monospaced font takes 0.6 of its size, others 0.56 on average.
"""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import plots
from docs import drawing
from tests.native import ROOT

DRAWINGS = ("flow", "kernels")
ALL = sorted((ROOT / "docs").rglob("*.svg"))
CHARTS = [path for path in ALL if path.parent.name == "performance"]
CHARTS += [ROOT / "docs/deepseek_v4.svg", ROOT / "docs/format_error.svg"]
_SVG = "{http://www.w3.org/2000/svg}"


def root_of(name: str) -> ElementTree.Element:
    return ElementTree.parse(ROOT / "docs" / f"{name}.svg").getroot()


def box_of(text: ElementTree.Element) -> tuple[float, float, float]:
    """Left, right and baseline of a text."""
    size = float(text.get("font-size", "16"))
    is_mono = text.get("font-family") == "monospace"
    letter = 0.6 if is_mono else 0.6 if text.get("font-weight") == "bold" else 0.56
    width = len("".join(text.itertext())) * size * letter
    x = float(text.get("x", "0"))
    left = x - {"middle": width / 2, "end": width}.get(text.get("text-anchor", ""), 0)
    return left, left + width, float(text.get("y", "0"))


@pytest.mark.parametrize("name", DRAWINGS)
def test_files_that_are_named_exist(name: str) -> None:
    texts = [
        "".join(text.itertext())
        for text in root_of(name).iter(f"{_SVG}text")
        if text.get("font-family") == "monospace" or "csrc/" in "".join(text.itertext())
    ]
    named = [path for text in texts for path in re.findall(r"(?:csrc|kvx_\w+)/[\w./]*\w/?", text)]
    assert len(named) > 3
    assert [path for path in named if not Path(ROOT / path).exists()] == []


@pytest.mark.parametrize("name", DRAWINGS)
def test_texts_have_room(name: str) -> None:
    root = root_of(name)
    _, _, width, _ = map(float, root.get("viewBox", "").split())
    rectangles = [
        tuple(float(rect.get(key, "0")) for key in ("x", "y", "width", "height"))
        for rect in root.iter(f"{_SVG}rect")
        if "%" not in rect.get("width", "")
    ]
    for text in root.iter(f"{_SVG}text"):
        left, right, y = box_of(text)
        words = "".join(text.itertext())
        assert left >= 0, words
        assert right <= width, words
        for x, top, room, height in rectangles:
            if top < y < top + height and x <= (left + right) / 2 <= x + room and room > 60:
                assert x <= left, words
                assert right <= x + room, words


def shown(path: Path) -> str:
    """Where a picture is, for the names of tests."""
    return str(path.relative_to(ROOT / "docs"))


@pytest.mark.parametrize("path", ALL, ids=shown)
def test_a_dark_scheme_has_every_colour(path: Path) -> None:
    """Colours are attributes in hexadecimal, and the style gives each of them another one."""
    text = path.read_text()
    assert drawing.both_schemes(text) == text, "run python -m docs.drawing"
    named = set(
        re.findall(r'(?:fill|stroke|color)[=:]"?([^"; >}]+)', text.partition("</style>")[2])
    )
    assert {colour for colour in named if colour[0] != "#"} <= {"none"}
    (style,) = re.findall(r"<style>(.*)</style>", text)
    assert style.startswith("@media (prefers-color-scheme:dark){")
    for kind, colour in re.findall(r'(fill|stroke)="(#\w+)"', text):
        assert f'[{kind}="{colour}"]{{{kind}:{drawing.dark(colour)}}}' in style


def contrast(one: str, other: str) -> float:
    """Source: WCAG 2.2, contrast ratio"""

    def luminance(colour: str) -> float:
        parts = (
            c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in drawing.rgb(colour)
        )
        return sum(
            weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), parts, strict=True)
        )

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("path", ALL, ids=shown)
def test_texts_can_be_read_by_day_and_by_night(path: Path) -> None:
    """Each on the last rectangle that is drawn under it."""
    root = ElementTree.parse(path).getroot()
    _, _, width, height = map(float, root.get("viewBox", "").split())
    under: list[tuple[float, float, float, float, str]] = []
    for element in root.iter():
        if element.tag == f"{_SVG}rect" and element.get("fill") != "none":
            x, y, w, h = (
                float(element.get(key, "0").replace("100%", str(whole)))
                for key, whole in (("x", 0), ("y", 0), ("width", width), ("height", height))
            )
            under.append((x, y, x + w, y + h, element.get("fill", "")))
        if element.tag == f"{_SVG}text":
            left, right, base = box_of(element)
            x, y = (left + right) / 2, base - 4
            paper = [fill for x1, y1, x2, y2, fill in under if x1 < x < x2 and y1 < y < y2][-1]
            ink = element.get("fill") or root.get("fill", "#000000")
            words = "".join(element.itertext())
            assert contrast(ink, paper) >= 4, (words, ink, paper)
            assert contrast(drawing.dark(ink), drawing.dark(paper)) >= 4, (words, ink, paper)


@pytest.mark.parametrize("path", CHARTS, ids=shown)
def test_texts_of_a_chart_lie_on_nothing(path: Path) -> None:
    """On no bar, point, tick or other text, and inside the picture."""
    root = ElementTree.parse(path).getroot()
    _, _, width, height = map(float, root.get("viewBox", "").split())
    texts = [(box_of(text), "".join(text.itertext())) for text in root.iter(f"{_SVG}text")]
    marks: list[tuple[float, float, float, float]] = []
    for rect in list(root.iter(f"{_SVG}rect"))[1:]:
        x, y, w, h = (float(rect.get(key, "0")) for key in ("x", "y", "width", "height"))
        marks.append((x, y, x + w, y + h))
    for dot in root.iter(f"{_SVG}circle"):
        x, y, r = (float(dot.get(key, "0")) for key in ("cx", "cy", "r"))
        marks.append((x - r, y - r, x + r, y + r))
    for line in root.iter(f"{_SVG}line"):
        if line.get("stroke-width") == "2":
            x, y, y2 = (float(line.get(key, "0")) for key in ("x1", "y1", "y2"))
            marks.append((x - 1, y, x + 1, y2))
    assert len(marks) > 4
    for i, ((left, right, base), words) in enumerate(texts):
        assert left >= 0, words
        assert right <= width, words
        assert base <= height, words
        # A digit is 8 of 11 pixels high.
        for x, y, x2, y2 in marks:
            assert not (x < right and left < x2 and y < base and base - 7 < y2), words
        for (l2, r2, b2), others in texts[:i]:
            assert not (l2 < right and left < r2 and abs(base - b2) < 8), (words, others)


def test_plots_are_those_of_the_results(tmp_path: Path) -> None:
    plots.draw(tmp_path)
    made = {path.name: path.read_text() for path in tmp_path.iterdir()}
    committed = {path.name: path.read_text() for path in plots.FOLDER.iterdir()}
    assert committed == made, "run python -m benchmarks.plots, and commit what it writes"


def test_the_page_of_performance_shows_every_plot() -> None:
    text = (ROOT / "docs/performance.md").read_text()
    assert re.findall(r"\]\(performance/(\w+)\.svg\)", text) != []
    assert set(re.findall(r"\]\(performance/(\w+)\.svg\)", text)) == set(plots.PLOTS)


def test_a_plot_says_what_the_result_says() -> None:
    """One row by hand: 1,582.3 ms computed, 48.4 ms loaded, 32.7 times as fast."""
    computed, kvx = plots.result_of("peers")["results"][:2]
    ms, loaded = computed["first_token_ms"]["2048"], kvx["first_token_ms"]["2048"]
    text = (plots.FOLDER / "prompts.svg").read_text()
    assert f">{ms:.0f} ms, computed<" in text
    assert f">{loaded:.0f} ms, {ms / loaded:.1f} times as fast<" in text


def test_the_prompt_of_the_hub_is_that_of_the_page() -> None:
    """As many squares as docs/vllm.md shows tokens: loaded and computed by the second server."""
    text = (ROOT / "docs/hub.svg").read_text().partition(">A prompt of 39 tokens")[2]
    shown = (ROOT / "docs/vllm.md").read_text()
    tokens = {
        source: int(number)
        for source, number in re.findall(r'source="(\w+)"\} (\d+)\.0', shown)[:3]
    }
    colours = re.findall(r'<rect[^>]*fill="(#\w+)"', text)
    loaded, computed = tokens["external_kv_transfer"], tokens["local_compute"]
    assert [colours.count(colour) for colour in dict.fromkeys(colours)] == [loaded, computed]
    assert f">{loaded} loaded: " in text
    assert f">{computed} computed<" in text
    assert loaded + computed == 39
