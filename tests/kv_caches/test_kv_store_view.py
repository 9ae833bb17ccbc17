"""KvCacheStore.cache_view: stores of any format as an end of a migration, with HF's own cache."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from kvx_adapters import transformers as hf
from kvx_core import DType, InvalidArgumentError, OutOfRangeError, migrate, verify
from tests.facts import SAME_MODEL
from tests.kv_stores import (
    DIM,
    FORMATS,
    HEADS,
    LAYERS,
    OTHERS,
    SEEDS,
    contents,
    dim_of,
    fill,
    same,
    some,
    store_of,
)

transformers = pytest.importorskip("transformers")
SCALED = [dtype for dtype in FORMATS if dtype.format.scaled]
of_formats = pytest.mark.parametrize("dtype", FORMATS, ids=lambda dtype: dtype.name)


def dynamic_cache(tokens: Tensor) -> Any:
    """transformers' own, filled by its own method."""
    cache = transformers.DynamicCache()
    for layer, halves in enumerate(tokens):
        cache.update(*(half.transpose(0, 1)[None].contiguous() for half in halves), layer)
    return cache


@of_formats
def test_from_a_store(dtype: DType) -> None:
    """What HF's cache then holds is what the store reads."""
    for seed, other in zip(SEEDS, OTHERS, strict=True):
        dim = dim_of(dtype, other)
        store = fill(store_of(dtype, other), some(37, seed, dim=dim))
        theirs = dynamic_cache(torch.full((LAYERS, 2, 37, HEADS, dim), 7.0))
        src, dst = store.cache_view(SAME_MODEL), hf.cache_view(theirs, SAME_MODEL)
        migrate(src, dst, [29])
        for i, layer in enumerate(theirs.layers):
            assert torch.equal(layer.keys[0, :, :29], store.read_keys(i, 0, 29))
            assert torch.equal(layer.values[0, :, :29], store.read_values(i, 0, 29))
            assert (layer.keys[0, :, 29:] == 7).all()
        assert verify(src, dst, [29])


@of_formats
def test_into_a_store(dtype: DType) -> None:
    """It then holds what appends would have stored, behind the tokens that it had."""
    for seed in SEEDS:
        tokens = some(30, seed, dim=dim_of(dtype))
        store = fill(store_of(dtype, dtype), tokens[:, :, :11])
        store.append_zeros(19)
        src = hf.cache_view(dynamic_cache(tokens), SAME_MODEL).at([[0]], starts=[11])
        dst = store.cache_view(SAME_MODEL).at(starts=[11])
        migrate(src, dst, [19], find_scales=dtype.format.scaled)
        assert same(contents(store), contents(fill(store_of(dtype, dtype), tokens)))


def test_stores_of_the_same_formats_exchange_bytes() -> None:
    ours = fill(store_of("Q8_0", "Q4_0"), some(20, 1))
    theirs = store_of("Q8_0", "Q4_0", max_seq_len=99)
    theirs.append_zeros(20)
    migrate(ours.cache_view(SAME_MODEL), theirs.cache_view(SAME_MODEL), [20])
    assert same(contents(theirs), contents(ours))


def test_blocks_of_a_store() -> None:
    tokens = some(24, 2)
    store = fill(store_of("bfloat16", "float32"), tokens)
    theirs = dynamic_cache(torch.zeros(LAYERS, 2, 10, HEADS, DIM))
    src = store.cache_view(SAME_MODEL, block_size=4).at([[5, 0, 2]])
    migrate(src, hf.cache_view(theirs, SAME_MODEL), [10])
    positions = [20, 21, 22, 23, 0, 1, 2, 3, 8, 9]
    for i, layer in enumerate(theirs.layers):
        assert torch.equal(layer.keys[0], store.read_keys(i)[:, positions])
        assert torch.equal(layer.values[0], store.read_values(i)[:, positions])
    with pytest.raises(
        InvalidArgumentError, match=r"^block_size is 5, expected a divisor of the 24"
    ):
        store.cache_view(SAME_MODEL, block_size=5)


def test_views_that_are_out_of_date() -> None:
    store, other = fill(store_of(), some(20, 1)), store_of()
    with pytest.raises(
        InvalidArgumentError, match=r"^the store holds no tokens, expected at least"
    ):
        other.cache_view(SAME_MODEL)
    other.append_zeros(20)
    src, dst = store.cache_view(SAME_MODEL), other.cache_view(SAME_MODEL)
    with pytest.raises(OutOfRangeError):
        migrate(src, dst, [21])
    fill(store, some(1, 2))
    migrate(src, dst, [20])  # appends change nothing that the view describes
    other.evict(19)
    said = (
        "dst is out of date: the store holds 19 tokens, expected the 20 described. Call "
        "cache_view again"
    )
    with pytest.raises(InvalidArgumentError, match=f"^{re.escape(said)}$"):
        migrate(src, dst, [5])
    migrate(src, other.cache_view(SAME_MODEL), [19])
