"""Writes docs/requirements.md from tests/requirements.txt: what was asked, and what shows it.

python -m docs.list_requirements
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
DATA = ROOT / "tests/requirements.txt"
PAGE = ROOT / "docs/requirements.md"

_HEAD = """# Requirements

What KVX was asked to be, where it is, and the test that shows it. Tests run with `make test`,
some of them with `make test ARGS=--slow`. What has run on an H100 says so, and what no GPU has
run: [kernels.md](kernels.md) has how kernels are tested.
"""


class Row(NamedTuple):
    """One thing that was asked."""

    asked: str
    where: str
    tests: tuple[str, ...]  # path::name
    note: str


@dataclass
class Section:
    """Rows that belong together."""

    title: str
    text: str = ""
    rows: list[Row] = field(default_factory=list)


def sections(text: str) -> list[Section]:
    """The sections of the data. Raises ValueError for a row of another form."""
    found: list[Section] = []
    for line in filter(None, text.split("\n")):
        if line.startswith("## "):
            found.append(Section(line.removeprefix("## ")))
        elif line.startswith("#"):
            continue
        elif " | " not in line:
            found[-1].text = line
        else:
            asked, where, tests, *note = line.split(" | ")
            if len(note) > 1:
                raise ValueError(f"{line!r} has {3 + len(note)} columns, expected 3 or 4")
            found[-1].rows.append(Row(asked, where, tuple(tests.split(", ")), "".join(note)))
    return found


def page(found: list[Section]) -> str:
    """docs/requirements.md."""
    parts = [_HEAD]
    for section in found:
        parts += [f"\n## {section.title}\n", f"\n{section.text}\n" * bool(section.text)]
        parts += ["\n| asked | where | shown by |\n| --- | --- | --- |\n"]
        for row in section.rows:
            shown = "; ".join(
                f"`{test.removeprefix('tests/').replace('.py::', ': ')}`" for test in row.tests
            )
            note = f"; **{row.note}**" if row.note else ""
            parts.append(f"| {row.asked} | {row.where} | {shown}{note} |\n")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(sections(DATA.read_text())))
