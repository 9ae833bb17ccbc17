"""kvx_adapters.sglang on the device pools of the SGLang wheel itself: what they write KVX reads,
and the other way round.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from kvx_adapters import sglang, transformers
from kvx_core import (
    BlockTable,
    CacheDesc,
    CacheSpan,
    CacheView,
    DType,
    InvalidArgumentError,
    Layout,
    OutOfRangeError,
    UnsupportedError,
    describe,
    gather_kv,
    migrate,
    verify,
    write_kv,
)
from tests import sglang_wheel as wheel
from tests.engines.engine import Sizes
from tests.engines.vllm import flash_attn
from tests.facts import SAME_MODEL
from tests.sglang_pools import (
    SEEDS,
    SENTINEL,
    Requests,
    buffers,
    bytes_of,
    mha,
    random_rows,
    scheduled,
    store,
    windows,
)
from tests.ways_out import WayOut, leads_out

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
LENGTHS = [37, 1, 16, 0]
every_seed = pytest.mark.parametrize("seed", SEEDS)
both_layouts = pytest.mark.parametrize("hnd", [False, True], ids=["nhd", "hnd"])
every_page = pytest.mark.parametrize("page", [1, 5, 16])


def view_of(pool: Any, **scales: Any) -> CacheView:
    return sglang.cache_view(pool, SAME_MODEL, **scales)


def tokens_of(pool: Any, seed: int, count: int, layer: int) -> tuple[Tensor, Tensor]:
    """Random keys and values of a layer."""
    return (
        random_rows(seed + 2 * layer, count, pool.head_num, pool.head_dim, dtype=pool.dtype),
        random_rows(seed + 2 * layer + 1, count, pool.head_num, pool.v_head_dim, dtype=pool.dtype),
    )


def same_bytes(found: Any, expected: Any) -> bool:
    pairs = zip(buffers(found), buffers(expected), strict=True)
    return all(torch.equal(bytes_of(a), bytes_of(b)) for a, b in pairs)


def test_the_wheel_is_the_described_version() -> None:
    assert wheel.VERSION == "0.5.23"


# ---- where K and V lie ----


def test_k_and_v_are_halves_of_one_allocation() -> None:
    pool = mha(page=16, pages=4, heads=2, dim=64)
    desc = sglang.cache_desc(pool, 1)
    assert desc.v is not None
    assert desc.v.data - desc.k.data == 80 * 2 * 64 * 2
    assert view_of(pool).null_block_id == sglang.PADDED_PAGE == 0
    assert desc.k.data == pool.get_key_buffer(1).data_ptr()
    assert (desc.k.layout, desc.k.shape) == (Layout.BLOCK_NHD, (5, 16, 2, 64))
    assert (desc.num_blocks, desc.block_size, desc.num_kv_heads, desc.head_dim) == (5, 16, 2, 64)
    desc.validate()


def test_hnd_pages_are_described_as_they_are() -> None:
    desc = sglang.cache_desc(mha(pages=4, hnd=True), 0)
    assert (desc.k.layout, desc.k.shape) == (Layout.BLOCK_HND, (5, 3, 16, 80))
    desc.validate()


def test_another_head_dim_of_v() -> None:
    pool = mha(dim=80, v_dim=24)
    view, requests = view_of(pool), Requests([21], page=16, pages=7, seed=0)
    key, value = tokens_of(pool, 0, 21, 0)
    store(pool, 0, requests.all_slots, key, value)
    table = sglang.block_table(requests.table, requests.rows, [21], page_size=16)
    found = gather_kv(view.layers[0], table, [21])
    assert torch.equal(torch.as_tensor(found[0])[0], key)
    assert torch.equal(torch.as_tensor(found[1])[0], value)


# ---- what the engine does meanwhile ----


class Event:
    """A CUDA event: query() is False while what it stands behind runs."""

    def __init__(self) -> None:
        self.is_done = True

    def query(self) -> bool:
        return self.is_done


def counter() -> Any:
    """Source: sglang 0.5.23 managers/cache_controller.py, LayerDoneCounter, LayerLoadingEvent"""
    return SimpleNamespace(events=[SimpleNamespace(finish_event=Event()) for _ in range(3)])


@pytest.mark.parametrize("which", [0, 2])
def test_a_pool_is_refused_while_hicache_loads_into_it(which: int) -> None:
    pool, there = mha(), mha()
    requests = Requests([7], page=16, pages=7, seed=0)
    loads = counter()
    view, dst = view_of(pool).at(slots=requests.all_slots), view_of(there)
    pool.register_layer_transfer_counter(loads)
    migrate(view, dst.at(slots=requests.all_slots), [7])
    event = loads.events[which].finish_event
    event.is_done = False
    for ends in ((view, dst.at(slots=[16])), (dst.at(slots=[16]), view)):
        with pytest.raises(
            InvalidArgumentError, match=r"out of date: HiCache loads .*synchronize\(\)"
        ):
            migrate(*ends, [7])
    event.is_done = True
    migrate(view, dst.at(slots=requests.all_slots), [7])


def test_groups_ask_the_outer_pool() -> None:
    """SWAKVPool takes the counter from the pools inside it."""
    pool, loads = windows(), counter()
    groups = sglang.layer_groups(pool, SAME_MODEL, window=12)
    pool.register_layer_transfer_counter(loads)
    assert pool.swa_kv_pool.layer_transfer_counter is None
    for group in groups:
        assert group.view.outdated is not None
        assert group.view.outdated() is None
    loads.events[1].finish_event.is_done = False
    for group in groups:
        assert group.view.outdated is not None
        assert "HiCache loads pages" in (group.view.outdated() or "")
    loads.events[1].finish_event.is_done = True
    pool.swa_kv_pool.k_buffer = [tensor.clone() for tensor in pool.swa_kv_pool.k_buffer]
    found = [group.view.outdated() for group in groups if group.view.outdated]
    assert [reason is None for reason in found] == [True, False]


def test_a_span_holds_what_the_scheduler_has_committed() -> None:
    """Behind a request's tokens its row has slots of requests that had the row before."""
    pool, there = mha(), mha()
    requests = Requests([37, 20], page=16, pages=7, seed=3)
    for layer in range(2):
        store(pool, layer, requests.all_slots, *tokens_of(pool, 9, 57, layer))
    counted = scheduled(requests.rows, [36, 20])
    span = sglang.span(view_of(pool), requests.table, counted, page_size=16)
    slots = requests.all_slots
    dst = view_of(there).at(slots=torch.cat([slots[:36], slots[37:]]))
    migrate(span, dst, sglang.committed(counted))
    key, _ = tokens_of(pool, 9, 57, 1)
    assert torch.equal(there.k_buffer[1][slots[:36]], key[:36])
    assert torch.equal(there.k_buffer[1][slots[37:]], key[37:])
    assert (bytes_of(there.k_buffer[1][slots[36]].clone()) == SENTINEL).all()
    whole = view_of(there).at(slots=slots)
    with pytest.raises(
        OutOfRangeError, match="src holds 36 tokens of sequence 0 by its engine's own"
    ):
        migrate(span, whole, [37, 20])
    counted[0].kv.kv_committed_len = 37
    migrate(span, whole, [37, 20])
    counted[1].kv.kv_allocated_len = 0  # released
    with pytest.raises(
        OutOfRangeError, match="src holds 0 tokens of sequence 1 by its engine's own"
    ):
        migrate(span, whole, [37, 20])
    counted[1].kv.req_pool_idx = None
    assert sglang.committed(counted) == [37, 0]
    with pytest.raises(
        InvalidArgumentError, match=r"requests\[1\]\.kv\.req_pool_idx is None, expected"
    ):
        sglang.span(view_of(pool), requests.table, counted, page_size=16)


# ---- writing and reading ----


@every_seed
@every_page
@both_layouts
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_kvx_writes_what_sglang_writes(dtype: torch.dtype, hnd: bool, page: int, seed: int) -> None:
    """Whole memories are compared: nothing else is touched."""
    found, expected = (mha(page=page, pages=29, dtype=dtype, hnd=hnd) for _ in range(2))
    view = view_of(found)
    slots = torch.randperm(29 * page, generator=torch.Generator().manual_seed(seed))[:23] + page
    for layer in range(2):
        key, value = tokens_of(found, seed, 23, layer)
        store(expected, layer, slots, key, value)
        write_kv(view.layers[layer], key, value, sglang.slot_mapping(slots))
    assert same_bytes(found, expected)
    assert bytes_of(found.k_buffer[0])[: page * 3 * 80 * dtype.itemsize].eq(SENTINEL).all()


def spans(view: CacheView, requests: Requests, page: int) -> dict[str, CacheSpan]:
    """The same tokens by each kind of lookup."""
    args = (requests.table, requests.rows, requests.lengths)
    return {
        "packed": view.at(sglang.block_table(*args, page_size=page)),
        "ragged": view.at(sglang.ragged(*args, page_size=page)),
        "slots": view.at(slots=sglang.request_slots(*args)),
    }


@every_seed
@every_page
@both_layouts
def test_kvx_reads_what_sglang_wrote(hnd: bool, page: int, seed: int) -> None:
    pool = mha(page=page, pages=60, hnd=hnd)
    requests = Requests(LENGTHS, page=page, pages=60, seed=seed)
    tokens = [tokens_of(pool, seed, sum(LENGTHS), layer) for layer in range(2)]
    for layer, (key, value) in enumerate(tokens):
        store(pool, layer, requests.all_slots, key, value)
    for kind, span in spans(view_of(pool), requests, page).items():
        for layer, (key, value) in enumerate(tokens):
            found_k, found_v = read(span, layer, LENGTHS)
            assert torch.equal(found_k, key), kind
            assert torch.equal(found_v, value), kind


def read(span: CacheSpan, layer: int, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """A layer's tokens, one request after the other, by migration into a plain tensor."""
    source = span.view.layers[layer]
    assert source.v is not None
    count, heads = sum(lengths), source.num_kv_heads
    tensors = [
        torch.zeros(count, 1, heads, dim, dtype=torch.float16)
        for dim in (source.head_dim, source.v_head_dim)
    ]
    described = CacheDesc.from_kv(*(describe(tensor, Layout.BLOCK_NHD) for tensor in tensors))
    one = CacheSpan(
        replace(span.view, layers=(source,), k_scales=None, v_scales=None),
        block_table=span.block_table,
        slots=span.slots,
    )
    migrate(one, CacheView((described,), SAME_MODEL).at(slots=torch.arange(count)), lengths)
    return tensors[0][:, 0], tensors[1][:, 0]


def test_the_tables_have_the_pages_of_each_request() -> None:
    requests = Requests([20, 3], page=16, pages=7, seed=1)
    args = (requests.table, requests.rows, [20, 3])
    first, second = requests.slots
    packed = sglang.block_table(*args, page_size=16)
    assert (packed.seq_count, packed.max_blocks_per_seq) == (2, 2)
    assert packed.owner.tolist() == [
        [int(first[0]) // 16, int(first[16]) // 16],
        [int(second[0]) // 16, -1],
    ]
    ragged = sglang.ragged(*args, page_size=16)
    assert ragged.owner[0].tolist() == [int(slot) // 16 for slot in torch.cat([first, second])]
    assert ragged.owner[1].tolist() == [0, 20, 23]
    by_slot = sglang.ragged(*args, page_size=1)
    assert by_slot.owner[0].tolist() == torch.cat([first, second]).tolist()
    part = sglang.request_slots(*args, starts=[17, 0])
    assert part.tolist() == [*first[17:].tolist(), *second.tolist()]
    assert sglang.seq_lens(torch.tensor([20, 3])).to_numpy().tolist() == [20, 3]


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_requests_without_tokens_move_nothing(lengths: list[int]) -> None:
    requests = Requests([20, 3], page=4, pages=7, seed=1)
    k, v = torch.zeros(2, 7, 4, 2, 8)
    cache = CacheDesc.from_kv(describe(k, Layout.BLOCK_NHD), describe(v, Layout.BLOCK_NHD))
    view, rows = CacheView((cache,), SAME_MODEL), requests.rows[: len(lengths)]
    for make in (sglang.block_table, sglang.ragged):
        table = make(requests.table, rows, lengths, page_size=4)
        assert migrate(view.at(table), view.at([[1]] * len(lengths)), lengths) == 0


# ---- to other engines and back ----


@every_seed
@pytest.mark.parametrize("layout", ["LBNHC", "BHLNC"])
@both_layouts
def test_to_vllm_and_back(hnd: bool, layout: str, seed: int) -> None:
    """vLLM's blocks are filled by its own indexing for comparison."""
    pool, back = (mha(page=5, pages=20, hnd=hnd, dtype=torch.bfloat16) for _ in range(2))
    requests = Requests([37, 1, 16], page=5, pages=20, seed=seed)
    args = (requests.table, requests.rows, requests.lengths)
    sizes = Sizes(
        num_layers=2,
        num_blocks=9,
        block_size=16,
        num_kv_heads=3,
        head_dim=80,
        dtype=torch.bfloat16,
    )
    found, expected = flash_attn(sizes, layout=layout), flash_attn(sizes, layout=layout)
    sequences = [[4, 1, 7], [2], [8]]
    places = [(b, n) for own, c in zip(sequences, [37, 1, 16], strict=True) for b, n in at(own, c)]
    blocks, offsets = torch.tensor(places).unbind(1)
    for layer in range(2):
        key, value = tokens_of(pool, seed, 54, layer)
        store(pool, layer, requests.all_slots, key, value)
        store(back, layer, requests.all_slots[:0], key[:0], value[:0])
        expected.write(layer, blocks, offsets, key, value)
    other = found.span(sequences, [37, 1, 16])
    facts = replace(SAME_MODEL, scale_convention="multiply")
    view = sglang.cache_view(pool, facts)
    vllm_view = replace(other.view, facts=facts)
    there = CacheSpan(vllm_view, block_table=other.block_table)
    span = view.at(sglang.block_table(*args, page_size=5))
    migrate(span, there, [37, 1, 16])
    assert all(torch.equal(a, b) for a, b in zip(found.raw, expected.raw, strict=True))
    assert verify(span, there, [37, 1, 16]).ok
    migrate(there, sglang.cache_view(back, facts).at(slots=requests.all_slots), [37, 1, 16])
    assert same_bytes(back, pool)


def at(blocks: list[int], count: int) -> list[tuple[int, int]]:
    return [(blocks[t // 16], t % 16) for t in range(count)]


@every_seed
def test_to_transformers_and_back(seed: int) -> None:
    pool, back = mha(page=16), mha(page=16)
    requests = Requests([43], page=16, pages=7, seed=seed)
    tokens = [tokens_of(pool, seed, 43, layer) for layer in range(2)]
    cache = DynamicCache()
    for layer, (key, value) in enumerate(tokens):
        store(pool, layer, requests.all_slots, key, value)
        cache.update(torch.zeros(1, 3, 43, 80).half(), torch.zeros(1, 3, 43, 80).half(), layer)
    dense = CacheView(
        tuple(transformers.cache_desc(layer) for layer in cache.layers), SAME_MODEL, dense=True
    )
    migrate(view_of(pool).at(slots=requests.all_slots), dense.at(), [43])
    for layer, (key, value) in zip(cache.layers, tokens, strict=True):
        assert torch.equal(layer.keys[0].transpose(0, 1), key)
        assert torch.equal(layer.values[0].transpose(0, 1), value)
    table = sglang.block_table(requests.table, requests.rows, [43], page_size=16)
    migrate(dense.at(), view_of(back).at(table), [43])
    assert same_bytes(back, pool)


# ---- refusals ----


def test_tokens_of_a_request_without_pages_are_not_passed_over() -> None:
    """As null blocks, which restores and loads pass over, and tables with holes."""
    requests = Requests([20], page=16, pages=7, seed=0)
    none = sglang.block_table(requests.table, requests.rows, [0], page_size=16).with_holes()
    src, dst = view_of(mha()).at(slots=requests.all_slots[:1]), view_of(mha()).at(none)
    migrate(src.view.at(slots=requests.all_slots[:0]), dst, [0])
    with pytest.raises(OutOfRangeError, match="expected below num_blocks"):
        migrate(src, dst, [1])


def test_a_pool_that_has_freed_its_buffers_is_refused() -> None:
    pool, dst = mha(), mha()
    slots = torch.arange(16, 20)
    src = view_of(pool).at(slots=slots)
    migrate(src, view_of(dst).at(slots=slots), [4])
    pool.k_buffer = [tensor.clone() for tensor in pool.k_buffer]
    with pytest.raises(InvalidArgumentError, match=r"the pool has its buffers elsewhere.*again"):
        migrate(src, view_of(dst).at(slots=slots), [4])
    pool._clear_buffers()
    with pytest.raises(InvalidArgumentError, match=r"pool\.k_buffer is gone"):
        migrate(src, view_of(dst).at(slots=slots), [4])
    with pytest.raises(InvalidArgumentError, match=r"pool\.k_buffer is gone"):
        view_of(pool)


def test_buffers_are_compared_with_the_pool() -> None:
    pool = mha()
    pool.k_buffer[1] = pool.k_buffer[1].float()
    with pytest.raises(
        InvalidArgumentError,
        match=r"pool\.k_buffer\[1\]\.dtype is torch\.float32, expected torch\.float16",
    ):
        view_of(pool)
    pool.k_buffer[1] = pool.k_buffer[1].half()[:-1]
    with pytest.raises(InvalidArgumentError, match=r"shape \(127, 3, 80\).*expected \(128, 3, 80"):
        view_of(pool)
    pool = mha()
    pool.v_buffer[0] = pool.v_buffer[0].to("meta")
    with pytest.raises(UnsupportedError, match=r"v_buffer\[0\]\.device is meta, expected cpu"):
        view_of(pool)
    with pytest.raises(InvalidArgumentError, match=r"layer is 2, expected 0 to 1"):
        sglang.cache_desc(mha(), 2)


def test_a_page_size_that_cuts_the_last_page_is_refused() -> None:
    pool = wheel.device.MHATokenToKVPool(
        size=50,
        page_size=16,
        dtype=torch.float16,
        head_num=1,
        head_dim=80,
        layer_num=1,
        device="cpu",
        enable_memory_saver=False,
    )
    with pytest.raises(InvalidArgumentError, match=r"66 slots, expected whole pages .* 16: its"):
        view_of(pool)


@pytest.mark.parametrize(
    ("rows", "lengths", "page", "message"),
    [
        ([1], [4], 16, r"token 0 of 4 is 0, expected at least 1: slot 0 is that of padded"),
        ([0], [4], 16, r"req_pool_indices\[0\] is 0, expected 1 to 4: row 0 is that of padded"),
        ([5], [4], 16, r"req_pool_indices\[0\] is 5, expected 1 to 4"),
        ([4], [97], 16, r"tokens of request 0 are 0 to 97, expected within 0 to 96"),
        ([4], [21], 16, r"the slot of token 20 of 21 is 0"),
        ([4], [20, 1], 16, r"ends has 2 entries, expected 1"),
        ([4], [20], 12, r"has slot \d+, expected place \d+ of its page of 12 tokens"),
        ([4], [3], 128, r"expected place|in page 0, expected at least slot 128"),
    ],
)
def test_rows_that_hold_no_such_tokens_are_refused(
    rows: list[int], lengths: list[int], page: int, message: str
) -> None:
    """Row 1 is not allocated; row 4 has 20 tokens in pages of 16."""
    requests = Requests([20, 3], page=16, pages=7, seed=1)
    rows = [int(requests.rows[0]) if row == 4 else row for row in rows]
    for make in (sglang.block_table, sglang.ragged):
        with pytest.raises(InvalidArgumentError, match=message):
            make(requests.table, rows, lengths, page_size=page)


def test_tokens_in_the_padded_page_are_refused() -> None:
    requests = Requests([3], page=16, pages=7, seed=1)
    row = int(requests.rows[0])
    requests.pool.write((row, slice(0, 2)), torch.tensor([5, 6], dtype=torch.int32))
    with pytest.raises(InvalidArgumentError, match=r"slot 5, expected place 0 of its page"):
        sglang.block_table(requests.table, [row], [2], page_size=16)
    requests.pool.write((row, slice(0, 2)), torch.tensor([32, 1], dtype=torch.int32))
    with pytest.raises(InvalidArgumentError, match=r"token 1 of a request has slot 1, expected"):
        sglang.block_table(requests.table, [row], [2], page_size=16)


def test_a_slot_past_the_pool_is_out_of_range() -> None:
    pool = mha(pages=3)
    key, value = tokens_of(pool, 0, 1, 0)
    with pytest.raises(OutOfRangeError, match="64"):
        write_kv(view_of(pool).layers[0], key, value, sglang.slot_mapping(torch.tensor([64])))


def test_other_pools_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"pool is a ReqToTokenPool, expected MHATokenTo"):
        view_of(Requests([1], page=1, pages=2, seed=0).pool)
    pool = mha()
    for name, value, message in [
        ("dtype", torch.float8_e4m3fnuz, r"pool\.dtype is torch\.float8_e4m3fnuz, expected one of"),
        ("kv_cache_layout", "vectorized_5d", "SGLANG_AITER_KV_CACHE_LAYOUT=nhd"),
        ("post_capture_active", True, r"pool\.post_capture_active is True, expected False"),
        ("quant_method", object(), "quantized rows with scales beside them"),
    ]:
        before = getattr(pool, name)
        setattr(pool, name, value)
        with pytest.raises(UnsupportedError, match=message):
            view_of(pool)
        setattr(pool, name, before)
    view_of(pool)


def test_facts() -> None:
    facts = sglang.cache_facts(
        mha(start_layer=4), version="0.5.23", rotary="half", rotary_dim=80, total_kv_heads=6
    )
    assert (facts.engine, facts.num_layers, facts.first_layer) == ("sglang 0.5.23", 2, 4)
    assert (facts.rope_applied, facts.total_kv_heads) == (True, 6)
    assert sglang.cache_facts(mha()).rope_applied is None
    assert sglang.cache_facts(mha()).engine == "sglang"
    given = {torch.bfloat16: DType.BF16, torch.float8_e5m2: None}
    assert [sglang.cache_facts(mha(dtype=dtype)).compute_dtype for dtype in given] == [
        *given.values()
    ]


def test_scales_in_tensors_are_not_copied() -> None:
    factors = [torch.tensor([0.5]), torch.tensor(0.25)]
    view = view_of(mha(dtype=torch.float8_e5m2), k_scales=factors, v_scales=[None, 2.0])
    assert view.k_scales is not None
    assert [one and one.data for one in view.k_scales] == [one.data_ptr() for one in factors]


def test_rows_that_lie_apart_are_refused() -> None:
    pool = mha()
    pool.v_buffer[1] = pool.v_buffer[1].repeat(1, 2, 1)[:, ::2]
    with pytest.raises(InvalidArgumentError, match=r"expected .*, contiguous: a row per slot"):
        view_of(pool)


def test_block_tables_are_those_of_kvx() -> None:
    requests = Requests([20], page=16, pages=7, seed=1)
    assert sglang.request_slots(requests.table, [], []).tolist() == []
    table = sglang.block_table(requests.table, requests.rows, [20], page_size=16)
    assert isinstance(table, BlockTable)


# ---- ways out ----


def with_field(name: str, value: Any) -> None:
    """A pool that says something else of itself."""
    pool = mha()
    setattr(pool, name, value)
    view_of(pool)


def replaced(*, again: bool) -> None:
    """The engine has moved the buffers of a pool that has been described."""
    pool = mha()
    view = view_of(pool)
    pool.k_buffer = [tensor.clone() for tensor in pool.k_buffer]
    src = view_of(pool) if again else view
    migrate(src.at(slots=[20]), view_of(mha()).at(slots=[20]), [1])


def freed(*, other: bool) -> None:
    pool = mha()
    pool._clear_buffers()
    view_of(mha() if other else pool)


def of_size(size: int) -> None:
    view_of(
        wheel.device.MHATokenToKVPool(
            size=size,
            page_size=16,
            dtype=torch.float16,
            head_num=1,
            head_dim=80,
            layer_num=1,
            device="cpu",
            enable_memory_saver=False,
        )
    )


def paged_by(page: int, *, count: int = 20, row: int | None = None) -> None:
    """A table of a request of 20 tokens in pages of 16."""
    requests = Requests([20], page=16, pages=7, seed=1)
    rows = requests.rows if row is None else [row]
    sglang.block_table(requests.table, rows, [count], page_size=page)


def by_slots() -> None:
    requests = Requests([20], page=16, pages=7, seed=1)
    slots = sglang.request_slots(requests.table, requests.rows, [20])
    migrate(view_of(mha()).at(slots=slots), view_of(mha()).at(slots=slots), [20])


def of_fp8(**scales: Any) -> None:
    view_of(mha(dtype=torch.float8_e4m3fn), **scales)


def in_a_window(*, registered: bool = True, first: int = 11) -> None:
    """Slots in the sliding layers of the tokens of 23 that a window of 12 still has."""
    pool, requests = windows(), Requests([23], page=5, pages=12, seed=1)
    if registered:
        mapping = torch.zeros(66, dtype=torch.int64)
        mapping[requests.all_slots[11:]] = torch.arange(5, 17)
        pool.register_mapping(mapping)
    _, sliding = sglang.layer_groups(pool, SAME_MODEL, window=12)
    sliding.slots(sglang.request_slots(requests.table, requests.rows, [23], starts=[first]))


WAYS_OUT = [
    WayOut(
        "expected where they were described. Call cache_view again",
        lambda: replaced(again=False),
        lambda: replaced(again=True),
    ),
    WayOut(
        "the pool has freed its buffers. Describe the pool that the engine uses now",
        lambda: freed(other=False),
        lambda: freed(other=True),
    ),
    WayOut(
        "its last page is cut off. Make size a multiple of 16, as SGLang's server does",
        lambda: of_size(50),
        lambda: of_size(64),
    ),
    WayOut(
        "of its page of 12 tokens. Give the page_size of the pool, or move by slots: request_slots",
        lambda: paged_by(12),
        lambda: [paged_by(16), by_slots()],
    ),
    WayOut(
        "slot 0 is that of padded tokens. Give rows that are allocated, and lengths up to the "
        "tokens that they hold",
        lambda: paged_by(16, count=21),
        lambda: paged_by(16, count=20),
    ),
    WayOut(
        "Choose another --kv-cache-dtype",
        lambda: with_field("dtype", torch.float8_e4m3fnuz),
        lambda: [view_of(mha(dtype=dtype)) for dtype in FLOATS],
    ),
    WayOut(
        "the tokens of V are split, too. Set SGLANG_AITER_KV_CACHE_LAYOUT=nhd",
        lambda: with_field("kv_cache_layout", "vectorized_5d"),
        lambda: with_field("kv_cache_layout", "nhd"),
    ),
    WayOut(
        "Choose --kv-cache-dtype auto, fp8_e4m3 or fp8_e5m2, and no DSA with FP8",
        lambda: with_field("quant_method", object()),
        lambda: [
            view_of(mha()),
            *(
                view_of(mha(dtype=dtype), k_scales=[None, None], v_scales=[None, None])
                for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
            ),
        ],
    ),
    WayOut(
        "only a part of its addresses has memory. Start SGLang with "
        "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING=0",
        lambda: with_field("post_capture_active", True),
        lambda: with_field("post_capture_active", False),
    ),
    WayOut(
        "its RadixAttention's k_scale, which may be None",
        of_fp8,
        lambda: of_fp8(k_scales=[None, torch.tensor(0.5)], v_scales=[None, 2.0]),
    ),
    WayOut(
        "Of SWAKVPool and HybridLinearKVPool use layer_groups",
        lambda: view_of(windows()),
        lambda: sglang.layer_groups(windows(), SAME_MODEL, window=12),
    ),
    WayOut(
        "expected the tokens of the sliding layers: the model's sliding_window_size",
        lambda: sglang.layer_groups(windows(), SAME_MODEL),
        lambda: sglang.layer_groups(windows(), SAME_MODEL, window=12),
    ),
    WayOut(
        "Make the SWATokenToKVPoolAllocator first: it calls register_mapping",
        lambda: in_a_window(registered=False),
        in_a_window,
    ),
    WayOut(
        "Give the last 12 tokens of each request: request_slots(..., starts=...)",
        lambda: in_a_window(first=0),
        lambda: in_a_window(first=23 - 12),
    ),
]


@pytest.mark.parametrize("case", WAYS_OUT, ids=str)
def test_each_way_out_leads_out(case: WayOut) -> None:
    leads_out(case)


def test_settings_that_ways_out_name_are_sglangs() -> None:
    """By name, in the wheel's own list of variables and arguments; a pool follows the first."""
    for name in ("SGLANG_AITER_KV_CACHE_LAYOUT", "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"):
        assert hasattr(wheel.envs, name)
    folder = Path(sys.modules["sglang"].__path__[0]) / "srt/arg_groups/fields"
    fields = "".join(path.read_text() for path in folder.glob("*.py"))
    for name in (
        "kv_cache_dtype",
        "enable_linear_replayssm",
        "enable_linear_replayssm_spec",
        "dcp_size",
        "hicache_mem_layout",
    ):
        assert f"    {name}: A[" in fields
    for choice in ("auto", "fp8_e4m3", "fp8_e5m2"):
        assert f'"{choice}",' in fields
