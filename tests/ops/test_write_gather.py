"""write_kv and gather_kv on the tensors of every library, their outputs and their refusals.

tests/test_write_gather.py checks what they write, in every layout, dtype and table.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import kvx_core
from kvx_core import (
    BlockTable,
    CacheDesc,
    DType,
    InvalidArgumentError,
    Layout,
    Memory,
    OutOfRangeError,
    ScaleDesc,
    ScaleGranularity,
    SlotMapping,
    UnsupportedError,
    describe,
    gather_kv,
    write_kv,
)
from tests.desc import dlpack
from tests.desc.dlpack import OnlyDLPack, Producer

NUM_BLOCKS, BLOCK_SIZE, HEADS, DIM = 5, 4, 3, 10


def tokens(n: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, HEADS, DIM, generator=generator).to(dtype)


def cache_of(k: Any, v: Any = None, layout: Layout = Layout.BLOCK_NHD) -> CacheDesc:
    return CacheDesc.from_kv(describe(k, layout), None if v is None else describe(v, layout))


def new_cache(dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor, CacheDesc]:
    """A cache full of sevens, K and V halves of one tensor."""
    kv = torch.full((NUM_BLOCKS, BLOCK_SIZE, HEADS, 2 * DIM), 7.0).to(dtype)
    k, v = kv.split(DIM, dim=-1)
    return k, v, cache_of(k, v)


def test_write_touches_the_named_slots_only() -> None:
    k, v, cache = new_cache()
    key, value = tokens(6), tokens(6, seed=1)
    expected_k, expected_v = k.clone(), v.clone()
    for i, slot in enumerate([19, 0, -1, 7, -5]):  # a sixth token is padding
        if slot >= 0:
            expected_k[slot // BLOCK_SIZE, slot % BLOCK_SIZE] = key[i]
            expected_v[slot // BLOCK_SIZE, slot % BLOCK_SIZE] = value[i]
    write_kv(cache, key, value, [19, 0, -1, 7, -5])
    assert torch.equal(k, expected_k)
    assert torch.equal(v, expected_v)


def test_an_invalid_slot_of_its_own_is_skipped() -> None:
    k, v, cache = new_cache()
    before = k.clone()
    write_kv(cache, tokens(2), tokens(2), SlotMapping.of([3, 3], invalid_slot=3))
    assert torch.equal(k, before)
    assert (v == 7).all()


@pytest.mark.parametrize("wrap", [lambda t: t, OnlyDLPack], ids=["torch", "dlpack"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_write_and_gather_torch(wrap: Any, dtype: torch.dtype) -> None:
    k, v = (torch.zeros(NUM_BLOCKS, HEADS, BLOCK_SIZE, DIM, dtype=dtype) for _ in "kv")
    cache = cache_of(wrap(k), wrap(v), Layout.BLOCK_HND)
    key, value = tokens(6, dtype), tokens(6, dtype, seed=1)
    slots = torch.tensor([8, 9, 10, 11, 0, 1], dtype=torch.int32)
    write_kv(cache, wrap(key), wrap(value), wrap(slots))
    out = torch.empty(1, 6, HEADS, DIM, dtype=dtype), torch.empty(6, HEADS, DIM, dtype=dtype)
    table = wrap(torch.tensor([[2, 0]], dtype=torch.int32))
    returned = gather_kv(cache, table, wrap(torch.tensor([6])), out=out)
    assert returned[0] is out[0]
    assert returned[1] is out[1]
    assert torch.equal(out[0][0], key)
    assert torch.equal(out[1], value)


@pytest.mark.parametrize("dtype", ["float16", "float32", ml_dtypes.bfloat16])
def test_write_and_gather_numpy(dtype: Any) -> None:
    k, v = np.zeros((2, NUM_BLOCKS, BLOCK_SIZE, HEADS, DIM), dtype)
    key, value = np.random.default_rng(0).normal(size=(2, 3, HEADS, DIM)).astype(dtype)
    write_kv(cache_of(k, v), key, value, np.array([4, 5, 6]))
    got_k, got_v = gather_kv(cache_of(k, v), np.array([[1]]), np.array([3]))
    assert got_k.dtype == got_v.dtype == np.dtype(dtype)
    assert got_k.shape == (1, 3, HEADS, DIM)
    assert np.array_equal(got_k[0], key)
    assert np.array_equal(got_v[0], value)


def test_new_outputs_are_zero_without_a_source() -> None:
    _, _, cache = new_cache()
    key, value = gather_kv(cache, [[1, -1], [0]], [6, 1], null_block_id=0, zero_fill=True)
    assert isinstance(key, torch.Tensor)
    assert key.shape == value.shape == (2, 6, HEADS, DIM)
    assert key.dtype is torch.bfloat16
    for out in (key, value):
        assert (out[0, :4] == 7).all()
        assert (out[0, 4:] == 0).all()
        assert (out[1] == 0).all()


@pytest.mark.parametrize("numpy", [False, True])
def test_new_outputs_lose_no_tokens(numpy: bool) -> None:
    """A block that a token needs is not taken for zeros unless the table or the call says so."""
    _, _, cache = new_cache()
    if numpy:
        k, v = np.full((2, NUM_BLOCKS, BLOCK_SIZE, HEADS, DIM), 7, np.float32)
        cache = cache_of(k, v)
    table = [[1, -1], [0, 2]]
    for lens, longest in (([6, 8], 8), ([6, 6], 6), ([6, 1], 9)):
        with pytest.raises(OutOfRangeError, match=r"indices\[1\] is -1, a null block"):
            gather_kv(cache, table, lens, max_seq_len=longest)
    with pytest.raises(OutOfRangeError, match="a null block"):
        gather_kv(cache, [[], [2]], [3, 3])  # a row without blocks
    found, _ = gather_kv(cache, BlockTable.packed(table).with_holes(), [6, 8])
    assert (np.asarray(found.tolist())[:, :, 0, 0] != 0).sum(1).tolist() == [4, 8]
    short, _ = gather_kv(cache, table, [3, 6], max_seq_len=9)
    assert (np.asarray(short.tolist())[:, :, 0, 0] != 0).sum(1).tolist() == [3, 6]


def test_given_outputs_keep_what_has_no_source() -> None:
    _, _, cache = new_cache()
    for zero_fill, rest in ((False, 5), (True, 0)):
        out = torch.full((1, 6, HEADS, DIM), 5.0), torch.full((1, 6, HEADS, DIM), 5.0)
        gather_kv(cache, [[1]], [3], out=out, zero_fill=zero_fill)
        for tensor in out:
            assert (tensor[0, :3] == 7).all()
            assert (tensor[0, 3:] == rest).all()


def test_a_sequence_is_cut_to_max_seq_len() -> None:
    _, _, cache = new_cache()
    key, _ = gather_kv(cache, [[1, 2]], [8], max_seq_len=3)
    assert key.shape == (1, 3, HEADS, DIM)


def test_gather_of_nothing() -> None:
    _, _, cache = new_cache()
    assert gather_kv(cache, [[1], [2]], [0, 0])[0].shape == (2, 0, HEADS, DIM)
    assert gather_kv(cache, [], [])[0].shape == (0, 0, HEADS, DIM)


def test_a_list_of_blocks_is_no_ragged_table() -> None:
    """FlashInfer's paged_kv_indices and paged_kv_indptr, with blocks to spare for what comes."""
    _, _, cache = new_cache()
    kv_indices, kv_indptr = [3, 1, 2, 4], [0, 2, 4]  # blocks
    for seq_lens in ([1, 2], [2, 1], [1, 0]):
        with pytest.raises(OutOfRangeError, match="a block id per token, not per block, and none"):
            gather_kv(cache, BlockTable.ragged(kv_indices, kv_indptr), seq_lens)
    with pytest.raises(OutOfRangeError, match="has a block id per token, not per block"):
        gather_kv(cache, BlockTable.ragged(kv_indices, kv_indptr, exact=False), [3, 1])


def test_a_ragged_table_of_more_tokens_than_are_gathered_says_so() -> None:
    _, _, cache = new_cache()
    key, value = tokens(5), tokens(5, seed=1)
    write_kv(cache, key, value, [12, 13, 14, 15, 4])
    indices, indptr = [3, 3, 3, 3, 1, 0], [0, 5, 6]
    found, _ = gather_kv(cache, BlockTable.ragged(indices, indptr), [5, 1], max_seq_len=2)
    assert torch.equal(found[0], key[:2])  # the rest is cut, not left out of the table
    with pytest.raises(OutOfRangeError, match=r"row 0 has 5 entries in gather\.block_table"):
        gather_kv(cache, BlockTable.ragged(indices, indptr), [3, 1])
    found, _ = gather_kv(cache, BlockTable.ragged(indices, indptr, exact=False), [3, 0])
    assert torch.equal(found[0], key[:3])


def test_new_outputs_of_another_dtype() -> None:
    k, _, cache = new_cache()
    key, value = gather_kv(cache, [[1]], [4], dtype="float32")
    assert key.dtype is value.dtype is torch.float32
    assert torch.equal(key[0], k[1].float())


def test_new_outputs_have_the_dtypes_of_k_and_v() -> None:
    k = torch.ones(NUM_BLOCKS, BLOCK_SIZE, HEADS, DIM, dtype=torch.float16)
    v = torch.ones(NUM_BLOCKS, BLOCK_SIZE, HEADS, 2 * DIM)
    key, value = gather_kv(cache_of(k, v), [[1]], [4])
    assert (key.dtype, value.dtype) == (torch.float16, torch.float32)
    assert value.shape == (1, 4, HEADS, 2 * DIM)


def test_a_cache_without_v() -> None:
    k = torch.zeros(NUM_BLOCKS, BLOCK_SIZE, HEADS, DIM)
    key = tokens(1, torch.float32)
    write_kv(cache_of(k), key, None, [2])
    got, value = gather_kv(cache_of(k), [[0]], [3])
    assert value is None
    assert torch.equal(got[0, 2], key[0])


def test_fp8_in_uint8_with_a_scale() -> None:
    k, v = torch.zeros(2, NUM_BLOCKS, BLOCK_SIZE, HEADS, DIM, dtype=torch.uint8)
    cache = CacheDesc.from_kv(
        describe(k, Layout.BLOCK_NHD, dtype=DType.F8_E4M3),
        describe(v, Layout.BLOCK_NHD, dtype=DType.F8_E4M3),
    )
    key = tokens(4, torch.float32)
    write_kv(cache, key, key, [0, 1, 2, 3], k_scale=0.5, v_scale=torch.tensor([0.25]))
    assert torch.equal(
        k[0].view(torch.float8_e4m3fn).float(), (key / 0.5).to(torch.float8_e4m3fn).float()
    )
    got_k, got_v = gather_kv(cache, [[0]], [4], k_scale=0.5, v_scale=0.25, dtype="float32")
    assert torch.equal(got_k[0], k[0].view(torch.float8_e4m3fn).float() * 0.5)
    assert torch.equal(got_v[0], v[0].view(torch.float8_e4m3fn).float() * 0.25)
    stored, _ = gather_kv(cache, [[0]], [4])
    assert stored.dtype is torch.float8_e4m3fn
    assert torch.equal(stored[0].view(torch.uint8), k[0])


def test_scales_of_other_granularity() -> None:
    k = torch.zeros(NUM_BLOCKS, BLOCK_SIZE, HEADS, DIM, dtype=torch.float8_e5m2)
    scales = torch.tensor([0.5, 1.0, 2.0])
    key = tokens(1, torch.float32)
    write_kv(cache_of(k), key, None, [0], k_scale=ScaleDesc.of(scales, ScaleGranularity.PER_HEAD))
    assert torch.equal(k[0, 0].float(), (key[0] / scales[:, None]).to(torch.float8_e5m2).float())


def test_tokens_described_by_hand() -> None:
    """FP8 keys that arrive as uint8."""
    k = torch.zeros(NUM_BLOCKS, BLOCK_SIZE, HEADS, DIM)
    key = tokens(2, torch.float8_e4m3fn)
    desc = describe(key.view(torch.uint8), Layout.BLOCK_CUSTOM, dtype="float8_e4m3fn")
    write_kv(cache_of(k), desc, None, [0, 1])
    assert torch.equal(k[0, :2], key.float())


@pytest.mark.parametrize(
    ("call", "error", "expected"),
    [
        (
            lambda cache: write_kv(cache, tokens(1), tokens(1), [20]),
            OutOfRangeError,
            "write.slots.slots[0] is 20, expected below num_blocks * block_size = 20 (spec 5.2)",
        ),
        (
            lambda cache: write_kv(cache, tokens(1)[:, :2], tokens(1), [0]),
            InvalidArgumentError,
            "write.io.key.shape[1] is 2, expected num_kv_heads 3 (spec 6.8)",
        ),
        (
            lambda cache: write_kv(cache, tokens(1), None, [0]),
            InvalidArgumentError,
            "write.io.value",
        ),
        (
            lambda cache: write_kv(cache, tokens(1), tokens(1), [0, 1]),
            InvalidArgumentError,
            "write.io.key.shape[0] is 1, expected at least num_tokens 2 (spec 6.8)",
        ),
        (
            lambda cache: write_kv(cache, tokens(1), tokens(1), [0], k_scale=0.5),
            InvalidArgumentError,
            "write.k_scale_desc is given, but cache.k.dtype is BF16",
        ),
        (
            lambda cache: gather_kv(cache, [[5]], [1]),
            OutOfRangeError,
            "gather.block_table.indices[0] is 5, expected below num_blocks 5 (spec 5.1)",
        ),
        (
            lambda cache: gather_kv(cache, [[1]], [1, 1]),
            InvalidArgumentError,
            "gather.seq_lens.seq_count is 2, expected block_table.seq_count 1 (spec 5.3)",
        ),
        (
            lambda cache: gather_kv(cache, [[1]], [1], out=(tokens(1), tokens(1)), dtype="float16"),
            InvalidArgumentError,
            "dtype is 'float16', expected None with out, whose tensors have dtypes of their own",
        ),
        (
            lambda cache: gather_kv(cache, [[1]], [1], k_scale=1.0),
            InvalidArgumentError,
            "dtype is None, expected the dtype to convert to, since scales are given and the "
            "outputs have none",
        ),
        (
            lambda cache: gather_kv(cache, [[1]], [1], max_seq_len=-1),
            InvalidArgumentError,
            "max_seq_len is -1, expected 0 to 4294967295",
        ),
        (
            lambda cache: write_kv(
                cache,
                tokens(1),
                tokens(1),
                Producer(data=4096, shape=(1,), dtype=(0, 64), device_type=dlpack.CUDA),
            ),
            InvalidArgumentError,
            "slots.memory is DEVICE, expected HOST, where cache.k is. Move it there first",
        ),
    ],
)
def test_refused_and_nothing_written(call: Any, error: type[Exception], expected: str) -> None:
    k, v, cache = new_cache()
    with pytest.raises(error) as raised:
        call(cache)
    assert str(raised.value).startswith(expected)
    assert (k == 7).all()
    assert (v == 7).all()


def test_a_cache_on_a_device_needs_cuda() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    k = Producer(data=1 << 20, shape=(2, 4, 3, 10), device_type=dlpack.CUDA)
    with pytest.raises(UnsupportedError) as raised:
        write_kv(cache_of(k), tokens(0), None, [])
    assert str(raised.value).startswith(
        "cache.k.memory is DEVICE, but no CUDA device can be used here: "
        if kvx_core.backend_info().has_cuda
        else "libkvx was built without CUDA; cache.k.memory is DEVICE. Rebuild with nvcc on PATH"
    )


def test_read_only_scales_are_not_found() -> None:
    k = torch.zeros(2, 4, 3, 8, dtype=torch.float8_e4m3fn)
    scales = np.zeros((2, 4, 3), np.float32)
    scales.flags.writeable = False
    found = ScaleDesc.of(scales, ScaleGranularity.PER_TOKEN_HEAD)
    cache = CacheDesc.from_kv(describe(k, Layout.BLOCK_NHD))
    with pytest.raises(InvalidArgumentError, match="k_scale is read-only memory"):
        write_kv(cache, torch.ones(1, 3, 8), None, [0], k_scale=found, find_scales=True)
    assert not scales.any()


def test_read_only_memory_is_never_written() -> None:
    k = np.zeros((NUM_BLOCKS, BLOCK_SIZE, HEADS, DIM), np.float32)
    cache = cache_of(k)
    k.setflags(write=False)
    with pytest.raises(InvalidArgumentError) as raised:
        write_kv(cache_of(k), tokens(1), None, [0])
    assert (
        str(raised.value) == "cache.k is read-only memory, expected writable. Pass a writable copy"
    )
    out = np.zeros((1, 2, HEADS, DIM), np.float32)
    out.setflags(write=False)
    with pytest.raises(InvalidArgumentError, match="key is read-only memory"):
        gather_kv(cache, [[0]], [2], out=(out, None))
    assert not out.any()
    read, _ = gather_kv(cache_of(k), [[0]], [2])  # as a source it is welcome
    assert not read.any()


def test_outputs_beside_memory_of_another_library_have_to_be_given() -> None:
    k = OnlyDLPack(torch.zeros(NUM_BLOCKS, BLOCK_SIZE, HEADS, DIM))
    with pytest.raises(UnsupportedError) as raised:
        gather_kv(cache_of(k), [[0]], [2])
    assert str(raised.value) == (
        "the cache's memory belongs to a OnlyDLPack, expected a torch.Tensor or a numpy.ndarray to "
        "allocate beside it. Pass out=(key, value)"
    )


def test_unified_memory_is_used_where_the_call_runs() -> None:
    _, _, cache = new_cache()
    managed = replace(cache.k, memory=Memory.UNIFIED)
    cache = CacheDesc.from_kv(managed, replace(cache.v, memory=Memory.UNIFIED))
    out = torch.zeros(1, 2, HEADS, DIM, dtype=torch.bfloat16)
    gather_kv(cache, BlockTable.packed([[1]]), [2], out=(out, out.clone()))
    assert (out == 7).all()


def test_indices_lie_where_the_key_takes_the_call() -> None:
    """A key on a device takes the call there, and slots that the host could read are refused."""
    _, _, cache = new_cache()
    key = Producer(data=4096, shape=(1, HEADS, DIM), device_type=dlpack.CUDA)
    row = Producer(data=4096, shape=(1, 1, HEADS, DIM), device_type=dlpack.CUDA)
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match=r"slots\.memory is HOST, expected DEV"):
            write_kv(cache, key, key, torch.tensor([1]))
        with pytest.raises(InvalidArgumentError, match=r"block_table\.memory is HOST, exp"):
            gather_kv(cache, torch.tensor([[1]]), torch.tensor([1]), out=(row, row))


def test_options_that_are_given_as_they_are_by_default_are_none() -> None:
    """A call keeps no more than one bound call for them; what equals a default is checked still."""
    _, _, cache = new_cache()
    out = tuple(torch.zeros(1, 2, HEADS, DIM) for _ in range(2))
    usual: dict[str, Any] = {"k_scale": None, "v_scale": None, "transfer": kvx_core.Transfer.KERNEL}
    token = torch.ones(1, HEADS, DIM)
    for _ in range(2):
        write_kv(cache, token, token, torch.tensor([3]))
        write_kv(cache, token, token, torch.tensor([3]), find_scales=False, stream=None, **usual)
        gather_kv(cache, torch.tensor([[0]]), torch.tensor([2]), out=out)
        gather_kv(cache, [[0]], [2], out=out, zero_fill=False, null_block_id=-1, **usual)
        assert len(cache.bound_calls.calls) == 2
        with pytest.raises(InvalidArgumentError, match="find_scales is 0, expected True or False"):
            write_kv(cache, token, token, [3], find_scales=0)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="null_block"):
            gather_kv(cache, [[0]], [2], out=out, null_block=0)  # type: ignore[call-overload]
    holed = BlockTable.packed(torch.tensor([[0]])).with_holes()
    for null in range(40):
        out[0].zero_()
        gather_kv(cache, holed, torch.tensor([2]), out=out, null_block_id=null)
        assert bool(out[0].any()) is (null != 0)
        assert len(cache.bound_calls.calls) <= 16
    gather_kv(
        cache, torch.tensor([[0]]), torch.tensor([2]), out=out, null_block_id=0, zero_fill=True
    )
    assert not out[0].any()


@pytest.mark.parametrize("max_seq_len", [None, 3])
def test_max_seq_len_beside_tensors_of_any_kind(max_seq_len: int | None) -> None:
    """Whether C reads them or not: the first rows of the sequence, the rest left alone."""
    _, _, cache = new_cache()
    token = torch.arange(8.0).view(8, 1, 1).expand(8, HEADS, DIM)
    write_kv(cache, token, -token, torch.arange(8))
    kinds: list[Any] = [torch.tensor, np.array, list]
    for table, lens in itertools.product(kinds, kinds):
        out = torch.full((2, 1, 3, HEADS, DIM), 9.0)
        gather_kv(cache, table([[0]]), lens([2]), max_seq_len=max_seq_len, out=tuple(out.unbind(0)))
        assert out[0, 0, :, 0, 0].tolist() == [0, 1, 9]
        assert out[1, 0, :, 0, 0].tolist() == [0, -1, 9]
        with pytest.raises(InvalidArgumentError, match=r"shape\[1\] is 3, expected max_seq_len 2"):
            gather_kv(cache, table([[0]]), lens([2]), max_seq_len=2, out=tuple(out.unbind(0)))


def test_a_length_that_no_table_holds_takes_no_memory() -> None:
    """Words are those of a call with `out`; the first length that is wrong is named."""
    _, _, cache = new_cache()
    for lengths, reason in (
        ([8, 10**12], "row 1 needs tokens [0, 0 + 1000000000000), but gather.block_table holds 8"),
        ([9, -1], "row 0 needs tokens [0, 0 + 9), but gather.block_table holds 8 per row"),
        ([-3, 0], "gather.seq_lens.lengths[0] is -3, expected at least 0"),
    ):
        with pytest.raises(OutOfRangeError) as raised:
            gather_kv(cache, [[3, 1], [0, 2]], lengths)
        assert str(raised.value).startswith(reason)
    out = torch.zeros(2, 20, HEADS, DIM, dtype=torch.bfloat16)
    with pytest.raises(OutOfRangeError, match=r"row 0 needs tokens \[0, 0 \+ 9\), but gather"):
        gather_kv(cache, [[3, 1], [0, 2]], [9, 0], out=(out, out.clone()))
