"""Stores of models with planes: found by prompts of such models alone, cut where planes can be."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvx_core import InvalidArgumentError, PlaneKind, PrefixStore, Section, StoreError
from kvx_core.snapshot import Precision
from kvx_core.stores import Directory
from kvx_core.stores.space import SpaceRecord
from tests.snapshot.with_planes import Engine, assert_same, copy_by_hand

TOKENS = range(100, 140)


def store_in(root: Path, planes: Any, **options: Any) -> PrefixStore:
    options = {"chunk_tokens": 16, "total_kv_heads": 2} | options
    return PrefixStore(
        Directory(root),
        fingerprint="abc",
        num_layers=1,
        precision=Precision.of(torch.bfloat16),
        planes=planes,
        **options,
    )


def engine(seed: int | None, block_size: int = 16) -> Engine:
    return Engine(block_size, 3, seed, layer=0)


def section(of: Engine, *, state: bool, tokens: int | None = None) -> list[Section]:
    return [of.section(state_tokens=tokens, state=state)]


def save(store: PrefixStore, of: Engine, *, state: bool, tokens: Any = TOKENS) -> None:
    """Every chunk as the engine has it; its state is that of each chunk's end."""
    for start, stop in store.spans(len(tokens)):
        save_entry(store, of, start, stop, state=state, tokens=tokens)


def save_entry(
    store: PrefixStore, of: Engine, start: int, stop: int, *, state: bool, tokens: Any = TOKENS
) -> None:
    held = section(of, state=state, tokens=stop if state else None)
    for states in (False, True)[: 1 + state]:
        captured = store.capture(tokens, start, stop, held, states=states)
        assert captured is not None
        assert store.commit(captured) > 0


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_prefix_with_planes_is_found_and_loaded(seed: int, tmp_path: Path) -> None:
    source = engine(seed)
    planes = source.planes(state=False)
    save(store_in(tmp_path, planes), source, state=False)
    store = store_in(tmp_path, planes)
    for prompt, num_tokens in ((TOKENS, 40), (range(100, 127), 27), ([*range(100, 118), 1], 18)):
        match = store.lookup(prompt)
        assert match.num_tokens == num_tokens
        dst, expected = engine(None, 8), engine(None, 8)
        store.load(match, 0, num_tokens, section(dst, state=False))
        copy_by_hand(source, expected, 0, num_tokens, state=False)
        assert_same(dst, expected)


def test_a_prefix_with_planes_never_matches_one_without(tmp_path: Path) -> None:
    source = engine(1)
    planes = source.planes(state=False)
    kinds = [PlaneKind.of(plane) for plane in planes]
    save(store_in(tmp_path, planes), source, state=False)
    assert store_in(tmp_path, kinds).lookup(TOKENS).num_tokens == 40
    others = [
        (),
        planes[:2],
        source.planes(),
        [*kinds[:2], replace(kinds[2], role=41)],
        [*kinds[:2], replace(kinds[2], tokens_per_entry=8)],
        [*kinds[1:], replace(kinds[0], replicated=False)],
    ]
    for other in others:
        assert store_in(tmp_path, other).lookup(TOKENS).num_tokens == 0
    assert store_in(tmp_path, planes).salted("x").lookup(TOKENS).num_tokens == 0


def test_a_state_is_loaded_for_its_own_prefix_alone(tmp_path: Path) -> None:
    source = engine(1)
    planes = source.planes()
    save(store_in(tmp_path, planes), source, state=True)
    store = store_in(tmp_path, planes)
    for prompt, num_tokens in ((TOKENS, 40), (range(100, 160), 40), (range(100, 139), 32),
                               (range(100, 120), 16), (range(100, 110), 0)):  # fmt: skip
        match = store.lookup(prompt)
        assert match.num_tokens == num_tokens
        dst, expected = engine(None, 8), engine(None, 8)
        store.load(match, 0, num_tokens, section(dst, state=True))
        copy_by_hand(source, expected, 0, num_tokens, state=num_tokens > 0)
        assert_same(dst, expected)
    dst, expected = engine(None, 8), engine(None, 8)
    match = store.lookup(TOKENS)
    store.load(match, 16, 40, section(dst, state=True))
    copy_by_hand(source, expected, 16, 40, state=True)
    assert_same(dst, expected)
    alone, expected_alone = engine(None, 8), engine(None, 8)
    store.load(match, 40, 40, section(alone, state=True))
    copy_by_hand(source, expected_alone, 40, 40, state=True)
    assert_same(alone, expected_alone)
    for stop in (36, 32):
        with pytest.raises(StoreError, match=rf"^stop is {stop}, expected 40: the states of a mat"):
            store.load(match, 0, stop, section(dst, state=True))
    with pytest.raises(InvalidArgumentError, match="STATE of layer 0 is a plane of the store alon"):
        store.load(match, 0, 40, section(dst, state=False))
    assert_same(dst, expected)


def test_a_longer_entry_is_as_good_where_it_has_planes(tmp_path: Path) -> None:
    """But not where the shorter one has states, which belong to its end."""
    source = engine(1)
    for state in (False, True):
        store = store_in(tmp_path / str(state), source.planes(state=state))
        for stop in (8, 12):
            save_entry(store, source, 0, stop, state=state)
        assert bool(store._stale_entries._found) is not state
        for stop in (8, 12):
            assert store.lookup(TOKENS[:stop]).num_tokens == stop


def test_what_stores_refuse(tmp_path: Path) -> None:
    source = engine(1)
    planes = source.planes(state=False)
    with pytest.raises(InvalidArgumentError, match="chunk_tokens is 18, expected a multiple of 4"):
        store_in(tmp_path / "other", planes, chunk_tokens=18)
    store = store_in(tmp_path, planes)
    with pytest.raises(InvalidArgumentError, match="STATE of layer 0 is a plane of the section al"):
        store.capture(TOKENS, 0, 16, section(source, state=True, tokens=16))
    bare = store_in(tmp_path, ())
    with pytest.raises(InvalidArgumentError, match="INDEX_K of layer 0 is a plane of the section"):
        bare.capture(TOKENS, 0, 16, section(source, state=False))
    without = section(source, state=False)[0]
    without = replace(without, view=replace(without.view, planes=()))
    with pytest.raises(InvalidArgumentError, match="INDEX_K of layer 0 is a plane of the store al"):
        store.capture(TOKENS, 0, 16, [without])
    states = store_in(tmp_path, source.planes())
    with pytest.raises(InvalidArgumentError, match=r"^section\.state_tokens is 40, expected 16: "):
        states.capture(TOKENS, 0, 16, section(source, state=True, tokens=40), states=True)
    with pytest.raises(InvalidArgumentError, match="sections have no states, expected"):
        store.capture(TOKENS, 0, 16, section(source, state=False), states=True)


def test_planes_are_part_of_the_space() -> None:
    bare = SpaceRecord("abc", (4, 4))
    assert json.loads(bare.text)["planes"] == []
    planes = SpaceRecord("abc", (4, 4), planes=(PlaneKind(0, 4), PlaneKind(0, 3)))
    assert json.loads(planes.text)["planes"] == [[0, 3, 1, False], [0, 4, 1, False]]
    assert bare.name == hashlib.sha256(bare.text).hexdigest() != planes.name
