"""docs/requirements.md: every row has a test that is there, and the table of features agrees."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from docs.list_requirements import DATA, PAGE, ROOT, Row, page, sections
from tests.documents import Document

FOUND = sections(DATA.read_text())
TITLES = [section.title for section in FOUND]
ROWS = [row for section in FOUND for row in section.rows]
UNSEEN = "not yet measured on a GPU"
SEEN = "on an H100"


@cache
def names_in(path: Path) -> frozenset[str]:
    """The functions of a file of tests, without running it."""
    tree = ast.parse(path.read_text())
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in tree.body if isinstance(node, functions))


def missing(row: Row) -> list[str]:
    """Tests of a row that are not there."""
    wrong = []
    for test in row.tests:
        path, _, name = test.partition("::")
        file = ROOT / path
        if not file.is_file() or not name.startswith("test_") or name not in names_in(file):
            wrong.append(test)
    return wrong


def section(title: str) -> list[Row]:
    (found,) = [one for one in FOUND if one.title == title]
    return found.rows


def test_every_row_has_a_test_that_is_there() -> None:
    assert {row.asked: missing(row) for row in ROWS if missing(row)} == {}
    assert all(row.tests and row.asked and row.where for row in ROWS)
    assert len(ROWS) > 60, "nothing was read"


def test_a_test_that_is_not_there_is_found() -> None:
    wrong = (
        "tests/pages/test_requirements.py::test_nothing",
        "tests/test_nothing.py::test_every_row_has_a_test_that_is_there",
        "tests/pages/test_requirements.py::missing",
        "tests/pages/test_requirements.py",
    )
    here = "tests/pages/test_requirements.py::test_a_test_that_is_not_there_is_found"
    assert missing(Row("a", "b", (*wrong, here), "")) == list(wrong)


def test_the_page_is_made_of_the_rows() -> None:
    assert PAGE.read_text() == page(FOUND), "run: python -m docs.list_requirements"


def test_it_begins_with_what_was_asked_and_the_three_users() -> None:
    assert TITLES[:2] == ["What the project was asked to be", "Its three users"]
    asked, users = ("\n".join(row.asked for row in section(title)) for title in TITLES[:2])
    for part in (
        "Descriptors", "kernel that writes", "kernel that gathers", "vLLM's cache", "TGI's cache",
        "TensorRT-LLM's pools", "Slot mappings, zero-copy", "KVCacheIndex, zero-copy",
        "plugin entry point",
    ):  # fmt: skip
        assert part in asked
    for user in ("vLLM attention backend plugin", "TRT-LLM pool bridge", "Migration script"):
        assert user in users


def test_nothing_is_asked_twice() -> None:
    for one in FOUND:
        asked = [row.asked for row in one.rows]
        assert len(set(asked)) == len(asked)


def test_what_runs_on_a_gpu_says_whether_one_has_run_it() -> None:
    """Rows of kernels, launches and devices."""
    word = re.compile(r"kernel\b|launch|on the device|captured graph|memcpy", re.IGNORECASE)
    kernels = [row for row in ROWS if word.search(row.asked)]
    assert kernels
    unsaid = [row.asked for row in kernels if UNSEEN not in row.note and SEEN not in row.note]
    assert unsaid == []
    for row in ROWS:
        assert (
            "GPU" not in row.note
            or UNSEEN in row.note
            or "need a GPU" in row.note
            or ("needs a GPU" in row.note)
        )


def features() -> dict[str, str]:
    text = (ROOT / "docs/compatibility.md").read_text()
    table = text.partition("## What is there, and what is not\n")[2].partition("\n## ")[0]
    cells = [line.strip("| ").split(" | ", 1) for line in table.splitlines() if "|" in line]
    return {cell[0]: cell[1] for cell in cells[2:]}


def test_the_table_of_features_agrees() -> None:
    """Each of its rows is shown, and says of a GPU what the card says."""
    said = features()
    shown = {row.asked: row for row in section("What is there, feature by feature")}
    assert list(shown) == [name for name in said if name != "not there yet"]
    for name, row in shown.items():
        assert ("not yet" in said[name] and "GPU" in said[name]) == (UNSEEN in row.note), name
        assert ("mock" in said[name]) == bool(re.search("a mock|laid out as", row.note)), name


def test_it_is_in_the_menu() -> None:
    assert ": requirements.md\n" in (ROOT / "mkdocs.yml").read_text()
    assert "(docs/requirements.md)" in Document("../README.md").text
