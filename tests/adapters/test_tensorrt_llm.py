"""TensorRT-LLM's pools through the adapter and back, on a mock with its memory layout.

The oracle is the mock's own pointer arithmetic. All allocated bytes are compared, guards included.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvx_adapters import tensorrt_llm as trt
from kvx_adapters.tensorrt_llm import PoolIndex, PoolSpec
from kvx_core import (
    BlockTable,
    CacheFacts,
    CacheView,
    Memory,
    OutOfRangeError,
    gather_kv,
    migrate,
)
from tests.adapters.tensorrt_llm_ends import (
    FACTS,
    WORKED_EXAMPLE,
    Dense,
    assert_same,
    config,
    load,
    rows_of,
    specs_of,
    store,
    views_of,
)
from tests.fakes.tensorrt_llm import Config, KvBlockArray, KvCacheManager

# ---- the worked example, byte for byte ----


def test_the_worked_example() -> None:
    (spec,) = specs_of(KvCacheManager(WORKED_EXAMPLE))
    assert (spec.sub_block_elements, spec.sub_block_bytes, spec.num_sub_blocks) == (4096, 8192, 16)
    assert spec.pool_shape == (4, 2, 2, 4096)
    pool = torch.zeros(spec.pool_shape, dtype=torch.float16)
    assert pool.nbytes == 131072
    base = pool.data_ptr()
    desc = trt.cache_desc(spec, 1, pool)
    assert desc.pool is not None
    assert desc.v is not None
    assert desc.pool.bytes_per_block == 8192
    assert desc.pool.primary - base == desc.k.data - base == 0x4000
    assert desc.v.data - desc.k.data == 8192
    assert desc.k.shape == (4, 2, 32, 64)
    assert desc.k.stride == desc.v.stride == (16384, 2048, 64, 1)
    assert desc.pool.secondary == 0
    block_3 = 3 * desc.k.stride[0] * 2
    assert desc.k.data + block_3 - base == 0x1C000
    assert desc.v.data + block_3 - base == 0x1E000
    # Token 101, in block 3, head 1, dim 7.
    inside = desc.k.stride[1] * 1 + desc.k.stride[2] * (101 % 32) + 7
    assert desc.k.data + block_3 + inside * 2 - base == 119438
    assert desc.v.data + block_3 + inside * 2 - base == 127630


def test_the_tables_of_the_worked_example() -> None:
    (spec,) = specs_of(KvCacheManager(WORKED_EXAMPLE))
    table = trt.block_offsets([[0, 1, 2, 3], [3, 0, 2]], spec, max_blocks_per_seq=4)
    assert table.shape == (2, 1, 2, 4)
    assert table.dtype == torch.int32
    assert table[0, 0].tolist() == [[0, 4, 8, 12], [1, 5, 9, 13]]
    assert table[1, 0].tolist() == [[12, 0, 8, trt.UNSET], [13, 1, 9, trt.UNSET]]
    spec = replace(spec, num_secondary_blocks=2)
    table = trt.block_offsets([[PoolIndex(1, is_secondary=True)]], spec, max_blocks_per_seq=1)
    assert table.flatten().tolist() == [-2147483644, -2147483643]
    mla = replace(spec, kv_factor=1)
    assert trt.block_offsets([[3]], mla, max_blocks_per_seq=1).flatten().tolist() == [6, 6]


def test_the_secondary_pool_of_the_worked_example() -> None:
    (spec,) = specs_of(KvCacheManager(WORKED_EXAMPLE))
    spec = replace(spec, num_secondary_blocks=2)
    primary = torch.zeros(spec.pool_shape, dtype=torch.float16)
    secondary = torch.zeros(2, *spec.pool_shape[1:], dtype=torch.float16)
    view = trt.cache_view(spec, primary, FACTS, secondary=secondary)
    assert view.secondary_num_blocks == 2
    pool = view.layers[1].pool
    assert pool is not None
    # K of layer 1 in block 1 of the secondary pool.
    assert pool.secondary + 4 * 8192 - secondary.data_ptr() == 49152
    kept = weakref.ref(secondary)
    del secondary, primary
    assert kept() is not None


def test_kvcacheindex() -> None:
    places = [PoolIndex(0), PoolIndex(5), PoolIndex(0, True), PoolIndex(4, True), None]
    values = [0, 5, -(1 << 31), -2147483644, -1]
    assert [trt.encode(place) for place in places] == values
    assert [trt.decode(value) for value in values] == places
    last = PoolIndex(0x7FFF_FFFE, is_secondary=True)
    assert trt.encode(last) == -2
    assert trt.decode(-2) == last
    for index in (-1, 0x7FFF_FFFF):
        with pytest.raises(
            OutOfRangeError,
            match=rf"^index is {index}, expected at least 0 and below 2147483647 \(KVCacheIndex\)$",
        ):
            trt.encode(PoolIndex(index, is_secondary=True))


# ---- every byte, both directions ----


def by_tensor(manager: KvCacheManager, spec: PoolSpec) -> CacheView:
    return trt.cache_view(spec, manager.pools[0].primary.tensor, FACTS)


def by_pointer(manager: KvCacheManager, spec: PoolSpec) -> CacheView:
    return trt.cache_views(manager.kv_cache_pool_pointers, [spec], [FACTS], memory=Memory.HOST)[0]


def by_buffers(manager: KvCacheManager, spec: PoolSpec) -> CacheView:
    return trt.buffer_view(spec, [manager.get_buffers(i, "HND") for i in spec.layers], FACTS)


VIEWS = pytest.mark.parametrize(
    ("view_of", "seed"), [(by_tensor, 1), (by_pointer, 2), (by_buffers, 3)]
)
CONFIGS = {
    "bf16": config(),
    "worked": replace(WORKED_EXAMPLE, blocks={4096: (8, 0)}),
    "fp32": config(dtype=torch.float32, head_dim=5),
    "one head, one token": config(
        num_kv_heads_per_layer=[1], tokens_per_block=1, head_dim=33, blocks={4096: (90, 0)}
    ),
    "mla": config(num_kv_heads_per_layer=[1] * 4, head_dim=72, kv_factor=1),
}


@VIEWS
@pytest.mark.parametrize("name", CONFIGS)
def test_kvx_writes_what_the_engine_reads(name: str, view_of: Any, seed: int) -> None:
    manager, expected = (KvCacheManager(CONFIGS[name], seed) for _ in range(2))
    (spec,) = specs_of(manager)
    tokens = spec.tokens_per_block
    lengths = [2 * tokens + 1, 1, tokens][: 3 if tokens > 1 else 2]
    requests = [[m.add_sequence(n) for n in lengths] for m in (manager, expected)]
    table, expected_table = (
        rows_of(m, r) for m, r in zip((manager, expected), requests, strict=True)
    )
    dense = Dense(spec, len(lengths), max(lengths), seed)
    for layer, tensors in zip(spec.layers, dense.layers, strict=True):
        array = expected.attention(layer, expected_table, 0)
        for row, length in enumerate(lengths):
            store(array, row, range(length), tensors)

    offsets = trt.block_table(table, 0, rows=slice(0, len(lengths)))
    migrate(dense.at(), view_of(manager, spec).at(offsets), trt.seq_lens(lengths))

    assert_same(manager.raw, expected.raw)


@VIEWS
@pytest.mark.parametrize("name", CONFIGS)
def test_kvx_reads_what_the_engine_wrote(name: str, view_of: Any, seed: int) -> None:
    manager = KvCacheManager(CONFIGS[name], seed)
    (spec,) = specs_of(manager)
    tokens = spec.tokens_per_block
    lengths = [1, 3 * tokens, 2 * tokens - tokens // 2]
    table = rows_of(manager, [manager.add_sequence(length) for length in lengths])
    found, expected = (Dense(spec, len(lengths), max(lengths), seed) for _ in range(2))
    for layer, tensors in zip(spec.layers, expected.layers, strict=True):
        array = manager.attention(layer, table, 0)
        for row, length in enumerate(lengths):
            load(array, row, range(length), tensors)
    before = [part.clone() for part in manager.raw]

    offsets = trt.block_table(table, 0, rows=slice(0, len(lengths)))
    migrate(view_of(manager, spec).at(offsets), found.at(), trt.seq_lens(lengths))

    for a, b in zip(found.layers, expected.layers, strict=True):
        assert_same(a, b)
    assert_same(manager.raw, before)


def test_gather_of_one_layer() -> None:
    manager = KvCacheManager(config())
    (spec,) = specs_of(manager)
    table = rows_of(manager, [manager.add_sequence(13)])
    key, value = gather_kv(
        trt.cache_desc(spec, 2, manager.pools[0].primary.tensor),
        trt.block_table(table, 0, rows=slice(0, 1)),
        trt.seq_lens([13]),
    )
    expected = Dense(spec, 1, 13, 0)
    load(manager.attention(2, table, 0), 0, range(13), expected.layers[2])
    assert_same([key, value], expected.layers[2])


# ---- offloading and the secondary pool ----


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_an_id_is_no_index_once_blocks_were_offloaded(seed: int) -> None:
    manager = KvCacheManager(config(blocks={4096: (9, 4)}), seed)
    (spec,) = specs_of(manager)
    (blocks,) = manager.windows.values()
    # Two blocks go to the secondary pool; the next sequence gets the objects that came for them,
    # which kept their ids and took over their memory.
    for block_id, into in ((5, 9), (2, 11)):
        blocks.offload(block_id, into)
    blocks.free = [11, 9, 7]
    request = manager.add_sequence(3 * 8)
    ids = request.block_ids[4096][0]
    assert {9, 11} < set(ids)
    table = rows_of(manager, [request])
    expected = Dense(spec, 1, 24, seed)
    found = Dense(spec, 1, 24, seed)
    for layer, tensors in zip(spec.layers, expected.layers, strict=True):
        load(manager.attention(layer, table, 0), 0, range(24), tensors)

    (view,) = views_of(manager)
    migrate(view.at(trt.block_table(table, 0, rows=slice(0, 1))), found.at(), [24])

    for a, b in zip(found.layers, expected.layers, strict=True):
        assert_same(a, b)


def test_blocks_in_either_pool_both_ways() -> None:
    """What the manager's own tables never hold, and its kernels follow: bit 31."""
    manager, expected = (KvCacheManager(config(blocks={4096: (9, 4)})) for _ in range(2))
    (spec,) = specs_of(manager)
    blocks: list[list[PoolIndex | int | None]] = [
        [3, PoolIndex(0, is_secondary=True), 8],
        [PoolIndex(3, is_secondary=True)],
        [PoolIndex(1, is_secondary=True), PoolIndex(0)],
    ]
    lengths = [20, 8, 9]
    table = trt.block_offsets(blocks, spec, max_blocks_per_seq=5)
    batch = table.flatten(0, 1)[None]  # as kv_cache_block_offsets has them
    dense = Dense(spec, 3, 20, 4)
    for layer, tensors in zip(spec.layers, dense.layers, strict=True):
        array = expected.attention(layer, batch, 0)
        for row, length in enumerate(lengths):
            store(array, row, range(length), tensors)

    (view,) = views_of(manager)
    assert view.secondary_num_blocks == 4
    migrate(dense.at(), view.at(BlockTable.kv_offsets(table)), lengths)
    assert_same(manager.raw, expected.raw)

    back = Dense(spec, 3, 20, 4)
    for tensors in back.layers:
        for row, length in enumerate(lengths):
            for tensor in tensors:
                tensor[row, :length] = 0
    migrate(view.at(trt.block_table(batch, 0)), back.at(), lengths)
    for a, b in zip(back.layers, dense.layers, strict=True):
        assert_same(a, b)


def test_a_pool_of_address_0_stays_away() -> None:
    """The engine adds a layer's offset to it, and has a pointer that is not 0."""
    manager = KvCacheManager(config())
    (spec,) = specs_of(manager)
    assert manager.kv_cache_pool_pointers[0, 1] == 0
    assert manager.attention(1, manager.block_offsets(), 0).secondary_pool != 0
    (view,) = views_of(manager)
    assert [layer.pool and layer.pool.secondary for layer in view.layers] == [0, 0, 0]
    assert view.secondary_num_blocks == 0
    table = trt.block_offsets([[0]], spec, max_blocks_per_seq=1) | -(1 << 31)
    with pytest.raises(
        OutOfRangeError,
        match=r"indices\[0\] is 0x80000000 \(secondary pool\), but pool.secondary is NULL",
    ):
        migrate(view.at(BlockTable.kv_offsets(table)), Dense(spec, 1, 8, 0).at(), [8])


def test_pools_of_a_manager_are_on_the_device() -> None:
    """Unless said otherwise; a secondary pool is what the pool's calls can reach."""
    manager = KvCacheManager(config(blocks={4096: (9, 4)}))
    (view,) = trt.cache_views(manager.kv_cache_pool_pointers, specs_of(manager), [FACTS])
    for layer in view.layers:
        assert layer.pool is not None
        assert layer.v is not None
        assert layer.pool.secondary != 0
        assert {layer.k.memory, layer.v.memory, layer.pool.memory} == {Memory.DEVICE}


# ---- what must not be read ----


@pytest.mark.parametrize("poison", [trt.UNSET, -(1 << 31), -2, 17, 1 << 20])
def test_columns_past_the_blocks_are_not_read(poison: int) -> None:
    manager, expected = (KvCacheManager(config()) for _ in range(2))
    (spec,) = specs_of(manager)
    lengths = [8, 0, 17]
    tables = [rows_of(m, [m.add_sequence(n) for n in lengths]).clone() for m in (manager, expected)]
    for row, length in enumerate(lengths):
        tables[0][:, row, :, -(-length // 8) :] = poison
    dense = Dense(spec, 3, 17, 5)
    for layer, tensors in zip(spec.layers, dense.layers, strict=True):
        for row, length in enumerate(lengths):
            store(expected.attention(layer, tables[1], 0), row, range(length), tensors)
    (view,) = views_of(manager)
    migrate(dense.at(), view.at(trt.block_table(tables[0], 0, rows=slice(0, 3))), lengths)
    assert_same(manager.raw, expected.raw)


def test_null_is_no_block_and_not_the_last_of_the_secondary_pool() -> None:
    manager, expected = (KvCacheManager(config(blocks={4096: (9, 4)})) for _ in range(2))
    (spec,) = specs_of(manager)
    table = trt.block_offsets([[1, None, 4]], spec, max_blocks_per_seq=3)
    assert table[0, 0, :, 1].tolist() == [trt.NULL_INDEX] * 2
    dense = Dense(spec, 1, 24, 6)
    for layer, tensors in zip(spec.layers, dense.layers, strict=True):
        array = expected.attention(layer, table.flatten(0, 1)[None], 0)
        store(array, 0, [*range(8), *range(16, 24)], tensors)
    (view,) = views_of(manager)
    migrate(dense.at(), view.at(BlockTable.kv_offsets(table).with_holes()), [24])
    assert_same(manager.raw, expected.raw)


def test_the_bound_of_an_index_is_that_of_sub_blocks() -> None:
    manager = KvCacheManager(config(blocks={4096: (9, 4)}))
    (spec,) = specs_of(manager)
    (view,) = views_of(manager)
    dense = Dense(spec, 1, 8, 0)

    def read(k: int, v: int) -> None:
        table = torch.tensor([[[[k], [v]]]], dtype=torch.int32)
        migrate(view.at(BlockTable.kv_offsets(table)), dense.at(), [8])

    read(8 * 6, 8 * 6 + 1)  # the last block: far above num_blocks 9
    read(3 * 6 - (1 << 31), 3 * 6 + 1 - (1 << 31))
    with pytest.raises(
        OutOfRangeError,
        match=r"indices\[0\] is 54 in the primary pool, expected below 9 blocks x 6 sub-blocks",
    ):
        read(9 * 6, 1)
    with pytest.raises(
        OutOfRangeError,
        match=r"indices\[1\] is 25 in the secondary pool, expected below 4 blocks x 6 sub-blocks",
    ):
        read(0, 4 * 6 + 1 - (1 << 31))
    with pytest.raises(
        OutOfRangeError,
        match=r"indices\[0\] is 3, sub-block 3 of its block, expected sub-block 0: that of K",
    ):
        read(3, 1)


# ---- windows ----

SMALL_WINDOW = 24


def two_windows(**fields: Any) -> Config:
    """Layers 0 and 2 see 24 tokens, 1 and 3 all."""
    defaults: dict[str, Any] = {
        "num_kv_heads_per_layer": [3] * 4,
        "max_attention_window_vec": [SMALL_WINDOW, 4096],
        "blocks": {SMALL_WINDOW: (11, 0), 4096: (23, 0)},
        "max_blocks_per_seq": 12,
    }
    return config(**(defaults | fields))


def test_two_windows_are_two_pools() -> None:
    manager = KvCacheManager(two_windows(), 1)
    assert manager.kv_cache_pool_mapping.tolist() == [[0, 0], [1, 0], [0, 1], [1, 1]]
    small, full = specs_of(manager)
    assert (small.layers, small.num_blocks, small.window) == ((0, 2), 11, SMALL_WINDOW)
    assert (full.layers, full.num_blocks, full.window) == ((1, 3), 23, 0)
    table = rows_of(manager, [manager.add_sequence(11), manager.add_sequence(17)])
    lengths = [11, 17]
    for pool, (spec, view) in enumerate(zip((small, full), views_of(manager), strict=True)):
        found, expected = (Dense(spec, 2, 17, pool) for _ in range(2))
        for layer, tensors in zip(spec.layers, expected.layers, strict=True):
            for row, length in enumerate(lengths):
                load(manager.attention(layer, table, 0), row, range(length), tensors)
        span = view.at(trt.block_table(table, pool, rows=slice(0, 2)))
        migrate(span, found.at(), trt.seq_lens(lengths, spec.window))
        for a, b in zip(found.layers, expected.layers, strict=True):
            assert_same(a, b)


def test_blocks_before_the_window_are_another_sequences() -> None:
    """One request outgrows its window while others get its blocks: canaries behind its entries."""
    config_ = two_windows()
    manager = KvCacheManager(config_, 2)
    small = specs_of(manager)[0]
    request = manager.add_sequence(9)
    dense = Dense(small, 1, 80, 2)
    arrays: list[KvBlockArray] = []

    def engine_writes(token: int) -> Tensor:
        table = rows_of(manager, [request])
        for layer, tensors in zip(small.layers, dense.layers, strict=True):
            arrays.append(manager.attention(layer, table, 0))
            store(arrays[-1], 0, [token], tensors)
        return table

    for token in range(9):
        engine_writes(token)
    (blocks, _) = manager.windows.values()
    for token in range(9, 80):
        manager.add_token(request)  # the engine makes room for it, and gives front blocks back
        for block_id in blocks.free:
            blocks.pools[0].primary.tensor[block_id] = 1e3  # whoever gets them next
        table = rows_of(manager, [request])
        # Before the step that stores the token: what it will see of those that are there.
        first, held = max(0, token + 1 - SMALL_WINDOW), min(token, SMALL_WINDOW - 1)
        assert trt.starts([token], SMALL_WINDOW).to_numpy().tolist() == [first]
        assert trt.seq_lens([token], SMALL_WINDOW).to_numpy().tolist() == [held]
        assert first >= request.num_front_blocks_removed[SMALL_WINDOW] * 8
        found, expected = (Dense(small, 1, 80, 3) for _ in range(2))
        for there, here in zip(expected.layers, dense.layers, strict=True):
            for a, b in zip(there, here, strict=True):
                a[0, first:token] = b[0, first:token]
        span = views_of(manager)[0].at(
            trt.block_table(table, 0, rows=slice(0, 1)), starts=trt.starts([token], small.window)
        )
        migrate(span, found.at([first]), trt.seq_lens([token], small.window))
        for a, b in zip(found.layers, expected.layers, strict=True):
            assert_same(a, b)
        engine_writes(token)
    assert request.num_front_blocks_removed[SMALL_WINDOW] == 7


def test_full_attention_starts_at_0() -> None:
    assert trt.starts([7, 90]).to_numpy().tolist() == [0, 0]
    assert trt.seq_lens([7, 90]).to_numpy().tolist() == [7, 90]
    lengths = torch.tensor([7, 90], dtype=torch.int32)
    assert trt.starts(lengths, 24).to_numpy().tolist() == [0, 67]
    assert trt.seq_lens(lengths, 24).to_numpy().tolist() == [7, 23]


@pytest.mark.parametrize("columns", [0, 8])
@pytest.mark.parametrize("window", [0, 24])
def test_nobody_to_move(window: int, columns: int) -> None:
    manager = KvCacheManager(config())
    (spec,) = specs_of(manager)
    made = trt.block_offsets([], spec, max_blocks_per_seq=columns)
    assert made.shape == (0, 1, 2, columns)
    table = trt.block_table(manager.block_offsets(), 0, rows=slice(0, 0))
    (view,) = views_of(manager)
    span = view.at(table, starts=trt.starts([], window))
    before = [part.clone() for part in manager.raw]
    assert migrate(span, span, trt.seq_lens([], window)) == 0
    assert_same(manager.raw, before)


# ---- beams ----


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_beams_share_full_blocks(seed: int) -> None:
    """One context request of one row, then a generation request of three."""
    manager, expected = (KvCacheManager(config(), seed) for _ in range(2))
    (spec,) = specs_of(manager)
    requests = [[m.add_sequence(9), m.add_sequence(19, 3)] for m in (manager, expected)]
    ids = requests[0][1].block_ids[4096]
    assert ids[0][:2] == ids[1][:2] == ids[2][:2]
    assert len({ids[0][2], ids[1][2], ids[2][2]}) == 3
    table, expected_table = (
        rows_of(m, r) for m, r in zip((manager, expected), requests, strict=True)
    )
    dense = Dense(spec, 4, 19, seed)
    for tensors in dense.layers:  # what beams share is the same in all of them
        for tensor in tensors:
            tensor[2:, :16] = tensor[1:2, :16]
    for layer, tensors in zip(spec.layers, dense.layers, strict=True):
        array = expected.attention(layer, expected_table, 0)
        for row, length in enumerate([9, 19, 19, 19]):
            store(array, row, range(length), tensors)

    (view,) = views_of(manager)
    context = trt.block_table(table, 0, rows=slice(0, 1))
    beams = trt.block_table(table, 0, rows=slice(1, 4), beam_width=3)
    assert (beams.seq_count, beams.beam_width, beams.num_rows) == (1, 3, 3)
    migrate(dense.view.at([[0]]), view.at(context), [9])
    # Three rows would be three tokens for each slot of a shared block: one row, then what differs.
    migrate(dense.view.at([[1]]), view.at(trt.block_table(table, 0, rows=slice(1, 2))), [19])
    others = trt.block_table(table, 0, rows=slice(2, 4))
    migrate(dense.view.at([[2], [3]], starts=[16, 16]), view.at(others, starts=[16, 16]), [3, 3])
    assert_same(manager.raw, expected.raw)

    found = Dense(spec, 4, 19, seed + 9)
    moved = migrate(view.at(beams), found.view.at([[1], [2], [3]]), trt.seq_lens([19]))
    assert moved == 3 * 19 * 3 * 2 * spec.num_kv_heads * spec.head_dim * 2
    for a, b in zip(found.layers, dense.layers, strict=True):
        assert_same([tensor[1:] for tensor in a], [tensor[1:] for tensor in b])


def test_a_requests_own_table_has_its_beams_as_rows() -> None:
    manager = KvCacheManager(config())
    (spec,) = specs_of(manager)
    request = manager.add_sequence(12, 2)
    own = request.offsets[4096]
    assert own[0, 0, 0, 2:].tolist() == [trt.UNSET] * 6
    table = trt.block_table(own, 0, beam_width=2)
    assert (table.seq_count, table.beam_width) == (1, 2)
    ids: list[list[PoolIndex | int | None]] = [list(row) for row in request.block_ids[4096]]
    made = trt.block_offsets(ids, spec, max_blocks_per_seq=8, beam_width=2)
    assert torch.equal(made, own)


# ---- head counts, K without V ----


def test_head_counts_are_pools_of_their_own() -> None:
    manager = KvCacheManager(config(num_kv_heads_per_layer=[4, 1, 4, 2, 1]), 3)
    assert manager.kv_cache_pool_mapping.tolist() == [[2, 0], [0, 0], [2, 1], [1, 0], [0, 1]]
    specs = specs_of(manager)
    assert [(spec.layers, spec.num_kv_heads) for spec in specs] == [
        ((1, 4), 1),
        ((3,), 2),
        ((0, 2), 4),
    ]
    table = rows_of(manager, [manager.add_sequence(21)])
    for pool, (spec, view) in enumerate(zip(specs, views_of(manager), strict=True)):
        found, expected = (Dense(spec, 1, 21, pool) for _ in range(2))
        for layer, tensors in zip(spec.layers, expected.layers, strict=True):
            load(manager.attention(layer, table, 0), 0, range(21), tensors)
        migrate(view.at(trt.block_table(table, pool, rows=slice(0, 1))), found.at(), [21])
        for a, b in zip(found.layers, expected.layers, strict=True):
            assert_same(a, b)


def test_the_table_of_another_pool_is_refused() -> None:
    """The pool of two layers has 4 sub-blocks per block, that of one has 2."""
    manager = KvCacheManager(config(num_kv_heads_per_layer=[4, 1, 4]))
    specs, views = specs_of(manager), views_of(manager)
    table = trt.block_offsets([[1]], specs[0], max_blocks_per_seq=1)
    with pytest.raises(OutOfRangeError, match=r"sub-block 2 of its block, expected sub-block 0"):
        migrate(views[1].at(BlockTable.kv_offsets(table)), Dense(specs[1], 1, 8, 0).at(), [8])


def test_mla_has_no_v() -> None:
    manager = KvCacheManager(CONFIGS["mla"])
    (spec,) = specs_of(manager)
    assert (spec.sub_blocks_per_block, spec.num_sub_blocks) == (4, 92)
    (view,) = views_of(manager)
    base = int(manager.kv_cache_pool_pointers[0, 0])
    assert [layer.v for layer in view.layers] == [None] * 4
    assert [layer.k.data - base for layer in view.layers] == [i * 8 * 72 * 2 for i in range(4)]
    offsets = manager.add_sequence(20).offsets[4096]
    assert torch.equal(offsets[:, :, 0], offsets[:, :, 1])


# ---- what the bytes mean ----


def test_facts() -> None:
    small = specs_of(KvCacheManager(two_windows()))[0]
    known = {"version": "1.2.0", "fingerprint": "f", "total_kv_heads": 6, "first_kv_head": 3}
    facts = trt.cache_facts(small, is_neox=True, rotary_dim=20, pp_layers=[4, 5, 6, 7], **known)
    assert facts == CacheFacts(
        engine="tensorrt_llm 1.2.0",
        fingerprint="f",
        rotary="half",
        rotary_dim=20,
        rope_applied=True,
        hadamard=False,
        scale_convention="multiply",
        num_layers=2,
        first_layer=None,  # 4 and 6
        window=SMALL_WINDOW,
        total_kv_heads=6,
        first_kv_head=3,
    )
    one = specs_of(KvCacheManager(config(num_kv_heads_per_layer=[3, 3])))[0]
    gptj = trt.cache_facts(one, is_neox=False, rotary_dim=20, **known)
    assert (gptj.rotary, gptj.first_layer) == ("interleaved", 0)
    later = trt.cache_facts(one, is_neox=False, rotary_dim=20, pp_layers=[4, 5], **known)
    assert later.first_layer == 4
    none = trt.cache_facts(small, is_neox=True, rotary_dim=0, **known)
    assert (none.rotary, none.rope_applied) == ("none", True)
    unknown = trt.cache_facts(small, is_neox=None, rotary_dim=None, **known)
    assert (unknown.rotary, unknown.rope_applied) == (None, None)


# ---- the manager's own count ----


@pytest.mark.parametrize("window", [0, 20])
def test_a_span_holds_what_is_in_the_cache(window: int) -> None:
    """Two blocks of 32 have room for 64 tokens, and 40 are there; of a window the last 19."""
    (spec,) = specs_of(KvCacheManager(WORKED_EXAMPLE))
    spec = replace(spec, window=window)
    facts = replace(FACTS, num_layers=2, window=window)
    pools = [torch.randn(spec.pool_shape).half(), torch.zeros(spec.pool_shape).half()]
    src, dst = (trt.cache_view(spec, pool, facts) for pool in pools)
    counts = [40, 9]
    span = trt.span(src, trt.id_table([[3, 0], [2]], spec), lambda: counts, window=window)
    first = trt.starts(counts, window) if window else None
    there = dst.at(trt.id_table([[1, 2], [0]], spec), starts=first)
    lengths = trt.seq_lens(counts, window)
    migrate(span, there, lengths)
    blocks = [pool.view(4, 2, 2, 2, 32, 64) for pool in pools]
    for row, old, new in ((0, [3, 0], [1, 2]), (1, [2], [0])):
        first_token = max(counts[row] + 1 - window, 0) if window else 0
        for t in range(64 if row == 0 else 32):
            got = blocks[1][new[t // 32], :, :, :, t % 32]
            want = blocks[0][old[t // 32], :, :, :, t % 32]
            moved = first_token <= t < counts[row]
            assert torch.equal(got, want if moved else torch.zeros_like(want)), (row, t)
    more = (lengths.to_numpy() + 1).tolist()
    for i, wrong in ((0, [more[0], 0]), (1, [0, more[1]])):
        error = f"src holds {counts[i]} tokens of sequence {i} by its engine's own count"
        with pytest.raises(OutOfRangeError, match=error):
            migrate(span, there, wrong)
    counts[:] = [41, 10]
    migrate(span, there, more)
