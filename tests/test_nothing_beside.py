"""What a call writes it writes where it may: no byte beside it, with kernels or without."""

from __future__ import annotations

import ctypes
import gc
import weakref

import pytest
import torch

from kvx_core import (
    BlockTable,
    CacheDesc,
    CacheFacts,
    CacheView,
    InvalidArgumentError,
    Layout,
    Plan,
    Plane,
    SeqLens,
    UnsupportedError,
    _abi,
    describe,
    migrate,
)
from kvx_core.lookup import find_tokens
from kvx_core.snapshot import Section, Snapshot
from tests.calls import Backend

SENTINEL = 7.0
PAIRS = [(torch.float32, torch.float16), (torch.float16, torch.float32)]


@pytest.mark.parametrize(("src_dtype", "dst_dtype"), PAIRS)
def test_zeros_are_as_wide_as_the_destination(
    backend: Backend, src_dtype: torch.dtype, dst_dtype: torch.dtype
) -> None:
    """ZERO_FILL of tokens without a source, where elements are converted one by one."""
    src = torch.ones(2, 2, 1, 3, dtype=src_dtype)
    dst = torch.full((2, 2, 1, 3), SENTINEL, dtype=dst_dtype)
    kept: list[object] = []

    def view(tensor: torch.Tensor, block: int) -> _abi.kvx_span_t:
        table = torch.tensor([[block]])
        found = _abi.kvx_block_table_t(
            format=1,
            index_dtype=7,
            seq_count=1,
            max_blocks_per_seq=1,
            indices=backend.address(table),
            indices_count=1,
        )
        cache = _abi.kvx_cache_desc_t(
            num_blocks=2, block_size=2, num_kv_heads=1, head_dim=3, k=backend.tensor(tensor, 1)
        )
        kept.append((table, found, cache))
        return _abi.kvx_span_t(
            num_layers=1,
            layers=_abi.pointer_array([cache], _abi.kvx_cache_desc_t),
            block_table=ctypes.pointer(found),
        )

    from_, to = view(src, -1), view(dst, 0)
    lens = torch.tensor([1])
    seq_lens = backend.seq_lens(lens)
    desc = _abi.kvx_migrate_desc_t(
        flags=_abi.FLAG_ZERO_FILL,
        seq_lens=ctypes.pointer(seq_lens),
        src=ctypes.pointer(from_),
        dst=ctypes.pointer(to),
    )
    backend.call("kvx_migrate_kv", desc)
    expected = torch.full_like(dst, SENTINEL)
    expected[0, 0] = 0
    assert torch.equal(dst, expected)


def nhd(tensor: torch.Tensor) -> CacheDesc:
    return CacheDesc.from_kv(describe(tensor, Layout.BLOCK_NHD))


def views(*tensors: torch.Tensor) -> CacheView:
    return CacheView(tuple(map(nhd, tensors)), CacheFacts())


def test_head_start_of_planes_alone_is_refused() -> None:
    """It would lead behind the plane."""

    def view(tensor: torch.Tensor) -> CacheView:
        plane = Plane.of(tensor, ("block", "token", "head", "dim"), 0)
        return CacheView((), CacheFacts(), dense=True, planes=(plane,))

    memory = torch.full((64,), 90, dtype=torch.uint8)
    src = view(torch.arange(32, dtype=torch.uint8).view(1, 2, 2, 8))
    dst = view(memory[:32].view(1, 2, 2, 8))
    with pytest.raises(InvalidArgumentError, match=r"dst\.head_start is 3, expected 0"):
        migrate(src.at(), dst.at(head_start=3), [2], same_model=True)
    assert (memory == 90).all()


def pointers(pools: list[torch.Tensor], ids: list[list[int]]) -> BlockTable:
    """A table of the blocks of pools, one per layer, each K alone."""
    return BlockTable.pointers([[[pool[i] for pool in pools] for i in row] for row in ids])


def test_a_plan_checks_pointers_of_all_layers() -> None:
    src = [torch.full((4, 4, 2, 8), 10.0 * layer + 1) for layer in range(2)]
    dst = [torch.zeros(4, 4, 2, 8) for _ in range(2)]
    first = views(*(pool[:1] for pool in dst))
    plan = Plan.migrate(
        views(*src).at([[0, 1, 2]]), first.at(pointers(dst, [[0, 1, 2]])), [8], same_model=True
    )
    plan.run()
    for layer, pool in enumerate(dst):
        assert [float(block.unique()) for block in pool] == [10.0 * layer + 1] * 2 + [0, 0]
    plan.run([4], dst_block_table=pointers(dst, [[3]]), src_block_table=[[0]])
    assert [float(pool[3].unique()) for pool in dst] == [1.0, 11.0]
    with pytest.raises(InvalidArgumentError, match=r"indices_count is 3, expected .* = 6"):
        plan.run([4], dst_block_table=pointers(dst[:1], [[0, 1, 2]]))
    assert [float(pool[2].unique()) for pool in dst] == [0, 0]


def test_pointer_tables_keep_their_blocks() -> None:
    rows = [[[torch.zeros(4, 2, 8)], [torch.zeros(4, 2, 8)]]]
    block = weakref.ref(rows[0][0][0])
    table = BlockTable.pointers(rows)
    rows.clear()
    gc.collect()
    assert block() is not None
    del table
    gc.collect()
    assert block() is None


def test_a_snapshot_takes_no_pointer_table() -> None:
    """A NULL is null in one plane only, which a snapshot cannot say."""
    pools = [torch.zeros(4, 4, 2, 8) for _ in range(2)]
    facts = CacheFacts(first_kv_head=0, total_kv_heads=2)
    view = CacheView(tuple(nhd(pool[:1]) for pool in pools), facts)
    with pytest.raises(UnsupportedError, match=r"section\.block_table is POINTERS"):
        Snapshot.capture(range(4), [Section((0, 1), view, pointers(pools, [[0]]))])


def test_v_is_not_found_among_keys() -> None:
    """Layer 0, of which places are asked in a table of pointers, has no V."""
    k0, k1, v1 = (torch.zeros(4, 4, 2, 8) for _ in range(3))
    layers = nhd(k0[:1]), CacheDesc.from_kv(*(describe(t[:1], Layout.BLOCK_NHD) for t in (k1, v1)))
    view = CacheView(layers, CacheFacts())
    span = view.at(BlockTable.pointers([[[k0[1], k1[1], v1[1]]]]))
    with pytest.raises(InvalidArgumentError, match="is_v is 1, expected 0"):
        find_tokens(span, SeqLens.of([4]), v=True)
