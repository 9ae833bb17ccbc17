"""kvx_write_layers against a loop of kvx_write_kv_ext, byte for byte. Spec: E.23

Every test works on whole allocations of random bytes: all bytes that no layer names stay as they
were.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import kvx_core as kvx
from kvx_core._c import abi
from kvx_core.errors import InvalidArgumentError, OutOfRangeError
from kvx_core.types import Layout, ScaleGranularity
from tests.caches import LAYOUTS, Cache, Geometry, assert_same_bytes, random_values, scaled
from tests.calls import Backend
from tests.layer_calls import Write, check, some_slots, tokens_of

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
SEEDS = (1, 2, 3)
GEOMETRIES = {
    "odd": Geometry(num_blocks=3, block_size=5, num_kv_heads=3, head_dim=7, num_layers=3),
    "one_head_of_80": Geometry(num_kv_heads=1, head_dim=80, num_layers=5),
    "eight_of_128": Geometry(num_blocks=4, num_kv_heads=8, head_dim=128, num_layers=7),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("layout", ["nhd", "hnd", "packed8", "mixed", "mla"])
def test_same_bytes_as_a_call_for_each_layer(
    backend: Backend, layout: str, geometry: str, seed: int
) -> None:
    sizes = GEOMETRIES[geometry]
    if layout == "packed8" and sizes.head_dim % 8:
        pytest.skip("packs of 8 do not divide this head_dim")
    cache = LAYOUTS[layout](sizes, BF16, seed)
    count = (1, 7, 11)[seed - 1]
    tokens = tokens_of(cache.layers, count, BF16, seed)
    check(backend, cache, tokens, some_slots(cache, count, seed))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("io_dtype", [torch.float32, BF16])
def test_conversion_with_scales_of_each_layer(
    backend: Backend, io_dtype: torch.dtype, seed: int
) -> None:
    cache = LAYOUTS["nhd"](GEOMETRIES["odd"], E4M3, seed)
    cache = scaled(cache, ScaleGranularity.PER_HEAD, seed)
    check(backend, cache, tokens_of(cache.layers, 6, io_dtype, seed), some_slots(cache, 6, seed))


@pytest.mark.parametrize("seed", SEEDS)
def test_layers_of_different_shapes(backend: Backend, seed: int) -> None:
    """Layers that no launch can share: another dtype, layout, number of heads, and no V."""
    odd = Geometry(num_blocks=3, block_size=5, num_kv_heads=3, head_dim=8, num_layers=1)
    parts = [
        LAYOUTS["nhd"](odd, BF16, seed),
        LAYOUTS["hnd"](replace(odd, num_kv_heads=1), torch.float16, seed + 10),
        LAYOUTS["mla"](odd, BF16, seed + 20),
        LAYOUTS["packed8"](odd, BF16, seed + 30),
        LAYOUTS["nhd"](odd, E4M3, seed + 40),
    ]
    cache = Cache(
        tuple(s for part in parts for s in part.storages),
        tuple(layer for part in parts for layer in part.layers),
    )
    check(backend, cache, tokens_of(cache.layers, 4, BF16, seed), some_slots(cache, 4, seed))


def test_many_layers(backend: Backend) -> None:
    """More pairs than one launch of few, and more than a mapping of one thread block."""
    sizes = Geometry(num_blocks=2, num_kv_heads=2, head_dim=16, num_layers=70)
    cache = LAYOUTS["nhd"](sizes, BF16, 5)
    check(backend, cache, tokens_of(cache.layers, 3, BF16, 5), torch.tensor([6, -1, 2]))


@pytest.mark.parametrize("count", [0, 4])
def test_no_token_that_moves(backend: Backend, count: int) -> None:
    cache = LAYOUTS["nhd"](Geometry(num_layers=3), BF16, 1)
    before = cache.clone()
    slots = torch.full((count,), -1)
    Write(backend, cache.layers, tokens_of(cache.layers, count, BF16, 1), slots).run()
    assert_same_bytes(cache, before)


def test_a_fault_in_the_last_layer_leaves_all_as_they_were(backend: Backend) -> None:
    cache = LAYOUTS["nhd"](Geometry(num_layers=3), BF16, 1)
    before = cache.clone()
    tokens, slots = tokens_of(cache.layers, 3, BF16, 1), torch.tensor([1, 2, 3])
    write = Write(backend, cache.layers, tokens, slots)
    write.writes[2].io.value.dtype = 99
    with pytest.raises(InvalidArgumentError, match=r"writes\[2\]\.io\.value\.dtype is 99"):
        write.run()
    assert_same_bytes(cache, before)


def test_scales_among_the_elements_of_another_layer(backend: Backend) -> None:
    cache = LAYOUTS["nhd"](Geometry(num_layers=3), E4M3, 1)
    v = cache.layers[1].halves()[1].tensor
    v.view(torch.uint8).view(-1)[:4] = torch.tensor([0, 0, 0, 0x3F], dtype=torch.uint8)  # 0.5
    before = cache.clone()
    tokens = tokens_of(cache.layers, 3, BF16, 1)
    write = Write(backend, cache.layers, tokens, torch.tensor([1, 2, 3]))
    write.writes[2].k_scale = backend.address(v)
    said = r"writes\[2\]\.k_scale\.data is .* among the elements of caches\[1\]\.v, which"
    with pytest.raises(InvalidArgumentError, match=said):
        write.run()
    backend.forget()
    assert_same_bytes(cache, before)


def test_a_slot_out_of_range(backend: Backend) -> None:
    """The host writes nothing; a device skips the token in every layer."""
    cache = LAYOUTS["nhd"](Geometry(num_layers=3), BF16, 1)
    expected = cache.clone()
    tokens = tokens_of(cache.layers, 3, BF16, 1)
    if not backend.looks_first:
        for layer, (key, value) in zip(expected.layers, tokens, strict=True):
            backend.write(layer, key, value, torch.tensor([1, -1, 3]))
    write = Write(backend, cache.layers, tokens, torch.tensor([1, 999, 3]))
    with pytest.raises(OutOfRangeError, match=r"slots\.slots\[1\] is 999"):
        write.run()
    backend.forget()
    assert_same_bytes(cache, expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_found_scales(backend: Backend, seed: int) -> None:
    """Scales that the call finds are those of a call for each layer."""
    cache = LAYOUTS["nhd"](Geometry(num_layers=3, head_dim=32), E4M3, seed)
    results = []
    for at_once in (False, True):
        mine = scaled(cache.clone(), ScaleGranularity.PER_TOKEN_HEAD, seed)
        tokens, slots = tokens_of(mine.layers, 5, BF16, seed), some_slots(mine, 5, seed)
        if at_once:
            Write(backend, mine.layers, tokens, slots, abi.FLAG_FIND_SCALES).run()
        else:
            for layer, (key, value) in zip(mine.layers, tokens, strict=True):
                backend.write(layer, key, value, slots, flags=abi.FLAG_FIND_SCALES)
        backend.forget()
        scales = [half.scale for layer in mine.layers for half in layer.halves()]
        results.append([*mine.storages, *scales])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_background_and_copy_engine(backend: Backend) -> None:
    for flags in (abi.FLAG_BACKGROUND, abi.FLAG_COPY_ENGINE):
        if flags == abi.FLAG_COPY_ENGINE and backend.mirror is not None:
            continue  # its slots stay on the host; test_device_flags.py has that
        cache = LAYOUTS["nhd"](Geometry(num_layers=20), BF16, 4)
        check(backend, cache, tokens_of(cache.layers, 5, BF16, 4), some_slots(cache, 5, 4), flags)


# --- Python -----------------------------------------------------------------------------------


def python_caches(count: int = 3, dtype: torch.dtype = BF16) -> tuple[Tensor, list[kvx.CacheDesc]]:
    """[layers, K and V, blocks, tokens, heads, dim] of sentinels, and each layer described."""
    whole = torch.full((count, 2, 5, 4, 3, 8), 7.0).to(dtype)
    return whole, [
        kvx.CacheDesc.from_kv(*(kvx.describe(t, Layout.BLOCK_NHD) for t in layer))
        for layer in whole
    ]


@pytest.mark.parametrize("form", ["stacked", "lists", "numpy", "list of slots"])
def test_python_writes_what_write_kv_writes(form: str) -> None:
    whole, caches = python_caches()
    expected, others = python_caches()
    keys, values = torch.randn(2, 3, 5, 3, 8).unbind()
    slots = torch.tensor([3, 19, -1, 0, 8])
    for cache, key, value in zip(others, keys, values, strict=True):
        kvx.write_kv(cache, key, value, slots)
    forms: dict[str, tuple[Any, Any, Any]] = {
        "stacked": (keys, values, slots),
        "lists": (list(keys), list(values), slots),
        "numpy": ([k.numpy() for k in keys], list(values), slots),
        "list of slots": (keys, values, slots.tolist()),
    }
    kvx.write_layers(caches, *forms[form])
    assert torch.equal(whole, expected)


def test_a_plan_is_called_again_with_other_tensors() -> None:
    whole, caches = python_caches(dtype=E4M3)
    expected, others = python_caches(dtype=E4M3)
    plan = kvx.WriteLayersPlan(caches, k_scales=[0.5, None, 2.0])
    for seed in range(3):
        keys, values = random_values((2, 3, 2, 3, 8), BF16, seed).unbind()
        slots = torch.tensor([seed, 10 + seed])
        plan(keys, values, slots)
        for cache, key, value, scale in zip(others, keys, values, (0.5, None, 2.0), strict=True):
            kvx.write_kv(cache, key, value, slots, k_scale=scale)
    assert torch.equal(whole.view(torch.uint8), expected.view(torch.uint8))
    assert repr(plan) == "<WriteLayersPlan of 3 layers>"


def test_python_refuses_with_a_sentence() -> None:
    whole, caches = python_caches()
    before = whole.clone()
    keys, values = torch.zeros(2, 3, 2, 3, 8)
    slots = torch.tensor([1, 2])
    with pytest.raises(InvalidArgumentError, match="keys has 2 entries, expected 3"):
        kvx.write_layers(caches, keys[:2], values, slots)
    with pytest.raises(InvalidArgumentError, match="caches is empty"):
        kvx.write_layers([], keys, values, slots)
    with pytest.raises(InvalidArgumentError, match=r"caches\[1\] is"):
        kvx.write_layers([caches[0], keys], keys, values, slots)
    with pytest.raises(InvalidArgumentError, match=r"caches\[2\]\.k\.data is that of caches\[0\]"):
        kvx.write_layers([caches[0], caches[1], caches[0]], keys, values, slots)
    with pytest.raises(OutOfRangeError, match=r"slots\.slots\[1\] is 20"):
        kvx.write_layers(caches, keys, values, [1, 20])
    assert torch.equal(whole, before)


def test_a_plan_refuses_memory_that_was_replaced() -> None:
    storage = torch.zeros(5 * 4 * 3 * 8, dtype=BF16)
    cache = kvx.CacheDesc.from_kv(kvx.describe(storage.view(5, 4, 3, 8), Layout.BLOCK_NHD), None)
    plan = kvx.WriteLayersPlan([cache])
    storage.untyped_storage().resize_(1 << 16)
    with pytest.raises(InvalidArgumentError, match="resized"):
        plan([torch.zeros(1, 3, 8, dtype=BF16)], None, torch.tensor([1]))
