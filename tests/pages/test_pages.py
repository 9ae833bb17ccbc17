"""Every page as a host of Markdown shows it: links and anchors lead somewhere, pictures are there,
tables are tables, nothing vanishes.

The parser is CommonMark's with tables, as GitHub's is. The site is in test_site.py.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("markdown_it")
from markdown_it import MarkdownIt
from markdown_it.token import Token

from tests.native import ROOT

FOLDERS = (".", ".github", "benchmarks", "docs", "examples", "tests")
PAGES = sorted(
    {
        page
        for folder in FOLDERS
        for page in (ROOT / folder).glob("*.md" if folder == "." else "**/*.md")
    }
)
# GitHub shows these, and no comment.
KEPT = re.compile(r"<!--.*?-->|</?details(?: markdown=\"1\")?>|</?summary>", re.DOTALL)


@cache
def tokens_of(page: Path) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(page.read_text())


def inline(page: Path) -> Iterator[Token]:
    """Each token within a paragraph, a heading or a cell."""
    for token in tokens_of(page):
        yield from token.children or ()


def text_of(token: Token) -> str:
    """A heading without its marks."""
    kinds = ("text", "code_inline")
    return "".join(child.content for child in token.children or () if child.type in kinds)


@cache
def anchors(page: Path) -> list[str]:
    """Those that GitHub makes of a page's headings."""
    found: list[str] = []
    times: Counter[str] = Counter()
    for before, token in pairwise(tokens_of(page)):
        if before.type == "heading_open":
            slug = re.sub(r"[^\w\- ]", "", text_of(token).strip().lower()).replace(" ", "-")
            found.append(f"{slug}-{times[slug]}" if times[slug] else slug)
            times[slug] += 1
    return found


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


every_page = pytest.mark.parametrize("page", PAGES, ids=name)


@every_page
def test_links_and_pictures_lead_somewhere(page: Path) -> None:
    lost = []
    for token in inline(page):
        target = str(token.attrs.get("href") or token.attrs.get("src") or "")
        if not target or re.match(r"[a-z]+:", target):
            assert token.type != "image" or not target, f"{target} is fetched from elsewhere"
            continue
        path, _, anchor = target.partition("#")
        at = (page.parent / path).resolve() if path else page
        has_anchor = not anchor or (at.suffix == ".md" and anchor in anchors(at))
        if not at.exists() or not at.is_relative_to(ROOT) or not has_anchor:
            lost.append(target)
        if token.type == "image":
            assert at.suffix == ".svg", target
            assert token.content, f"{target} has no text for who cannot see it"
    assert lost == []


@every_page
def test_nothing_vanishes(page: Path) -> None:
    """What looks like HTML is not shown: <name> belongs in `code`."""
    html = [token.content for token in inline(page) if token.type == "html_inline"]
    html += [token.content for token in tokens_of(page) if token.type == "html_block"]
    assert [text for text in html if "<" in KEPT.sub("", text)] == []


@every_page
def test_tables_are_tables(page: Path) -> None:
    """Each row has the cells of its header; a | in `code` ends a cell, too."""
    lines = page.read_text().split("\n")
    rows: set[int] = set()
    for token in tokens_of(page):
        if token.type == "table_open":
            assert token.map is not None
            first, last = token.map
            cells = [len(re.findall(r"(?<!\\)\|", line)) for line in lines[first:last] if line]
            assert len(set(cells)) == 1, f"line {first + 1}: {cells}"
            rows |= set(range(first, last))
        elif token.type in ("fence", "code_block", "html_block"):
            assert token.map is not None
            rows |= set(range(*token.map))
    assert [i + 1 for i, line in enumerate(lines) if line.startswith("|") and i not in rows] == []


@every_page
def test_one_title_and_no_level_left_out(page: Path) -> None:
    levels = [int(token.tag[1]) for token in tokens_of(page) if token.type == "heading_open"]
    if page.parent.name == ".github":
        return
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b <= a + 1 for a, b in pairwise(levels))
