"""The README: its Python runs as it stands and prints what it says, and its links lead to files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.documents import Document
from tests.native import ROOT


def test_python_examples(capsys: pytest.CaptureFixture[str]) -> None:
    readme = Document("../README.md")
    readme.run({})
    printed = capsys.readouterr().out
    assert readme.prints()
    for said in readme.prints():
        assert said in printed


def test_links_lead_to_files() -> None:
    text = (ROOT / "README.md").read_text()
    targets = {target.split("#")[0] for target in re.findall(r"\]\(([^)]+)\)", text)}
    assert len(targets) > 10
    assert [target for target in targets if not Path(ROOT / target).exists()] == []
