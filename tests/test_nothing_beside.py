"""A call writes nothing beside its tokens, on the CPU and with kernels."""

from __future__ import annotations

import ctypes
import gc
import weakref
from functools import partial

import pytest
import torch

from kvx_core import (
    BlockTable,
    CacheDesc,
    CacheFacts,
    CacheView,
    InvalidArgumentError,
    Layout,
    OutOfRangeError,
    Plan,
    Plane,
    SeqLens,
    SlotMapping,
    describe,
    migrate,
)
from kvx_core._c import abi
from kvx_core.desc.find_tokens import find_tokens
from kvx_core.snapshot import Section, Snapshot
from tests.calls import Backend
from tests.planes import Paged, View
from tests.planes import migrate as move_planes

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

    def view(tensor: torch.Tensor, block: int) -> abi.kvx_span_t:
        table = torch.tensor([[block]])
        found = abi.kvx_block_table_t(
            format=1,
            index_dtype=7,
            seq_count=1,
            max_blocks_per_seq=1,
            indices=backend.address(table),
            indices_count=1,
        )
        cache = abi.kvx_cache_desc_t(
            num_blocks=2, block_size=2, num_kv_heads=1, head_dim=3, k=backend.tensor(tensor, 1)
        )
        kept.append((table, found, cache))
        return abi.kvx_span_t(
            num_layers=1,
            layers=abi.pointer_array([cache], abi.kvx_cache_desc_t),
            block_table=ctypes.pointer(found),
        )

    from_, to = view(src, -1), view(dst, 0)
    lens = torch.tensor([1])
    seq_lens = backend.seq_lens(lens)
    desc = abi.kvx_migrate_desc_t(
        flags=abi.FLAG_ZERO_FILL,
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


def test_a_snapshot_takes_no_tokens_that_one_layer_lacks() -> None:
    """A NULL of a table of pointers is null in one plane only."""
    pools = [torch.zeros(4, 4, 2, 8) for _ in range(2)]
    facts = CacheFacts(first_kv_head=0, total_kv_heads=2)
    view = CacheView(tuple(nhd(pool[:1]) for pool in pools), facts)
    table = BlockTable.pointers([[[pools[0][2], None]]])
    assert Snapshot.capture(range(4), [Section((0, 1), view, pointers(pools, [[2]]))]) is not None
    assert Snapshot.capture(range(4), [Section((0, 1), view, table)]) is None


def test_v_is_not_found_among_keys() -> None:
    """Layer 0, of which places are asked in a table of pointers, has no V."""
    k0, k1, v1 = (torch.zeros(4, 4, 2, 8) for _ in range(3))
    layers = nhd(k0[:1]), CacheDesc.from_kv(*(describe(t[:1], Layout.BLOCK_NHD) for t in (k1, v1)))
    view = CacheView(layers, CacheFacts())
    span = view.at(BlockTable.pointers([[[k0[1], k1[1], v1[1]]]]))
    with pytest.raises(InvalidArgumentError, match="is_v is 1, expected 0"):
        find_tokens(span, SeqLens.of([4]), v=True)


def test_units_of_a_plane_lie_along_dim() -> None:
    """Else the last axis, of tokens, would be cut into units."""
    pages = torch.zeros(2, 64, 34, dtype=torch.uint8)
    Plane.of(pages, ("block", "token", "dim"), "k", dtype="Q8_0")
    with pytest.raises(
        InvalidArgumentError, match=r"axes\[2\] is token, expected dim: the last ax"
    ):
        Plane.of(pages, ("block", "dim", "token"), "k", dtype="Q8_0")


def test_pointers_of_blocks_with_other_strides() -> None:
    """One descriptor stands for all blocks, so that a block of another order would be torn."""
    pool = torch.arange(4 * 4 * 2 * 8, dtype=torch.float32).view(4, 4, 2, 8)
    hnd = torch.zeros(2, 4, 8).transpose(0, 1)
    view = views(pool[:1])
    with pytest.raises(
        InvalidArgumentError, match=r"block_table\[0\]\[1\]\[0\] is F32 \[4, 2, 8\]"
    ):
        BlockTable.pointers([[[pool[0]], [hnd]]])
    other = BlockTable.pointers([[[hnd]]])
    message = r"plane 0 that are F32 \[4, 2, 8\] with strides \[8, 32, 1\], but the view describes"
    with pytest.raises(InvalidArgumentError, match=message):
        view.at(other)
    dst = torch.zeros(1, 8, 2, 8)
    dense = CacheView((nhd(dst),), CacheFacts(), dense=True)
    plan = Plan.migrate(view.at(pointers([pool], [[2]])), dense, [1], same_model=True)
    for table in (other, BlockTable.pointers([[[hnd]]])):
        with pytest.raises(InvalidArgumentError, match=message):
            plan.run([4], src_block_table=table)
    plan.run([8], src_block_table=pointers([pool], [[2, 1]]))
    assert torch.equal(dst[0, :4], pool[2])
    assert torch.equal(dst[0, 4:], pool[1])


@pytest.mark.parametrize("given", ["list", "tensor", "mapping"])
def test_a_run_skips_the_slots_that_its_plan_skips(given: str) -> None:
    src, dst = torch.ones(1, 3, 1, 4), torch.full((2, 4, 1, 4), SENTINEL)
    skipping = SlotMapping.of([0], invalid_slot=5)
    plan = Plan.migrate(
        CacheView((nhd(src),), CacheFacts(), dense=True), views(dst).at(slots=skipping), [1],
        same_model=True,
    )  # fmt: skip
    slots: object = [1, 5, 6] if given == "list" else torch.tensor([1, 5, 6])
    if given == "mapping":
        slots = SlotMapping.of([1, 6, 5], invalid_slot=6)
    plan.run([3], dst_slots=slots)  # type: ignore[arg-type]
    expected = torch.full((8, 1, 4), SENTINEL)
    expected[[1, 5] if given == "mapping" else [1, 6]] = 1
    assert torch.equal(dst.view(8, 1, 4), expected)
    assert plan.describe([3], dst_slots=slots).num_null_dst == 1  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [2**32 - 1, 2**32, 2**33, 2**62])
def test_lengths_past_32_bits_are_refused_alike(length: int) -> None:
    src, dst = torch.zeros(2, 4, 1, 4), torch.full((2, 4, 1, 4), SENTINEL)
    ends = views(src).at([[0, 1]]), views(dst).at([[1, 0]])
    with Plan.migrate(*ends, [1], same_model=True) as plan:
        sentences = set()
        for lens in ([length], torch.tensor([length])):
            for call in (partial(migrate, *ends, lens, same_model=True), partial(plan.run, lens)):
                with pytest.raises(OutOfRangeError) as refusal:
                    call()
                sentences.add(str(refusal.value))
        assert len(sentences) == 1
        assert str(length) in sentences.pop()
    assert (dst == SENTINEL).all()


@pytest.mark.parametrize("convert", [False, True])
@pytest.mark.parametrize("entry", [0, 1 << 30])
def test_states_of_long_sequences_move_at_once(backend: Backend, convert: bool, entry: int) -> None:
    """A state stands for all tokens of its sequence: work is counted in entries, not in tokens."""
    if not backend.looks_first:
        return
    src = torch.arange(3 * 2 * 8, dtype=torch.float32).view(3, 2, 8)
    dst = torch.full((3, 2, 8), SENTINEL, dtype=torch.bfloat16 if convert else torch.float32)
    ends = []
    for tensor in (src, dst):
        axes = ("block", "head", "dim") if entry == 0 else ("block", "token", "dim")
        plane = Paged(tensor, axes, tokens_per_entry=entry)
        ends.append(View([plane], None if entry == 0 else [[1], [0]]))
    lengths = [1 << 62, (1 << 62) - 1] if entry == 0 else [1 << 31, 1 << 30]
    move_planes(backend, *ends, lengths)
    expected = torch.full((3, 2, 8), SENTINEL)
    if entry == 0:
        expected[:2] = src[:2]
    else:
        expected[1], expected[0, 0] = src[1], src[0, 0]
    assert torch.equal(dst.float(), expected)
