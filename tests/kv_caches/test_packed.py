"""PackedKVCache and kvcache_append: what they hold, byte for byte, and what they refuse."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import random
import re
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvx_core import CachedAttention, InvalidArgumentError, PackedKVCache, kvcache_append
from kvx_core.caches.packed import cache as packed_cache
from kvx_core.caches.packed.cache import Held
from tests.caches import random_values

BATCH, DIM = 3, 21
DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8)
SEEDS = (0, 1, 2)


def some(seq_len: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Keys and values of every bit pattern that numbers of `dtype` may have."""
    shape = (BATCH, seq_len, DIM)
    drawn = torch.uint8 if dtype is torch.int8 else dtype
    return (
        random_values(shape, drawn, seed).view(dtype),
        random_values(shape, drawn, seed + 100).view(dtype),
    )


def same_bytes(found: Tensor | None, wanted: Tensor) -> bool:
    assert found is not None
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    return torch.equal(found.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))


def holds(cache: PackedKVCache, keys: Tensor, values: Tensor) -> bool:
    assert cache.seq_len == keys.shape[1]
    assert cache.has_packed
    assert cache.is_empty == (keys.shape[1] == 0)
    return same_bytes(cache.packed_keys(), keys) and same_bytes(cache.packed_values(), values)


# ---- what it holds ----


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_sequence_of_calls(
    dtype: torch.dtype, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside two plain tensors and torch.cat, with views of every size seen on the way."""
    monkeypatch.setattr("kvx_core.caches.packed.cache._SPARE", 4)
    choose = random.Random(f"calls {seed} {dtype}")
    cache = PackedKVCache(choose.choice([0, 5, 30]))
    wanted: tuple[Tensor, Tensor] | None = None
    views: list[tuple[Tensor | None, Tensor]] = []
    for step in range(100):
        call = choose.choice(["append"] * 8 + ["prompt", "truncate", "set", "clear"])
        if call in ("append", "prompt") or wanted is None:
            length = choose.randrange(0, 4) if call == "append" else choose.randrange(5, 30)
            new = some(length, 1000 * seed + step, dtype)
            if choose.random() < 0.3:  # strides of their own
                new = (new[0].transpose(0, 2).contiguous().transpose(0, 2), new[1])
            given = tuple(half.clone() for half in new)
            cache.append_packed(*new)
            assert same_bytes(new[0], given[0])
            assert same_bytes(new[1], given[1])
            wanted = new if wanted is None else cat(wanted, new)
        elif call == "truncate":
            drop = choose.randrange(0, wanted[0].shape[1] + 1)
            cache.truncate(drop)
            wanted = (wanted[0][:, : cache.seq_len], wanted[1][:, : cache.seq_len])
            views.clear()  # the next append writes over what they show
        elif call == "set":
            wanted = some(choose.randrange(0, 9), 1000 * seed + step, dtype)
            cache.set_packed(*(half.clone() for half in wanted))
        else:
            cache.clear()
            assert cache.packed_keys() is cache.packed_values() is None
            assert not cache.has_packed
            assert cache.is_empty
            assert cache.seq_len == cache.capacity == 0
            wanted = None
            continue
        assert holds(cache, *wanted)
        views.append((cache.packed_keys(), wanted[0].clone()))
        views.append((cache.packed_values(), wanted[1].clone()))
        assert all(same_bytes(view, then) for view, then in views[-20:])
    assert all(same_bytes(view, then) for view, then in views)


def cat(held: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    def whole(a: Tensor, b: Tensor) -> Tensor:
        joined = torch.cat([a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)], 1)
        return joined.view(a.dtype)

    return whole(held[0], new[0]), whole(held[1], new[1])


def test_only_the_new_tokens_are_written() -> None:
    """Every byte of both allocations: what lies behind the last token stays as it was."""
    cache = PackedKVCache(capacity=50)
    first, new = some(7), some(2, 1)
    cache.append_packed(*first)
    held = cache._held
    assert held is not None
    assert held.keys.shape == held.values.shape == (BATCH, 7 + 256, DIM)
    for half in (held.keys, held.values):
        half[:, 7:] = float("nan")
    cache.append_packed(*new)
    for half, before, after in zip((held.keys, held.values), first, new, strict=True):
        assert torch.equal(half[:, :7], before)
        assert torch.equal(half[:, 7:9], after)
        assert half[:, 9:].isnan().all()


def test_packed_keys_are_views() -> None:
    cache = PackedKVCache()
    cache.append_packed(*some(5))
    keys, values = cache.packed_keys(), cache.packed_values()
    assert keys is not None
    assert values is not None
    for _ in range(20):
        cache.append_packed(*some(1))
        again = cache.packed_keys(), cache.packed_values()
        assert again[0] is not None
        assert again[1] is not None
        assert (again[0].data_ptr(), again[1].data_ptr()) == (keys.data_ptr(), values.data_ptr())
        assert again[0].stride() == (cache.capacity * DIM, DIM, 1)
    keys[1, 2] = 77
    assert (cache.packed_keys() == 77).any()


def test_set_packed_takes_tensors_as_they_are_and_never_writes_them() -> None:
    keys, values = some(6)
    strided = keys.transpose(0, 1).contiguous().transpose(0, 1)
    before = strided.clone(), values.clone()
    cache = PackedKVCache()
    cache.set_packed(strided, values)
    assert cache.packed_keys().data_ptr() == strided.data_ptr()
    assert cache.packed_values().data_ptr() == values.data_ptr()
    assert cache.capacity == 6
    cache.truncate(4)
    cache.append_packed(*some(3, 1))
    assert torch.equal(strided, before[0])
    assert torch.equal(values, before[1])
    new = some(3, 1)
    assert holds(cache, *cat((keys[:, :2], values[:, :2]), new))


def test_truncate_drops_as_many_tokens_and_keeps_the_room() -> None:
    cache = PackedKVCache()
    keys, values = some(10)
    cache.append_packed(keys, values)
    room = cache.capacity
    cache.truncate(3)
    assert holds(cache, keys[:, :7], values[:, :7])
    assert cache.capacity == room
    cache.truncate(0)
    cache.truncate(7)
    assert holds(cache, keys[:, :0], values[:, :0])
    cache.append_packed(keys, values)
    assert holds(cache, keys, values)
    assert cache.capacity == room


@pytest.mark.parametrize("batch", [1, 3])
def test_tokens_that_truncate_dropped_can_be_appended_from_a_view(batch: int) -> None:
    """They lie where they are written to, one token further on: a plain copy would smear them."""
    keys, values = (half[:batch] for half in some(12))
    for take in (slice(4, 9), slice(5, 10), slice(3, 12)):
        cache = PackedKVCache()
        cache.append_packed(keys, values)
        old_keys, old_values = cache.packed_keys(), cache.packed_values()
        assert old_keys is not None
        assert old_values is not None
        cache.truncate(7)
        # K's old tokens as V and the other way round: the first write must not change the second.
        cache.append_packed(old_values[:, take], old_keys[:, take])
        wanted = cat((keys[:, :5], values[:, :5]), (values[:, take], keys[:, take]))
        assert holds(cache, *wanted)


def test_a_copy_shares_memory_until_either_appends() -> None:
    keys, values = some(6)
    cache = PackedKVCache()
    cache.append_packed(keys, values)
    fork = copy.copy(cache)
    assert fork.packed_keys().data_ptr() == cache.packed_keys().data_ptr()
    mine, theirs = some(2, 1), some(1, 2)
    fork.truncate(1)
    cache.append_packed(*mine)
    fork.append_packed(*theirs)
    cache.append_packed(*mine)
    assert holds(cache, *cat(cat((keys, values), mine), mine))
    assert holds(fork, *cat((keys[:, :5], values[:, :5]), theirs))
    deep = copy.deepcopy(cache)
    deep.append_packed(*theirs)
    cache.append_packed(*mine)
    assert holds(deep, *cat(cat(cat((keys, values), mine), mine), theirs))
    assert copy.copy(PackedKVCache(3)).has_packed is False


@pytest.mark.parametrize("new", [1, 2])
@pytest.mark.parametrize("which", ["the original", "the copy"])
def test_a_copy_keeps_its_tokens_when_the_other_drops_and_appends(which: str, new: int) -> None:
    """Whichever of the two goes back, and by however many tokens it then goes on."""
    keys, values = some(6)
    cache = PackedKVCache()
    cache.append_packed(keys, values)
    fork = copy.copy(cache)
    changed, kept = (cache, fork) if which == "the original" else (fork, cache)
    changed.truncate(3)
    more = some(new, 1)
    changed.append_packed(*more)
    assert holds(kept, keys, values)
    assert holds(changed, *cat((keys[:, :3], values[:, :3]), more))
    kept.truncate(6)
    kept.append_packed(*more)
    assert holds(kept, *more)
    assert holds(changed, *cat((keys[:, :3], values[:, :3]), more))


def test_inference_mode_and_back() -> None:
    cache = PackedKVCache()
    parts = [some(2, seed) for seed in range(4)]
    with torch.inference_mode():
        cache.append_packed(*(half.clone() for half in parts[0]))
    cache.append_packed(*parts[1])
    with torch.inference_mode():
        cache.append_packed(*parts[2])
        cache.set_packed(*(half.clone() for half in (cache.packed_keys(), cache.packed_values())))
    cache.append_packed(*parts[3])
    assert holds(cache, *cat(cat(cat(parts[0], parts[1]), parts[2]), parts[3]))


def test_it_keeps_no_tensor_after_clear() -> None:
    cache = PackedKVCache()
    keys, values = some(3)
    cache.set_packed(keys, values)
    seen = weakref.ref(keys)
    del keys
    assert seen() is not None
    cache.clear()
    gc.collect()
    assert seen() is None
    cache.append_packed(values[:1, :, :5].half(), values[:1, :, :5].half())
    assert repr(cache) == "PackedKVCache(1 x 3 x 5, float16, room for 259 tokens)"


def test_repr() -> None:
    cache = PackedKVCache()
    assert repr(cache) == "PackedKVCache(nothing)"
    cache.set_packed(*some(3))
    assert repr(cache) == "PackedKVCache(3 x 3 x 21, float32, tensors of the caller)"


# ---- growth ----


class Copies(TorchDispatchMode):
    """Counts the bytes that torch copies."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0
        self.allocations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.name().partition(".")[0].removeprefix("aten::")
        if name == "empty":
            self.allocations += 1
        elif name == "copy_":
            self.num_bytes += args[0].nbytes
        else:
            assert name in ("slice", "alias", "detach", "expand", "unsqueeze", "lift_fresh"), (
                f"{name} may copy"
            )
        return out


def test_an_append_copies_its_tokens_and_growth_those_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every byte that torch copies, and how often memory is asked for. Appends of a token for which
    there is room are libkvx's."""
    monkeypatch.setattr("kvx_core.caches.packed.cache._SPARE", 16)
    new = torch.ones(2, 1, 8)
    PackedKVCache().append_packed(new, new)  # binds libkvx to torch, once in a process
    cache = PackedKVCache()
    with Copies() as counted:
        for _ in range(256):
            cache.append_packed(new, new)
    assert cache.capacity == 4 * 4 * 17
    assert counted.num_bytes == 2 * (3 + 17 + 4 * 17) * new.nbytes
    assert counted.allocations == 2 * 3
    with Copies() as counted:
        PackedKVCache().append_packed(new.expand(2, 256, 8), new.expand(2, 256, 8))
    assert counted.num_bytes == 2 * 256 * new.nbytes


@pytest.mark.parametrize("dtype", [torch.complex64, torch.bool, torch.float64], ids=str)
def test_numbers_that_libkvx_does_not_know_are_held_too(dtype: torch.dtype) -> None:
    wanted = torch.randn(2, 9, 5).to(dtype)
    cache = PackedKVCache()
    for token in wanted.split(1, 1):
        cache.append_packed(token, token)
    assert torch.equal(known(cache.packed_keys()), wanted)


def test_a_storage_that_was_resized_is_not_written_behind_its_end() -> None:
    cache = PackedKVCache()
    keys, values = some(1)
    cache.append_packed(keys, values)
    known(cache.packed_values()).untyped_storage().resize_(0)
    with pytest.raises(InvalidArgumentError, match="has a storage of 0 bytes"):
        cache.append_packed(keys, values)
    assert cache.seq_len == 1


@pytest.mark.parametrize("new", [1, 2])
@pytest.mark.parametrize("which", ["new_keys", "new_values"])
def test_tokens_whose_storage_was_shrunk_are_not_read_past_their_end(which: str, new: int) -> None:
    """One token is appended by C, two by torch."""
    cache = PackedKVCache(capacity=20)
    cache.append_packed(*some(3))
    before = state_of(cache)[1]
    tokens = dict(zip(("new_keys", "new_values"), some(new, 1), strict=True))
    shrunk = tokens[which].untyped_storage()
    shrunk.resize_(shrunk.nbytes() - 1)
    with pytest.raises(InvalidArgumentError, match=f"^{which} has a storage of .* expected at lea"):
        cache.append_packed(**tokens)
    assert cache.seq_len == 3
    assert state_of(cache)[1] == before


@pytest.mark.parametrize("seed", SEEDS)
def test_single_tokens_of_any_strides(seed: int) -> None:
    """What C appends and what it leaves to torch: rows apart, numbers apart, expanded rows, the
    cache's own tokens, a Parameter, one that needs a gradient that is not recorded."""
    random = torch.Generator().manual_seed(seed)
    batch, dim = 3, 7
    cache, wanted = PackedKVCache(), torch.empty(batch, 0, dim)
    for shape, view in (
        ((batch, 2, dim), lambda t: t[:, 1:]),
        ((batch, 1, 2 * dim), lambda t: t[:, :, ::2]),
        ((dim, 1, batch), lambda t: t.permute(2, 1, 0)),
        ((1, 1, dim), lambda t: t.expand(batch, 1, dim)),
        ((batch, 1, dim), lambda t: known(cache.packed_values())[:, :1]),
        ((batch, 1, dim), torch.nn.Parameter),
        ((batch, 1, dim), lambda t: t.requires_grad_()),
        ((batch, 1, dim), lambda t: t),
    ) * 2:
        token = view(torch.randn(shape, generator=random))
        with torch.no_grad():
            wanted = torch.cat((wanted, token), 1)
            cache.append_packed(-token, token)
    assert holds(cache, -wanted, wanted)
    assert not known(cache.packed_keys()).requires_grad


def test_conjugates_and_negatives_are_held_as_numbers() -> None:
    numbers = torch.randn(2, 4, 5, dtype=torch.complex64)
    cache = PackedKVCache()
    for token in numbers.conj().imag.split(1, 1):
        assert token.is_neg()
        cache.append_packed(token, token)
    assert torch.equal(known(cache.packed_values()), -numbers.imag)


def test_deep_copies_and_pickles_have_memory_of_their_own() -> None:
    keys, values = some(9)
    cache = PackedKVCache()
    cache.append_packed(keys[:, :5], values[:, :5])
    others = copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))
    cache.append_packed(keys[:, 5:], values[:, 5:])
    for other in others:
        assert holds(other, keys[:, :5], values[:, :5])
        other.append_packed(values[:, 5:], keys[:, 5:])
    assert holds(cache, keys, values)
    for other in others:
        assert holds(other, *cat((keys[:, :5], values[:, :5]), (values[:, 5:], keys[:, 5:])))


def known(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each growth copies, of K or V."""
    found = []

    def with_room(half: Tensor, seq_len: int, capacity: int) -> Tensor:
        found.append(seq_len)
        return grow(half, seq_len, capacity)

    grow = packed_cache._with_room
    monkeypatch.setattr(packed_cache, "_with_room", with_room)
    return found


@pytest.mark.parametrize("growth", [4, 2])
def test_single_appends_copy_less_than_twice_a_bulk_copy(
    growth: int, moved: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a host, and on a device, whose room grows less."""
    monkeypatch.setattr(packed_cache, "_GROWTH", {"cpu": growth})
    new = torch.ones(1, 1, 1)
    cache = PackedKVCache()
    for seq_len in range(1, 4097):
        cache.append_packed(new, new)
        assert sum(moved) / 2 <= 2 * seq_len
        assert cache.capacity <= max(257, growth * seq_len)
    assert 4096 + sum(moved) / 2 < 2 * 4096
    assert len(moved) == 2 * {4: 3, 2: 5}[growth]


def test_capacity_is_reserved_at_once(moved: list[int]) -> None:
    cache = PackedKVCache(capacity=1000)
    new = torch.ones(1, 1, 4)
    for _ in range(1000):
        cache.append_packed(new, new)
    assert moved == [0, 0]
    assert cache.capacity == 1000


# ---- what it refuses ----

GOOD = torch.zeros(BATCH, 2, DIM)
REFUSED: dict[str, tuple[Any, Any, str]] = {
    "no tensor": ([1], GOOD, "new_keys is a list, expected a torch.Tensor (batch, seq, dim)"),
    "no values": (GOOD, None, "new_values is None, expected a torch.Tensor (batch, seq, dim)"),
    "axes": (
        GOOD[0],
        GOOD[0],
        "new_keys has 2 axes, shape (2, 21), expected 3: (batch, seq, dim), where dim is "
        "num_kv_heads * head_dim",
    ),
    "four axes": (GOOD[None], GOOD, "new_keys has 4 axes, shape (1, 3, 2, 21), expected 3"),
    "values' axes": (GOOD, GOOD[0], "new_values has 2 axes, shape (2, 21), expected 3"),
    "lengths": (
        GOOD,
        GOOD[:, :1],
        "new_values.shape is (3, 1, 21), expected (3, 2, 21) as new_keys",
    ),
    "values' dim": (GOOD, GOOD[..., :7], "new_values.shape is (3, 2, 7), expected (3, 2, 21)"),
    "dtypes": (
        GOOD,
        GOOD.half(),
        "new_values.dtype is torch.float16, expected torch.float32 as new_keys has",
    ),
    "devices": (
        GOOD,
        GOOD.to("meta"),
        "new_values.device is meta, expected cpu as new_keys has",
    ),
    "sparse": (
        GOOD.to_sparse(),
        GOOD,
        "new_keys.layout is torch.sparse_coo, expected torch.strided. Pass new_keys.to_dense()",
    ),
}
REFUSED_LATER: dict[str, tuple[Any, Any, str]] = {
    "batch": (
        GOOD[:1],
        GOOD[:1],
        "new_keys.shape[0] is 1, expected batch 3 of the cache. Call clear() before tokens of "
        "another batch",
    ),
    "dim": (
        GOOD[..., :7],
        GOOD[..., :7],
        "new_keys.shape[2] is 7, expected dim 21 of the cache. Call clear() before tokens of "
        "another dim",
    ),
    "dtype": (
        GOOD.half(),
        GOOD.half(),
        "new_keys.dtype is torch.float16, expected torch.float32 as the cache holds. Pass "
        "new_keys.to(cache.packed_keys().dtype), and new_values alike",
    ),
    "device": (
        GOOD.to("meta"),
        GOOD.to("meta"),
        "new_keys.device is meta, expected cpu as the cache holds.",
    ),
}


def state_of(cache: PackedKVCache) -> tuple[Held | None, list[bytes]]:
    """What it holds, and every byte of its memory."""
    held = cache._held
    halves = [] if held is None else [held.keys, held.values]
    return held, [half.numpy().tobytes() for half in halves]


@pytest.mark.parametrize("what", REFUSED)
def test_keys_and_values_that_do_not_match_are_refused(what: str) -> None:
    keys, values, says = REFUSED[what]
    for cache in (PackedKVCache(), with_tokens()):
        before = state_of(cache)
        with pytest.raises(InvalidArgumentError, match=f"^{re.escape(says)}"):
            cache.append_packed(keys, values)
        with pytest.raises(InvalidArgumentError, match=f"^{re.escape(says.replace('new_', ''))}"):
            cache.set_packed(keys, values)
        assert state_of(cache) == before


@pytest.mark.parametrize("what", REFUSED_LATER)
def test_tokens_that_cannot_follow_are_refused(what: str) -> None:
    keys, values, says = REFUSED_LATER[what]
    cache = with_tokens()
    before = state_of(cache)
    with pytest.raises(InvalidArgumentError, match=f"^{re.escape(says)}"):
        cache.append_packed(keys, values)
    assert state_of(cache) == before
    cache.clear()
    cache.append_packed(keys, values)
    cache.set_packed(GOOD, GOOD)
    cache.append_packed(GOOD, GOOD)


def with_tokens() -> PackedKVCache:
    cache = PackedKVCache()
    cache.append_packed(*some(5))
    return cache


def test_more_tokens_than_there_are_cannot_be_dropped() -> None:
    cache = with_tokens()
    before = state_of(cache)
    for wrong, says in (
        (6, "num_tokens is 6, expected at most seq_len 5: truncate drops that many from the end"),
        (-1, "num_tokens is -1, expected 0 to"),
        (True, "num_tokens is True, expected an integer"),
    ):
        with pytest.raises(InvalidArgumentError, match=re.escape(says)):
            cache.truncate(wrong)
    assert state_of(cache) == before
    with pytest.raises(InvalidArgumentError, match="expected at most seq_len 0"):
        PackedKVCache().truncate(1)


def test_an_allocation_that_fails_leaves_it_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = with_tokens()
    before = state_of(cache)
    make, calls = torch.empty, iter(range(9))

    def fails_for_values(*args: Any, **options: Any) -> Tensor:
        if next(calls) == 1:
            raise RuntimeError("out of memory")
        return make(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", fails_for_values)
        with pytest.raises(RuntimeError, match="out of memory"):
            cache.append_packed(*some(400))
    assert state_of(cache) == before


# ---- gradients ----


def test_gradients_flow_through_the_cache() -> None:
    """Those of the same computation with torch.cat, though a step in between records nothing."""
    parts = [tuple(half.double().requires_grad_() for half in some(n, n)) for n in (3, 1, 2)]
    weight = torch.randn(BATCH, DIM, 6, dtype=torch.float64, requires_grad=True)

    def loss(keys: Tensor, values: Tensor) -> Tensor:
        return ((keys @ weight).tanh() @ weight.mT * values).sum()

    cache = PackedKVCache()
    total = torch.zeros((), dtype=torch.float64)
    for part in parts:
        cache.append_packed(*part)
        keys, values = cache.packed_keys(), cache.packed_values()
        assert keys is not None
        assert values is not None
        total = total + loss(keys, values)  # saved for backward before the next append
    inputs = [half for part in parts for half in part] + [weight]
    found = torch.autograd.grad(total, inputs)
    wanted = torch.zeros((), dtype=torch.float64)
    for n in (1, 2, 3):
        wanted = wanted + loss(*(torch.cat([p[kv] for p in parts[:n]], 1) for kv in (0, 1)))
    for one, other in zip(found, torch.autograd.grad(wanted, inputs), strict=True):
        torch.testing.assert_close(one, other)
    with torch.no_grad():
        cache.append_packed(*parts[0])
    keys = cache.packed_keys()
    assert keys is not None
    assert not keys.requires_grad
    assert cache.capacity > cache.seq_len


def test_what_backward_needs_is_not_overwritten() -> None:
    """Not even where truncate has made room in it."""
    keys, values = (half.requires_grad_() for half in some(4))
    cache = PackedKVCache()
    cache.append_packed(keys, values)
    loss = (known(cache.packed_keys()) * known(cache.packed_values())).sum()
    cache.truncate(2)
    with torch.no_grad():
        cache.append_packed(*some(2, 1))
    loss.backward()
    assert torch.equal(known(keys.grad), values)
    assert torch.equal(known(values.grad), keys)


def test_appends_leave_graphs_that_read_earlier_views_alone() -> None:
    """Queries learn while keys do not, as where an adapter trains them alone."""
    query = torch.randn(BATCH, 1, DIM, requires_grad=True)
    parts = [(torch.randn(BATCH, n, DIM), torch.randn(BATCH, n, DIM)) for n in (3, 1, 2)]
    cache, total = PackedKVCache(), torch.zeros(())
    for part in parts:
        cache.append_packed(*part)
        total = total + (query @ known(cache.packed_keys()).mT).tanh().sum()
    at = known(cache.packed_keys()).data_ptr()
    cache.append_packed(*some(1, 9))
    assert known(cache.packed_keys()).data_ptr() == at
    (found,) = torch.autograd.grad(total, [query], retain_graph=True)
    wanted = torch.zeros(())
    for n in (1, 2, 3):
        wanted = wanted + (query @ torch.cat([part[0] for part in parts[:n]], 1).mT).tanh().sum()
    torch.testing.assert_close(found, torch.autograd.grad(wanted, [query])[0])
    cache.truncate(5)
    cache.append_packed(*some(1, 8))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(total, [query])


# ---- threads ----


def test_readers_need_no_lock_while_one_thread_appends() -> None:
    """Token i is i everywhere: a reader that saw half a step would see something else."""
    cache = PackedKVCache()
    done = threading.Event()
    wrong: list[str] = []

    def read() -> None:
        while not done.is_set():
            keys, values = cache.packed_keys(), cache.packed_values()
            if keys is None or values is None:
                continue
            wanted = torch.arange(values.shape[1], dtype=torch.float32)
            if keys.shape[1] > values.shape[1]:  # values were asked for later
                wrong.append("values are behind keys")
            for half in (keys[0, : len(wanted), 0], values[0, : keys.shape[1], 3]):
                if not torch.equal(half, wanted[: len(half)]):
                    wrong.append(f"{half}")

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for i in range(1500):
        new = torch.full((1, 1, 4), float(i))
        cache.append_packed(new, new)
    done.set()
    for reader in readers:
        reader.join()
    assert not wrong
    assert cache.seq_len == 1500


# ---- the op ----

OPS: dict[str, Callable[..., Tensor]] = {
    "kvcache_append": kvcache_append,
    "torch.ops": torch.ops.kvx.kvcache_append,
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("axis", [0, 1, 2, -1, -3])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_op_appends_along_an_axis(seed: int, axis: int, op: str) -> None:
    shape = [2, 3, 5]
    longer = [7 if i == axis % 3 else n for i, n in enumerate(shape)]
    cache, new = random_values(shape, torch.float32, seed), random_values(longer, torch.float32, 9)
    found = OPS[op](cache, new, axis)
    for index in torch.cartesian_prod(*map(torch.arange, found.shape)).tolist():
        source, shift = (cache, 0) if index[axis] < shape[axis] else (new, shape[axis])
        index_there = [n - shift if i == axis % 3 else n for i, n in enumerate(index)]
        assert found[tuple(index)] == source[tuple(index_there)]
    found.zero_()
    assert torch.equal(cache, random_values(shape, torch.float32, seed))  # memory of its own


def test_the_op_has_gradients() -> None:
    cache = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    new = torch.randn(2, 1, 4, dtype=torch.float64, requires_grad=True)
    for which in ((cache, new), (cache, new.detach()), (cache.detach(), new)):
        assert torch.autograd.gradcheck(kvcache_append, which)
        assert torch.autograd.gradgradcheck(kvcache_append, which)
    nothing = torch.zeros(2, 0, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(kvcache_append, (nothing, new))
    cache_t, new_t = (t.detach().transpose(0, 1).requires_grad_() for t in (cache, new))
    assert torch.autograd.gradcheck(lambda a, b: kvcache_append(a, b, -3), (cache_t, new_t))


def test_the_op_on_meta_tensors() -> None:
    """What torch.library.opcheck says of it is in test_torch_ops.py."""
    new = torch.zeros(3, 4, 21, device="meta")
    made = torch.ops.kvx.kvcache_append(GOOD.to("meta"), new)
    assert made.shape == (3, 6, 21)
    assert made.is_meta


OP_REFUSED: dict[str, tuple[Any, Any, Any, str]] = {
    "no cache": (None, GOOD, 1, "cache is None, expected a torch.Tensor"),
    "no new": (GOOD, [1.0], 1, "new is a list, expected a torch.Tensor"),
    "no axes": (
        torch.tensor(1.0),
        torch.tensor(1.0),
        0,
        "cache has no axes, expected at least one",
    ),
    "axes": (GOOD, GOOD[0], 1, "new has 2 axes, expected 3 as cache has"),
    "empty": (GOOD, torch.zeros(0), 1, "new has 1 axes, expected 3 as cache has"),
    "axis": (GOOD, GOOD, 3, "axis is 3, expected -3 to 2"),
    "negative axis": (GOOD, GOOD, -4, "axis is -4, expected -3 to 2"),
    "batch": (
        GOOD,
        GOOD[:1],
        1,
        "new.shape[0] is 1, expected 3 as cache has: only axis 1 may differ",
    ),
    "dim": (GOOD, GOOD[..., :5], -2, "new.shape[2] is 5, expected 21 as cache has: only axis 1"),
    "dtype": (
        GOOD,
        GOOD.half(),
        1,
        "new.dtype is torch.float16, expected torch.float32 as cache has. Pass "
        "new.to(torch.float32)",
    ),
    "device": (GOOD, GOOD.to("meta"), 1, "new.device is meta, expected cpu as cache has"),
}


@pytest.mark.parametrize("what", OP_REFUSED)
def test_what_the_op_refuses(what: str) -> None:
    cache, new, axis, says = OP_REFUSED[what]
    with pytest.raises(InvalidArgumentError, match=f"^{re.escape(says)}"):
        kvcache_append(cache, new, axis)
    if isinstance(cache, Tensor) and isinstance(new, Tensor):
        with pytest.raises(InvalidArgumentError, match=f"^{re.escape(says)}"):
            torch.ops.kvx.kvcache_append(cache, new, axis)


def test_every_name_of_a_packed_cache_is_there() -> None:
    """Of the cache, the block and the op; their arguments in this order."""
    parameters = {
        PackedKVCache.append_packed: ["self", "new_keys", "new_values"],
        PackedKVCache.set_packed: ["self", "keys", "values"],
        PackedKVCache.packed_keys: ["self"],
        PackedKVCache.packed_values: ["self"],
        PackedKVCache.clear: ["self"],
        kvcache_append: ["cache", "new", "axis"],
    }
    for call, names in parameters.items():
        assert list(inspect.signature(call).parameters) == names
    made = PackedKVCache()
    assert made.packed_keys() is made.packed_values() is None
    assert CachedAttention(2, 4).kv_cache is None
    assert "kv_cache" in inspect.signature(CachedAttention.forward).parameters


def test_the_ways_of_the_benchmark_hold_the_same_tokens() -> None:
    """Per token: KVX, torch's concatenation, transformers' cache and numpy's concatenation."""
    packed = pytest.importorskip("benchmarks.packed", exc_type=ImportError)
    assert {"kvx", "torch", "hf", "numpy"} <= set(packed._WAYS)
    keys, values = (half.half() for half in some(5))
    packed_by_head = [half.new_zeros(2, 5, 8 * 128).normal_() for half in (keys, values)]
    new = packed._in_ones(*(half.new_ones(2, 3, 8 * 128) for half in (keys, values)))
    packed._verify("a few", *packed_by_head, new)


def shrunk() -> Tensor:
    """A tensor whose storage holds two of its numbers."""
    tensor = torch.zeros(1, 100, 64)
    tensor.untyped_storage().resize_(8)
    return tensor


def test_tensors_whose_storage_was_shrunk_are_refused() -> None:
    """They would be read past their end."""
    says = "has a storage of 8 bytes, expected at least 25600: it has been resized since"
    cache = PackedKVCache()
    for call in (cache.append_packed, cache.set_packed):
        for pair in ((shrunk(), torch.zeros(1, 100, 64)), (torch.zeros(1, 100, 64), shrunk())):
            with pytest.raises(InvalidArgumentError, match=says):
                call(*pair)
    assert not cache.has_packed
    for resized in (0, 1):  # after the cache has them
        pair = torch.zeros(1, 100, 64), torch.zeros(1, 100, 64)
        cache.set_packed(*pair)
        pair[resized].untyped_storage().resize_(8)
        with pytest.raises(InvalidArgumentError, match=f"the cache's {'kv'[resized]}.* {says}"):
            cache.append_packed(torch.zeros(1, 1, 64), torch.zeros(1, 1, 64))
    cache = PackedKVCache()
    cache.append_packed(torch.zeros(1, 100, 64), torch.zeros(1, 100, 64))
    keys = cache.packed_keys()
    assert keys is not None
    keys.untyped_storage().resize_(8)
    with pytest.raises(InvalidArgumentError, match="the cache's keys has a storage of 8 bytes"):
        cache.append_packed(torch.zeros(1, 1, 64), torch.zeros(1, 1, 64))
