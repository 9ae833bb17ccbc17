"""TQ2, TQ3 and TQ4 at either end of calls: TurboQuant's units of 128 numbers. Spec: E.10, E.20

What a unit is says kvx_core.encodings.turboquant, which tests/test_turboquant.py compares with the
definition.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvx_core import (
    CacheDesc,
    CacheFacts,
    CacheView,
    DType,
    InvalidArgumentError,
    Layout,
    UnsupportedError,
    describe,
    gather_kv,
    migrate,
    write_kv,
)
from kvx_core.encodings import turboquant
from tests import test_formats as formats
from tests.affine import mlx
from tests.calls import CPU, HOSTGRID
from tests.format_moves import one_vector, span, values
from tests.fp4 import page
from tests.turboquant_moves import BITS, DIM, decode, encode

SEEDS = (1, 2, 3)
OTHERS = (DType.BF16, DType.F32, DType.F8_E4M3FNUZ, DType.Q8_0, DType.Q4_K, *BITS)
of_formats = pytest.mark.parametrize("dtype", BITS, ids=lambda dtype: dtype.name)


def test_sizes() -> None:
    for dtype, bits in BITS.items():
        assert (dtype.itemsize, dtype.numbers) == (turboquant.unit_bytes(DIM, bits), DIM)
        assert DType.of(f"tq{bits}") is dtype
    assert [dtype.value for dtype in BITS] == [26, 27, 28]


@of_formats
@pytest.mark.parametrize("other", OTHERS, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("dim", [128, 256])
def test_every_pair(dtype: DType, other: DType, dim: int) -> None:
    """NHD blocks of 5 tokens to HND blocks of 4, there and back; nothing else changes."""
    if dim % other.numbers:
        return
    tables, lens = ([[4, 0, 2], [1, -1, -1]], [[5, 1, 3, 0], [2, -1, -1, -1]]), [13, 2]
    for seed, heads in zip(SEEDS, (1, 3, 5), strict=True):
        for a, b in ((other, dtype), (dtype, other)):
            source = encode(values((5, 5, heads, dim), seed), a)
            target = formats.memory(b, (6, heads, 4), dim, seed)
            expected = target.copy()
            for row, length in enumerate(lens):
                for t in range(length):
                    stored = source[tables[0][row][t // 5], t % 5]
                    moved = stored if a is b else encode(decode(stored, a), b)
                    expected[tables[1][row][t // 4], :, t % 4] = moved
            ends = (
                span(source, a, Layout.BLOCK_NHD, tables[0]),
                span(target, b, Layout.BLOCK_HND, tables[1]),
            )
            formats.move(CPU, *ends, lens, source, target)
            np.testing.assert_array_equal(target, expected)


@of_formats
def test_a_head_of_256_is_two_units(dtype: DType) -> None:
    """Each half has its own norm: one of zeros, the other is as without it."""
    numbers = values((9, 256), 1)[2:]
    numbers[:, :DIM] = 0
    got = one_vector(CPU, numbers.view(np.uint8), DType.F32, dtype)
    np.testing.assert_array_equal(got[:, dtype.itemsize :], encode(numbers[:, DIM:], dtype))
    assert not got[:, dtype.itemsize - 2 : dtype.itemsize].any()  # the norm
    one = turboquant.encode(numbers, BITS[dtype])
    assert one.shape[-1] != got.shape[-1]


@of_formats
def test_what_is_no_number(dtype: DType) -> None:
    """NaN is 0, infinity and what is too large have the largest norm, which is finite."""
    numbers = values((6, DIM), 2)
    numbers[2, ::5], numbers[3, 3], numbers[4, 7], numbers[5] = np.nan, np.inf, -3e38, np.nan
    got = one_vector(CPU, numbers.view(np.uint8), DType.F32, dtype)
    np.testing.assert_array_equal(got, encode(numbers, dtype))
    norms = got[:, -2:].copy().view(np.float16)[:, 0]
    assert norms[[0, 3, 4, 5]].tolist() == [0, 65504, 65504, 0]
    anything = np.random.default_rng(3).integers(0, 256, (40, dtype.itemsize), np.uint8)
    back = one_vector(CPU, anything, dtype, DType.F32).view(np.float32)
    np.testing.assert_array_equal(back, decode(anything, dtype))


@of_formats
def test_units_may_lie_apart(dtype: DType) -> None:
    """Every third unit of wider vectors; the bytes between stay as they were."""
    heads, size = 3, dtype.itemsize
    numbers = values((2, 4, heads, 2 * DIM), 1)
    wide = formats.memory(dtype, (2, 4, heads), 6 * DIM, 2)
    expected, units = wide.copy(), encode(numbers, dtype)
    expected[..., :size], expected[..., 3 * size : 4 * size] = units[..., :size], units[..., size:]
    end = span(wide, dtype, Layout.BLOCK_NHD, [[1, 0]])
    k = end.view.layers[0].k
    k = replace(k, shape=(*k.shape[:-1], 2), stride=(*k.stride[:-1], 3))
    end = replace(end, view=replace(end.view, layers=(CacheDesc.from_kv(k),)))
    raw = numbers.view(np.uint8)
    src = span(raw, DType.F32, Layout.BLOCK_NHD, [[1, 0]])
    formats.move(CPU, src, end, [8], raw, wide)
    np.testing.assert_array_equal(wide, expected)
    back = np.full_like(raw, 0xA5)
    formats.move(CPU, end, span(back, DType.F32, Layout.BLOCK_NHD, [[1, 0]]), [8], wide, back)
    np.testing.assert_array_equal(back.view(np.float32), decode(units, dtype))


@pytest.mark.parametrize("seed", SEEDS)
def test_write_and_gather(seed: int) -> None:
    """K in TQ4, V in TQ2 of another head_dim: 11 tokens into slots, and back as float32."""
    key, value = values((11, 3, 256), seed), values((11, 3, 128), seed + 9)
    k = formats.memory(DType.TQ4, (4, 3, 5), 256, 1)
    v = formats.memory(DType.TQ2, (4, 5, 3), 128, 2)
    cache = CacheDesc.from_kv(
        describe(torch.from_numpy(k), Layout.BLOCK_HND, dtype="TQ4"),
        describe(torch.from_numpy(v), Layout.BLOCK_NHD, dtype="TQ2"),
    )
    expected = k.copy(), v.copy()
    slots = [*range(15, 20), *range(5, 10), -1]
    for i, slot in enumerate(slots[:10]):
        expected[0][slot // 5, :, slot % 5] = encode(key[i], DType.TQ4)
        expected[1][slot // 5, slot % 5] = encode(value[i], DType.TQ2)
    write_kv(cache, torch.from_numpy(key), torch.from_numpy(value), torch.tensor(slots))
    np.testing.assert_array_equal(k, expected[0])
    np.testing.assert_array_equal(v, expected[1])
    got = gather_kv(cache, [[3, 1]], [10], dtype="float32")
    for found, numbers, dtype in zip(got, (key, value), (DType.TQ4, DType.TQ2), strict=True):
        np.testing.assert_array_equal(found[0], decode(encode(numbers[:10], dtype), dtype))


@of_formats
def test_smaller_heads_as_one_axis(dtype: DType) -> None:
    """A head of 64 is refused with the way out; six of them are three units."""
    heads, dim = 6, 64
    raw = torch.full((2, 4, 1, 3 * dtype.itemsize), 0xA5, dtype=torch.uint8)
    units = CacheDesc.from_kv(describe(raw, Layout.BLOCK_NHD, dtype=dtype))
    way_out = "; where the heads of a token follow each other, describe heads and dim as one axis"
    with pytest.raises(InvalidArgumentError, match=f"128 numbers, but head_dim is 64, .*{way_out}"):
        replace(units, head_dim=64).validate()
    numbers = torch.from_numpy(values((2, 4, heads, dim), 3)).bfloat16()
    merged = CacheDesc.from_kv(describe(numbers.view(2, 4, 1, heads * dim), Layout.BLOCK_NHD))
    ends = [CacheView((c,), CacheFacts()) for c in (merged, units)]
    migrate(*(end.at([[1, 0]]) for end in ends), [7], same_model=True)
    expected = encode(numbers.float().view(2, 4, 1, -1).numpy(), dtype)
    expected[0, 3] = 0xA5
    np.testing.assert_array_equal(raw.numpy(), expected)


@of_formats
def test_a_device_does_as_the_host(dtype: DType) -> None:
    """NHD blocks of 4 tokens to HND blocks of 3, there and back, and as they are."""
    numbers = values((2, 4, 3, 256), 1)
    numbers[0, 1, 2, 5:9] = np.nan, np.inf, -np.inf, 3e38
    for other in (DType.F32, DType.BF16, DType.F8_E4M3, DType.Q8_0, DType.Q4_K, *BITS):
        for a, b in ((other, dtype), (dtype, other)):
            source = encode(numbers if a in BITS else values((2, 4, 3, 256), 2), a)
            if a is DType.F32:
                source = numbers.view(np.uint8)
            found = []
            for backend in (CPU, HOSTGRID):
                target = formats.memory(b, (3, 3, 3), 256, 1)
                src = span(source, a, Layout.BLOCK_NHD, [[1, 0]])
                dst = span(target, b, Layout.BLOCK_HND, [[2, 0, 1]])
                formats.move(backend, src, dst, [7], source, target)
                found.append(target)
            np.testing.assert_array_equal(*found)


@of_formats
@pytest.mark.parametrize("make", [mlx, page], ids=["U8_BIAS", "F4_E2M1"])
def test_a_device_finds_no_scales_beside_the_data_for_it(dtype: DType, make: Any) -> None:
    """From formats that keep them there it converts as the host does."""
    beside = make(3, 4, 3, 256, 1)
    found = []
    for backend in (CPU, HOSTGRID):
        units = formats.memory(dtype, (2, 4, 3), 256, 1)
        end = span(units, dtype, Layout.BLOCK_NHD, [[1, 0]])
        raw = [*beside.raw, torch.from_numpy(units)]
        backend.migrate_spans(beside.span([[2, 0]]), end, [7], raw)
        found.append(units)
    np.testing.assert_array_equal(*found)
    before = [tensor.clone() for tensor in beside.raw]
    sentence = (
        f"K goes from {dtype.name} to {beside.span([[2, 0]]).view.layers[0].k.dtype.name}, whose "
        f"scales calls on DEVICE memory do not find for {dtype.name}; migrate by way of F16 (spec "
        "E.20)"
    )
    with pytest.raises(UnsupportedError, match=re.escape(sentence)):
        HOSTGRID.migrate_spans(end, beside.span([[2, 0]]), [7], raw)
    for now, was in zip(beside.raw, before, strict=True):
        assert torch.equal(now, was)
