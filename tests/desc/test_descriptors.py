"""Descriptors: zero-copy, frozen, keeping what they describe alive, and the struct that C gets."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch

from kvx_core import (
    BlockTable,
    BlockTableFormat,
    CacheDesc,
    DType,
    InvalidArgumentError,
    Layout,
    Memory,
    PoolDesc,
    ScaleDesc,
    ScaleGranularity,
    SeqLens,
    SlotMapping,
    TensorDesc,
    UnsupportedError,
    describe,
    gather_kv,
)
from tests.desc import dlpack
from tests.desc.dlpack import Producer


def halves() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A cache as vLLM has it, (3, 4, 16, 2 * 80), and its K and V."""
    kv = torch.zeros(3, 4, 16, 160, dtype=torch.bfloat16)
    return kv, kv[..., :80], kv[..., 80:]


def cache_of(k: torch.Tensor, v: torch.Tensor | None, layout: Layout) -> CacheDesc:
    return CacheDesc.from_kv(describe(k, layout), None if v is None else describe(v, layout))


def test_describe_points_into_the_tensor() -> None:
    kv, k, v = halves()
    for tensor, offset in ((k, 0), (v, 80)):
        desc = describe(tensor, Layout.BLOCK_HND)
        assert desc.data == tensor.data_ptr() == kv.data_ptr() + 2 * offset
        assert desc.shape == (3, 4, 16, 80)
        assert desc.stride == (4 * 16 * 160, 16 * 160, 160, 1)
        assert desc.dtype is DType.BF16
        assert desc.memory is Memory.HOST
        assert desc.owner is tensor


def test_fp8_in_uint8() -> None:
    tensor = torch.zeros(3, 4, 16, 64, dtype=torch.uint8)
    assert describe(tensor, Layout.BLOCK_HND).dtype is DType.U8
    for name in (DType.F8_E4M3, "float8_e4m3fn"):
        desc = describe(tensor, Layout.BLOCK_HND, dtype=name)
        assert desc.dtype is DType.F8_E4M3
        assert desc.data == tensor.data_ptr()


def test_a_dtype_of_another_size_is_refused() -> None:
    tensor = torch.zeros(3, 4, 16, 64, dtype=torch.uint8)
    with pytest.raises(InvalidArgumentError) as raised:
        describe(tensor, Layout.BLOCK_HND, dtype=DType.BF16)
    assert str(raised.value) == (
        "dtype is BF16 of 2 bytes, expected one of the 1 bytes that the tensor's U8 elements have"
    )


def test_more_axes_than_the_abi_has_are_refused() -> None:
    desc = describe(torch.zeros(1, 1, 1, 1, 1, 1), Layout.BLOCK_CUSTOM)
    with pytest.raises(InvalidArgumentError, match=r"tensor\.ndim is 6, expected at most 5"):
        desc.to_c()


def test_tensor_to_c() -> None:
    _, k, _ = halves()
    c = describe(k, Layout.BLOCK_HND).to_c()
    assert c.size == 112
    assert (c.dtype, c.layout, c.memory, c.ndim) == (2, 2, 1, 4)
    assert list(c.shape) == [3, 4, 16, 80, 0]
    assert list(c.stride) == [4 * 16 * 160, 16 * 160, 160, 1, 0]
    assert c.data == k.data_ptr()


def test_cache_of_halves() -> None:
    _, k, v = halves()
    cache = cache_of(k, v, Layout.BLOCK_HND)
    cache.validate()
    assert (cache.num_blocks, cache.block_size, cache.num_kv_heads) == (3, 16, 4)
    assert (cache.head_dim, cache.v_head_dim) == (80, 80)
    assert list(cache.tensors) == ["k", "v"]
    c = cache.to_c()
    assert (c.size, c.num_blocks, c.block_size, c.num_kv_heads, c.head_dim) == (280, 3, 16, 4, 80)
    assert (c.k.data, c.v.data) == (k.data_ptr(), v.data_ptr())
    assert c.pool.size == 0


def test_k_and_v_of_different_layouts() -> None:
    """TGI's paged cache: K packed, V transposed."""
    k = torch.zeros(5, 2, 8, 16, 8, dtype=torch.float16)
    v = torch.zeros(5, 2, 48, 16, dtype=torch.float32).transpose(2, 3)
    cache = CacheDesc.from_kv(
        describe(k, Layout.BLOCK_HND_PACKED), describe(v, Layout.BLOCK_CUSTOM)
    )
    cache.validate()
    assert (cache.block_size, cache.head_dim, cache.v_head_dim) == (16, 64, 48)


def test_axes_are_named_in_any_order() -> None:
    """As many heads as tokens and numbers: nothing but the names says which axis is which."""
    logical = torch.arange(5 * 4 * 4 * 4).reshape(5, 4, 4, 4).float()  # block, token, head, dim
    names = ("block", "token", "head", "dim")
    wanted = describe(logical, "BLOCK_NHD")
    for order in permutations(range(4)):
        stored = logical.permute(order).contiguous()
        found = describe(stored, [names[i] for i in order])
        assert found.layout is Layout.BLOCK_HND
        assert found.shape == (5, 4, 4, 4)
        key, _ = gather_kv(CacheDesc.from_kv(found), [[3, 1]], [8])
        expected, _ = gather_kv(CacheDesc.from_kv(wanted), [[3, 1]], [8])
        assert torch.equal(key, expected)
    packed = logical.reshape(5, 4, 4, 2, 2).permute(3, 0, 1, 4, 2).contiguous()
    found = describe(packed, ("dim", "block", "token", "dim", "head"))
    assert (found.layout, found.shape) == (Layout.BLOCK_HND_PACKED, (5, 4, 2, 4, 2))
    key, _ = gather_kv(CacheDesc.from_kv(found), [[3, 1]], [8])
    assert torch.equal(key[0], logical[[3, 1]].flatten(0, 1))


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        ((), "layout is a tuple, expected a kvx_core.Layout"),
        (("block", "token", "head"), "layout is block, token, head, expected block, token and hea"),
        (("block", "token", "dim", "head", "head"), "layout is block, token, dim, head, head, exp"),
        (("block", "token", "dim", "head", "dim"), "layout names 5 axes, expected 4, those of ten"),
        (("block", "token", "dim", "row"), "layout[3] is 'ROW', expected a kvx_core.Axis: BLOCK"),
    ],
)
def test_names_of_axes_that_are_refused(layout: Any, says: str) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        describe(torch.zeros(5, 4, 3, 2), layout)
    assert str(refused.value).startswith(says)


def test_custom_does_not_guess_which_axis_is_which() -> None:
    """[block, token, head, dim] with as many heads as tokens was read with both exchanged."""
    k = torch.arange(3 * 4 * 4 * 8).reshape(3, 4, 4, 8).float()
    with pytest.raises(InvalidArgumentError, match=r"cache.k.shape\[1\] and shape\[2\] are both 4"):
        gather_kv(CacheDesc.from_kv(describe(k, "BLOCK_CUSTOM")), [[1]], [4])
    key, _ = gather_kv(CacheDesc.from_kv(describe(k, "BLOCK_NHD")), [[1]], [4])
    assert torch.equal(key[0], k[1])


def test_a_cache_without_v() -> None:
    cache = cache_of(torch.zeros(5, 16, 1, 576), None, Layout.BLOCK_NHD)
    cache.validate()
    assert cache.v_head_dim == 0
    assert list(cache.tensors) == ["k"]
    assert (cache.to_c().v.data, cache.to_c().v.ndim) == (None, 0)


def test_a_cache_on_a_device_can_be_described() -> None:
    k = Producer(data=1 << 20, shape=(3, 4, 16, 64), device_type=dlpack.CUDA)
    cache = CacheDesc.from_kv(describe(k, Layout.BLOCK_HND))
    cache.validate()
    assert cache.k.memory is Memory.DEVICE


def test_validate_passes_the_sentence_of_c_on() -> None:
    k = torch.zeros(3, 4, 16, 64)
    v = torch.zeros(3, 4, 32, 64)
    with pytest.raises(InvalidArgumentError) as raised:
        cache_of(k, v, Layout.BLOCK_HND).validate()
    assert str(raised.value) == (
        "cache.v.shape[2] is 32, expected block_size 16 (BLOCK_HND, spec 4.2)"
    )


def test_overlapping_elements_are_refused() -> None:
    k = torch.zeros(64).expand(3, 4, 16, 64)
    with pytest.raises(InvalidArgumentError, match="elements overlap"):
        cache_of(k, None, Layout.BLOCK_HND).validate()


@pytest.mark.parametrize(
    ("layout", "shape", "expected"),
    [
        (Layout.BLOCK_NHD, (3, 4, 5), "tensor.ndim is 3, expected 4 (BLOCK_NHD, spec 4.2)"),
        (
            Layout.BLOCK_HND_PACKED,
            (3, 4, 5, 6),
            "tensor.ndim is 4, expected 5 (BLOCK_HND_PACKED, spec 4.2)",
        ),
        (
            Layout.BLOCK_CUSTOM,
            (3, 4),
            "tensor.ndim is 2, expected 4 or 5 (BLOCK_CUSTOM, spec 4.2)",
        ),
    ],
)
def test_k_without_the_axes_of_its_layout(
    layout: Layout, shape: tuple[int, ...], expected: str
) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        CacheDesc.from_kv(describe(torch.zeros(shape), layout))
    assert str(raised.value) == expected


def test_descriptors_are_frozen_and_compare_by_what_they_describe() -> None:
    _, k, v = halves()
    cache = cache_of(k, v, Layout.BLOCK_HND)
    with pytest.raises(dataclasses.FrozenInstanceError):
        cache.num_blocks = 4  # type: ignore[misc]
    assert cache == cache_of(k.detach(), v.detach(), Layout.BLOCK_HND)
    assert cache != cache_of(v, k, Layout.BLOCK_HND)
    assert hash(cache) == hash(cache_of(k.detach(), v.detach(), Layout.BLOCK_HND))
    assert "owner" not in repr(cache)


def test_replacing_a_field_renews_the_struct() -> None:
    _, k, v = halves()
    cache = cache_of(k, v, Layout.BLOCK_HND)
    other = dataclasses.replace(cache, v=None)
    assert other.to_c().v.data is None
    assert cache.to_c().v.data == v.data_ptr()


def test_a_cache_keeps_its_tensors_alive() -> None:
    _, k, v = halves()
    alive = [weakref.ref(k), weakref.ref(v)]
    cache = cache_of(k, v, Layout.BLOCK_HND)
    del k, v
    gc.collect()
    assert all(ref() is not None for ref in alive)
    del cache
    gc.collect()
    assert all(ref() is None for ref in alive)


def test_pool() -> None:
    primary, secondary = torch.zeros(64), torch.zeros(64)
    pool = PoolDesc.of(primary, 128, secondary[32:])
    assert pool == PoolDesc(Memory.HOST, 128, primary.data_ptr(), secondary.data_ptr() + 128)
    c = pool.to_c()
    assert (c.size, c.memory, c.bytes_per_block) == (32, 1, 128)
    assert (c.primary, c.secondary) == (primary.data_ptr(), secondary.data_ptr() + 128)
    assert PoolDesc.of(primary, 128).secondary == 0


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed_table(dtype: torch.dtype) -> None:
    indices = torch.zeros(7, 5, dtype=dtype)
    table = BlockTable.packed(indices[2:])
    assert table.format is BlockTableFormat.PACKED
    assert table.indices == indices[2].data_ptr()
    assert (table.seq_count, table.max_blocks_per_seq, table.indices_count) == (5, 5, 25)
    assert table.num_rows == 5
    c = table.to_c()
    assert (c.size, c.format, c.seq_count, c.beam_width, c.flags) == (64, 1, 5, 1, 0)
    assert c.index_dtype == (6 if dtype is torch.int32 else 7)
    assert c.indptr is None


def test_packed_table_of_lists_is_padded_with_null() -> None:
    table = BlockTable.packed([[3, 1], [7], []])
    assert isinstance(table.owner, np.ndarray)
    assert table.owner.tolist() == [[3, 1], [7, -1], [-1, -1]]
    assert table.indices == table.owner.ctypes.data


@pytest.mark.parametrize("rows", [[], [[]], [[], []]])
def test_packed_table_of_nothing(rows: list[list[int]]) -> None:
    table = BlockTable.packed(rows)
    assert (table.seq_count, table.max_blocks_per_seq) == (len(rows), 1)
    as_arrays = BlockTable.packed([np.array(row, np.int64) for row in rows])
    assert table.owner.tolist() == as_arrays.owner.tolist() == [[2**63 - 1]] * len(rows)


def test_ragged_table() -> None:
    indices, indptr = torch.zeros(9, dtype=torch.int32), torch.tensor([0, 4, 9])
    table = BlockTable.ragged(indices, indptr)
    assert table.format is BlockTableFormat.RAGGED
    assert (table.indices, table.indptr) == (indices.data_ptr(), indptr.data_ptr())
    assert (table.index_dtype, table.indptr_dtype) == (DType.S32, DType.S64)
    assert (table.seq_count, table.indices_count, table.indptr_count) == (2, 9, 3)
    assert BlockTable.ragged([1, 1, 2], [0, 1, 3]).seq_count == 2


def test_kv_offsets_table() -> None:
    indices = torch.zeros(3, 2, 2, 6, dtype=torch.int32)
    table = BlockTable.kv_offsets(indices)
    assert table.format is BlockTableFormat.KV_OFFSETS
    assert (table.seq_count, table.beam_width, table.max_blocks_per_seq) == (3, 2, 6)
    assert (table.indices_count, table.flags, table.num_rows) == (72, 1, 6)


def test_tables_are_taken_as_they_are_or_packed() -> None:
    table = BlockTable.ragged([1], [0, 1])
    assert BlockTable.of(table) is table
    assert BlockTable.of([[1, 2]]).format is BlockTableFormat.PACKED
    lens, slots = SeqLens.of([1]), SlotMapping.of([1])
    assert SeqLens.of(lens) is lens
    assert SlotMapping.of(slots) is slots
    scale = ScaleDesc.of(0.5)
    assert ScaleDesc.of(scale) is scale


def test_slots() -> None:
    slots = torch.arange(10)
    mapping = SlotMapping.of(slots[3:], invalid_slot=99)
    assert (mapping.slots, mapping.token_count) == (slots[3].data_ptr(), 7)
    c = mapping.to_c()
    assert (c.size, c.dtype, c.token_count, c.invalid_slot) == (32, 7, 7, 99)
    part = mapping.part(2, 5)
    assert (part.slots, part.token_count) == (slots[5].data_ptr(), 3)
    assert part.invalid_slot == 99


def test_seq_lens() -> None:
    for lengths in (torch.tensor([3, 0, 5], dtype=torch.int32), np.array([3, 0, 5]), [3, 0, 5]):
        lens = SeqLens.of(lengths)
        assert lens.seq_count == 3
        assert lens.to_numpy().tolist() == [3, 0, 5]
        assert lens.to_c().size == 24
    assert SeqLens.of([]).to_numpy().tolist() == []


def test_lengths_on_a_device_cannot_be_read() -> None:
    device = Producer(data=4096, shape=(2,), dtype=(0, 32), device_type=dlpack.CUDA)
    with pytest.raises(UnsupportedError) as raised:
        SeqLens.of(device).to_numpy()
    assert str(raised.value) == (
        "seq_lens.memory is DEVICE, expected HOST, where it can be read. Pass a copy"
    )


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (
            lambda: BlockTable.packed(torch.zeros(4, 8, dtype=torch.int64)[:, :5]),
            "block_table.indices.stride is (8, 1), expected (5, 1), contiguous. "
            "Pass a contiguous copy",
        ),
        (
            lambda: SlotMapping.of(torch.arange(10)[::2]),
            "slots.stride is (2,), expected (1,), contiguous. Pass a contiguous copy",
        ),
        (lambda: SlotMapping.of(torch.zeros(2, 2)), "slots.ndim is 2, expected 1"),
        (lambda: SeqLens.of(torch.tensor(3)), "seq_lens.ndim is 0, expected 1"),
        (lambda: BlockTable.packed(torch.arange(3)), "block_table.indices.ndim is 1, expected 2"),
        (
            lambda: BlockTable.kv_offsets(torch.zeros(1, 1, 3, 4, dtype=torch.int32)),
            "block_table.indices.shape[2] is 3, expected 2, K and V (KV_OFFSETS, spec 5.1)",
        ),
        (
            lambda: BlockTable.ragged(
                [1], Producer(data=4096, shape=(2,), dtype=(0, 32), device_type=dlpack.CUDA)
            ),
            "block_table.indptr.memory is DEVICE, expected HOST, where block_table.indices is. "
            "Move it there first",
        ),
        (
            lambda: SeqLens.of("12"),
            "seq_lens is '12', expected a tensor of int32 or int64",
        ),
        (
            lambda: SeqLens.of([1, 2**63]),
            "seq_lens[1] is 9223372036854775808, expected an integer of 64 bits",
        ),
        (
            lambda: SlotMapping.of([1.5]),  # type: ignore[list-item]
            "slots[0] is 1.5, expected an integer of 64 bits",
        ),
        (
            lambda: BlockTable.packed([[0], [1.5]]),  # type: ignore[list-item]
            "block_table[1][0] is 1.5, expected an integer of 64 bits",
        ),
    ],
)
def test_tables_that_c_could_not_see_to_be_wrong(make: Any, expected: str) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        make()
    assert str(raised.value).startswith(expected)


def test_lists_live_as_long_as_their_descriptor() -> None:
    """Garbage collection between making a descriptor and using it moves nothing."""
    lens = SeqLens.of(list(range(100_000)))
    gc.collect()
    np.zeros(100_000)
    assert lens.to_numpy().tolist() == list(range(100_000))


def test_scales() -> None:
    one = ScaleDesc.of(0.25)
    assert (one.granularity, one.shape, one.dtype) == (
        ScaleGranularity.PER_TENSOR,
        (),
        DType.F32,
    )
    assert one.to_numpy() == 0.25
    inline = torch.arange(24, dtype=torch.bfloat16).reshape(4, 6)[:, ::3]
    scale = ScaleDesc.of(inline, ScaleGranularity.PER_BLOCK_HEAD)
    assert (scale.data, scale.shape, scale.stride) == (inline.data_ptr(), (4, 2), (6, 3))
    assert scale.to_numpy().tolist() == inline.tolist()
    c = scale.to_c()
    assert (c.size, c.dtype, c.granularity, c.ndim) == (104, 2, 4, 2)
    assert list(c.shape) == [4, 2, 0, 0, 0]
    assert list(c.stride) == [6, 3, 0, 0, 0]


def test_a_tensor_desc_can_be_written_by_hand() -> None:
    """What an adapter does that knows addresses but has no tensor."""
    memory = np.zeros(4096, np.uint8)
    desc = TensorDesc(
        dtype=DType.BF16,
        layout=Layout.BLOCK_NHD,
        memory=Memory.HOST,
        shape=(2, 4, 2, 8),
        stride=(128, 32, 16, 1),
        data=memory.ctypes.data,
        owner=memory,
    )
    assert desc.ndim == 4
    CacheDesc.from_kv(desc).validate()


def test_lengths_are_those_of_the_descriptor_not_of_its_owner() -> None:
    lens = SeqLens.of(torch.tensor([9, 9, 2, 3]))
    part = replace(lens, seq_count=2, lengths=lens.lengths + 16)
    assert part.to_numpy().tolist() == [2, 3]
