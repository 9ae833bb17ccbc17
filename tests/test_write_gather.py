"""kvx_write_kv and kvx_gather_kv against the reference, byte for byte.

Every test works on whole allocations of random bytes: stored tokens must be exact, and all other
bytes unchanged.
"""

from __future__ import annotations

import math
import mmap
import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvx_core._c import abi
from kvx_core.errors import InvalidArgumentError, OutOfRangeError
from kvx_core.types import Layout, Memory, ScaleGranularity
from tests import reference, tables
from tests.caches import (
    DTYPES,
    LAYOUTS,
    Allocation,
    Cache,
    Geometry,
    assert_same_bytes,
    assert_same_elements,
    mixed,
    random_values,
)
from tests.calls import BACKENDS, CPU, Backend
from tests.reference import Half, KvOffsets, Layer, Packed, Ragged
from tests.token_calls import (
    CASES,
    GEOMETRIES,
    check_gather,
    check_write,
    key_value,
    output,
    outputs,
)

# --- write ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layout", "geometry"), CASES)
def test_write_every_layout_and_geometry(backend: Backend, layout: str, geometry: str) -> None:
    for seed, dtype in enumerate((torch.bfloat16, torch.float32, torch.float8_e4m3fn)):
        cache = LAYOUTS[layout](GEOMETRIES[geometry], dtype, seed)
        slots = tables.slots(cache, 23, seed, dtype=(torch.int64, torch.int32)[seed % 2])
        tokens = key_value(cache.layers[-1], len(slots), dtype, seed)
        check_write(backend, cache, tokens, slots)


@pytest.mark.parametrize("io_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["nhd", "tgi", "vllm_BHLNC", "custom_packed"])
def test_write_converts(
    backend: Backend, layout: str, dtype: torch.dtype, io_dtype: torch.dtype
) -> None:
    for geometry in (Geometry(), GEOMETRIES["odd"]):
        cache = LAYOUTS[layout](geometry, dtype, seed=1)
        slots = tables.slots(cache, 13, seed=2)
        check_write(backend, cache, key_value(cache.layers[-1], 13, io_dtype, 3), slots)


@pytest.mark.parametrize("count", [1, 9])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("heads", "dim"), [(1, 24), (5, 264), (8, 128), (3, 2)])
@pytest.mark.parametrize("layout", ["nhd", "hnd", "mla"])
def test_write_tokens_narrower_and_wider_than_a_block_of_threads(
    backend: Backend, layout: str, heads: int, dim: int, index_dtype: torch.dtype, count: int
) -> None:
    """3 to 165 vectors of 16 bytes, or vectors of 4."""
    sizes = Geometry(num_blocks=4, block_size=3, num_kv_heads=heads, head_dim=dim)
    cache = LAYOUTS[layout](sizes, torch.bfloat16, 1)
    slots = tables.slots(cache, count, seed=2, dtype=index_dtype)
    check_write(backend, cache, key_value(cache.layers[-1], count, torch.bfloat16, 3), slots)


def test_write_k_and_v_of_different_dtypes(backend: Backend) -> None:
    cache = mixed(Geometry(), torch.bfloat16, seed=1, v_dtype=torch.float8_e5m2)
    slots = tables.slots(cache, 9, seed=2)
    key = random_values((9, 2, 16), torch.float16, seed=3)
    value = random_values((9, 2, 16), torch.float32, seed=4)
    check_write(backend, cache, [key, value], slots)


def test_write_opaque_rows(backend: Backend) -> None:
    for layout in ("nhd", "packed8", "custom_dim_outermost"):
        cache = LAYOUTS[layout](Geometry(head_dim=34), torch.uint8, seed=1)
        slots = tables.slots(cache, 12, seed=2)
        check_write(backend, cache, key_value(cache.layers[-1], 12, torch.uint8, 3), slots)


def test_write_keys_of_any_strides(backend: Backend) -> None:
    """Keys as engines hold them: slices of a fused qkv, padded, expanded over heads, transposed."""
    cache = LAYOUTS["hnd"](Geometry(), torch.bfloat16, seed=1)
    slots = tables.slots(cache, 10, seed=2)
    qkv = random_values((10, 4 * 16 + 2 * 16 + 2 * 16), torch.bfloat16, seed=3)
    key, value = (t.unflatten(1, (2, 16)) for t in qkv.split((64, 32, 32), dim=1)[1:])
    check_write(backend, cache, [key, value], slots)
    padded = random_values((17, 2, 16), torch.bfloat16, seed=4)
    check_write(backend, cache, [padded, value], slots)
    latent = random_values((10, 1, 16), torch.bfloat16, seed=5).expand(10, 2, 16)
    check_write(backend, cache, [latent, padded], slots)
    one_token = random_values((1, 2, 16), torch.bfloat16, seed=6).expand(10, 2, 16)
    transposed = random_values((16, 10, 2), torch.bfloat16, seed=7).permute(1, 2, 0)
    check_write(backend, cache, [one_token, transposed], slots)


def test_write_packed_tokens_into_packed_halves(backend: Backend) -> None:
    """K | V rows on both sides, where one copy could move both."""
    for dtype in (torch.bfloat16, torch.uint8):
        cache = LAYOUTS["vllm_LBNHC"](Geometry(), dtype, seed=1)
        slots = tables.slots(cache, 15, seed=2)
        both = random_values((15, 2, 32), dtype, seed=3)
        check_write(backend, cache, list(both.split(16, dim=-1)), slots)
        swapped = both.split(16, dim=-1)[::-1]
        check_write(backend, cache, list(swapped), slots)


def test_write_nothing(backend: Backend) -> None:
    cache = LAYOUTS["nhd"](Geometry(), torch.float16, seed=1)
    tokens = key_value(cache.layers[-1], 6, torch.float16, seed=2)
    check_write(backend, cache, tokens, torch.full((6,), -1))  # all skipped
    check_write(backend, cache, tokens, torch.empty(0, dtype=torch.int64))  # zero tokens
    check_write(backend, cache, [t[:0] for t in tokens], torch.empty(0, dtype=torch.int32))


@pytest.mark.parametrize("invalid_slot", [-1, -100, 7, 1 << 40])
def test_write_skips_the_invalid_slot(backend: Backend, invalid_slot: int) -> None:
    cache = LAYOUTS["nhd"](Geometry(), torch.float16, seed=1)
    slots = tables.slots(cache, 19, seed=2, skipped=0.5, invalid_slot=invalid_slot)
    assert (slots == invalid_slot).any()
    check_write(
        backend, cache, key_value(cache.layers[-1], 19, torch.float16, 3), slots, invalid_slot
    )


def test_write_the_same_slot_twice_is_refused_or_harms_nothing_else(backend: Backend) -> None:
    """The host refuses it; a device does not compare slots."""
    cache = LAYOUTS["vllm_LBHNC"](Geometry(), torch.float16, seed=1)
    tokens = key_value(cache.layers[-1], 3, torch.float16, seed=2)
    expected = cache.clone()
    reference.write(expected.layers[-1], *tokens, torch.tensor([4, 9, 9]))
    if backend.looks_first:
        before = cache.clone()
        with pytest.raises(InvalidArgumentError, match="has slot 9 twice, for tokens 1 and 2 of"):
            backend.write(cache.layers[-1], *tokens, torch.tensor([4, 9, 9]))
        return assert_same_bytes(cache, before)
    backend.write(cache.layers[-1], *tokens, torch.tensor([4, 9, 9]))
    for written in (cache, expected):  # slot 9 itself is unspecified
        for half in written.layers[-1].halves():
            half.put(reference.Place(9 // 4, 9 % 4), torch.zeros(2, 16, dtype=torch.float16))
    assert_same_bytes(cache, expected)


def test_write_with_the_v1_scale_pointers(backend: Backend) -> None:
    """kvx_write_desc_t.k_scale is one F32 for all of K when k_scale_desc has no data."""
    cache = LAYOUTS["nhd"](Geometry(), torch.float8_e4m3fn, seed=1)
    tokens = key_value(cache.layers[-1], 5, torch.bfloat16, seed=2)
    slots = tables.slots(cache, 5, seed=3)
    scales = torch.tensor([0.5, 3.0])
    one = ScaleGranularity.PER_TENSOR
    scaled = cache.with_scales(lambda half, name: (scales["kv".index(name)], one))
    expected = scaled.clone()
    reference.write(expected.layers[-1], *tokens, slots)
    write = abi.kvx_write_desc_t(
        io=backend.io(*tokens, 5),
        slots=backend.slots(slots),
        k_scale=backend.address(scales),
        v_scale=backend.address(scales) + 4,
    )
    backend.call("kvx_write_kv", backend.layer(cache.layers[-1]), write)
    assert_same_bytes(cache, expected)


# --- gather -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("layout", "geometry"), CASES)
def test_gather_every_layout_and_geometry(backend: Backend, layout: str, geometry: str) -> None:
    for seed, dtype in enumerate((torch.bfloat16, torch.float32, torch.float8_e4m3fn)):
        cache = LAYOUTS[layout](GEOMETRIES[geometry], dtype, seed)
        lengths = torch.tensor([9, 0, 1, 5, 2 * cache.block_size])
        make = (tables.packed, tables.ragged)[seed % 2]
        end = make(cache, lengths.tolist(), seed, dtype=(torch.int32, torch.int64)[seed % 2])
        check_gather(backend, cache, end, lengths, max_seq_len=int(lengths.max()))


@pytest.mark.parametrize("io_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["nhd", "tgi", "vllm_BHLNC", "custom_packed"])
def test_gather_converts(
    backend: Backend, layout: str, dtype: torch.dtype, io_dtype: torch.dtype
) -> None:
    for geometry in (Geometry(), GEOMETRIES["odd"]):
        cache = LAYOUTS[layout](geometry, dtype, seed=1).fill(seed=2)
        end = tables.packed(cache, [7, 3], seed=3)
        check_gather(backend, cache, end, torch.tensor([7, 3]), 7, dtype=io_dtype)


def test_gather_opaque_rows(backend: Backend) -> None:
    for layout in ("nhd", "packed8", "vllm_LBNHC"):
        cache = LAYOUTS[layout](Geometry(head_dim=34), torch.uint8, seed=1)
        end = tables.packed(cache, [7, 3], seed=3)
        check_gather(backend, cache, end, torch.tensor([7, 3]), 8)


@pytest.mark.parametrize("zero_fill", [False, True])
@pytest.mark.parametrize("style", ["dense", "strided", "transposed"])
@pytest.mark.parametrize("layout", ["nhd", "tgi", "vllm_LBNHC"])
def test_gather_into_any_strides(
    backend: Backend, layout: str, style: str, zero_fill: bool
) -> None:
    cache = LAYOUTS[layout](Geometry(), torch.float16, seed=1).fill(seed=3)
    lengths = torch.tensor([6, 11, 0], dtype=torch.int32)
    end = tables.packed(cache, lengths.tolist(), seed=2, nulls=0.3)
    check_gather(backend, cache, end, lengths, 12, style=style, zero_fill=zero_fill)
    check_gather(backend, cache, end, lengths, 12, dtype=torch.float32, style=style)


def test_gather_into_3d(backend: Backend) -> None:
    cache = LAYOUTS["hnd"](Geometry(), torch.float16, seed=1)
    end = tables.packed(cache, [6, 11], seed=2)
    check_gather(backend, cache, end, torch.tensor([6, 11]), 12, flat=True)
    check_gather(backend, cache, end, torch.tensor([6, 11]), 12, flat=True, zero_fill=True)


def test_gather_packed_halves_into_packed_halves(backend: Backend) -> None:
    """K | V rows on both sides, where one copy could move both."""
    cache = LAYOUTS["vllm_LBNHC"](Geometry(), torch.bfloat16, seed=1)
    end = tables.packed(cache, [6, 11], seed=2, nulls=0.2)
    memory = Allocation(2 * 11 * 2 * 32 * 2, seed=3)
    both = memory.take((2, 11, 2, 32), torch.bfloat16)
    key, value = both.split(16, dim=-1)
    halves = (Half(key, Layout.BLOCK_CUSTOM), Half(value, Layout.BLOCK_CUSTOM))
    result = Cache((memory.storage,), (Layer(*halves),))
    expected = result.clone()
    for zero_fill in (False, True):
        reference.gather(cache.layers[1], end, [6, 11], *outputs(expected), zero_fill=zero_fill)
        backend.gather(
            cache.layers[1],
            end,
            torch.tensor([6, 11]),
            key,
            value,
            max_seq_len=11,
            zero_fill=zero_fill,
        )
        assert_same_bytes(result, expected)


@pytest.mark.parametrize("make", [tables.packed, tables.ragged], ids=["packed", "ragged"])
@pytest.mark.parametrize("null_block_id", [-1, 0, 1])
@pytest.mark.parametrize("zero_fill", [False, True])
@pytest.mark.parametrize("layout", ["nhd", "hnd", "tgi"])
def test_gather_never_reads_null_blocks(
    backend: Backend, layout: str, make, null_block_id: int, zero_fill: bool
) -> None:
    for dtype, io_dtype in ((torch.float16, torch.float16), (torch.float8_e5m2, torch.bfloat16)):
        cache = LAYOUTS[layout](Geometry(), dtype, seed=1).fill(seed=2)
        lengths = torch.tensor([9, 4, 16, 0])
        end = make(cache, lengths.tolist(), seed=3, nulls=0.4, null_block_id=null_block_id)
        check_gather(backend, cache, end, lengths, 17, dtype=io_dtype, zero_fill=zero_fill)


def test_a_null_block_id_need_not_be_a_block(backend: Backend) -> None:
    cache = LAYOUTS["nhd"](Geometry(), torch.float16, seed=1)
    end = Packed(torch.tensor([[1, 999, 2], [999, 4, tables.POISON]]), 4, null_block_id=999)
    check_gather(backend, cache, end, torch.tensor([11, 7]), 12, zero_fill=True)
    pool = LAYOUTS["tensorrt_llm"](Geometry(), torch.float16, seed=1)
    offsets = tables.kv_offsets(pool, [11, 7], seed=2)
    offsets.indices[0, 0, :, 1] = torch.tensor([999 * 4, 999 * 4 + 1])
    check_gather(backend, pool, replace(offsets, null_block_id=999), torch.tensor([11, 7]), 12)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("length_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("make", [tables.packed, tables.ragged], ids=["packed", "ragged"])
def test_gather_index_and_length_dtypes(
    backend: Backend, make, index_dtype: torch.dtype, length_dtype: torch.dtype
) -> None:
    cache = LAYOUTS["nhd"](Geometry(), torch.float16, seed=1)
    lengths = torch.tensor([9, 4, 0, 1], dtype=length_dtype)
    end = make(cache, lengths.tolist(), seed=3, dtype=index_dtype)
    check_gather(backend, cache, end, lengths, 9)


def test_gather_cuts_at_max_seq_len(backend: Backend) -> None:
    cache = LAYOUTS["nhd"](Geometry(), torch.float16, seed=1)
    lengths = torch.tensor([9, 4, 15, 5])
    for make in (tables.packed, tables.ragged):
        end = make(cache, lengths.tolist(), seed=3)
        for max_seq_len in (1, 4, 5, 14):
            check_gather(backend, cache, end, lengths, max_seq_len, zero_fill=True)


def test_gather_nothing(backend: Backend) -> None:
    cache = LAYOUTS["nhd"](Geometry(), torch.float16, seed=1)
    end = tables.packed(cache, [4, 3], seed=2)
    check_gather(backend, cache, end, torch.tensor([0, 0]), 4)
    check_gather(backend, cache, end, torch.tensor([4, 3]), 0)
    none = Packed(torch.empty(0, 3, dtype=torch.int32), cache.block_size)
    check_gather(backend, cache, none, torch.empty(0, dtype=torch.int32), 4)
    empty = Ragged(torch.empty(0, dtype=torch.int32), torch.tensor([0]), cache.block_size)
    check_gather(backend, cache, empty, torch.empty(0, dtype=torch.int32), 4)


@pytest.mark.parametrize("zero_fill", [False, True])
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("block_size", [1, 4, 32])
def test_gather_kv_offsets(backend: Backend, block_size: int, beams: int, zero_fill: bool) -> None:
    """Both pools, nulls, beams that share a length, K and V in different blocks."""
    for seed, num_layers in enumerate((1, 2, 5)):
        g = Geometry(block_size=block_size, num_layers=num_layers)
        cache = LAYOUTS["tensorrt_llm"](g, torch.bfloat16, seed).fill(seed)
        lengths = torch.tensor([9, 1, 0, 2 * block_size])
        end = tables.kv_offsets(cache, lengths.tolist(), seed, beams=beams, nulls=0.2)
        assert (end.indices < -1).any(), "the secondary pool is used"
        check_gather(backend, cache, end, lengths, int(lengths.max()), zero_fill=zero_fill)
        check_gather(backend, cache, end, lengths, 5, dtype=torch.float32)


def test_gather_kv_offsets_without_secondary_pool(backend: Backend) -> None:
    cache = LAYOUTS["tensorrt_llm"](Geometry(), torch.bfloat16, seed=1)
    layers = tuple(
        Layer(*(replace(half, secondary=None) for half in layer.halves())) for layer in cache.layers
    )
    cache = replace(cache, layers=layers, storages=cache.storages[:1])
    end = tables.kv_offsets(cache, [9, 4], seed=2, secondary=False)
    check_gather(backend, cache, end, torch.tensor([9, 4]), 9)


def test_gather_kv_offsets_of_keys_alone(backend: Backend) -> None:
    """MLA: K only, one sub-block per layer; the table still has two rows, and V's is not read."""
    pool = Allocation(5 * 3 * 4 * 24 * 2, seed=1)
    stored = pool.take((5, 3, 1, 4, 24), torch.bfloat16)  # block, layer, head, token, dim
    layers = tuple(Layer(Half(stored[:, layer], Layout.BLOCK_HND), None) for layer in range(3))
    cache = Cache((pool.storage,), layers, sub_blocks=3, bytes_per_block=4 * 24 * 2)
    indices = torch.full((2, 1, 2, 3), tables.POISON, dtype=torch.int32)
    indices[:, :, 0] = torch.tensor([[4 * 3, 0, 2 * 3], [1 * 3, -1, 3 * 3]])[:, None]
    end = KvOffsets(indices, 4, 3)
    check_gather(backend, cache, end, torch.tensor([10, 11]), 12, zero_fill=True)


# --- out of range -----------------------------------------------------------------------------


def refused_write(
    backend: Backend, cache: Cache, tokens: list[Tensor], slots: Tensor, at: int, message: str
) -> None:
    """Slot `at` is refused with `message`. The host writes nothing, a device the other tokens."""
    expected = cache.clone()
    if not backend.looks_first:
        others = slots.clone()
        others[at] = -1
        reference.write(expected.layers[-1], *tokens, others)
    with pytest.raises(OutOfRangeError, match=message):
        backend.write(cache.layers[-1], *tokens, slots)
    assert_same_bytes(cache, expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("slot", [20, 21, 2**31 - 1])
@pytest.mark.parametrize("at", [0, 7, 15])
def test_a_slot_out_of_range(backend: Backend, at: int, slot: int, dtype: torch.dtype) -> None:
    cache = LAYOUTS["vllm_LBNHC"](Geometry(), torch.bfloat16, seed=1)  # 5 blocks of 4
    tokens = key_value(cache.layers[-1], 16, torch.bfloat16, seed=2)
    slots = tables.slots(cache, 16, seed=3, dtype=dtype)
    slots[at] = slot
    message = rf"write\.slots\.slots\[{at}\] is {slot}\b.*\b20\b"
    refused_write(backend, cache, tokens, slots, at, message)


def test_a_slot_beyond_32_bits_is_out_of_range(backend: Backend) -> None:
    """4 + 2^32 is slot 4 for whoever looks at 32 bits."""
    cache = LAYOUTS["nhd"](Geometry(), torch.bfloat16, seed=1)
    tokens = key_value(cache.layers[-1], 2, torch.bfloat16, seed=2)
    for slot in (4 + (1 << 32), (1 << 63) - 1):
        message = re.escape(f"[1] is {slot}")
        refused_write(backend, cache, tokens, torch.tensor([0, slot]), 1, message)


def refused_gather(
    backend: Backend,
    cache: Cache,
    end: Packed | Ragged | KvOffsets,
    lengths: list[int],
    message: str,
    error: type[Exception] = OutOfRangeError,
    *,
    sound: Packed | Ragged | KvOffsets | None = None,
    sound_lengths: list[int] | None = None,
) -> None:
    """The gather is refused with `message`. The host writes nothing. A device gathers the tokens
    that lie where `sound`, the table before it was broken, has them, as far as sound_lengths go.
    """
    layer = cache.layers[-1]
    lens = torch.tensor(lengths)
    beams = end.indices.shape[1] if isinstance(end, KvOffsets) else 1
    for zero_fill in (False, True):
        result = output(layer, len(lengths) * beams, 16, torch.bfloat16, "dense")
        expected = result.clone()
        if not backend.looks_first:
            wanted, good = (
                [n for n in some for _ in range(beams)]
                for some in (lengths, sound_lengths or lengths)
            )
            reference.gather(layer, sound or end, good, *outputs(expected), zero_fill)
            for kv, (out, before) in enumerate(
                zip(outputs(expected), outputs(result), strict=True)
            ):
                for row, token in product(range(len(good)), range(16)):
                    # Nothing of a row whose length is negative is looked at.
                    late = good[row] <= token and (token < wanted[row] or wanted[row] < 0)
                    if late or (
                        token < good[row]
                        and sound
                        and sound.place(row, token, kv) != end.place(row, token, kv)
                    ):
                        out[row, token] = before[row, token]
        key, value = outputs(result)
        with pytest.raises(error, match=message):
            backend.gather(
                layer,
                end,
                lens,
                key,
                value,
                max_seq_len=16,
                zero_fill=zero_fill,
                bytes_per_block=cache.bytes_per_block,
                secondary_num_blocks=0 if layer.k.secondary is None else 7,
            )
        assert_same_bytes(result, expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_a_block_out_of_range(backend: Backend, dtype: torch.dtype) -> None:
    cache = LAYOUTS["hnd"](Geometry(), torch.bfloat16, seed=1)  # 5 blocks of 4
    values = [5, 2**31 - 1] + ([2 + (1 << 32)] if dtype == torch.int64 else [])
    for block in values:
        packed = tables.packed(cache, [9, 11], seed=2, dtype=dtype)
        ragged = tables.ragged(cache, [9, 11], seed=2, dtype=dtype)
        for end, at in ((packed, (1, 2)), (ragged, (int(ragged.indptr[1]) + 10,))):
            refused_gather(
                backend, cache, tables.with_entry(end, at, block), [9, 11], rf"{block}\b.*\b5\b",
                sound=end,
            )  # fmt: skip


def test_lengths_out_of_range(backend: Backend) -> None:
    cache = LAYOUTS["nhd"](Geometry(), torch.bfloat16, seed=1)
    end = Packed(torch.zeros(2, 3, dtype=torch.int32), cache.block_size)  # 12 tokens each
    per_token = Ragged(torch.zeros(9, dtype=torch.int32), torch.tensor([0, 4, 9]), 4)
    for table, lengths, kept, message in (
        (end, [4, -1], [4, 0], r"seq_lens\.lengths\[1\] is -1\b"),
        (end, [-(1 << 40), 3], [0, 3], r"lengths\[0\] is -1099511627776\b"),
        (end, [13, 3], [12, 3], r"row 0 needs tokens .* 13\), .* holds 12 "),
        (end, [3, 1 << 32], [3, 12], r"row 1 needs tokens .* 16\), .* holds 12 "),
        (per_token, [4, 6], [4, 5], r"row 1 needs tokens .* 6\), .* holds 5 "),
    ):
        refused_gather(backend, cache, table, lengths, message, sound_lengths=kept)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    ("indptr", "message"),
    [
        ([1, 4, 9], r"indptr\[0\] is 1\b.*\b0\b"),
        ([0, 6, 5, 9], r"indptr\[2\] is 5\b.*\b6\b"),
        ([0, 4, 8], r"indptr\[2\] is 8\b.*\b9\b"),
        ([0, 4, 10], r"indptr\[2\] is 10\b.*\b9\b"),
        ([0, -4, 9], r"indptr\[1\] is -4\b.*\b0\b"),
    ],
)
def test_indptr_out_of_order(
    backend: Backend, indptr: list[int], message: str, dtype: torch.dtype
) -> None:
    cache = LAYOUTS["nhd"](Geometry(), torch.bfloat16, seed=1)
    end = Ragged(torch.zeros(9, dtype=torch.int32), torch.tensor(indptr, dtype=dtype), 4)
    lengths = [0] * (len(indptr) - 1)
    refused_gather(backend, cache, end, lengths, message, InvalidArgumentError)


@pytest.mark.parametrize(
    ("kv", "index", "message"),
    [
        (0, 5 * 4, r"20\b"),  # past the 5 blocks of 4 sub-blocks in the primary pool
        (1, 5 * 4 + 1, r"21\b"),
        (0, 7 * 4 - (1 << 31), r"28\b"),  # past the 7 blocks of the secondary pool
        (0, 1, r"\b1\b"),  # V's sub-block in K's row
        (1, 4, r"\b4\b"),  # K's sub-block in V's row
        (1, 4 + 3, r"\b7\b"),  # V of the other layer
        (0, 0x7FFF_FFFF, r"2147483647\b"),  # TensorRT-LLM's "unset"
        (0, -2, r"secondary"),  # secondary, 0x7ffffffe
    ],
)
def test_kv_offsets_out_of_range(backend: Backend, kv: int, index: int, message: str) -> None:
    cache = LAYOUTS["tensorrt_llm"](Geometry(), torch.bfloat16, seed=1)
    end = tables.kv_offsets(cache, [9, 11], seed=2)
    at = (1, 0, kv, 2)
    refused_gather(
        backend, cache, tables.with_entry(end, at, index), [9, 11], message,
        sound=end,
    )  # fmt: skip


def test_a_secondary_index_without_a_secondary_pool_is_out_of_range(backend: Backend) -> None:
    cache = LAYOUTS["tensorrt_llm"](Geometry(), torch.bfloat16, seed=1)
    layers = tuple(
        Layer(*(replace(half, secondary=None) for half in layer.halves())) for layer in cache.layers
    )
    cache = replace(cache, layers=layers)
    end = tables.kv_offsets(cache, [9, 11], seed=2, secondary=False)
    at = (0, 0, 1, 1)
    refused_gather(
        backend, cache, tables.with_entry(end, at, (2 * 4 + 1) - (1 << 31)), [9, 11], "secondary",
        sound=end,
    )  # fmt: skip


# --- offsets beyond 32 bits -------------------------------------------------------------------


MAP_NORESERVE = 0x4000  # Linux; the mmap module does not name it


@pytest.fixture
def ten_gigabytes(backend: Backend) -> Tensor:
    """10 GiB of zeros as bytes, of which only what is touched exists if the host has them."""
    size = 10 << 30
    if backend.mirror is not None:
        return torch.zeros(size, dtype=torch.uint8, device=backend.mirror.device)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    memory = mmap.mmap(-1, size, flags=flags)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def touched_bytes(memory: Tensor) -> int:
    """Bytes of the mapping that lie in real memory, from /proc/self/smaps."""
    if memory.is_cuda:
        return 0
    start = f"{memory.data_ptr():x}-"
    text = Path("/proc/self/smaps").read_text()
    entry = text[re.search(rf"^0*{start}", text, re.MULTILINE).start() :]
    return int(re.search(r"^Rss: +(\d+) kB", entry, re.MULTILINE)[1]) << 10


def test_offsets_beyond_2_to_the_31_elements(backend: Backend, ten_gigabytes: Tensor) -> None:
    """5 * 2^30 bf16 elements: slots, rows and byte offsets all pass 2^32."""
    block_size, heads, dim = 16, 2, 64
    per_block = block_size * heads * dim
    flat = ten_gigabytes.view(torch.bfloat16)
    num_blocks = flat.numel() // 2 // per_block
    k, v = flat[: 2 * num_blocks * per_block].view(2, num_blocks, block_size, heads, dim)
    layer = Layer(Half(k, Layout.BLOCK_NHD), Half(v, Layout.BLOCK_NHD))
    assert v.numel() > 1 << 31
    slots = torch.tensor([num_blocks * block_size - 1, 5, -1, 1 << 24, (1 << 24) + (1 << 20) + 3])
    key, value = random_values((2, 5, heads, dim), torch.bfloat16, seed=1)
    backend.write(layer, key, value, slots)
    assert touched_bytes(ten_gigabytes) <= 2 * 4 * 2 * 4096  # two halves, four tokens, two pages

    blocks = (slots[[0, 1, 3, 4]] // block_size).reshape(4, 1)
    got_key, got_value = torch.zeros(2, 4, block_size, heads, dim, dtype=torch.bfloat16)
    lengths = torch.full((4,), block_size)
    backend.gather(
        layer, Packed(blocks, block_size), lengths, got_key, got_value, max_seq_len=block_size
    )
    for got, tokens in ((got_key, key), (got_value, value)):
        expected = torch.zeros_like(got)
        for row, i in enumerate((0, 1, 3, 4)):
            expected[row, int(slots[i]) % block_size] = tokens[i]
        assert_same_elements(got, expected, "gathered")


def test_strides_beyond_2_to_the_31_elements(backend: Backend, ten_gigabytes: Tensor) -> None:
    """Two heads 4 GiB apart, in a layout whose token axis is beyond 2^31 bytes."""
    flat = ten_gigabytes.view(torch.float16)
    k = flat.as_strided((3, 4, 2, 8), (8, 1 << 29, (1 << 31) + 64, 1))
    v = flat.as_strided((3, 4, 2, 8), (8, 1 << 29, (1 << 31) + 64, 1), storage_offset=1 << 12)
    layer = Layer(Half(k, Layout.BLOCK_NHD), Half(v, Layout.BLOCK_NHD))
    key, value = random_values((2, 4, 2, 8), torch.float32, seed=1)
    slots = torch.tensor([11, 0, 3, 6])
    backend.write(layer, key, value, slots)
    assert touched_bytes(ten_gigabytes) <= 2 * 2 * 4 * 4096
    for half, tokens in ((k, key), (v, value)):
        for i, slot in enumerate(slots.tolist()):
            expected = reference.convert(tokens[i], torch.float16)
            assert_same_elements(half[slot // 4, slot % 4].cpu(), expected, f"slot {slot}")


def tokens_first(half: Half) -> Tensor:
    """A view of a cache tensor as [block, token, head, dim], or [.., dim / pack, pack]."""
    if half.layout == Layout.BLOCK_NHD:
        return half.tensor
    return (
        half.tensor.permute(0, 3, 1, 2, 4) if half.tensor.ndim == 5 else half.tensor.transpose(1, 2)
    )


@pytest.mark.parametrize(
    ("layout", "head_dim"),
    [("vllm_LBHNC", 128), ("tgi", 72), ("custom_padded_rows", 104)],
)
def test_calls_that_store_past_the_caches(backend: Backend, layout: str, head_dim: int) -> None:
    """Large enough for threads and streaming stores; torch's indexing is the oracle here."""
    info = abi.kvx_backend_info_t()
    abi.check(abi.library().kvx_backend_info(info))
    block_size, heads = 32, 8
    num_blocks = info.stream_bytes // (2 * block_size * heads * head_dim * 2) + 2
    g = Geometry(num_blocks, block_size, heads, head_dim, num_layers=1)
    cache = LAYOUTS[layout](g, torch.bfloat16, seed=1).fill(seed=2)
    generator = torch.Generator().manual_seed(3)
    table = torch.randperm(num_blocks, generator=generator)[None]
    length = num_blocks * block_size - 3
    lengths = torch.tensor([length])
    for dtype in (torch.bfloat16, torch.float32):
        result = output(cache.layers[0], 1, length, dtype, "dense")
        expected = result.clone()
        backend.gather(
            cache.layers[0],
            Packed(table, block_size),
            lengths,
            *outputs(result),
            max_seq_len=length,
        )
        for half, out in zip(cache.layers[0].halves(), outputs(expected), strict=True):
            assert out is not None
            dense = tokens_first(half)[table[0]].flatten(3).flatten(0, 1)
            out[0] = dense[:length]
        assert_same_bytes(result, expected)

    slots = torch.randperm(num_blocks * block_size, generator=generator)
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        shape = (len(slots), heads, head_dim)
        tokens = torch.rand((2, *shape), generator=generator).bfloat16()
        target = LAYOUTS[layout](g, dtype, seed=4)
        expected = target.clone()
        for half, rows in zip(expected.layers[0].halves(), tokens, strict=True):
            place = tokens_first(half)
            values = rows.to(dtype).unflatten(-1, place.shape[3:])
            as_int = torch.uint8 if dtype.itemsize == 1 else torch.int16
            index = (slots // block_size, slots % block_size)
            place.view(as_int)[index] = values.view(as_int)
        backend.write(target.layers[0], *tokens, slots)
        assert_same_bytes(target, expected)


def test_unified_memory_is_used_where_the_call_runs(backend: Backend) -> None:
    """Spec: 4.3, 6.6. In a build without CUDA that is the CPU, scales and all."""
    if backend is CPU and len(BACKENDS) > 2:
        pytest.skip(
            "this build runs calls on UNIFIED memory on the device, which is not host memory"
        )
    unified = replace(backend, memory=Memory.UNIFIED)
    cache = LAYOUTS["nhd"](Geometry(), torch.bfloat16, seed=1)
    tokens = key_value(cache.layers[-1], 7, torch.bfloat16, seed=2)
    check_write(unified, cache, tokens, tables.slots(cache, 7, seed=3))
    if not backend.looks_first:  # a device's scales cannot be read before the call
        return
    two = cache.with_scales(lambda half, name: (torch.tensor(2.0), ScaleGranularity.PER_TENSOR))
    with pytest.raises(InvalidArgumentError, match=r"k_scale_desc is given, but cache\.k\.dtype"):
        unified.write(two.layers[-1], *tokens, torch.zeros(7, dtype=torch.int32))


def test_element_addresses_of_every_layout() -> None:
    """The zoo itself: K and V of a layer never share an element, nor do layers."""
    for name, build in LAYOUTS.items():
        cache = build(Geometry(), torch.float16, 1)
        seen: set[int] = set()
        for layer in cache.layers:
            for half in layer.halves():
                index = torch.arange(half.tensor.untyped_storage().nbytes() // 2)
                own = index.as_strided(
                    half.tensor.shape, half.tensor.stride(), half.tensor.storage_offset()
                )
                assert own.unique().numel() == math.prod(half.tensor.shape), name
                assert seen.isdisjoint(own.flatten().tolist()), name
                seen.update(own.flatten().tolist())
