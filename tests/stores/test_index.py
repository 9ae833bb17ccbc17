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
