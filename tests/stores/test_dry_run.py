"""A dry run of a store says why lookups would find nothing of what is going to be stored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvx_core import DType, InvalidArgumentError, Precision
from kvx_core.stores.dry_run import never_found
from tests.stores.engine import HEADS, LAYERS, Engine, save, store_in
from tests.stores.test_prefix import files_of


def test_what_is_found(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    whole = Engine().sections(parts=2)
    assert never_found(store, whole, []) == ""
    assert never_found(store, whole, [(0, HEADS)] * 2) == ""  # ranks that share all heads
    ranks = [Engine(heads=range(head, head + 1)).sections() for head in range(HEADS)]
    assert [never_found(store, rank, [(i, i + 1) for i in range(HEADS)]) for rank in ranks] == [
        ""
    ] * HEADS
    stage = Engine(layers=range(1, LAYERS)).sections()  # another one has the first layer
    assert never_found(store, stage, []) == ""
    assert files_of(tmp_path) == []


def test_it_names_what_is_stored(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    engine = Engine()
    kind = store.would_write(engine.sections(parts=2))
    assert files_of(tmp_path) == []
    save(store, list(range(16)), engine, parts=2)
    (stored,) = files_of(tmp_path)
    assert stored.name.split(".")[1] == kind.id


@pytest.mark.parametrize("heads", [[], [(0, 1)] * 4])
def test_heads_that_nobody_has(heads: list[tuple[int, int]], tmp_path: Path) -> None:
    """As with MLA, if a store expects the heads of its config."""
    rank = Engine(heads=range(1)).sections()
    assert never_found(store_in(tmp_path), rank, heads) == (
        "nobody would store head 1 of layer 0: all ranks together have the KV heads 0 of 4, and an "
        "entry is found when it holds all"
    )


def test_heads_that_the_model_does_not_have(tmp_path: Path) -> None:
    found = never_found(store_in(tmp_path), Engine().sections(), [(0, 4), (4, 5)])
    assert found == (
        "a rank would store the KV heads 4 of layer 0, expected some of the 4 that the store has "
        "there"
    )
    with pytest.raises(InvalidArgumentError, match=r"has layers .* and heads \(0, 4\), expected"):
        never_found(store_in(tmp_path, total_kv_heads=1), Engine().sections(), [])


def test_layers_that_differ_in_their_heads(tmp_path: Path) -> None:
    """Layer 0 has one head, which both ranks hold, layer 1 four, two on each."""
    store = store_in(tmp_path, num_layers=2, total_kv_heads=[1, HEADS])
    one, two = (
        Engine(heads=range(count)).sections(parts=3, fingerprint=None)[0] for count in (1, 2)
    )
    facts = [replace(s.view.facts, total_kv_heads=None) for s in (one, two)]
    sections = [
        replace(one, layers=(layer,), view=replace(one.view, facts=facts))
        for layer, (one, facts) in enumerate(zip((one, two), facts, strict=True))
    ]
    ranks = {0: [(0, 1), (0, 1)], 1: [(0, 2), (2, 4)]}
    assert never_found(store, sections, ranks) == ""
    assert never_found(store, sections, []) == (
        "nobody would store head 2 of layer 1: all ranks together have the KV heads 0 to 1 of 4, "
        "and an entry is found when it holds all"
    )


@pytest.mark.parametrize("accept", ["same", "lossy"])
def test_values_that_are_less_precise_than_the_store_asks_for(accept: Any, tmp_path: Path) -> None:
    sections = Engine().sections(compute_dtype=DType.BF16)
    store = store_in(tmp_path, accept=accept, precision=Precision.of(torch.float32))
    assert never_found(store, sections, []) == (
        ""
        if accept == "lossy"
        else "values of layer 0 would be stored as bf16, expected numbers that include those of "
        "f32, which a lookup asks for"
    )
    assert never_found(store_in(tmp_path), Engine().sections(), []) == ""
