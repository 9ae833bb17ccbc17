"""docs/stores.md: its snippets run one after the other, and print what it says."""

from __future__ import annotations

import re

import pytest
import torch

from kvx_core import KvCacheStore, PackedKVCache
from tests.documents import Document

pytest.importorskip("transformers")

PAGE = Document("stores.md")
TEXT = PAGE.text


def test_the_snippets(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    assert len(PAGE.snippets()) == 10
    PAGE.run({})
    assert capsys.readouterr().out.splitlines() == PAGE.prints()


@pytest.mark.parametrize(("kind", "at"), [(PackedKVCache, 1), (KvCacheStore, 2)])
def test_the_table_lists_every_public_name(kind: type, at: int) -> None:
    public = {name for name in dir(kind) if not name.startswith("_")}
    table = TEXT.split("| call | does |")[at].partition("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    listed = set(re.findall(r"`(?:KvCacheStore\.)?(\w+)[`(]", " ".join(cells))) - {kind.__name__}
    assert listed == public


def test_the_figures_of_growth() -> None:
    """1 append of 4096 tokens copies 4096; single ones also what each growth moves."""
    for factor, said in ((4, "copy 1.3 times"), (2, "(1.9 times on a device)")):
        capacity, moved = 257, 0
        while capacity < 4096:
            moved, capacity = moved + capacity, capacity * factor
        assert f"{(4096 + moved) / 4096:.1f}" in said
        assert said in TEXT
