"""docs/snapshots.md: its snippet runs, and prints what it says."""

from __future__ import annotations

import re

import pytest

from tests.native import ROOT

TEXT = (ROOT / "docs/snapshots.md").read_text()


def test_the_snippet_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    exec(compile(snippet, "docs/snapshots.md", "exec"), {"__name__": "snippet"})
    assert capsys.readouterr().out.splitlines() == re.findall(
        r"^print\(.*\)  # (.*)$", snippet, re.M
    )
