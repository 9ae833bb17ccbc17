"""packed_view: packed caches as an end of a migration, from and to HF transformers' own cache."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from kvx_adapters import transformers as hf
from kvx_core import (
    CacheFacts,
    CacheView,
    FactsMismatchError,
    InvalidArgumentError,
    PackedKVCache,
    describe,
    migrate,
    packed_view,
    verify,
)
from kvx_core.caches.packed import expand_heads
from kvx_core.desc.cache import CacheDesc
from tests.facts import SAME_MODEL

transformers = pytest.importorskip("transformers")

LAYERS, BATCH, KV_HEADS, DIM = 3, 2, 3, 8
SENTINEL = 77.0


Tokens = list[tuple[Tensor, Tensor]]  # keys and values of each layer


def some(seq_len: int, seed: int, dtype: torch.dtype = torch.float32) -> Tokens:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(LAYERS, 2, BATCH, seq_len, KV_HEADS * DIM, generator=generator)
    return [(layer[0].to(dtype), layer[1].to(dtype)) for layer in tokens]


def sentinels(seq_len: int, dtype: torch.dtype) -> Tokens:
    shape = (BATCH, seq_len, KV_HEADS * DIM)
    return [
        (torch.full(shape, SENTINEL, dtype=dtype), torch.full(shape, SENTINEL, dtype=dtype))
        for _ in range(LAYERS)
    ]


def packed(tokens: Tokens) -> list[PackedKVCache]:
    caches = []
    for keys, values in tokens:
        cache = PackedKVCache()
        cache.append_packed(keys, values)
        caches.append(cache)
    return caches


def dynamic_cache(tokens: Tokens) -> Any:
    """transformers' own, filled by its own method."""
    cache = transformers.DynamicCache()
    for i, halves in enumerate(tokens):
        cache.update(*(half.unflatten(2, (KV_HEADS, DIM)).transpose(1, 2) for half in halves), i)
    return cache


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_to_transformers_and_back(dtype: torch.dtype, seed: int) -> None:
    tokens = some(11, seed, dtype)
    mine = packed(tokens)
    theirs = dynamic_cache(sentinels(11, dtype))
    view = packed_view(mine, SAME_MODEL, KV_HEADS)
    assert view.dense
    desc = view.layers[1]
    assert (desc.num_blocks, desc.block_size) == (BATCH, 11)
    assert (desc.num_kv_heads, desc.head_dim) == (KV_HEADS, DIM)
    assert desc.k.data == mine[1].packed_keys().data_ptr()
    assert desc.k.stride[0] == mine[1].capacity * KV_HEADS * DIM
    hf_view = hf.cache_view(theirs, SAME_MODEL)
    lengths = [11, 6]
    migrate(view, hf_view, lengths)
    assert verify(view, hf_view, lengths)
    for (keys, values), layer in zip(tokens, theirs.layers, strict=True):
        for half, found in ((keys, layer.keys), (values, layer.values)):
            wanted = half.unflatten(2, (KV_HEADS, DIM)).transpose(1, 2).clone()
            wanted[1, :, 6:] = SENTINEL
            assert torch.equal(found, wanted)

    room = [PackedKVCache() for _ in range(LAYERS)]
    for cache, halves in zip(room, sentinels(13, dtype), strict=True):
        cache.set_packed(*halves)
    migrate(hf_view, packed_view(room, SAME_MODEL, KV_HEADS), lengths)
    new = some(1, 9, dtype)
    for cache, (keys, values), (new_key, new_value) in zip(room, tokens, new, strict=True):
        cache.truncate(2)
        cache.append_packed(new_key, new_value)
        for found, half, token in (
            (cache.packed_keys(), keys, new_key),
            (cache.packed_values(), values, new_value),
        ):
            wanted = torch.cat([half, token], 1)
            wanted[1, 6:11] = SENTINEL
            assert found is not None
            assert torch.equal(found, wanted)


def test_the_room_behind_the_tokens_is_left_alone() -> None:
    """All bytes of the allocation: a migration into 5 tokens writes 5 tokens."""
    cache = packed(some(5, 0))[0]
    held = cache._held
    assert held is not None
    held.keys.fill_(SENTINEL)
    held.values.fill_(SENTINEL)
    source = packed(some(5, 1))[0]
    migrate(*(packed_view(one, SAME_MODEL, KV_HEADS) for one in (source, cache)), [5, 0])
    wanted = torch.full_like(held.keys, SENTINEL)
    wanted[0, :5] = source.packed_keys()[0]
    assert torch.equal(held.keys, wanted)


def test_repeated_heads_are_shown_once() -> None:
    tokens = some(7, 0)
    wide = packed(
        [(expand_heads(k, KV_HEADS, 12), expand_heads(v, KV_HEADS, 12)) for k, v in tokens]
    )
    view = packed_view(wide, SAME_MODEL, KV_HEADS, num_heads=12)
    narrow = packed_view(packed(tokens), SAME_MODEL, KV_HEADS)
    assert view.layers[0].num_kv_heads == KV_HEADS
    assert verify(view, narrow, [7, 7])
    target = packed([(torch.zeros_like(k), torch.zeros_like(v)) for k, v in tokens])
    migrate(view, packed_view(target, SAME_MODEL, KV_HEADS), [7, 7])
    for cache, (keys, values) in zip(target, tokens, strict=True):
        assert torch.equal(cache.packed_keys(), keys)
        assert torch.equal(cache.packed_values(), values)
    before = wide[0].packed_keys().clone()
    with pytest.raises(InvalidArgumentError, match="read-only"):
        migrate(narrow, view, [7, 7])
    assert torch.equal(wide[0].packed_keys(), before)


def test_tokens_that_record_gradients_are_described() -> None:
    cache = PackedKVCache()
    new = torch.randn(1, 2, KV_HEADS * DIM, requires_grad=True)
    cache.append_packed(new, new * 2)
    k, v = torch.zeros(2, 1, 2, KV_HEADS, DIM)
    target = CacheDesc.from_kv(describe(k, "BLOCK_NHD"), describe(v, "BLOCK_NHD"))
    migrate(
        packed_view(cache, SAME_MODEL, KV_HEADS), CacheView((target,), SAME_MODEL, dense=True), [2]
    )
    assert torch.equal(v.flatten(2), 2 * new.detach())


def test_a_view_is_refused_when_its_cache_has_moved_on() -> None:
    caches = packed(some(4, 0))
    other = packed_view(packed(some(4, 1)), SAME_MODEL, KV_HEADS)

    def outdated() -> str | None:
        try:
            migrate(view, other, [4, 4])
        except InvalidArgumentError as error:
            return str(error)
        return None

    view = packed_view(caches, SAME_MODEL, KV_HEADS)
    caches[2].append_packed(*some(1, 2)[2])  # there is room: what was described stays
    assert outdated() is None
    caches[2].truncate(2)
    assert outdated() == (
        "src is out of date: caches[2] holds 3 tokens, expected the 4 described. Call packed_view "
        "again"
    )
    caches[2].append_packed(*some(1, 2)[2])
    assert outdated() is None
    caches[1].append_packed(*some(400, 2)[1])
    assert outdated() == (
        "src is out of date: caches[1] has new tensors, expected those described. A PackedKVCache "
        "replaces them where there is no room for an append: call packed_view again"
    )
    view = packed_view(caches, SAME_MODEL, KV_HEADS)
    caches[0].clear()
    assert "caches[0] has new tensors" in str(outdated())
    keys, values = some(4, 3)[0]
    for half in range(2):  # keys or values alone are others
        caches[0].set_packed(keys, values)
        view = packed_view(caches, SAME_MODEL, KV_HEADS)
        caches[0].set_packed(*(t.clone() if i == half else t for i, t in enumerate((keys, values))))
        assert "caches[0] has new tensors" in str(outdated())


def test_nobody_writes_what_a_fork_holds() -> None:
    """Neither through a view from before the fork nor through one from behind it; both are read."""
    caches = packed(some(4, 0))
    earlier = packed_view(caches, SAME_MODEL, KV_HEADS)
    fork = [copy.copy(cache) for cache in caches]
    src = packed_view(packed(some(4, 1)), SAME_MODEL, KV_HEADS)
    with pytest.raises(InvalidArgumentError, match=r"caches\[0\] was copied, expected no copy"):
        migrate(src, earlier, [4, 4])
    for caches_now in (caches, fork):
        shared = packed_view(caches_now, SAME_MODEL, KV_HEADS)
        with pytest.raises(InvalidArgumentError, match=r"layers\[0\]\.k .*read-only"):
            migrate(src, shared, [4, 4])
        assert verify(shared, packed_view(packed(some(4, 0)), SAME_MODEL, KV_HEADS), [4, 4])
    for cache, tokens in zip(fork, some(1, 2), strict=True):
        cache.append_packed(*tokens)  # which gives it memory of its own
    migrate(src, packed_view(fork, SAME_MODEL, KV_HEADS), [4, 4])
    assert verify(src, packed_view(fork, SAME_MODEL, KV_HEADS), [4, 4])
    for cache, (keys, values) in zip(caches, some(4, 0), strict=True):
        assert torch.equal(cache.packed_keys(), keys)
        assert torch.equal(cache.packed_values(), values)


def test_what_cannot_be_described() -> None:
    caches = packed(some(4, 0))
    empty = PackedKVCache()
    for call, says in (
        (
            ([], SAME_MODEL, 3),
            "caches is a list, expected a PackedKVCache, or a list or tuple with",
        ),
        ((None, SAME_MODEL, 3), "caches is None, expected a PackedKVCache"),
        (([*caches, 1], SAME_MODEL, 3), "caches[3] is 1, expected a PackedKVCache"),
        ((caches, {}, 3), "facts is a dict, expected a CacheFacts"),
        ((caches, SAME_MODEL, 0), "num_kv_heads is 0, expected 1 to"),
        (
            (caches, SAME_MODEL, 5),
            "caches[0] has dim 24, expected a multiple of the 5 heads that it",
        ),
        (([caches[0], empty], SAME_MODEL, 3), "caches[1] holds no tokens, expected at least one."),
    ):
        with pytest.raises(InvalidArgumentError, match=f"^{re.escape(says)}"):
            packed_view(*call)
    with pytest.raises(InvalidArgumentError, match="num_heads is 4, expected a multiple of num_kv"):
        packed_view(caches, SAME_MODEL, 3, num_heads=4)
    with pytest.raises(InvalidArgumentError, match="has dim 24, expected a multiple of the 9"):
        packed_view(caches, SAME_MODEL, 3, num_heads=9)
    view = packed_view(caches, SAME_MODEL, KV_HEADS)
    other = packed_view(packed(some(4, 1)), CacheFacts(fingerprint="another"), KV_HEADS)
    with pytest.raises(FactsMismatchError):
        migrate(view, other, [4, 4])
