"""A dry run of a store says why lookups would find nothing of what is going to be stored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvx_core import DType, InvalidArgumentError, Precision
from kvx_core.stores.dry_run import never_found
from tests.core.test_stores import HEADS, LAYERS, Engine, files_of, save, store_in

NAME_OF_FILES = ["16-", f".l0-3.h0-{HEADS}.pf32.safetensors"]


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
    last = store.would_write(engine.sections(parts=2), (0, HEADS)).rpartition("/")[2]
    assert [last[:3], last[3 + 64 :]] == NAME_OF_FILES
    save(store, list(range(16)), engine)
    (stored,) = files_of(tmp_path)
    assert [stored.name[:3], stored.name[3 + 64 :]] == NAME_OF_FILES


@pytest.mark.parametrize("heads", [[], [(0, 1)] * 4])
def test_heads_that_nobody_has(heads: list[tuple[int, int]], tmp_path: Path) -> None:
    """As with MLA, if a store expects the heads of its config."""
    rank = Engine(heads=range(1)).sections()
    assert never_found(store_in(tmp_path), rank, heads) == (
        "nobody would store head 1 of layer 0: all ranks together have the KV heads 0 of 4, and an "
        "entry is found when it holds all"
    )


def test_heads_that_the_model_does_not_have(tmp_path: Path) -> None:
    found = never_found(store_in(tmp_path), Engine().sections(), [(4, 5)])
    assert found.endswith(
        ".l0-3.h4-5.pf32.safetensors' would be stored, expected a name of a model of 3 layers and "
        "4 KV heads"
    )
    with pytest.raises(InvalidArgumentError, match=r"has layers .* and heads \(0, 4\), expected"):
        never_found(store_in(tmp_path, total_kv_heads=1), Engine().sections(), [])


def test_layers_that_differ_in_their_heads(tmp_path: Path) -> None:
    one, two = (Engine(heads=range(count)).sections(parts=3)[0] for count in (1, 2))
    sections = [one, replace(two, layers=(2,))]
    assert never_found(store_in(tmp_path), sections, []) == (
        "layers have the KV heads 0 and 0 to 1, expected the same in all: a store of layers "
        "that differ in their number of heads is not there yet"
    )


@pytest.mark.parametrize("accept", ["same", "lossy"])
def test_values_that_are_less_precise_than_the_store_asks_for(accept: Any, tmp_path: Path) -> None:
    sections = Engine().sections(compute_dtype=DType.BF16)
    store = store_in(tmp_path, accept=accept, precision=Precision.of(torch.float32))
    assert never_found(store, sections, []) == (
        ""
        if accept == "lossy"
        else "values would be stored as bf16, expected numbers that include those of f32, which a "
        "lookup asks for"
    )
    assert never_found(store_in(tmp_path), Engine().sections(), []) == ""
