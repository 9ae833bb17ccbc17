"""kvx_adapters.sglang: FP8, MLA, sliding windows and pools beside recurrent states, on the wheel's
own classes.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvx_adapters import sglang
from kvx_core import (
    CacheDesc,
    CacheView,
    DType,
    InvalidArgumentError,
    Layout,
    UnsupportedError,
    describe,
    migrate,
    write_kv,
)
from tests import sglang_wheel as wheel
from tests.facts import SAME_MODEL
from tests.sglang_pools import (
    SEEDS,
    Requests,
    buffers,
    bytes_of,
    mha,
    mla,
    random_rows,
    store,
    windows,
)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
every_seed = pytest.mark.parametrize("seed", SEEDS)
both_layouts = pytest.mark.parametrize("hnd", [False, True], ids=["nhd", "hnd"])


def same_bytes(found: Any, expected: Any) -> bool:
    pairs = zip(buffers(found), buffers(expected), strict=True)
    return all(torch.equal(bytes_of(a), bytes_of(b)) for a, b in pairs)


def plain(*shapes: tuple[int, ...], dtype: torch.dtype) -> tuple[list[Tensor], CacheView]:
    """A layer of zeros with a block per token: K (tokens, heads, dim) and V, if there is one."""
    tensors = [torch.zeros(shape, dtype=dtype) for shape in shapes]
    halves = [describe(tensor.unsqueeze(1), Layout.BLOCK_NHD) for tensor in tensors]
    return tensors, CacheView((CacheDesc.from_kv(*halves),), SAME_MODEL)


# ---- FP8 ----


@every_seed
@both_layouts
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_fp8_reads_as_sglang_means_it(dtype: torch.dtype, hnd: bool, seed: int) -> None:
    """SGLang stores value / scale in uint8; powers of two make it exact."""
    pool = mha(dtype=dtype, hnd=hnd, layers=1)
    requests = Requests([37, 4], page=16, pages=7, seed=seed)
    key, value = (random_rows(seed + i, 41, 3, 80, dtype=torch.float32) for i in range(2))
    stored = key.clone(), value.clone()
    pool.set_kv_buffer(
        SimpleNamespace(layer_id=0), requests.all_slots, *stored, k_scale=0.5, v_scale=4.0
    )
    view = sglang.cache_view(pool, SAME_MODEL, k_scales=[torch.tensor(0.5)], v_scales=[4.0])
    assert view.layers[0].k.dtype is (DType.F8_E4M3 if dtype == E4M3 else DType.F8_E5M2)
    (found_k, found_v), there = plain((41, 3, 80), (41, 3, 80), dtype=torch.float32)
    migrate(view.at(slots=requests.all_slots), there.at(slots=torch.arange(41)), [41])
    assert torch.equal(found_k, (key / 0.5).to(dtype).float() * 0.5)
    assert torch.equal(found_v, (value / 4.0).to(dtype).float() * 4.0)


@every_seed
@both_layouts
def test_fp8_is_written_as_sglang_writes_it(hnd: bool, seed: int) -> None:
    found, expected = (mha(dtype=E4M3, hnd=hnd) for _ in range(2))
    slots = torch.randperm(112, generator=torch.Generator().manual_seed(seed))[:23] + 16
    view = sglang.cache_view(found, SAME_MODEL, k_scales=[0.5, None], v_scales=[4.0, None])
    for layer, (k_scale, v_scale) in enumerate([(0.5, 4.0), (None, None)]):
        key, value = (random_rows(seed + i, 23, 3, 80, dtype=torch.float32) for i in range(2))
        expected.set_kv_buffer(
            None,
            slots,
            key.clone(),
            value.clone(),
            k_scale=k_scale,
            v_scale=v_scale,
            layer_id_override=layer,
        )
        assert view.k_scales is not None
        assert view.v_scales is not None
        write_kv(
            view.layers[layer],
            key,
            value,
            sglang.slot_mapping(slots),
            k_scale=view.k_scales[layer],
            v_scale=view.v_scales[layer],
        )
    assert same_bytes(found, expected)


def test_scales_are_compared_with_the_pool() -> None:
    pool = mha(dtype=E4M3)
    with pytest.raises(InvalidArgumentError, match=r"k_scales has no entries, expected 2, one per"):
        sglang.cache_view(pool, SAME_MODEL)
    with pytest.raises(InvalidArgumentError, match=r"v_scales has 1 entries, expected 2.*v_scale,"):
        sglang.cache_view(pool, SAME_MODEL, k_scales=[1.0, 1.0], v_scales=[1.0])
    with pytest.raises(InvalidArgumentError, match=r"k_scales\[1\] has shape \(3,\), expected one"):
        sglang.cache_view(pool, SAME_MODEL, k_scales=[1.0, torch.ones(3)], v_scales=[1.0, 1.0])
    for other in (mha(), mla(dtype=E4M3)):
        with pytest.raises(InvalidArgumentError, match="stores it without scales"):
            sglang.cache_view(other, SAME_MODEL, k_scales=[1.0, 1.0])


# ---- MLA ----


@every_seed
@pytest.mark.parametrize("page", [1, 5, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, E4M3, E5M2], ids=str)
def test_latents_there_and_back(dtype: torch.dtype, page: int, seed: int) -> None:
    """From pages of one size into those of another, and back into an empty pool."""
    pool, other, back = mla(page=page, pages=40, dtype=dtype), mla(dtype=dtype), None
    requests = Requests([37, 1], page=page, pages=40, seed=seed)
    beyond = Requests([37, 1], page=16, pages=7, seed=seed + 9)
    expected = mla(dtype=dtype)
    for layer in range(2):
        latents = random_rows(seed + layer, 38, 1, 80, dtype=torch.float32).to(dtype)
        store(pool, layer, requests.all_slots, latents)
        store(expected, layer, beyond.all_slots, latents)
    views = [sglang.cache_view(held, SAME_MODEL) for held in (pool, other)]
    assert views[0].layers[0].v is None
    assert views[0].layers[0].head_dim == 80
    src = views[0].at(sglang.block_table(requests.table, requests.rows, [37, 1], page_size=page))
    dst = views[1].at(sglang.ragged(beyond.table, beyond.rows, [37, 1], page_size=16))
    migrate(src, dst, [37, 1])
    assert same_bytes(other, expected)
    back = mla(page=page, pages=40, dtype=dtype)
    migrate(dst, sglang.cache_view(back, SAME_MODEL).at(slots=requests.all_slots), [37, 1])
    assert same_bytes(back, pool)


def test_packed_latents_are_refused() -> None:
    pool = mla()
    pool.dsa_kv_cache_store_fp8 = True
    with pytest.raises(UnsupportedError, match="quantized rows with scales beside them"):
        sglang.cache_view(pool, SAME_MODEL)


# ---- sliding windows ----


@every_seed
def test_layers_of_a_window_have_slots_of_their_own(seed: int) -> None:
    """A request of 23 tokens whose window has dropped the first 11 of them."""
    pool, back = windows(), windows()
    requests = Requests([23], page=5, pages=12, seed=seed)
    held = requests.all_slots[11:]
    mapping = torch.zeros(66, dtype=torch.int64)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(seed)) + 5
    mapping[held] = order[:12]
    for each in (pool, back):
        each.register_mapping(mapping)
    tokens = {}
    for layer in range(4):
        key, value = (random_rows(seed + 7 * layer + i, 23, 2, 24) for i in range(2))
        first = 11 if layer in (0, 3) else 0
        loc = wheel.device.KVWriteLoc(
            requests.all_slots[first:], mapping[requests.all_slots[first:]]
        )
        pool.set_kv_buffer(SimpleNamespace(layer_id=layer), loc, key[first:], value[first:])
        tokens[layer] = key[first:], value[first:]
    groups = sglang.layer_groups(pool, SAME_MODEL, window=12)
    assert [(group.layers, group.window) for group in groups] == [((1, 2), 0), ((0, 3), 12)]
    assert [group.view.facts.first_layer for group in groups] == [1, None]
    assert [group.view.facts.window for group in groups] == [0, 12]
    into = sglang.layer_groups(back, SAME_MODEL, window=12)
    for group, other, first in zip(groups, into, (0, 11), strict=True):
        slots = sglang.request_slots(requests.table, requests.rows, [23], [first])
        src = group.view.at(slots=group.slots(slots))
        for i, layer in enumerate(group.layers):
            found, there = plain((23 - first, 2, 24), (23 - first, 2, 24), dtype=torch.float16)
            one = replace(src, view=replace(src.view, layers=src.view.layers[i : i + 1]))
            there = replace(there, facts=src.view.facts)
            migrate(one, there.at(slots=torch.arange(23 - first)), [23 - first])
            assert all(map(torch.equal, found, tokens[layer]))
        migrate(src, other.view.at(slots=other.slots(slots)), [23 - first])
    for name in ("full_kv_pool", "swa_kv_pool"):
        assert same_bytes(getattr(back, name), getattr(pool, name))


def test_tokens_behind_the_window_are_refused() -> None:
    pool = windows()
    _, sliding = sglang.layer_groups(pool, SAME_MODEL, window=12)
    with pytest.raises(InvalidArgumentError, match=r"full_to_swa_index_mapping is None"):
        sliding.slots(torch.tensor([7]))
    mapping = torch.zeros(66, dtype=torch.int64)
    mapping[8] = 9
    pool.register_mapping(mapping)
    with pytest.raises(InvalidArgumentError, match=r"slots\[1\] is 7, which has no slot in the wi"):
        sliding.slots(torch.tensor([8, 7]))
    mapping[65] = 4
    found: Any = sliding.slots(torch.tensor([65, 8])).owner
    assert found.tolist() == [4, 9]
    mapping[9] = 1  # of a pool whose pages have one token
    assert sliding.slots(torch.tensor([9])).owner.tolist() == [1]
    for slot in (-1, 0, 66):
        with pytest.raises(InvalidArgumentError, match=rf"slots\[0\] is {slot}, which has no slot"):
            sliding.slots(torch.tensor([slot]))
    with pytest.raises(InvalidArgumentError, match="window is 0, expected the tokens of the slid"):
        sglang.layer_groups(pool, SAME_MODEL)
    with pytest.raises(UnsupportedError, match=r"pool is a SWAKVPool.*use layer_groups"):
        sglang.cache_view(pool, SAME_MODEL)


def test_a_pool_of_windows_alone_has_one_group() -> None:
    pool = windows()
    pool.layers_mapping = {0: (0, True), 3: (1, True)}
    (group,) = sglang.layer_groups(pool, SAME_MODEL, window=12)
    assert (group.layers, group.window) == ((0, 3), 12)


def test_layers_that_share_their_place_are_refused() -> None:
    pool = windows()
    pool.layers_mapping = {0: (0, True), 1: (0, False), 2: (0, False), 3: (1, True)}
    with pytest.raises(UnsupportedError, match=r"pool are at \[0, 0\], expected 0 to 1: pools of"):
        sglang.layer_groups(pool, SAME_MODEL, window=12)


def test_scales_go_to_the_layers_of_each_group() -> None:
    pool = windows(dtype=E5M2)
    scales = [1.0, 2.0, 4.0, 8.0]
    full, sliding = sglang.layer_groups(
        pool, SAME_MODEL, window=12, k_scales=scales, v_scales=scales[::-1]
    )
    for group, k, v in ((full, [2.0, 4.0], [4.0, 2.0]), (sliding, [1.0, 8.0], [8.0, 1.0])):
        found = group.view.k_scales, group.view.v_scales
        assert [[scale.to_numpy().item() for scale in half] for half in found] == [k, v]
    with pytest.raises(InvalidArgumentError, match="k_scales has 2 entries, expected 4"):
        sglang.layer_groups(pool, SAME_MODEL, window=12, k_scales=scales[:2], v_scales=scales)


# ---- beside recurrent states, and alone ----


def test_attention_beside_recurrent_states() -> None:
    pool = wheel.device.HybridLinearKVPool(
        size=48,
        dtype=torch.float16,
        page_size=16,
        head_num=2,
        head_dim=24,
        full_attention_layer_ids=[3, 7],
        device="cpu",
        mamba_pool=None,
    )
    (group,) = sglang.layer_groups(pool, SAME_MODEL)
    assert (group.layers, group.window, group.view.facts.num_layers) == ((3, 7), 0, 2)
    key, value = (random_rows(i, 3, 2, 24) for i in range(2))
    slots = torch.tensor([17, 20, 16])
    pool.set_kv_buffer(SimpleNamespace(layer_id=7), slots, key, value)
    found, there = plain((3, 2, 24), (3, 2, 24), dtype=torch.float16)
    view = replace(group.view, layers=group.view.layers[1:], facts=SAME_MODEL)
    migrate(view.at(slots=group.slots(slots)), there.at(slots=torch.arange(3)), [3])
    assert all(map(torch.equal, found, (key, value)))


def test_a_plain_pool_is_one_group() -> None:
    (group,) = sglang.layer_groups(mha(start_layer=4), SAME_MODEL, window=7)
    assert (group.layers, group.window, group.view.facts.first_layer) == ((4, 5), 7, 4)
