"""The README: its Python runs as it stands and prints what it says. Links: test_pages.py."""

from __future__ import annotations

import pytest

from tests.documents import Document


def test_python_examples(capsys: pytest.CaptureFixture[str]) -> None:
    readme = Document("../README.md")
    readme.run({})
    printed = capsys.readouterr().out
    assert readme.prints()
    for said in readme.prints():
        assert said in printed
