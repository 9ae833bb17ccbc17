"""CacheView, CacheSpan and migrate in Python: facts, structs, bytes, refusals.

tests/test_migrate.py checks what a migration moves, in every layout, dtype and table.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvx_core import (
    BlockTable,
    CacheDesc,
    CacheFacts,
    CacheView,
    FactsMismatchError,
    InvalidArgumentError,
    KvxError,
    Layout,
    OutOfRangeError,
    PoolDesc,
    ScaleDesc,
    SeqLens,
    SlotMapping,
    describe,
    migrate,
    verify,
)
from kvx_core.ops.left_out import bytes_left_out
from kvx_core.stores import Section
from tests.desc import dlpack
from tests.desc.dlpack import Producer

NUM_LAYERS, BLOCK_SIZE, HEADS, DIM = 3, 8, 4, 16
FACTS = CacheFacts(
    engine="here 1.0",
    fingerprint="abc",
    rotary_dim=16,
    rope_applied=True,
    total_kv_heads=4,
    first_kv_head=0,
)


def paged(num_blocks: int = 6, seed: int = 0) -> tuple[list[torch.Tensor], CacheView]:
    """Layers of K and V in one tensor each, (num_blocks, heads, block_size, 2 * dim), random."""
    generator = torch.Generator().manual_seed(seed)
    layers = [
        torch.randn(num_blocks, HEADS, BLOCK_SIZE, 2 * DIM, generator=generator).bfloat16()
        for _ in range(NUM_LAYERS)
    ]
    return layers, view_of([layer.split(DIM, dim=-1) for layer in layers], Layout.BLOCK_HND)


def dense(
    batch: int = 2, length: int = 20, heads: int = HEADS, dtype: torch.dtype = torch.bfloat16
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], CacheView]:
    """Layers of (batch, length, heads, dim), full of nines."""
    shape = (batch, length, heads, DIM)
    layers = [(torch.full(shape, 9.0).to(dtype), torch.full(shape, 9.0).to(dtype)) for _ in "lll"]
    return layers, view_of(layers, Layout.BLOCK_NHD, dense=True)


def view_of(layers: Any, layout: Layout, **options: Any) -> CacheView:
    caches = [CacheDesc.from_kv(describe(k, layout), describe(v, layout)) for k, v in layers]
    return CacheView(layers=tuple(caches), facts=FACTS, **options)


def tokens_of(layer: torch.Tensor, blocks: list[int], n: int) -> torch.Tensor:
    """The first n tokens of a sequence in a layer of `paged`: (n, heads, 2 * dim)."""
    return layer[blocks].transpose(1, 2).reshape(-1, HEADS, 2 * DIM)[:n]


TABLE = [[4, 1, 3], [2, 0]]
LENS = [19, 10]


def test_migrate_moves_all_layers() -> None:
    src_layers, src = paged()
    dst_layers, dst = dense()
    moved = migrate(src.at(TABLE), dst, LENS)
    assert moved == sum(LENS) * NUM_LAYERS * HEADS * 2 * DIM * 2
    for layer, (k, v) in zip(src_layers, dst_layers, strict=True):
        for s, (blocks, n) in enumerate(zip(TABLE, LENS, strict=True)):
            expected = tokens_of(layer, blocks, n)
            assert torch.equal(torch.cat([k[s, :n], v[s, :n]], -1), expected)
            assert (k[s, n:] == 9).all()
            assert (v[s, n:] == 9).all()


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: x,
        lambda x: torch.tensor(x),
        lambda x: torch.tensor(x, dtype=torch.int32),
        lambda x: np.array(x),
    ],
    ids=["list", "int64", "int32", "numpy"],
)
def test_tables_slots_and_lengths_of_any_kind(wrap: Any) -> None:
    src_layers, src = paged()
    dst_layers, dst = dense()
    slots = [*range(5, 14), *range(20, 25)]
    span = src.at(block_table=wrap([[4, 1], [2, 0]]), starts=wrap([3, 1]))
    migrate(span, dst.at(slots=wrap(slots)), wrap([9, 5]))
    for layer, (k, _) in zip(src_layers, dst_layers, strict=True):
        assert torch.equal(k[0, 5:14], tokens_of(layer, [4, 1], 12)[3:, :, :DIM])
        assert torch.equal(k[1, :5], tokens_of(layer, [2], 6)[1:, :, :DIM])
        assert (k[0, 14:] == 9).all()


def test_descriptors_are_taken_as_they_are() -> None:
    _, src = paged()
    table, slots, starts = BlockTable.packed(TABLE), SlotMapping.of([1]), SeqLens.of([0, 0])
    span = src.at(table, starts=starts)
    assert span.block_table is table
    assert span.starts is starts
    assert src.at(slots=slots).slots is slots
    assert src.at(slots=slots).view is src


def test_a_range_of_heads() -> None:
    """Rank 1 of 2 takes its two heads from a cache that holds all four."""
    src_layers, src = paged()
    dst_layers, dst = dense(heads=2)
    rank = replace(dst, facts=replace(FACTS, first_kv_head=2))
    moved = migrate(src.at(TABLE, head_start=2), rank, LENS, num_heads=2)
    assert moved == sum(LENS) * NUM_LAYERS * 2 * 2 * DIM * 2
    for layer, (k, _) in zip(src_layers, dst_layers, strict=True):
        assert torch.equal(k[0, :19], tokens_of(layer, TABLE[0], 19)[:, 2:, :DIM])
    with pytest.raises(FactsMismatchError, match=r"first_kv_head \+ head_start is 1 at the source"):
        migrate(src.at(TABLE, head_start=1), rank, LENS, num_heads=2)


def test_null_blocks_are_left_or_zeroed() -> None:
    _, src = paged()
    src = replace(src, null_block_id=0)
    for zero_fill, rest in ((False, 9), (True, 0)):
        layers, dst = dense()
        table = BlockTable.packed(TABLE)
        migrate(src.at(table if zero_fill else table.with_holes()), dst, LENS, zero_fill=zero_fill)
        for k, v in layers:
            assert (k[1, 8:10] == rest).all()
            assert (v[1, 8:10] == rest).all()
            assert (k[1, 10:] == 9).all()


def test_scales_of_layers() -> None:
    """FP8 in the destination, each layer with its own scales."""
    src_layers, src = paged()
    layers, dst = dense(dtype=torch.float8_e4m3fn)
    factors = [0.5, 1.0, 2.0]
    dst = replace(
        dst,
        k_scales=tuple(map(ScaleDesc.of, factors)),
        v_scales=(None, ScaleDesc.of(4.0), None),
    )
    gc.collect()
    moved = migrate(src.at(TABLE), dst, LENS)
    assert moved == sum(LENS) * NUM_LAYERS * HEADS * 2 * DIM
    for i, (k, v) in enumerate(layers):
        tokens = tokens_of(src_layers[i], TABLE[0], 19).float()
        stored_k = (tokens[..., :DIM] / factors[i]).to(torch.float8_e4m3fn)
        stored_v = (tokens[..., DIM:] / (4.0 if i == 1 else 1.0)).to(torch.float8_e4m3fn)
        assert torch.equal(k[0, :19].float(), stored_k.float())
        assert torch.equal(v[0, :19].float(), stored_v.float())


def test_beams_share_a_length() -> None:
    """A KV_OFFSETS table with two beams moves two rows of each sequence."""
    pool = torch.randn(4, 2, HEADS, BLOCK_SIZE, DIM)
    k, v = pool.unbind(1)
    bytes_per_block = pool[0, 0].nbytes
    cache = CacheDesc.from_kv(
        describe(k, Layout.BLOCK_HND),
        describe(v, Layout.BLOCK_HND),
        pool=PoolDesc.of(pool, bytes_per_block),
    )
    src = CacheView(layers=(cache,), facts=FACTS)
    table = torch.tensor([[[[0], [1]], [[6], [7]]]], dtype=torch.int32)  # beams in blocks 0 and 3
    layers, dst = dense(batch=2)
    dst = replace(dst, layers=dst.layers[:1])
    moved = migrate(src.at(BlockTable.kv_offsets(table)), dst, [5])
    assert moved == 2 * 5 * HEADS * 2 * DIM * 2
    for row, block in enumerate((0, 3)):
        assert torch.equal(layers[0][0][row, :5], k[block].transpose(0, 1)[:5].bfloat16())
        assert torch.equal(layers[0][1][row, :5], v[block].transpose(0, 1)[:5].bfloat16())


def test_a_cache_without_v() -> None:
    k, out = torch.randn(2, 8, 1, 576), torch.zeros(2, 8, 1, 576)
    src, dst = (
        CacheView((CacheDesc.from_kv(describe(t, Layout.BLOCK_NHD)),), FACTS, dense=True)
        for t in (k, out)
    )
    assert migrate(src, dst, [8, 8]) == out.nbytes
    assert torch.equal(k, out)


def test_facts_are_compared_first() -> None:
    _, src = paged()
    layers, dst = dense()
    dst = replace(dst, facts=replace(FACTS, fingerprint=None, engine=None, rotary="half"))
    with pytest.raises(FactsMismatchError) as raised:
        migrate(src.at(TABLE), dst, [1000])  # out of range too, but that is not looked at
    assert raised.value.reasons == (
        "fingerprint is 'abc' at the source (here 1.0) and unknown at the destination: "
        "set CacheFacts.fingerprint of the destination",
        "rotary is 'half' at the destination and unknown at the source (here 1.0): "
        "set CacheFacts.rotary of the source",
    )
    assert str(raised.value) == (
        "the copy would not mean the same: " + "; ".join(raised.value.reasons)
    )
    assert isinstance(raised.value, InvalidArgumentError)
    assert all((k == 9).all() and (v == 9).all() for k, v in layers)


@pytest.mark.parametrize(
    ("call", "error", "expected"),
    [
        (
            lambda src, dst: migrate(src.at(TABLE), dst, [25, 3]),
            OutOfRangeError,
            "row 0 needs tokens [0, 0 + 25), but src.block_table holds 24 per row (spec 5.3)",
        ),
        (
            lambda src, dst: migrate(src.at(TABLE), dst, [-1, 3]),
            OutOfRangeError,
            "migrate.seq_lens.lengths[0] is -1, expected at least 0 (spec 5.3)",
        ),
        (
            lambda src, dst: migrate(src.at([[4], [7]]), dst, [3, 3]),
            OutOfRangeError,
            "src.block_table.indices[1] is 7, expected below num_blocks 6 (spec 5.1)",
        ),
        (
            lambda src, dst: migrate(src.at(TABLE), dst, LENS, num_heads=5),
            InvalidArgumentError,
            "src.head_start is 0: with num_heads 5 it reaches past the 4 heads of layers[0]; move "
            "fewer, or layers of fewer heads in a call of their own",
        ),
        (
            lambda src, dst: migrate(src.at(TABLE), dst, LENS, num_heads=-1),
            InvalidArgumentError,
            "num_heads is -1, expected 0 to 4294967295",
        ),
        (
            lambda src, dst: migrate(src.at(TABLE), dst.at(slots=[0, 1], starts=[0, 0]), LENS),
            InvalidArgumentError,
            "dst has slots and starts, expected starts NULL",
        ),
        (
            lambda src, dst: migrate(src.at(TABLE), replace(dst, layers=dst.layers[:1]), LENS),
            InvalidArgumentError,
            "dst.num_layers is 1, expected src.num_layers 3; describe at each end the layers that "
            "both hold (spec E.3)",
        ),
        (
            lambda src, dst: migrate(src.at([*TABLE, [5]]), dst, [1, 1, 1]),
            InvalidArgumentError,
            "dst is dense and holds 2 sequences (num_blocks), expected at least 3; move fewer in a "
            "call (spec E.3)",
        ),
        (
            lambda src, dst: migrate(
                src.at(Producer(4096, (2, 2), dtype=(0, 32), device_type=dlpack.CUDA)), dst, LENS
            ),
            InvalidArgumentError,
            "src.block_table.memory is DEVICE, expected HOST, where src.layers[0].k is. Move it ",
        ),
    ],
)
def test_refused_and_nothing_written(call: Any, error: type[Exception], expected: str) -> None:
    _, src = paged()
    layers, dst = dense()
    with pytest.raises(error) as raised:
        call(src, dst)
    assert str(raised.value).startswith(expected)
    assert all((k == 9).all() and (v == 9).all() for k, v in layers)


def test_read_only_memory_is_never_written() -> None:
    _, src = paged()
    array = np.zeros((2, 20, HEADS, DIM), np.float32)
    writable = [(array.copy(), array.copy()) for _ in range(3)]
    writable[1][1].setflags(write=False)
    dst = view_of(writable, Layout.BLOCK_NHD, dense=True)
    with pytest.raises(InvalidArgumentError) as raised:
        migrate(src.at(TABLE), dst, LENS)
    assert str(raised.value) == (
        "dst.layers[1].v is read-only memory, expected writable. Pass a writable copy"
    )
    assert not any(k.any() or v.any() for k, v in writable)


def test_one_scale_per_layer() -> None:
    _, view = dense()
    with pytest.raises(InvalidArgumentError) as raised:
        replace(view, k_scales=(None, None))
    assert str(raised.value) == "k_scales has 2 entries, expected 3, one per layer (spec E.3)"


def test_scales_lie_where_the_cache_lies() -> None:
    _, view = dense()
    scale = ScaleDesc.of(Producer(4096, (), dtype=(2, 32), device_type=dlpack.CUDA))
    with pytest.raises(InvalidArgumentError, match=r"v_scales\[1\]\.memory is DEVICE, expected"):
        replace(view, v_scales=(None, scale, None))


@pytest.mark.parametrize("move", [migrate, verify])
def test_a_paged_view_has_to_be_told_where_sequences_lie(move: Any) -> None:
    """Without a table it would be read as if block s were sequence s."""
    _, src = paged()
    layers, dst = dense()
    calls: list[tuple[str, Callable[[], object]]] = [
        ("src: ", lambda: move(src, dst, [1, 1])),
        ("dst: ", lambda: move(dst, src, [1, 1])),
        ("", lambda: src.at()),
        ("", lambda: src.at(starts=[0, 0], head_start=1)),
    ]
    for name, call in calls:
        with pytest.raises(InvalidArgumentError) as raised:
            call()
        assert str(raised.value) == (
            f"{name}the view is paged and has neither block_table nor slots, expected one of them: "
            "view.at(block_table=...) or view.at(slots=...). A cache whose block s is sequence s "
            "is described with CacheView(dense=True)"
        )
    with pytest.raises(InvalidArgumentError, match="the view is paged"):
        replace(src.at([[0]]), block_table=None)
    assert all((k == 9).all() and (v == 9).all() for k, v in layers)


def test_a_dense_view_takes_starts_heads_and_tables() -> None:
    layers, view = dense()
    for span in (view.at(), view.at(starts=[3, 0]), view.at(head_start=1), view.at([[1], [0]])):
        assert span.view is view
    _, src = paged()
    to = view.at(starts=[3, 1], first_positions=[-3, -1])
    migrate(src.at([[4], [2]]), to, [5, 8])
    assert (layers[0][0][0, :3] == 9).all()
    assert not (layers[0][0][0, 3:8] == 9).any()


def test_a_view_that_its_engine_has_left_is_refused() -> None:
    _, src = paged()
    layers, dst = dense()
    reasons: list[str | None] = [None, None, "the engine has moved on. Describe it again"]
    watched = replace(dst, outdated=lambda: reasons.pop(0))
    migrate(src.at([[4], [2]]), watched, [1, 0])
    assert not (layers[0][0][0, 0] == 9).any()
    assert migrate(watched, src.at([[4], [2]]), [1, 0])
    with pytest.raises(InvalidArgumentError) as raised:
        migrate(src.at([[4], [2]]), watched, [8, 0])
    assert str(raised.value) == ("dst is out of date: the engine has moved on. Describe it again")
    assert (layers[0][0][0, 1:] == 9).all()


def test_a_view_without_layers_is_refused_by_c() -> None:
    view = CacheView(layers=(), facts=FACTS, dense=True)
    with pytest.raises(KvxError, match=r"src\.num_layers is 0, expected at least 1"):
        migrate(view, view, [])


def test_a_view_keeps_everything_alive() -> None:
    layers, view = dense()
    scale = np.array(1.0, np.float32)
    alive = [weakref.ref(t) for pair in layers for t in pair] + [weakref.ref(scale)]
    view = replace(view, k_scales=[ScaleDesc.of(scale)] * 3)  # a list does as well
    assert view.k_scales is not None
    assert isinstance(view.k_scales, tuple)
    del layers, scale
    gc.collect()
    span = view.at(torch.tensor([[0], [1]]), starts=[0, 0])
    del view
    gc.collect()
    assert all(ref() is not None for ref in alive)
    del span
    gc.collect()
    assert all(ref() is None for ref in alive)


def test_views_are_frozen_and_compare_by_what_they_describe() -> None:
    layers, view = dense()
    assert view == view_of(layers, Layout.BLOCK_NHD, dense=True)
    assert view != replace(view, null_block_id=0)
    with pytest.raises(AttributeError):
        view.null_block_id = 0  # type: ignore[misc]
    assert "owner" not in repr(view)


def test_scales_of_fp8_are_read_alone() -> None:
    """Both ends may have the same, in memory that cannot be written."""
    scale = np.array([0.5], np.float32)
    scale.flags.writeable = False
    ends = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        k, v = (torch.randn(2, 4, 2, 8).to(torch.float8_e4m3fn) for _ in range(2))
        cache = CacheDesc.from_kv(describe(k, "BLOCK_NHD"), describe(v, "BLOCK_NHD"))
        scales = {"k_scales": (ScaleDesc.of(scale),), "v_scales": (ScaleDesc.of(scale),)}
        view = CacheView((cache,), CacheFacts(first_kv_head=0), **scales)
        ends.append(view.at([[0, 1]]))
    migrate(*ends, [7], same_model=True)
    assert verify(*ends, [7])


def test_a_section_of_some_layers_has_their_scales() -> None:
    scales = [[ScaleDesc.of(2.0 ** (2 * i + j)) for i in range(3)] for j in range(2)]
    layers = []
    for _ in range(3):
        k, v = (torch.zeros(2, 4, 2, 8).to(torch.float8_e4m3fn) for _ in range(2))
        layers.append(CacheDesc.from_kv(describe(k, "BLOCK_NHD"), describe(v, "BLOCK_NHD")))
    view = CacheView(
        tuple(layers),
        CacheFacts(first_kv_head=0),
        k_scales=tuple(scales[0]),
        v_scales=tuple(scales[1]),
    )
    some = Section((4, 5, 6), view, BlockTable.packed([[0, 1]])).of([6, 4])
    assert some.layers == (6, 4)
    assert [layer.k.data for layer in some.view.layers] == [layers[i].k.data for i in (2, 0)]
    for found, given in zip((some.view.k_scales, some.view.v_scales), scales, strict=True):
        assert found is not None
        assert [one.data for one in found if one is not None] == [given[2].data, given[0].data]
    assert (some.view.k_zeros, some.view.v_zeros) == (None, None)


def test_lengths_that_another_process_writes_after_the_move(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A table with holes: what was left out is counted by the lengths that were moved."""
    lens = np.array([7])

    def written_first(*args: Any) -> int:
        lens[0] = -5
        return bytes_left_out(*args)

    monkeypatch.setattr(sys.modules["kvx_core.ops.migrate"], "bytes_left_out", written_first)
    ends = []
    for _ in range(2):
        k, v = torch.randn(2, 2, 4, 2, 8)
        cache = CacheDesc.from_kv(describe(k, "BLOCK_NHD"), describe(v, "BLOCK_NHD"))
        ends.append(CacheView((cache,), CacheFacts(first_kv_head=0)))
    src = ends[0].at(BlockTable.packed([[0, -1]]).with_holes())
    assert migrate(src, ends[1].at([[0, 1]]), lens, same_model=True) == 4 * 2 * 2 * 8 * 4
    assert lens[0] == -5
