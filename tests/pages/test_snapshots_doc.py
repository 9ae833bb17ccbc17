"""docs/snapshots.md: its snippets run, and print what it says."""

from __future__ import annotations

import pytest

from tests.documents import Document


def test_the_snippets_run(capsys: pytest.CaptureFixture[str]) -> None:
    page = Document("snapshots.md")
    assert len(page.snippets()) == 2
    page.run({"__name__": "snippet"})
    assert capsys.readouterr().out.splitlines() == page.prints()
