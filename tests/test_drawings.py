"""The drawings of how a call runs: the files that they name exist, their texts have room.

Widths are estimates: a letter of a monospaced font takes 0.6 of its size, others 0.56 on average.
"""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.native import ROOT

DRAWINGS = ("flow", "kernels")
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
