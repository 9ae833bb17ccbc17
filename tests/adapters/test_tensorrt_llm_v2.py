"""KVCacheManagerV2's slots, and get_buffers of both managers, on a mock with its memory layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvx_adapters import tensorrt_llm as trt
from kvx_adapters.tensorrt_llm import PoolSpec
from kvx_core import (
    BlockTable,
    CacheView,
    InvalidArgumentError,
    Memory,
    UnsupportedError,
    gather_kv,
    migrate,
)
from tests.adapters.tensorrt_llm_ends import (
    FACTS,
    NAMES,
    WORKED_EXAMPLE,
    Dense,
    assert_same,
    config,
    load,
    specs_of,
    store,
)
from tests.fakes.tensorrt_llm import KvCacheManager, KvCacheManagerV2
from tests.ways_out import WayOut, leads_out

Manager = KvCacheManagerV2


def v2_specs(manager: Manager) -> tuple[PoolSpec, ...]:
    c = manager.config
    return trt.pool_specs(
        manager.kv_cache_pool_mapping,
        num_blocks=manager.num_slots,
        tokens_per_block=c.tokens_per_block,
        num_kv_heads_per_layer=c.num_kv_heads_per_layer,
        head_dim=c.head_dim,
        dtype=NAMES[c.dtype],
        kv_factor=c.kv_factor,
        max_attention_window_vec=[
            None if c.window_of(layer) == 4096 else c.window_of(layer)
            for layer in range(c.num_layers)
        ],
    )


def by_pointers(manager: Manager, spec: PoolSpec, pool: int) -> CacheView:
    return trt.cache_views(
        manager.kv_cache_pool_pointers[pool : pool + 1], [spec], [FACTS], memory=Memory.HOST
    )[0]


def by_buffers(manager: Manager, spec: PoolSpec, pool: int) -> CacheView:
    return trt.buffer_view(spec, [manager.get_buffers(i, "HND") for i in spec.layers], FACTS)


def by_slots(manager: Manager, spec: PoolSpec, pool: int) -> CacheView:
    keys, values = (
        [manager.get_mem_pool_base_address(layer, kv) for layer in spec.layers] for kv in (0, 1)
    )
    return trt.slot_view(
        spec,
        keys,
        values if spec.kv_factor == 2 else None,
        FACTS,
        page_stride=manager.get_page_stride(spec.layers[0]),
        memory=Memory.HOST,
    )


VIEWS = (by_pointers, by_buffers, by_slots)
SLOTS = [[7, 3, 0], [5], [9, 1, 11]]
LENGTHS = [20, 8, 17]


def offsets_table(manager: Manager, spec: PoolSpec, pool: int) -> BlockTable:
    return trt.block_table(device_table(manager), pool, rows=slice(0, 3))


def slots_table(manager: Manager, spec: PoolSpec, pool: int) -> BlockTable:
    return trt.id_table(SLOTS, spec)


def pages_table(manager: Manager, spec: PoolSpec, pool: int) -> BlockTable:
    return trt.page_table(manager.get_batch_cache_indices(pool, SLOTS), spec)


def device_table(manager: Manager) -> Tensor:
    """Requests in rows 4, 0, 2 of the host table, copied for a batch; what is not used is 0."""
    rows = [4, 0, 2]
    for pool in range(len(manager.groups)):
        for row, slots in zip(rows, SLOTS, strict=True):
            manager.host_kv_cache_block_offsets[pool, row, 0, : len(slots)] = torch.tensor(slots)
    table = torch.full((len(manager.groups), 6, 2, 8), trt.UNSET, dtype=torch.int32)
    manager.copy_batch_block_offsets(table, rows)
    return table


CONFIGS = {
    "one window": config(),
    "mla": config(num_kv_heads_per_layer=[1] * 3, head_dim=72, kv_factor=1),
    "two windows": config(max_attention_window_vec=[24, 4096], blocks={24: (12, 0), 4096: (19, 0)}),
    "two windows in one pool": config(
        num_kv_heads_per_layer=[3] * 4,
        max_attention_window_vec=[4096, 24],
        blocks={24: (12, 0), 4096: (19, 0)},
    ),
    "one layer": config(num_kv_heads_per_layer=[3], dtype=torch.float16),
}


def test_the_worked_example() -> None:
    manager = KvCacheManagerV2(WORKED_EXAMPLE)
    assert manager.kv_cache_pool_mapping.tolist() == [[0, 0], [0, 1]]
    assert manager.index_scales == [4]
    bounds = [manager.get_page_index_upper_bound(*at) for at in ((0, 0), (1, 0), (1, 1))]
    assert bounds == [16, 14, 13]
    (spec,) = v2_specs(manager)
    assert spec == specs_of(KvCacheManager(WORKED_EXAMPLE))[0]
    buffer = manager.get_buffers(1, "HND")
    base = manager.allocations[0].tensor.data_ptr()
    assert buffer.shape == (7, 2, 2, 32, 64)
    assert buffer.is_contiguous()
    assert buffer.data_ptr() == base + 16384
    assert manager.get_batch_cache_indices(0, [[3]]) == [[6]]
    desc = by_buffers(manager, spec, 0).layers[1]
    assert desc.k.data == base + 16384
    assert desc.k.shape == (4, 2, 32, 64)
    assert desc.k.stride == (16384, 2048, 64, 1)
    # Page 6 of the buffer is block 3 of the view.
    assert buffer[6, 0].data_ptr() == desc.k.data + 3 * 16384 * 2


def test_windows_that_share_a_pool() -> None:
    manager = KvCacheManagerV2(CONFIGS["two windows in one pool"])
    assert manager.kv_cache_pool_mapping.tolist() == [[0, 0], [1, 0], [0, 1], [1, 1]]
    specs = v2_specs(manager)
    found = [(spec.layers, spec.num_blocks, spec.window) for spec in specs]
    assert found == [((0, 2), 31, 0), ((1, 3), 31, 24)]
    full, sliding = (by_pointers(manager, spec, pool) for pool, spec in enumerate(specs))
    assert full.layers == sliding.layers


@pytest.mark.parametrize("name", CONFIGS)
def test_all_descriptions_are_the_same(name: str) -> None:
    manager = KvCacheManagerV2(CONFIGS[name])
    for pool, spec in enumerate(v2_specs(manager)):
        first, *others = (view_of(manager, spec, pool) for view_of in VIEWS)
        assert all(view.layers == first.layers for view in others)


@pytest.mark.parametrize(
    ("table_of", "seed"), [(offsets_table, 1), (slots_table, 2), (pages_table, 3)]
)
@pytest.mark.parametrize("view_of", VIEWS)
@pytest.mark.parametrize("name", CONFIGS)
def test_both_ways(
    name: str,
    view_of: Callable[[Manager, PoolSpec, int], CacheView],
    table_of: Callable[[Manager, PoolSpec, int], BlockTable],
    seed: int,
) -> None:
    manager, expected = (KvCacheManagerV2(CONFIGS[name], seed) for _ in range(2))
    table = device_table(expected)
    for pool, spec in enumerate(v2_specs(manager)):
        dense = Dense(spec, 3, 20, seed + pool)
        for layer, tensors in zip(spec.layers, dense.layers, strict=True):
            for row, length in enumerate(LENGTHS):
                store(expected.attention(layer, table, 0), row, range(length), tensors)
        span = view_of(manager, spec, pool).at(table_of(manager, spec, pool))
        migrate(dense.at(), span, LENGTHS)

        found = Dense(spec, 3, 20, seed)
        wanted = Dense(spec, 3, 20, seed)
        for layer, tensors in zip(spec.layers, wanted.layers, strict=True):
            for row, length in enumerate(LENGTHS):
                load(expected.attention(layer, table, 0), row, range(length), tensors)
        migrate(span, found.at(), LENGTHS)
        for a, b in zip(found.layers, wanted.layers, strict=True):
            assert_same(a, b)
    assert_same(manager.raw, expected.raw)


def test_a_hole_is_no_block() -> None:
    """BAD_PAGE_INDEX, in the place of a block that a window has left behind, is kept as it is."""
    manager = KvCacheManagerV2(config(), 1)
    (spec,) = v2_specs(manager)
    manager.host_kv_cache_block_offsets[0, 0, 0, :3] = torch.tensor([-1, 4, 2])
    table = torch.zeros(1, 1, 2, 8, dtype=torch.int32)
    manager.copy_batch_block_offsets(table, [0])
    assert table[0, 0].tolist() == [[-1, 24, 12] + [0] * 5, [-1, 25, 13] + [1] * 5]
    pages = manager.get_batch_cache_indices(0, [[-1, 4, 2]])
    expected = Dense(spec, 1, 20, 5)
    for layer, tensors in zip(spec.layers, expected.layers, strict=True):
        load(manager.attention(layer, table, 0), 0, range(8, 20), tensors)
    view = by_pointers(manager, spec, 0)
    for blocks in (
        trt.block_table(table, 0),
        trt.page_table(pages, spec),
        trt.id_table([[-1, 4, 2]], spec),
    ):
        found = Dense(spec, 1, 20, 5)
        migrate(view.at(blocks.with_holes()), found.at(), [20])
        for a, b in zip(found.layers, expected.layers, strict=True):
            assert_same(a, b)


def test_slots_that_hold_other_buffers() -> None:
    """An index key of the size of K and V: [L0 K, L0 V, L0 index, L1 K, ...]."""
    manager, expected = (KvCacheManagerV2(config(), 2, extra_buffers=1) for _ in range(2))
    spec = PoolSpec(
        layers=(0, 1, 2),
        num_blocks=23,
        tokens_per_block=8,
        num_kv_heads=3,
        head_dim=20,
        dtype="BF16",
        index_scale=manager.get_page_index_scale(0),
    )
    assert (spec.sub_blocks_per_block, spec.num_sub_blocks) == (9, 207)
    dense = Dense(spec, 3, 20, 8)
    buffers = expected.allocations[0].tensor.view(23, 3, 3, 3, 8, 20)  # slot, layer, buffer, ...
    for layer, tensors in enumerate(dense.layers):
        for kv, tensor in enumerate(tensors):
            for row, length in enumerate(LENGTHS):
                for token in range(length):
                    slot = SLOTS[row][token // 8]
                    buffers[slot, layer, kv, :, token % 8] = tensor[row, token]

    offsets = trt.block_table(device_table(manager), 0, rows=slice(0, 3))
    migrate(dense.at(), by_slots(manager, spec, 0).at(offsets), LENGTHS)

    assert_same(manager.raw, expected.raw)
    made = trt.block_offsets(SLOTS, spec, max_blocks_per_seq=3)
    assert made[0, 0].tolist() == [[63, 27, 0], [64, 28, 1]]
    for call in (
        lambda: trt.cache_desc(spec, 0, (64, Memory.HOST)),
        lambda: trt.buffer_view(spec, [], FACTS),
    ):
        with pytest.raises(
            UnsupportedError,
            match=r"^index_scale is 9, expected 6, kv_factor for each layer: other buffers lie "
            r"between these. Use slot_view$",
        ):
            call()


def pool_with_other_buffers() -> tuple[Manager, PoolSpec]:
    """Its slots hold an index key beside K and V, which its mapping does not count."""
    manager = KvCacheManagerV2(config(), 2, extra_buffers=1)
    (spec,) = trt.pool_specs(
        torch.tensor([[0, 0], [0, 1], [0, 2]], dtype=torch.int32),
        num_blocks=manager.num_slots,
        tokens_per_block=8,
        num_kv_heads_per_layer=[3, 3, 3],
        head_dim=20,
        dtype="BF16",
        index_scales=manager.index_scales,
    )
    return manager, spec


def test_a_mapping_that_does_not_count_other_buffers() -> None:
    """MiniMax-M3's manager numbers layers 0, 1, 2, though an index key lies between them."""
    manager, spec = pool_with_other_buffers()
    with pytest.raises(UnsupportedError, match=r"^index_scale is 9, expected 6, .* Use slot_view$"):
        trt.cache_views(manager.kv_cache_pool_pointers, [spec], [FACTS], memory=Memory.HOST)
    assert by_slots(manager, spec, 0).layers[1].k.stride == (9 * 480, 160, 20, 1)


def test_a_table_per_layer() -> None:
    """SWA scratch: each layer is a pool that begins where the slots do, and its table says where
    in a slot it lies."""
    manager = KvCacheManagerV2(config(), 3)
    manager.host_kv_cache_block_offsets[0, 0, 0, :3] = torch.tensor([6, 0, 21])
    table = torch.full((3, 1, 2, 8), trt.UNSET, dtype=torch.int32)
    manager.copy_block_offsets_per_layer(table, [0])
    assert table[2, 0, :, 0].tolist() == [6 * 6 + 4, 6 * 6 + 5]
    pointers = [[manager.get_mem_pool_base_address(i, 0, per_layer=True), 0] for i in range(3)]
    specs = trt.pool_specs(
        torch.tensor([[0, 0], [1, 0], [2, 0]], dtype=torch.int32),
        num_blocks=[23 * 6 // 2] * 3,
        tokens_per_block=8,
        num_kv_heads_per_layer=[3, 3, 3],
        head_dim=20,
        dtype="BF16",
    )
    views = trt.cache_views(torch.tensor(pointers), specs, [FACTS] * 3, memory=Memory.HOST)
    shared = torch.zeros(1, 1, 2, 8, dtype=torch.int32)
    manager.copy_batch_block_offsets(shared, [0])
    for layer, (spec, view) in enumerate(zip(specs, views, strict=True)):
        found, expected = (Dense(spec, 1, 21, layer) for _ in range(2))
        load(manager.attention(layer, shared, 0), 0, range(21), expected.layers[0])
        migrate(view.at(trt.block_table(table, layer)), found.at(), [21])
        assert_same(found.layers[0], expected.layers[0])


# ---- get_buffers by mistake ----


@pytest.mark.parametrize("make", [KvCacheManager, KvCacheManagerV2])
def test_nhd_by_mistake_is_refused(make: type[KvCacheManager | KvCacheManagerV2]) -> None:
    """The default of get_buffers: the same bytes under the names of other axes."""
    manager = make(config())
    (spec,) = specs_of(KvCacheManager(config()))
    with pytest.raises(
        InvalidArgumentError,
        match=r"^buffers\[0\] has the axes of NHD, \(2, 8, 3, 20\), expected those of HND, "
        r"\(2, 3, 8, 20\): get_buffers\(layer_idx, kv_layout\) reshapes whatever the attention "
        r"backend has stored. Pass kv_layout='HND'$",
    ):
        trt.buffer_view(spec, [manager.get_buffers(i) for i in range(3)], FACTS)
    with pytest.raises(InvalidArgumentError, match=r"has the axes of HND, .* Pass kv_layout='NHD'"):
        trt.buffer_view(
            replace(spec, kv_layout="NHD"), [manager.get_buffers(i, "HND") for i in range(3)], FACTS
        )


def test_with_as_many_heads_as_tokens_both_are_one_tensor() -> None:
    manager = KvCacheManager(config(num_kv_heads_per_layer=[8, 8]))
    (spec,) = specs_of(manager)
    nhd, hnd = (
        trt.buffer_view(spec, [manager.get_buffers(i, layout) for i in range(2)], FACTS)
        for layout in ("NHD", "HND")
    )
    assert nhd.layers == hnd.layers
    turned = [manager.get_buffers(i, "HND").transpose(2, 3) for i in range(2)]
    with pytest.raises(
        InvalidArgumentError,
        match=r"^buffers\[0\] is \(23, 2, 8, 8, 20\) with strides \(5120, 1280, 20, 160, 1\), "
        r"expected \(blocks, 2, 8, 8, 20\), all but the first contiguous$",
    ):
        trt.buffer_view(spec, turned, FACTS)


@pytest.mark.parametrize("make", [KvCacheManager, KvCacheManagerV2])
def test_a_backend_that_stores_nhd(make: type[KvCacheManager | KvCacheManagerV2]) -> None:
    """FLASHINFER before 1.2: what get_buffers then gives is what its kernels index."""
    manager = make(config(), 4)
    spec = replace(specs_of(KvCacheManager(config()))[0], kv_layout="NHD")
    buffers = [manager.get_buffers(i, "NHD") for i in range(3)]
    view = trt.buffer_view(spec, buffers, FACTS)
    block = 5
    page = block * (3 if make is KvCacheManagerV2 else 1)
    for layer, buffer in enumerate(buffers):
        key, value = gather_kv(view.layers[layer], trt.id_table([[block]], spec), [8])
        assert_same(
            [key[0], value[0]], [buffer[page, 0].contiguous(), buffer[page, 1].contiguous()]
        )
    pool = manager.allocations[0].tensor.view(spec.pool_shape)
    assert trt.cache_view(spec, pool, FACTS).layers == view.layers


Buffers = list[Tensor]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b[:2], r"^buffers has 2 entries, expected 3$"),
        (
            lambda b: [b[0], b[2], b[1]],
            r"^buffers\[1\] begins 3840 bytes after buffers\[0\], expected 1920: give the layers "
            r"of one pool, in its order$",
        ),
        (
            lambda b: [part.view(torch.float16) for part in b],
            r"^buffers\[0\] is of torch.float16, expected torch.bfloat16$",
        ),
        (
            lambda b: [part[1:] for part in b],
            r"^buffers\[0\] has 22 blocks, 2880 elements apart, expected 23, 2880 apart$",
        ),
        (
            lambda b: [part[:0] for part in b],
            r"^buffers\[0\] has 0 blocks, 2880 elements apart, expected 23, 2880 apart$",
        ),
        (
            lambda b: [part[::2] for part in b],
            r"^buffers\[0\] has 12 blocks, 5760 elements apart, expected 23, 2880 apart$",
        ),
        (
            lambda b: [part[..., :10] for part in b],
            r"^buffers\[0\] is \(23, 2, 3, 8, 10\) with strides \(2880, 480, 160, 20, 1\), "
            r"expected \(blocks, 2, 3, 8, 20\), all but the first contiguous$",
        ),
        (
            lambda b: [part.transpose(2, 3) for part in b],
            r"^buffers\[0\] has the axes of NHD",
        ),
        (
            lambda b: [part.contiguous() for part in b],
            r"^buffers\[0\].shape\[0\] is 23, expected 69 pages of 23 slots \(KVCacheManagerV2\): "
            r"give the layers of one pool, in its order$",
        ),
    ],
)
def test_buffers_that_do_not_agree(change: Callable[[Buffers], Buffers], message: str) -> None:
    manager = KvCacheManager(config())
    (spec,) = specs_of(manager)
    with pytest.raises(InvalidArgumentError, match=message):
        trt.buffer_view(spec, change([manager.get_buffers(i, "HND") for i in range(3)]), FACTS)


def test_one_layer_has_blocks_and_no_pages_of_others() -> None:
    """The managers place it alike."""
    manager = KvCacheManager(config(num_kv_heads_per_layer=[3]))
    (spec,) = specs_of(manager)
    with pytest.raises(
        InvalidArgumentError,
        match=r"^buffers\[0\] has 22 blocks, 960 elements apart, expected 23, 960 apart$",
    ):
        trt.buffer_view(spec, [manager.get_buffers(0, "HND")[1:]], FACTS)


# ---- addresses and pages that do not agree ----


@pytest.mark.parametrize(
    ("keys", "values", "stride", "message"),
    [
        (
            [0x1000, 0x1780],
            [0x13C0, 0x1B40],
            480,
            r"^page_stride is 480 bytes, expected 960, num_kv_heads \* tokens_per_block \* "
            r"head_dim elements$",
        ),
        ([0x1000], [0x13C0], 960, r"^keys has 1 entries, expected 2$"),
        (
            [0x1000, 0x1780],
            [0x1780, 0x1F00],
            960,
            r"^values is \[0x1780, 0x1f00\], expected \[0x13c0, 0x1b40\]: V directly behind K$",
        ),
        ([0x1000, 0x1780], None, 960, r"^values is None, expected \[0x13c0, 0x1b40\]"),
        (
            [0x1000, 0x9000],
            [0x13C0, 0x93C0],
            960,
            r"^keys are \[32768\] bytes apart, expected multiples of 960, at least 1920, within a "
            r"slot of 3840: give each layer of one pool$",
        ),
        ([0x1000, 0x2680], [0x13C0, 0x2A40], 960, r"^keys are \[5760\] bytes apart"),
        ([0x1000, 0x1790], [0x13C0, 0x1B50], 960, r"^keys are \[1936\] bytes apart"),
        ([0x1000, 0x13C0], [0x13C0, 0x1780], 960, r"^keys are \[960\] bytes apart"),
        ([0x1000, 0x1000], [0x13C0, 0x13C0], 960, r"^keys are \[0\] bytes apart"),
    ],
)
def test_addresses_that_do_not_agree(
    keys: Sequence[int], values: Sequence[int] | None, stride: int, message: str
) -> None:
    (spec,) = specs_of(KvCacheManager(config(num_kv_heads_per_layer=[3, 3])))
    with pytest.raises(InvalidArgumentError, match=message):
        trt.slot_view(spec, keys, values, FACTS, page_stride=stride)


def test_keys_between_pages() -> None:
    spec = replace(
        specs_of(KvCacheManager(config(num_kv_heads_per_layer=[3, 3])))[0], index_scale=9
    )
    with pytest.raises(
        InvalidArgumentError, match=r"^keys are \[1936\] bytes apart, expected multi"
    ):
        trt.slot_view(spec, [0x1000, 0x1790], [0x13C0, 0x1B50], FACTS, page_stride=960)


def test_pages_that_are_none() -> None:
    """Block ids of KVCacheManager look like pages, until one is no multiple."""
    (spec,) = specs_of(KvCacheManager(config()))
    with pytest.raises(
        InvalidArgumentError,
        match=r"^pages\[1\]\[0\] is 5, expected -1 or a multiple of 6 / 2, pages of one slot. Give "
        r"block ids to id_table$",
    ):
        trt.page_table([[6, 3], [5]], spec)
    with pytest.raises(InvalidArgumentError, match=r"^pages\[0\]\[1\] is -3, expected -1 or a mul"):
        trt.page_table([[-1, -3]], spec)


def test_ids_say_nothing_where_blocks_are_offloaded() -> None:
    (spec,) = specs_of(KvCacheManager(config(blocks={4096: (9, 4)})))
    with pytest.raises(
        UnsupportedError,
        match=r"^num_secondary_blocks is 4, expected 0 for block ids: once blocks were offloaded, "
        r"an id is not a place in memory. Use block_table$",
    ):
        trt.id_table([[1, 2]], spec)


# ---- ways out ----


def with_other_buffers(view: Callable[[Manager, PoolSpec, int], CacheView]) -> None:
    """A pool whose slots hold an index key beside K and V of each layer."""
    manager, spec = pool_with_other_buffers()
    view(manager, spec, 0)


def of_buffers(kv_layout: str, *, order: Sequence[int] = (0, 1, 2)) -> None:
    manager = KvCacheManagerV2(config())
    (spec,) = v2_specs(manager)
    trt.buffer_view(spec, [manager.get_buffers(i, kv_layout) for i in order], FACTS)


def whole(pool: Tensor) -> None:
    (spec,) = specs_of(KvCacheManager(WORKED_EXAMPLE))
    trt.cache_desc(spec, 0, pool)


def of_pages(table: Callable[[list[list[int]], PoolSpec], BlockTable]) -> None:
    table([[6, 3], [5]], specs_of(KvCacheManager(config()))[0])


def of_offloaded(*, by_ids: bool) -> None:
    (spec,) = specs_of(KvCacheManager(config(blocks={4096: (9, 4)})))
    if by_ids:
        trt.id_table([[1, 2]], spec)
    else:
        trt.block_table(trt.block_offsets([[1, 2]], spec, max_blocks_per_seq=2)[None, 0], 0)


def with_windows(windows: list[int | None]) -> None:
    trt.pool_specs(
        torch.tensor([[0, 0], [1, 0], [0, 1]], dtype=torch.int32),
        num_blocks=[5, 6],
        tokens_per_block=8,
        num_kv_heads_per_layer=[4, 2, 4],
        head_dim=20,
        dtype="HALF",
        max_attention_window_vec=windows,
    )


OFFSETS = torch.zeros(2, 6, 2, 8, dtype=torch.int32)
POOL = torch.zeros(4, 2, 2, 2 * 32 * 64, dtype=torch.float16)
WAYS_OUT = [
    WayOut(
        "other buffers lie between these. Use slot_view",
        lambda: with_other_buffers(by_pointers),
        lambda: with_other_buffers(by_slots),
    ),
    WayOut(
        "reshapes whatever the attention backend has stored. Pass kv_layout='HND'",
        lambda: of_buffers("NHD"),
        lambda: of_buffers("HND"),
    ),
    WayOut(
        "give the layers of one pool, in its order",
        lambda: of_buffers("HND", order=(0, 2, 1)),
        lambda: of_buffers("HND", order=(0, 1, 2)),
    ),
    WayOut(
        "expected contiguous, as TensorRT-LLM allocates pools. Pass the whole pool",
        lambda: whole(POOL.transpose(1, 2)),
        lambda: whole(POOL),
    ),
    WayOut(
        "expected contiguous. Pass the whole table, and rows without a step",
        lambda: trt.block_table(OFFSETS[..., :4], 0, rows=slice(0, 6, 3)),
        lambda: trt.block_table(OFFSETS, 0, rows=slice(0, 3)),
    ),
    WayOut(
        "pages of one slot. Give block ids to id_table",
        lambda: of_pages(trt.page_table),
        lambda: of_pages(trt.id_table),
    ),
    WayOut(
        "an id is not a place in memory. Use block_table",
        lambda: of_offloaded(by_ids=True),
        lambda: of_offloaded(by_ids=False),
    ),
    WayOut(
        "KVCacheManagerV2 of main takes [pattern[i % len(pattern)] for i in pp_layers]",
        lambda: with_windows([16, 32]),
        lambda: with_windows([[16, 32][i % 2] for i in range(3)]),
    ),
]


@pytest.mark.parametrize("case", WAYS_OUT, ids=str)
def test_each_way_out_leads_out(case: WayOut) -> None:
    leads_out(case)
