"""Index: what a process knows of a store's files, in bounded memory."""

from __future__ import annotations

import pytest

from kvx_core.stores import index as module
from kvx_core.stores.index import Index


def test_an_index_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_NAMES", 100)
    index = Index()
    for i in range(300):
        index.mark_present(f"file {i}")
        index.mark_absent(f"other {i}")
        index.found_good(f"good {i}")
        index.held(f"held {i}")
    for known in (index._files, index._absent, index._good, index._held):
        assert len(known) <= 100
    assert index.is_held("held 299")
    assert not index.is_there("other 299")


def test_a_file_that_is_being_written_is_not_asked_for() -> None:
    """The disk does not have it yet: asked now, it would say that the file is to be saved again."""
    index = Index()
    index.expect("file")
    assert index.is_held("file")
    assert not index.has_doubted
    index.wrote("file")
    assert index.is_held("file")
    assert not index.has_doubted
    index.expect("other")
    index.mark_absent("other")  # a lookup has asked the disk meanwhile
    index.mark_uncertain("other")
    assert index.is_held("other")
    index.not_written("other")
    assert not index.is_held("other")


def test_a_file_that_was_written_while_the_disk_was_asked_is_there() -> None:
    time = 0.0
    index = Index(clock=lambda: time)
    asked = index.now()
    time = 0.1
    index.wrote("file")
    index.mark_absent("file", asked)  # before that it was missing
    assert index.is_held("file")
    assert index.is_there("file")
    asked = index.now()
    index.mark_absent("file", asked)
    assert not index.is_held("file")
    assert not index.is_there("file")
