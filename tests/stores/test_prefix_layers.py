"""A store of a model whose layers differ in heads, head_dims, dtypes and scales."""

from __future__ import annotations

from typing import Any

import pytest

from kvx_core import InvalidArgumentError, PrefixStore
from kvx_core.snapshot import Precision, Section, Snapshot
from kvx_core.stores import BlobStore
from kvx_core.stores.dry_run import never_found
from tests.snapshot.layered import LAYERS, PLAIN, STOP, Model, Rank
from tests.stores_memory import InMemory

SEEDS = [1, 2, 3]
TOKENS = range(100, 100 + STOP)
LO, HI = 5, STOP


def store_of(blobs: BlobStore, model: list[Model], **options: Any) -> PrefixStore:
    usual: dict[str, Any] = {
        "fingerprint": "abc",
        "num_layers": len(model),
        "total_kv_heads": [m.heads for m in model],
        "precision": [one.precision for one in Rank(model, 4, "BLOCK_NHD").sections()],
        "chunk_tokens": 8,
    }
    return PrefixStore(blobs, **usual | options)


def save(store: PrefixStore, sections: list[Section]) -> None:
    for start, stop in store.spans(STOP):
        snapshot = store.capture(TOKENS, start, stop, sections)
        assert snapshot is not None
        assert store.commit(snapshot) > 0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("producers", "consumers"), [(1, 1), (2, 1), (1, 4), (4, 2)])
def test_unequal_layers_are_stored_by_any_ranks_and_loaded_by_any(
    producers: int,
    consumers: int,
    seed: int,
) -> None:
    """Of four ranks all hold the one head of the first layer, and two each of the last one's."""
    blobs = InMemory()
    model = [m.filled(seed) for m in LAYERS]
    store = store_of(blobs, model)
    for rank in range(producers):
        assert store.lookup(TOKENS).num_tokens == 0  # until all heads are there
        src = Rank(model, 4, "BLOCK_NHD", rank, producers).put(0, STOP)
        held = src.heads
        assert store.missing(TOKENS, 0, 8, (0, 1, 2), held)
        save(store, src.sections())
        assert not store.missing(TOKENS, 0, 8, (0, 1, 2), held)
        assert not store.missing(TOKENS, 0, 8, (2, 0), [held[2], held[0]], from_memory=True)
    for rank in range(consumers):
        reader = store_of(blobs, model)
        match = reader.lookup(TOKENS)
        assert match.num_tokens == STOP
        dst, expected = (Rank(model, 7, "BLOCK_HND", rank, consumers) for _ in range(2))
        assert reader.load(match, LO, HI, dst.sections()) > 0
        dst.assert_same(expected.put(LO, HI))
        assert reader.carried == Precision()


@pytest.mark.parametrize("options", [{}, {"format": "q8_0"}, {"key": b"k" * 32}])
def test_formats_and_keys_of_unequal_layers(
    options: dict[str, Any],
) -> None:
    """What is loaded is what a snapshot of the same layers restores."""
    blobs = InMemory()
    model = [m.filled(1) for m in PLAIN]
    store = store_of(blobs, model, encryption_key=b"e" * 32, **options)
    save(store, Rank(model, 4, "BLOCK_NHD").put(0, STOP).sections())
    dst, expected = (Rank(model, 7, "BLOCK_HND", 1, 2) for _ in range(2))
    store.load(store.lookup(TOKENS), 0, STOP, dst.sections())
    whole = Snapshot.capture(
        TOKENS, Rank(model, 4, "BLOCK_NHD").put(0, STOP).sections(), format=options.get("format")
    )
    assert whole is not None
    for section in expected.sections():
        whole.restore(section, 0, STOP)
    dst.assert_same(expected)


def test_a_dry_run_of_ranks_with_other_heads_in_each_layer() -> None:
    blobs = InMemory()
    model = [m.filled(1) for m in LAYERS]
    store, rank = store_of(blobs, model), Rank(model, 4, "BLOCK_NHD", 0, 2)
    both = [Rank(model, 4, "BLOCK_NHD", i, 2).heads for i in range(2)]
    heads = {layer: [one[layer] for one in both] for layer in range(3)}
    assert never_found(store, rank.sections(), heads) == ""
    assert never_found(store, rank.sections(), {i: held[:1] for i, held in heads.items()}) == (
        "nobody would store head 2 of layer 1: all ranks together have the KV heads 0 to 1 of 4, "
        "and an entry is found when it holds all"
    )
    assert list(blobs.files) == ["kvx-store.json"]


def test_a_model_with_other_heads_is_another() -> None:
    blobs = InMemory()
    model = [m.filled(1) for m in LAYERS]
    save(store_of(blobs, model), Rank(model, 4, "BLOCK_NHD").put(0, STOP).sections())
    for totals in ([1, 4, 4], [4, 4, 4], [1, 4, 3]):
        other = store_of(blobs, model, total_kv_heads=totals)
        assert other.lookup(TOKENS).num_tokens == 0
        with pytest.raises(InvalidArgumentError, match=r"facts.total_kv_heads is \d, expected \d"):
            other.capture(TOKENS, 0, 8, Rank(model, 4, "BLOCK_NHD").sections())
    small = store_of(blobs, model, total_kv_heads=[1, 2, 2])
    with pytest.raises(InvalidArgumentError, match=r"layers \(1,\) and heads \(0, 4\), expected"):
        small.capture(TOKENS, 0, 8, Rank(model, 4, "BLOCK_NHD").sections())


def test_heads_of_missing_are_those_of_its_layers() -> None:
    blobs = InMemory()
    store = store_of(blobs, [m.filled(1) for m in LAYERS])
    for heads, message in (
        ([(0, 1), (0, 4)], "heads has 2 ranges, expected one, or one for each of the 3 layers"),
        ([(0, 1), (0, 4), (0, 3)], "heads end at 3, expected at most 2, those of layer 2"),
        ((0, 2), "heads end at 2, expected at most 1, those of layer 0"),
        ([(0, 1), (2, 2), (0, 2)], r"heads\[1\] is .* expected first and one past the last head"),
        ([(0, 1), (0,), (0, 2)], r"heads\[1\] is .* expected first and one past the last head"),
        ([(0, 1), "ab", (0, 2)], r"heads\[1\] is 'ab', expected a list of integers"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            store.missing(TOKENS, 0, 8, (0, 1, 2), heads)  # type: ignore[arg-type]
