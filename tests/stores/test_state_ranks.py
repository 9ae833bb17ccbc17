"""States that n ranks have stored, loaded by m ranks: each section against the rule of ranks that
tests/states.py writes out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvx_core import (
    CacheDesc,
    CacheView,
    InvalidArgumentError,
    PlaneKind,
    PrefixStore,
    Section,
    UnsupportedError,
    describe,
)
from kvx_core.snapshot import Precision, Snapshot
from tests.snapshot.sections import FACTS
from tests.states import FAMILIES, Family, Layout, Rank, model_states
from tests.stores_memory import InMemory

TOKENS = list(range(100, 121))
SAVES = Layout(conv=(0, 2, 1), before=1, gap=5)
LOADS = Layout(conv=(0, 1, 2), state=(0, 1, 3, 2), behind=2)


def store_of(blobs: InMemory, family: Family, **options: Any) -> PrefixStore:
    """Of a model whose layer 0 has keys and values, and layers 1 and 2 states."""
    planes = [plane for layer in (1, 2) for plane in Rank(family, SAVES, 0, 1).planes(layer)]
    usual: dict[str, Any] = {
        "fingerprint": "abc",
        "num_layers": 3,
        "total_kv_heads": [1, 0, 0],
        "precision": Precision.of("float32"),
        "chunk_tokens": 16,
        "planes": planes,
    }
    return PrefixStore(blobs, **usual | options)


def keys_and_values() -> Section:
    k, v = (describe(torch.zeros(1, 32, 1, 4), "BLOCK_NHD") for _ in range(2))
    cache = CacheDesc.from_kv(k, v)
    return Section((0,), CacheView((cache,), replace(FACTS, first_kv_head=0), dense=True), None)


Ranks = dict[int, Rank]  # the memory that a rank has for layers 1 and 2


def rank_of(family: Family, layout: Layout, rank: int, num_ranks: int) -> Ranks:
    return {layer: Rank(family, layout, rank, num_ranks, slots=(2,)) for layer in (1, 2)}


def section(rank: Ranks) -> Section:
    planes = tuple(plane for layer, memory in rank.items() for plane in memory.planes(layer))
    view = CacheView((), replace(FACTS, first_kv_head=0), planes=planes, dense=True)
    return Section((1, 2), view, None, state_tokens=len(TOKENS))


def states(family: Family, seed: int) -> dict[int, Any]:
    """Of the model, by layer."""
    return {layer: model_states(family, 1, seed + layer) for layer in (1, 2)}


def saved(store: PrefixStore, ranks: list[Ranks], full: dict[int, Any]) -> list[Snapshot]:
    """What the ranks store of the states after TOKENS, beside the tokens."""
    for start, stop in store.spans(len(TOKENS)):
        snapshot = store.capture(TOKENS, start, stop, [keys_and_values()])
        assert snapshot is not None
        store.commit(snapshot)
    found = []
    for rank in ranks:
        for layer, memory in rank.items():
            memory.write(full[layer])
        snapshot = store.capture(TOKENS, 16, len(TOKENS), [section(rank)], states=True)
        assert snapshot is not None
        store.commit(snapshot)
        found.append(snapshot)
    return found


@pytest.mark.parametrize("counts", [(1, 2), (2, 1), (2, 4), (8, 2), (4, 4), (1, 8)], ids=str)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.kind + "-whole" * bool(f.whole))
def test_other_ranks_load_what_ranks_have_stored(family: Family, counts: tuple[int, int]) -> None:
    """In another order of axes, with other columns beside those that count."""
    n, m = counts
    full, blobs = states(family, seed=n + 10 * m), InMemory()
    saved(store_of(blobs, family), [rank_of(family, SAVES, i, n) for i in range(n)], full)
    for i in range(m):
        reader, rank = store_of(blobs, family), rank_of(family, LOADS, i, m)
        match = reader.lookup(TOKENS)
        assert match.num_tokens == len(TOKENS)
        reader.load(match, 0, len(TOKENS), [keys_and_values(), section(rank)])
        for layer, memory in rank.items():
            memory.check(full[layer])


def test_sections_may_stand_in_another_order() -> None:
    family, blobs = FAMILIES[3], InMemory()
    full, order = states(family, seed=5), replace(LOADS, sections=("v", "q", "k"))
    saved(store_of(blobs, family), [rank_of(family, SAVES, 0, 1)], full)
    rank, reader = rank_of(family, order, 1, 2), store_of(blobs, family)
    held = [keys_and_values(), section(rank)]
    reader.load(reader.lookup(TOKENS), 0, len(TOKENS), held)
    for layer, memory in rank.items():
        memory.check(full[layer])


def test_the_states_of_a_rank_alone_are_no_hit() -> None:
    family, blobs = FAMILIES[3], InMemory()
    ranks, full = [rank_of(family, SAVES, i, 2) for i in range(2)], states(family, seed=3)
    saved(store_of(blobs, family), ranks[1:], full)
    assert store_of(blobs, family).lookup(TOKENS).num_tokens == 0
    saved(store_of(blobs, family), ranks[:1], full)
    assert store_of(blobs, family).lookup(TOKENS).num_tokens == len(TOKENS)


def test_a_store_has_each_section_cut_into_heads() -> None:
    """Those of a delta net: 8 heads, of which each has as much of Q, K and V."""
    family = Family("gdn", {"q": 24, "k": 24, "v": 40}, (8, 3, 5))
    full = states(family, seed=4)
    store = store_of(InMemory(), family)
    (snapshot,) = saved(store, [rank_of(family, SAVES, 1, 2)], full)
    assert snapshot.header.heads == {1: (4, 8), 2: (4, 8)}
    for layer in (1, 2):
        conv, state = full[layer]["conv"][0], full[layer]["state"][0]
        for name, expected in {
            "conv_state": conv[:24].reshape(8, 9)[4:],
            "role_1001": conv[24:48].reshape(8, 9)[4:],
            "role_1002": conv[48:].reshape(8, 15)[4:],
            "state": state.reshape(8, 15)[4:],
        }.items():
            found = snapshot.tensors[f"planes.{layer}.{name}"]
            assert found.shape[1:] == expected.shape
            at = slice(found.offset, found.offset + expected.nbytes)
            assert snapshot.memory[at].tobytes() == expected.tobytes()


def test_what_cannot_be_cut_is_refused() -> None:
    """3 ranks, and 8 heads into which a store cuts: Q has 24 channels, K and V too."""
    family = Family("gdn", {"q": 24, "k": 24, "v": 24}, (24, 1, 1))
    rank, store = rank_of(family, SAVES, 0, 3), store_of(InMemory(), family)
    with pytest.raises(UnsupportedError, match="over 3 ranks, expected a divisor of 8, the heads"):
        store.capture(TOKENS, 16, len(TOKENS), [section(rank)], states=True)


def test_heads_divide_each_section() -> None:
    conv, state = rank_of(FAMILIES[3], SAVES, 0, 1)[1].planes(1)
    assert len(list(conv.by_heads(8))) == 3
    with pytest.raises(UnsupportedError, match=r"section v of .* has 40 channels or heads"):
        list(conv.by_heads(12))
    with pytest.raises(UnsupportedError, match=r"section heads of .* has 8 channels or heads"):
        list(state.by_heads(16))


def test_states_of_several_ranks_are_no_section() -> None:
    one, two = (rank_of(FAMILIES[3], SAVES, i, 2) for i in range(2))
    store = store_of(InMemory(), FAMILIES[3])
    with pytest.raises(InvalidArgumentError, match="of rank 0 of 2 and rank 1 of 2, expected all"):
        store.capture(TOKENS, 16, len(TOKENS), [section({1: one[1], 2: two[2]})], states=True)


def test_a_snapshot_has_states_whole() -> None:
    held = section(rank_of(FAMILIES[0], SAVES, 1, 2))
    with pytest.raises(UnsupportedError, match="is rank 1 of 2, expected all ranks together"):
        Snapshot.capture(TOKENS, [held])


def test_kinds_of_planes_say_no_heads() -> None:
    """Where planes are given without what they mean, so are their heads."""
    family = FAMILIES[3]
    kinds = {PlaneKind(1, 7, 0), PlaneKind(1, 1001, 0), PlaneKind(1, 1002, 0), PlaneKind(1, 8, 0)}
    kinds |= {replace(kind, layer=2) for kind in kinds}
    given = store_of(InMemory(), family, planes=sorted(kinds), state_heads=8)
    assert given.kinds.record == store_of(InMemory(), family).kinds.record
