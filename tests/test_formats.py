"""Formats: every pair at both ends of migrate, and blocks of numbers byte by byte. Spec: E.6, E.10

The oracle of ggml's formats is ggml (tests/ggml.py), that of AMD's FP8 is torch, that of the others
is tests/reference.py.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

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
    Plane,
    describe,
    gather_kv,
    migrate,
    write_kv,
)
from tests.calls import CPU, Backend
from tests.format_moves import (
    FORMATS,
    GGML,
    SEEDS,
    decode,
    encode,
    memory,
    move,
    one_vector,
    span,
    values,
)

NEW = (DType.F8_E4M3FNUZ, *GGML)  # the others' pairs are in test_codecs.py
PAIRS = [pair for pair in itertools.product(FORMATS, repeat=2) if set(pair) & set(NEW)]


# --- every pair ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("a", "b"), PAIRS, ids=lambda dtype: dtype.name)
def test_every_pair(backend: Backend, a: DType, b: DType) -> None:
    """NHD blocks of 5 tokens to HND blocks of 4; nothing else changes.

    3 heads of 96 numbers; one head of 256, and fewer tokens, where units hold as many.
    """
    is_wide = 256 in (a.numbers, b.numbers)
    heads, dim, lens = (1, 256, [6, 1]) if is_wide else (3, 96, [13, 2])
    tables = [[4, 0, 2], [1, -1, -1]], [[5, 1, 3, 0], [2, -1, -1, -1]]
    for seed in SEEDS:
        source = encode(values((5, 5, heads, dim), seed), a)
        target = memory(b, (6, heads, 4), dim, seed)
        expected = target.copy()
        for row, length in enumerate(lens):
            for t in range(length):
                stored = source[tables[0][row][t // 5], t % 5]
                moved = stored if a is b else encode(decode(stored, a), b)
                expected[tables[1][row][t // 4], :, t % 4] = moved
        src = span(source, a, Layout.BLOCK_NHD, tables[0])
        dst = span(target, b, Layout.BLOCK_HND, tables[1])
        move(backend, src, dst, lens, source, target)
        np.testing.assert_array_equal(target, expected)


@pytest.mark.parametrize("dtype", GGML, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("other", [DType.F16, None], ids=["F16", "same"])
def test_units_may_lie_apart(backend: Backend, dtype: DType, other: DType | None) -> None:
    """Every third unit of wider vectors, at one end; the bytes between stay as they were."""
    heads, dim, size = 2, 2 * dtype.numbers, dtype.itemsize
    source = encode(values((2, 4, heads, dim), 1), dtype)
    wide = memory(dtype, (2, 4, heads), 3 * dim, 2)
    wide[..., :size], wide[..., 3 * size : 4 * size] = source[..., :size], source[..., size:]
    src = span(wide, dtype, Layout.BLOCK_NHD, [[1, 0]])
    cache = src.view.layers[0]
    k = replace(cache.k, shape=(*cache.k.shape[:-1], 2), stride=(*cache.k.stride[:-1], 3))
    src = replace(src, view=replace(src.view, layers=(CacheDesc.from_kv(k),)))
    to = other or dtype
    target = memory(to, (2, 4, heads), dim, 3)
    expected = encode(decode(source, dtype), to) if other else source
    move(backend, src, span(target, to, Layout.BLOCK_NHD, [[1, 0]]), [8], wide, target)
    np.testing.assert_array_equal(target, expected)
    back = memory(dtype, (2, 4, heads), 3 * dim, 4)
    kept = back.copy()
    end = span(back, dtype, Layout.BLOCK_NHD, [[1, 0]])
    k = replace(end.view.layers[0].k, shape=k.shape, stride=k.stride)
    end = replace(end, view=replace(end.view, layers=(CacheDesc.from_kv(k),)))
    move(backend, span(target, to, Layout.BLOCK_NHD, [[1, 0]]), end, [8], target, back)
    again = encode(decode(target, to), dtype) if other else target
    kept[..., :size], kept[..., 3 * size : 4 * size] = again[..., :size], again[..., size:]
    np.testing.assert_array_equal(back, kept)


# --- numbers ------------------------------------------------------------------------------------


def test_fnuz_is_torch_s(backend: Backend) -> None:
    """All 256 patterns; all float16 numbers, which the largest is in reach of."""
    codes = np.arange(256, dtype=np.uint8).reshape(8, 32)
    got = one_vector(backend, codes, DType.F8_E4M3FNUZ, DType.F32).view(np.float32)
    np.testing.assert_array_equal(got, decode(codes, DType.F8_E4M3FNUZ))
    halves = np.arange(1 << 16, dtype=np.uint16).reshape(-1, 32)
    exact = halves.view(np.float16).astype(np.float32)
    got = one_vector(backend, halves.view(np.uint8), DType.F16, DType.F8_E4M3FNUZ)
    np.testing.assert_array_equal(got, encode(exact, DType.F8_E4M3FNUZ))
    assert got[exact == np.inf].tolist() == [0x7F]  # saturates
    assert got[(exact == 0) & np.signbit(exact)].tolist() == [0]  # there is no negative zero
    assert set(got[np.isnan(exact)].tolist()) == {0x80}


def test_what_a_unit_cannot_hold(backend: Backend) -> None:
    """NaN becomes 0; past the largest scale, and infinity, is the largest; too small is 0."""
    numbers = np.zeros((5, 32), np.float32)
    numbers[0, :3] = np.nan, 127, -1
    numbers[1, :3] = np.inf, -np.inf, 65504
    numbers[2, :2] = 3e38, -3e38
    numbers[3, :2] = 1e-40, -1e-42
    numbers[4, :] = np.nan
    raw = numbers.view(np.uint8)
    q8 = one_vector(backend, raw, DType.F32, DType.Q8_0)
    scales, steps = q8[:, :2].copy().view(np.float16)[:, 0], q8[:, 2:].view(np.int8)
    assert scales.tolist() == [1, 65504, 65504, 0, 0]
    assert steps[:4, :3].tolist() == [[0, 127, -1], [127, -127, 1], [127, -127, 0], [0, 0, 0]]
    assert not steps[4].any()
    q4 = decode(one_vector(backend, raw, DType.F32, DType.Q4_0), DType.Q4_0)
    assert q4[0, 0] == q4[0, 2] == 0
    assert q4[1, :2].tolist() == [8 * 65504, -7 * 65504]
    assert q4[2, :2].tolist() == [8 * 65504, -7 * 65504]
    assert not q4[3:].any()


# --- the other operations -----------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_write_and_gather(seed: int) -> None:
    """K in Q8_0, V in Q4_0 with another head_dim: 11 tokens into slots, and back as float32."""
    key, value = values((11, 3, 96), seed), values((11, 3, 32), seed + 9)
    k, v = memory(DType.Q8_0, (4, 3, 5), 96, 1), memory(DType.Q4_0, (4, 5, 3), 32, 2)
    cache = CacheDesc.from_kv(
        describe(torch.from_numpy(k), Layout.BLOCK_HND, dtype="Q8_0"),
        describe(torch.from_numpy(v), Layout.BLOCK_NHD, dtype="Q4_0"),
    )
    expected = k.copy(), v.copy()
    slots = [*range(15, 20), *range(5, 10), -1]
    for i, slot in enumerate(slots[:10]):
        expected[0][slot // 5, :, slot % 5] = encode(key[i], DType.Q8_0)
        expected[1][slot // 5, slot % 5] = encode(value[i], DType.Q4_0)
    write_kv(cache, torch.from_numpy(key), torch.from_numpy(value), torch.tensor(slots))
    np.testing.assert_array_equal(k, expected[0])
    np.testing.assert_array_equal(v, expected[1])
    got = gather_kv(cache, [[3, 1]], [10], dtype="float32")
    stored = encode(key[:10], DType.Q8_0), encode(value[:10], DType.Q4_0)
    np.testing.assert_array_equal(got[0][0], decode(stored[0], DType.Q8_0))
    np.testing.assert_array_equal(got[1][0], decode(stored[1], DType.Q4_0))


def test_planes_hold_units() -> None:
    """An indexer's keys in Q8_0 to bfloat16, where tokens lie innermost."""
    numbers = values((2, 4, 64), 5)
    source, target = encode(numbers, DType.Q8_0), torch.zeros(2, 64, 4, dtype=torch.bfloat16)
    planes = (
        Plane.of(source, ("block", "token", "dim"), role="index_k", layer=0, dtype="Q8_0"),
        Plane.of(target, ("block", "dim", "token"), role="index_k", layer=0),
    )
    ends = [CacheView(layers=(), facts=CacheFacts(), planes=(p,), dense=True).at() for p in planes]
    migrate(*ends, [4, 3], same_model=True)
    expected = torch.from_numpy(decode(source, DType.Q8_0)).to(torch.bfloat16)
    expected[1, 3] = 0
    assert torch.equal(target, expected.transpose(1, 2))


# --- from Python --------------------------------------------------------------------------------


def test_a_description_counts_units() -> None:
    raw = torch.zeros(2, 4, 3, 4 * 34, dtype=torch.uint8)
    k = describe(raw, Layout.BLOCK_NHD, dtype="q8_0")
    cache = CacheDesc.from_kv(
        k, describe(raw[..., :34], Layout.BLOCK_NHD, dtype=DType.Q8_0), shared_kv=True
    )
    assert (k.shape, k.stride) == ((2, 4, 3, 4), (48, 12, 4, 1))
    assert (cache.head_dim, cache.v_head_dim, cache.head_bytes) == (128, 32, 5 * 34)
    cache.validate()
    with pytest.raises(
        InvalidArgumentError, match=r"k.shape\[-1\] is 135 bytes with stride 1, exp"
    ):
        describe(raw[..., 1:], Layout.BLOCK_NHD, dtype="Q8_0", name="k")
    with pytest.raises(
        InvalidArgumentError, match=r"k.stride\[0\] is 840 bytes, expected a multiple"
    ):
        describe(
            torch.zeros(2, 4, 3, 70, dtype=torch.uint8)[..., :68],
            Layout.BLOCK_NHD,
            dtype="Q8_0",
            name="k",
        )
    with pytest.raises(
        InvalidArgumentError, match="dtype is Q8_0 of 34 bytes, expected one of the 4"
    ):
        describe(torch.zeros(2, 4, 3, 34), Layout.BLOCK_NHD, dtype="Q8_0")


def test_a_head_of_half_a_unit_is_refused() -> None:
    half = torch.zeros(2, 4, 3, 48)
    units = torch.zeros(2, 4, 3, 2 * 34, dtype=torch.uint8)
    src = CacheDesc.from_kv(describe(half, Layout.BLOCK_NHD))
    dst = CacheDesc.from_kv(describe(units, Layout.BLOCK_NHD, dtype="Q8_0"))
    wrong = replace(dst, head_dim=48)
    with pytest.raises(InvalidArgumentError, match="units hold 32 numbers, but head_dim is 48"):
        wrong.validate()
    ends = (CacheView(layers=(c,), facts=CacheFacts()).at(block_table=[[0]]) for c in (src, dst))
    with pytest.raises(InvalidArgumentError, match=r"head_dim 64, expected that of .*, 48"):
        CPU.migrate_spans(*ends, [4], [half, units])
