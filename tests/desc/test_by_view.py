"""ByView: what is computed of a view is dropped with it, at the end of a process too."""

from __future__ import annotations

import gc
import subprocess
import sys

import torch

from kvx_core import CacheDesc, CacheFacts, CacheView, describe
from kvx_core.desc.by_view import ByView


def new_view() -> CacheView:
    k = torch.zeros(2, 4, 1, 8)
    return CacheView([CacheDesc.from_kv(describe(k, "BLOCK_NHD"))], CacheFacts())


def test_a_view_has_a_dict_of_its_own_as_long_as_it_exists() -> None:
    kept = ByView[str, int]()
    views = [new_view() for _ in range(3)]
    for i, view in enumerate(views):
        kept.of(view)["number"] = i
    assert [kept.of(view) for view in views] == [{"number": i} for i in range(3)]
    del views[1], view
    gc.collect()
    assert len(kept) == 2
    assert kept.of(new_view()) == {}
    assert [kept.of(view) for view in views] == [{"number": 0}, {"number": 2}]


AT_EXIT = """
import torch
from kvx_core import CacheDesc, CacheFacts, CacheView, describe
from kvx_core.desc.by_view import ByView
k = torch.zeros(2, 4, 1, 8)
view = CacheView([CacheDesc.from_kv(describe(k, "BLOCK_NHD"))], CacheFacts())
kept = ByView()
kept.of(view)["of"] = 1
def keeps(): return view
"""


def test_a_process_that_ends_says_nothing() -> None:
    found = subprocess.run(
        [sys.executable, "-c", AT_EXIT], capture_output=True, text=True, check=True
    )
    assert found.stderr == ""
