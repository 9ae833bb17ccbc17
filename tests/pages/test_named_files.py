"""Every file of this repository that a page, a comment or a docstring names exists."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.native import ROOT

FOLDERS = "kvx_core|kvx_adapters|kvx_conformance|csrc|tests|docs|benchmarks|examples|cmake"
# A path from the root on, which may be a pattern: `csrc/rules/apart*`, `kvx_core/{desc,ops}`.
PATH = re.compile(rf"(?<![\w./-])(?:{FOLDERS})/[\w./*{{}},-]*[\w*}}/](?![<\w])")
NAME = re.compile(r"(?<![\w./*-])[a-z]\w*\.(?:py|cc|cu|cuh|inl)\b")  # a file of some room


ENDINGS = (".md", ".py", ".h", ".cc", ".cu", ".cuh", ".inl")
FILES = [
    path.relative_to(ROOT).as_posix()
    for folder in (".", *FOLDERS.split("|"))
    for path in (ROOT / folder).glob("*" if folder == "." else "**/*")
    if path.suffix in ENDINGS
]
# They name files of others beside no `Source:`.
OF_OTHERS = {"docs/layouts.md", "kvx_adapters/tgi/caches.py", "tests/fakes/tgi.py"}


def exists(path: str) -> bool:
    choices = re.search(r"{(.*?)}", path)
    if choices is not None:
        return all(exists(path.replace(choices[0], one, 1)) for one in choices[1].split(","))
    if "*" in path:
        return any(ROOT.glob(path))
    return (ROOT / path).exists()


def said(name: str) -> Iterator[str]:
    """All of a page, comments and docstrings of code; without their sources."""
    text = (ROOT / name).read_text()
    if name.endswith(".py"):
        parts = re.findall(r'(?s)"""(.*?)"""|((?:#[^\n]*\n\s*)+)', text)
    elif not name.endswith(".md"):
        parts = re.findall(r"(?s)/\*(.*?)\*/|((?://[^\n]*\n\s*)+)", text)
    else:
        parts = [(text, "")]
    for pair in parts:
        for part in pair:
            yield re.sub(r"(?s)Source:.*?(?=\n\s*\n|\Z)", "", part)


def unknown(
    pattern: re.Pattern[str], files: list[str], exists: Callable[[str], bool]
) -> tuple[list[tuple[str, str]], int]:
    """What the files name that does not exist, and how many names there are."""
    found = [
        (name, one)
        for name in files
        if name not in OF_OTHERS
        for part in said(name)
        for one in pattern.findall(part)
        if "NAME" not in one
    ]
    return [pair for pair in found if not exists(pair[1])], len(found)


def test_paths() -> None:
    wrong, count = unknown(PATH, FILES, exists)
    assert not wrong
    assert count > 300, "little was read"


def test_names() -> None:
    rooms = ("kvx_core/", "kvx_adapters/", "csrc/", "docs/architecture", "CONTRIBUTING")
    names = {Path(name).name for name in FILES}
    wrong, count = unknown(NAME, [n for n in FILES if n.startswith(rooms)], names.__contains__)
    assert not wrong
    assert count > 100, "little was read"
