"""ggml's formats, byte for byte: its own encoders, its own decoders, and what they leave open.

Spec: E.10
"""

from __future__ import annotations

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
    describe,
    migrate,
)
from tests import ggml
from tests.calls import CPU, Backend
from tests.format_moves import SEEDS, TORCH, memory, one_vector, values

FORMATS = tuple(ggml.NAMES)
SCALES = {  # where a unit has float16 numbers
    DType.Q4_1: (0, 2),
    DType.Q5_1: (0, 2),
    DType.Q4_K: (0, 2),
    DType.Q5_K: (0, 2),
    DType.Q6_K: (208,),
}
EDGE = 2.0**32  # magnitudes past it count as it, where an encoder searches

each_format = pytest.mark.parametrize("dtype", FORMATS, ids=lambda dtype: dtype.name)


def encoded(backend: Backend, numbers: np.ndarray, dtype: DType) -> np.ndarray:
    """float32 [n, numbers] as units, [n, bytes]."""
    numbers = np.ascontiguousarray(numbers, np.float32)
    return one_vector(backend, numbers.view(np.uint8), DType.F32, dtype)


def decoded(backend: Backend, units: np.ndarray, dtype: DType) -> np.ndarray:
    return one_vector(backend, units, dtype, DType.F32).view(np.float32)


def nasty(dtype: DType, seed: int, rows: int) -> np.ndarray:
    """Numbers [rows, of two units] that are close to what encoders decide by.

    Ties and their neighbours, constants and almost, one sign, zeros beside few numbers, and scales
    from float16's subnormal numbers to its largest.
    """
    random = np.random.default_rng(seed)
    dim = 2 * dtype.numbers
    steps = random.integers(-127, 128, (rows, dim)) + random.choice([0, 0.5, -0.5], (rows, dim))
    normal = random.standard_normal((rows, dim))
    kinds = [
        steps,
        np.nextafter(steps.astype(np.float32), np.float32(9)),
        normal,
        1 + 1e-6 * normal,
        -1 - 1e-4 * np.abs(normal),
        -np.abs(normal),
        np.abs(normal) + 3,
        normal * (random.random((rows, dim)) < 0.05),
        np.round(normal * 4) / 4,
        normal**5,
        normal * 2.0 ** random.integers(-20, 1, (rows, dim // 16)).repeat(16, 1),
    ]
    kind = random.integers(0, len(kinds), rows)
    found = np.stack(kinds)[kind, np.arange(rows)] * 2.0 ** random.integers(-36, 13, (rows, 1))
    past = np.abs(found).max(-1, keepdims=True) / 60000  # least numbers are stored as float16
    return (found * 2.0 ** -np.ceil(np.log2(np.maximum(past, 1))) + 0.0).astype(np.float32)


# --- decoding -----------------------------------------------------------------------------------


@each_format
def test_every_scale_and_every_level(backend: Backend, dtype: DType) -> None:
    """Finite float16 numbers as scales, all if a unit is small, and random levels."""
    halves = np.arange(1 << 16, dtype=np.uint16)
    halves = halves[np.isfinite(halves.view(np.float16))][:: dtype.numbers // 32 * 4 - 3]
    units = memory(dtype, (len(halves),), dtype.numbers, 1)
    for place, at in enumerate(SCALES.get(dtype, (0,))):
        units[:, at : at + 2] = np.roll(halves, 7 * place).view(np.uint8).reshape(-1, 2)
    got = decoded(backend, units, dtype)
    np.testing.assert_array_equal(
        got.view(np.uint32), ggml.dequantize(units, dtype).view(np.uint32)
    )


@each_format
@pytest.mark.parametrize("of", [DType.F16, DType.BF16], ids=["f16", "bf16"])
@pytest.mark.parametrize("seed", SEEDS)
def test_other_floats_are_those_of_float32(
    backend: Backend, dtype: DType, of: DType, seed: int
) -> None:
    """Scales of any bits: infinite ones, NaN, and those whose numbers float16 cannot hold."""
    units = memory(dtype, (37,), 3 * dtype.numbers, seed)
    with np.errstate(all="ignore"):
        numbers = torch.from_numpy(ggml.dequantize(units, dtype))
    expected = numbers.to({DType.F16: torch.float16, DType.BF16: torch.bfloat16}[of])
    got = torch.from_numpy(one_vector(backend, units, dtype, of)).view(expected.dtype)
    assert torch.equal(got.isnan(), expected.isnan())
    got[got.isnan()], expected[expected.isnan()] = 0, 0
    assert torch.equal(got.view(torch.int16), expected.view(torch.int16))


@each_format
@pytest.mark.parametrize("of", [DType.F32, DType.F16, DType.BF16], ids=["f32", "f16", "bf16"])
def test_past_the_caches_as_within(dtype: DType, of: DType) -> None:
    """17 MiB of numbers, which streaming stores write, at an address of a line and beside one."""
    dim, size = 1024, of.itemsize
    tokens = (17 << 20) // (dim * size)
    units = memory(dtype, (tokens,), dim, 4)
    raw = torch.zeros(tokens * dim * size + 128, dtype=torch.uint8)
    at = -raw.data_ptr() % 64
    for begin in (at, at + size):
        raw.fill_(0x5A)
        target = raw[begin : begin + tokens * dim * size].view(1, tokens, 1, -1)
        for first, last in ((0, tokens), (0, 3), (tokens - 3, tokens)):
            part = target[:, first:last].clone() if last - first == 3 else target
            ends = []
            for tensor, kind in (
                (torch.from_numpy(units)[None, first:last, None], dtype),
                (part, of),
            ):
                typed = tensor.view(TORCH.get(kind, torch.uint8))
                desc = CacheDesc.from_kv(describe(typed, Layout.BLOCK_NHD, dtype=kind))
                ends.append(CacheView((desc,), CacheFacts(), dense=True).at())
            migrate(*ends, [last - first], same_model=True)
            assert torch.equal(part, target[:, first:last])
        assert (raw[:begin] == 0x5A).all()
        assert (raw[begin + target.numel() :] == 0x5A).all()


# --- encoding -----------------------------------------------------------------------------------


@each_format
@pytest.mark.parametrize("of", [DType.F32, DType.F16, DType.BF16], ids=["f32", "f16", "bf16"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_unit_does_not_depend_on_those_beside_it(
    backend: Backend, dtype: DType, of: DType, seed: int
) -> None:
    """Of 43, which are encoded eight at a time, some have numbers that no scale fits."""
    random = np.random.default_rng(seed)
    numbers = values((43, dtype.numbers), seed)
    for row, odd in zip(
        random.permutation(43),
        (np.nan, np.inf, -np.inf, 3e38, 8.4e6, 1e-38, 1e-45, 2.0**-118, 0.0, 1e-7),
        strict=False,
    ):
        numbers[row] *= 0 if abs(odd) < 1 else 1
        numbers[row, random.integers(0, dtype.numbers, 3)] = odd
    source = torch.from_numpy(numbers).to(TORCH[of]).view(torch.uint8).numpy()
    together = one_vector(backend, source.reshape(1, -1), of, dtype).reshape(43, -1)
    for unit, alone in zip(together, source, strict=True):
        np.testing.assert_array_equal(unit, one_vector(backend, alone[None], of, dtype)[0])


@each_format
@pytest.mark.parametrize("seed", SEEDS)
def test_units_are_ggml_s(backend: Backend, dtype: DType, seed: int) -> None:
    rows = (400 if backend is CPU else 40) if dtype.numbers == 256 else 600
    numbers = np.concatenate([nasty(dtype, seed, rows), values((9, 2 * dtype.numbers), seed)])
    expected = ggml.quantize_in_c(numbers, dtype)
    if dtype in ggml.IN_PYTHON:
        np.testing.assert_array_equal(expected, ggml.quantize_in_python(numbers, dtype))
    np.testing.assert_array_equal(encoded(backend, numbers, dtype), expected)


@pytest.mark.parametrize("dtype", [DType.IQ4_NL, *ggml.K_QUANTS], ids=lambda dtype: dtype.name)
def test_searches_are_ggml_s_near_zero_and_far_from_it(dtype: DType) -> None:
    """Where 1e-15 ends, where squares are subnormal or none, and up to the largest scales."""
    random = np.random.default_rng(5)
    numbers = random.standard_normal((300, dtype.numbers))
    exponents = np.concatenate(
        [np.linspace(-140, -40, 200), np.linspace(-52, -48, 60), np.linspace(10, 15, 40)]
    )
    scaled = (numbers * 2.0 ** exponents[:, None]).astype(np.float32)
    np.testing.assert_array_equal(encoded(CPU, scaled, dtype), ggml.quantize_in_c(scaled, dtype))


@pytest.mark.parametrize("dtype", [DType.Q4_1, DType.Q5_1], ids=lambda dtype: dtype.name)
def test_of_zeros_of_both_signs_the_first_is_the_least(backend: Backend, dtype: DType) -> None:
    """As in C; numpy's minimum is either."""
    numbers = np.zeros((4, 32), np.float32)
    numbers[0, 3], numbers[1, 0], numbers[2, :] = -0.0, -0.0, -0.0
    numbers[3, :3] = 1, -0.0, 2
    expected = ggml.quantize_in_c(numbers, dtype)
    np.testing.assert_array_equal(encoded(backend, numbers, dtype), expected)
    assert expected[:, 2:4].tolist() == [[0, 0], [0, 0x80], [0, 0x80], [0, 0x80]]


# --- what a unit cannot hold --------------------------------------------------------------------


@each_format
def test_nan_counts_as_zero(backend: Backend, dtype: DType) -> None:
    random = np.random.default_rng(3)
    numbers = values((30, dtype.numbers), 3)
    missing = random.random(numbers.shape) < 0.2
    missing[5] = True
    with_nan = np.where(missing, np.nan, numbers).astype(np.float32)
    with_nan[missing] *= random.choice([1, -1], missing.sum())  # NaN of both signs
    with_zero = np.where(missing, 0, numbers)
    np.testing.assert_array_equal(
        encoded(backend, with_nan, dtype), encoded(backend, with_zero, dtype)
    )


@each_format
def test_any_bits_become_finite_numbers(backend: Backend, dtype: DType) -> None:
    rows = 12 if dtype.numbers == 256 else 200
    bits = np.random.default_rng(8).integers(0, 1 << 32, (rows, dtype.numbers), np.uint32)
    bits[:, 0] = 0x7F800000
    bits[::2, 1] = 0xFF800000
    units = encoded(backend, bits.view(np.float32), dtype)
    assert np.isfinite(decoded(backend, units, dtype)).all()
    numbers = np.nan_to_num(bits.view(np.float32), nan=0)  # infinity: the largest float32
    np.testing.assert_array_equal(units, encoded(backend, numbers, dtype))


def test_infinity_is_the_largest_number_of_a_unit(backend: Backend) -> None:
    """By hand: d and m saturate at 65504, levels at their bounds."""
    numbers = np.zeros((3, 32), np.float32)
    numbers[0, :2] = np.inf, -np.inf
    numbers[1, :2] = -np.inf, 3e38
    numbers[2] = -1e6
    most = np.float32(65504)
    got = decoded(backend, encoded(backend, numbers, DType.Q5_0), DType.Q5_0)
    # The first number of the largest magnitude gets level 0.
    assert (got[:2, :3] / most).tolist() == [[16, -15, 0], [-16, 15, 0]]
    assert (got[2] == -16 * np.float32(np.float16(1e6 / 16))).all()
    for dtype, high in ((DType.Q4_1, 14), (DType.Q5_1, 30)):
        got = decoded(backend, encoded(backend, numbers, dtype), dtype) / most
        assert got[:, :3].tolist() == [[high, -1, 0], [-1, high, 0], [-1, -1, -1]]


@pytest.mark.parametrize("dtype", [DType.IQ4_NL, *ggml.K_QUANTS], ids=lambda dtype: dtype.name)
def test_searches_take_what_is_far_off_as_2_to_the_32(backend: Backend, dtype: DType) -> None:
    numbers = values((8, dtype.numbers), 4)
    far, edge = numbers.copy(), numbers.copy()
    far[:, 7::9], far[::2, 5::11] = np.inf, -1e30
    edge[:, 7::9], edge[::2, 5::11] = EDGE, -EDGE
    got = encoded(backend, far, dtype)
    np.testing.assert_array_equal(got, encoded(backend, edge, dtype))
    for at in SCALES.get(dtype, (0,)):  # never infinity
        assert np.isfinite(got[:, at : at + 2].copy().view(np.float16)).all()


# --- units that span heads ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ggml.K_QUANTS, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("seed", SEEDS)
def test_heads_and_dim_as_one_axis(dtype: DType, seed: int) -> None:
    """A bfloat16 NHD cache of 4 heads of 64 into units that hold all four, and back."""
    heads, dim, lens = 4, 64, [9, 3]
    numbers = torch.from_numpy(values((2, 6, 4, heads, dim), seed)).bfloat16()
    units = torch.from_numpy(memory(dtype, (2, 5, 5), heads * dim, seed))
    kept, back = units.clone(), torch.full_like(numbers, 9)
    src_table, dst_table = [[5, 0, 2], [1, -1, -1]], [[3, 1], [4, -1]]

    def plain(cache: torch.Tensor) -> CacheView:
        merged = cache.view(2, 6, 4, 1, heads * dim)
        layer = CacheDesc.from_kv(*(describe(half, Layout.BLOCK_NHD) for half in merged))
        return CacheView((layer,), CacheFacts())

    halves = (describe(half[:, :, None], Layout.BLOCK_NHD, dtype=dtype) for half in units)
    store = CacheView((CacheDesc.from_kv(*halves),), CacheFacts())
    migrate(plain(numbers).at(src_table), store.at(dst_table), lens, same_model=True)
    migrate(store.at(dst_table), plain(back).at(src_table), lens, same_model=True)
    expected = torch.full_like(numbers, 9)
    for half in range(2):
        for row, length in enumerate(lens):
            for t in range(length):
                at = half, src_table[row][t // 4], t % 4
                token = ggml.quantize(numbers[at].float().numpy().reshape(-1), dtype)
                kept[half, dst_table[row][t // 5], t % 5] = torch.from_numpy(token)
                again = torch.from_numpy(ggml.dequantize(token, dtype))
                expected[at] = again.bfloat16().view(heads, dim)
    assert torch.equal(units, kept)
    assert torch.equal(back, expected)


def test_a_head_smaller_than_a_unit_is_refused_with_the_way_out() -> None:
    raw = torch.zeros(2, 4, 1, 144, dtype=torch.uint8)
    units = CacheDesc.from_kv(describe(raw, Layout.BLOCK_NHD, dtype="Q4_K"))
    way_out = "; where the heads of a token follow each other, describe heads and dim as one axis"
    with pytest.raises(
        InvalidArgumentError, match=f"256 numbers, but head_dim is 128, .*{way_out}"
    ):
        replace(units, head_dim=128).validate()
    with pytest.raises(InvalidArgumentError, match=r"head_dim is 96, expected a multiple \(spec"):
        replace(units, head_dim=96).validate()
    heads = CacheDesc.from_kv(describe(torch.zeros(2, 4, 2, 128), Layout.BLOCK_NHD))
    ends = (CacheView((c,), CacheFacts()).at(block_table=[[0]]) for c in (heads, units))
    with pytest.raises(InvalidArgumentError, match=r"num_kv_heads is 1, expected .*, 2; where"):
        CPU.migrate_spans(*ends, [4], [heads.k.owner, raw])
