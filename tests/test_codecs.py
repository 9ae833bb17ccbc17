"""Conversion of numbers: every pattern of every small format, every pair, every scale. Spec: E.6

The oracle is tests/reference.py: explicit tables of all values, nearest with ties to even. The
first tests check the oracle itself against torch where torch follows the same rules.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import platform
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from kvx_core._c import abi
from kvx_core.errors import InvalidArgumentError
from kvx_core.types import Layout, ScaleGranularity
from tests import reference, tables
from tests.caches import (
    DTYPES,
    LAYOUTS,
    SCALE_SHAPES,
    Cache,
    Geometry,
    assert_same_bytes,
    random_values,
    scaled,
)
from tests.calls import CPU, Backend
from tests.reference import FORMATS, MAGNITUDES, SCALED, Half, Layer, Place, from_bits

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP8 = (E4M3, E5M2)
SMALL = tuple(FORMATS)
PAIRS = [
    pytest.param(src, dst, id=f"{src}-{dst}".replace("torch.", ""))
    for src, dst in itertools.permutations(DTYPES, 2)
]


def every_pattern(dtype: torch.dtype) -> Tensor:
    """All values of a format of 8 or 16 bits, infinity and NaN too, in order of their bits."""
    if dtype == torch.int8:
        return torch.arange(256).to(torch.int8)
    bits = FORMATS[dtype].bits
    return from_bits(np.arange(1 << (8 * np.dtype(bits).itemsize)).astype(bits), dtype)


def hard_floats(dtype: torch.dtype) -> Tensor:
    """float32 around every rounding decision of `dtype`: values, midpoints, and one ulp beside."""
    table = MAGNITUDES[dtype]
    table = np.append(table, 2 * table[-1] - table[-2])  # where overflow begins
    exact = np.concatenate([table, (table[1:] + table[:-1]) / 2])
    with np.errstate(over="ignore"):
        near = exact.astype(np.float32)
    special = np.array(
        [np.inf, np.nan, 3.4028235e38, 1.1754944e-38, 1e-45, 5.877e-39, 1e30], dtype=np.float32
    )
    near = np.concatenate([near, np.nextafter(near, np.float32(0)), special])
    with np.errstate(over="ignore"):
        near = np.concatenate([near, np.nextafter(near, np.float32(np.inf))])
    return torch.from_numpy(np.concatenate([near, -near]))


def inputs_for(src: torch.dtype, dst: torch.dtype) -> Tensor:
    """Every value of `src` if they can be listed, otherwise every hard one."""
    return hard_floats(dst) if src == torch.float32 else every_pattern(src)


def as_tokens(flat: Tensor, dim: int) -> Tensor:
    """The values as [num_tokens, 1, dim], repeated to fill the last row."""
    rows = math.ceil(flat.numel() / dim)
    index = torch.arange(rows * dim) % flat.numel()
    return flat[index].view(rows, 1, dim)


def convert(
    backend: Backend,
    flat: Tensor,
    dtype: torch.dtype,
    *,
    src_scale: Tensor | None = None,
    dst_scale: Tensor | None = None,
    dim: int = 128,
    strided: bool = False,
) -> Tensor:
    """What libkvx makes of every element: a migration of one block, `dim` elements per token."""
    rows = as_tokens(flat, dim)
    target = torch.zeros(len(rows), 1, 2 * dim if strided else dim, dtype=dtype)
    if strided:  # neither side is contiguous, nor steps alike
        spread = torch.zeros(len(rows), 1, 3 * dim, dtype=flat.dtype)
        spread[..., ::3] = rows
        rows, view = spread[..., ::3], target[..., ::2]
    else:
        view = target

    def cache(tensor: Tensor, scale: Tensor | None) -> Cache:
        granularity = ScaleGranularity.NONE if scale is None else ScaleGranularity.PER_TENSOR
        half = Half(tensor[None], Layout.BLOCK_NHD, scale, granularity)
        return Cache((), (Layer(half, None),))

    one = torch.tensor([len(rows)])
    dense = reference.Dense()
    backend.migrate(cache(rows, src_scale), dense, cache(view, dst_scale), dense, one)
    return view.flatten()[: flat.numel()]


def assert_converted(got: Tensor, source: Tensor, expected: Tensor) -> None:
    """Bitwise equal; a NaN of more than 8 bits may be any NaN."""
    assert got.dtype == expected.dtype
    as_int = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[got.element_size()]
    differ = got.contiguous().view(as_int) != expected.contiguous().view(as_int)
    if got.element_size() > 1:
        differ &= ~(got.isnan() & expected.isnan())
    if differ.any():
        i = int(differ.nonzero()[0])
        raise AssertionError(
            f"{int(differ.sum())} of {got.numel()} differ, the first at {i}: "
            f"{reference.decode(source[i]).item()!r} became {reference.decode(got[i]).item()!r}, "
            f"expected {reference.decode(expected[i]).item()!r}"
        )


@pytest.fixture
def flush_denormal() -> Iterator[None]:
    """Subnormal floats are flushed to zero in this thread, as some applications set it."""
    if not torch.set_flush_denormal(True):
        warnings.warn("this processor cannot flush subnormals; the test shows less", stacklevel=1)
    yield
    torch.set_flush_denormal(False)


# --- the oracle -------------------------------------------------------------------------------


def test_the_tables_hold_the_published_extremes() -> None:
    for dtype in SMALL:
        info = torch.finfo(dtype)
        assert MAGNITUDES[dtype][-1] == info.max
        assert MAGNITUDES[dtype][1] == info.smallest_normal * info.eps
    assert MAGNITUDES[E4M3][-1] == 448
    assert MAGNITUDES[E5M2][-1] == 57344


@pytest.mark.parametrize("dtype", SMALL, ids=str)
def test_the_oracle_decodes_as_torch_does(dtype: torch.dtype) -> None:
    stored = every_pattern(dtype)
    decoded, expected = reference.decode(stored), stored.float()
    assert torch.equal(decoded.isnan(), expected.isnan())
    kept = ~expected.isnan()
    assert torch.equal(decoded[kept].view(torch.int32), expected[kept].view(torch.int32))


@pytest.mark.parametrize("dtype", SMALL, ids=str)
def test_the_oracle_encodes_as_torch_does(dtype: torch.dtype) -> None:
    """torch does not saturate FP8, so only what FP8 can hold is compared."""
    values = torch.cat([hard_floats(dtype), random_values((20000,), torch.float32, seed=1)])
    if dtype in FP8:
        values = values[values.abs() <= MAGNITUDES[dtype][-1]]
    expected = values.to(dtype)
    assert_converted(reference.encode(values, dtype), values, expected)


# --- every pattern, every pair ----------------------------------------------------------------


@pytest.mark.parametrize(("src", "dst"), PAIRS)
def test_every_value(backend: Backend, src: torch.dtype, dst: torch.dtype) -> None:
    """All patterns, through the vector path, its tail, single elements and strided rows."""
    values = inputs_for(src, dst)
    expected = reference.convert(values, dst)
    assert_converted(convert(backend, values, dst), values, expected)
    assert_converted(convert(backend, values, dst, dim=19), values, expected)
    assert_converted(convert(backend, values, dst, dim=40, strided=True), values, expected)
    assert_converted(convert(backend, values[::7], dst, dim=1), values[::7], expected[::7])


@pytest.mark.parametrize("scale", [0.0123, 0.25, 1.0, 3.0, 448.0, 1e-6])
@pytest.mark.parametrize("dst", SCALED, ids=str)
@pytest.mark.parametrize("src", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_value_to_scaled_bytes(
    backend: Backend, src: torch.dtype, dst: torch.dtype, scale: float
) -> None:
    values = inputs_for(src, dst)
    if src == torch.float32:  # rounding decisions lie at scale * midpoint
        values = torch.cat([values, values * torch.tensor(scale)])
    divisor = torch.tensor(scale)
    expected = reference.convert(values, dst, None, divisor)
    assert_converted(convert(backend, values, dst, dst_scale=divisor), values, expected)


HARD_EXPONENTS = (-126, -61, -60, -3, 0, 60, 61, 126)
HARD_SIGNIFICANDS = (1.0, 1 + 2**-23, 2 - 2**-23, 2 - 2**-22, 4 / 3, 1.0625, 1.0625 + 2**-23)


@pytest.mark.parametrize("exponent", HARD_EXPONENTS)
@pytest.mark.parametrize("dst", FP8, ids=str)
def test_every_bfloat16_by_scales_that_round_hard(
    backend: Backend, dst: torch.dtype, exponent: int
) -> None:
    """Divisors whose quotients come as close to a rounding decision as any."""
    values = every_pattern(torch.bfloat16)
    for significand in HARD_SIGNIFICANDS:
        divisor = torch.tensor(significand * 2.0**exponent)
        expected = reference.convert(values, dst, None, divisor)
        assert_converted(convert(backend, values, dst, dst_scale=divisor), values, expected)


@pytest.mark.parametrize("exponent", HARD_EXPONENTS)
@pytest.mark.parametrize("dst", FP8, ids=str)
def test_every_bfloat16_in_small_calls(dst: torch.dtype, exponent: int) -> None:
    """The CPU makes no tables for so few numbers."""
    values = every_pattern(torch.bfloat16)
    for significand in HARD_SIGNIFICANDS[::2]:
        divisor = torch.tensor(significand * 2.0**exponent)
        expected = reference.convert(values, dst, None, divisor)
        parts = [convert(CPU, part, dst, dst_scale=divisor) for part in values.split(2048)]
        assert_converted(torch.cat(parts), values, expected)


@pytest.mark.parametrize("scale", [None, 0.0123, 0.5])
@pytest.mark.parametrize(
    ("src", "dst"),
    [
        (torch.bfloat16, E4M3),
        (torch.bfloat16, E5M2),
        (E4M3, torch.bfloat16),
        (E5M2, torch.float16),
        (E4M3, torch.float32),
        (E4M3, E5M2),
    ],
    ids=str,
)
def test_conversions_that_store_past_the_caches(
    src: torch.dtype, dst: torch.dtype, scale: float | None
) -> None:
    """On the CPU, which does so in calls of this size."""
    info = abi.kvx_backend_info_t()
    abi.check(abi.library().kvx_backend_info(info))
    values, bits = every_pattern(src), FORMATS[dst].bits if dst in FORMATS else np.float32
    times = info.stream_bytes // (len(values) * np.dtype(bits).itemsize) + 1
    given = None if scale is None else torch.tensor(scale)
    src_scale, dst_scale = (given, None) if src in FP8 else (None, given)
    expected = reference.convert(values, dst, src_scale, dst_scale).repeat(times)
    many = values.repeat(times)
    got = convert(CPU, many, dst, src_scale=src_scale, dst_scale=dst_scale)
    assert_converted(got, many, expected)


@pytest.mark.parametrize("scale", [0.0123, 0.25, 3.0, 448.0, 1e-6, 2.0**-126, 1e-40])
@pytest.mark.parametrize("dst", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("src", SCALED, ids=str)
def test_every_value_from_scaled_bytes(
    backend: Backend, src: torch.dtype, dst: torch.dtype, scale: float
) -> None:
    factor = torch.tensor(scale)
    for times in (1, 33):  # in a small call and in one for which the CPU makes tables
        values = every_pattern(src).repeat(times)
        expected = reference.convert(values, dst, factor)
        assert_converted(convert(backend, values, dst, src_scale=factor), values, expected)


@pytest.mark.parametrize("src", SCALED, ids=str)
@pytest.mark.parametrize("dst", SCALED, ids=str)
def test_every_value_from_scaled_bytes_to_scaled_bytes(
    backend: Backend, src: torch.dtype, dst: torch.dtype
) -> None:
    """The source's scale is applied, the product rounded to float32, then the destination's."""
    scales = (None, 0.3, 0.0625, 7.7, 1e-4)
    for a, b, times in itertools.product(scales, scales, (1, 33)):
        if a == b:
            continue
        values = every_pattern(src).repeat(times)
        factor = None if a is None else torch.tensor(a)
        divisor = None if b is None else torch.tensor(b)
        expected = reference.convert(values, dst, factor, divisor)
        got = convert(backend, values, dst, src_scale=factor, dst_scale=divisor)
        assert_converted(got, values, expected)


@pytest.mark.parametrize("dtype", SCALED, ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.3, 2.0**-10])
def test_the_same_scale_on_both_sides_changes_no_number(
    backend: Backend, dtype: torch.dtype, scale: float
) -> None:
    """Only NaN may change its bits; infinity and -128 may saturate. Spec: E.6, rule 8"""
    values = every_pattern(dtype)
    values = values[values.float().isfinite() & (values.float() != -128)]
    got = convert(
        backend, values, dtype, src_scale=torch.tensor(scale), dst_scale=torch.tensor(scale)
    )
    assert_converted(got, values, values)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_dtype_keeps_every_bit(backend: Backend, dtype: torch.dtype) -> None:
    """Signalling NaN, negative zero, codes that mean nothing: bytes are bytes."""
    if dtype == torch.float32:
        values = torch.arange(-(1 << 31), 1 << 31, 100_003).to(torch.int32).view(torch.float32)
    else:
        values = every_pattern(dtype)
    as_int = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[values.element_size()]
    for dim, strided in ((128, False), (19, True)):
        got = convert(backend, values, dtype, dim=dim, strided=strided)
        assert torch.equal(got.contiguous().view(as_int), values.view(as_int))


def test_saturation_nan_and_zero_by_hand(backend: Backend) -> None:
    """A few results written out, so that oracle and library cannot be wrong together."""
    inf, nan = math.inf, math.nan
    inputs = torch.tensor([inf, -inf, nan, -nan, 449.0, 464.0, 1e9, -1e9, 0.0, -0.0, 2.0**-10])
    e4m3 = convert(backend, inputs, E4M3).view(torch.uint8).tolist()
    assert e4m3 == [0x7E, 0xFE, 0x7F, 0x7F, 0x7E, 0x7E, 0x7E, 0xFE, 0x00, 0x80, 0x00]
    e5m2 = convert(backend, inputs, E5M2).view(torch.uint8).tolist()
    assert e5m2 == [0x7B, 0xFB, 0x7F, 0x7F, 0x5F, 0x5F, 0x7B, 0xFB, 0x00, 0x80, 0x14]
    f16 = convert(
        backend, torch.tensor([65519.0, 65520.0, -1e9, 2.0**-25, 3 * 2.0**-25]), torch.float16
    )
    assert f16.tolist() == [65504.0, inf, -inf, 0.0, 2.0**-23]
    codes = torch.tensor([0x7E, 0x01, 0x81, 0x08, 0x80], dtype=torch.uint8).view(E4M3)
    assert convert(backend, codes, torch.float32).tolist() == [448, 2**-9, -(2**-9), 2**-6, -0.0]


# --- scales -----------------------------------------------------------------------------------


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("granularity", SCALE_SHAPES, ids=lambda g: g.name)
@pytest.mark.parametrize("layout", ["nhd", "tgi", "vllm_BHLNC", "custom_token_innermost"])
def test_every_granularity(
    backend: Backend, layout: str, granularity: ScaleGranularity, scale_dtype: torch.dtype
) -> None:
    """Write, gather and migrate with scales that differ at every place where they may."""
    g = Geometry(num_kv_heads=3, head_dim=20)
    for dtype, strided in ((E4M3, False), (E5M2, True)):
        cache = scaled(LAYOUTS[layout](g, dtype, 1), granularity, 2, scale_dtype, strided)
        expected = cache.clone()
        slots = tables.slots(cache, 17, 3)
        key, value = random_values((2, 17, 3, 20), torch.bfloat16, 4)
        reference.write(expected.layers[-1], key, value, slots)
        backend.write(cache.layers[-1], key, value, slots)
        assert_same_bytes(cache, expected)

        cache.fill(5)
        lengths = [9, 4, 11]
        end = tables.packed(cache, lengths, 6, nulls=0.2)
        got = torch.zeros(2, 3, 11, 3, 20, dtype=torch.float32)
        wanted = torch.zeros_like(got)
        reference.gather(cache.layers[-1], end, lengths, *wanted)
        backend.gather(cache.layers[-1], end, torch.tensor(lengths), *got, max_seq_len=11)
        assert torch.equal(got.view(torch.int32), wanted.view(torch.int32))

        for other in SCALE_SHAPES:
            target = LAYOUTS["packed8"](Geometry(8, 8, 3, 20), E4M3, 7)
            target = scaled(target, other, 8, scale_dtype, strided)
            expected = target.clone()
            dst_end = tables.packed(target, lengths, 9, shared=False)
            reference.migrate(cache.layers, end, expected.layers, dst_end, lengths)
            backend.migrate(cache, end, target, dst_end, torch.tensor(lengths))
            assert_same_bytes(target, expected)


def test_scales_of_heads_and_tokens_move_with_ranges(backend: Backend) -> None:
    src = LAYOUTS["nhd"](Geometry(num_kv_heads=4), E4M3, 1).fill(2)
    dst = LAYOUTS["hnd"](Geometry(num_kv_heads=6, block_size=8), E5M2, 3)
    for granularity in SCALE_SHAPES:
        source, target = scaled(src, granularity, 4), scaled(dst, granularity, 5)
        src_end = tables.packed(source, [11, 7], 6, starts=[3, 0])
        dst_end = tables.packed(target, [8, 12], 7, shared=False)
        expected = target.clone()
        reference.migrate(
            source.layers, src_end, expected.layers, dst_end, [8, 7],
            src_starts=[3, 0], dst_starts=[0, 5], src_head=1, dst_head=3, num_heads=3,
        )  # fmt: skip
        backend.migrate(
            source, src_end, target, dst_end, torch.tensor([8, 7]),
            src_starts=torch.tensor([3, 0]), dst_starts=torch.tensor([0, 5]),
            src_head=1, dst_head=3, num_heads=3,
        )  # fmt: skip
        assert_same_bytes(target, expected)


def is_scale(scale: Tensor) -> Tensor:
    return scale.isfinite() & (scale > 0)


def put_back(moved: Tensor, before: Tensor, half: Half, place: Place) -> None:
    """Undoes the heads of a token that have no usable scale."""
    scale = half.scale_at(place)
    assert scale is not None
    bad = ~is_scale(scale).expand(half.num_kv_heads, 1)[:, 0]
    moved[bad] = before[bad]


@pytest.mark.parametrize("bad", [0.0, -1.0, math.inf])
def test_one_scale_of_both_ends_that_is_no_scale_is_refused(bad: float) -> None:
    """Also where it would be left out because it is the same: of each head, but there is one."""
    of = Geometry(num_kv_heads=1)
    src, dst = (scaled(LAYOUTS["nhd"](of, E4M3, i), ScaleGranularity.PER_HEAD, i) for i in (1, 2))
    for cache in (src, dst):
        for layer in cache.layers:
            for half in (layer.k, layer.v):
                assert half is not None
                assert half.scale is not None
                half.scale.fill_(bad)
    before = dst.clone()
    ends = (reference.Packed(torch.tensor([blocks]), 4) for blocks in ([0, 4], [1, 3]))
    with pytest.raises(InvalidArgumentError, match="expected a finite scale above 0"):
        CPU.migrate(src, next(ends), dst, next(ends), torch.tensor([8]))
    assert_same_bytes(dst, before)


@pytest.mark.parametrize("bad", [0.0, -0.0, -1.0, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("granularity", SCALE_SHAPES, ids=lambda g: g.name)
def test_a_scale_that_is_no_scale_is_refused(
    backend: Backend, granularity: ScaleGranularity, bad: float
) -> None:
    """Where the call would use it: the host then writes nothing, a device all heads but those.
    Elsewhere it may be anything.
    """
    cache = scaled(LAYOUTS["nhd"](Geometry(), E4M3, 1).fill(2), granularity, 3)
    half = cache.layers[-1].v
    assert half is not None
    assert half.scale is not None
    last = tuple(n - 1 for n in half.scale.shape)  # block 4, token 3, head 1: slot 19
    half.scale[last] = bad
    message = r"expected a finite scale above 0 \(spec E\.6\)"
    sound = cache.with_scales(lambda h, name: (h.scale.where(is_scale(h.scale), 1), granularity))

    key, value = random_values((2, 2, 2, 16), torch.bfloat16, 4)
    slots, places = torch.tensor([0, 19]), [Place(0, 0), Place(4, 3)]
    before, expected = cache.clone().layers[-1].v, sound.clone()
    if not backend.looks_first:
        reference.write(expected.layers[-1], key, value, slots)
        for place in places:
            put_back(expected.layers[-1].v.at(place), before.at(place), half, place)
    with pytest.raises(InvalidArgumentError, match=message):
        backend.write(cache.layers[-1], key, value, slots)
    assert_same_bytes(cache, expected)

    end, dst_end = (reference.Packed(torch.tensor([blocks]), 4) for blocks in ([0, 4], [1, 3]))
    out, gathered = torch.full((2, 2, 1, 8, 2, 16), 7.0)
    if not backend.looks_first:
        reference.gather(sound.layers[-1], end, [8], *gathered)
        for token in range(8):
            put_back(gathered[1, 0, token], out[1, 0, token], half, end.place(0, token, 1))
    with pytest.raises(InvalidArgumentError, match=message):
        backend.gather(cache.layers[-1], end, torch.tensor([8]), *out, max_seq_len=8)
    assert torch.equal(out, gathered)

    other = LAYOUTS["hnd"](Geometry(), torch.bfloat16, 5)
    before, expected = other.clone().layers[-1].v, other.clone()
    if not backend.looks_first:
        reference.migrate(sound.layers, end, expected.layers, dst_end, [8])
        for token in range(8):
            there = dst_end.place(0, token, 1)
            moved, kept = expected.layers[-1].v.at(there), before.at(there)
            put_back(moved, kept, half, end.place(0, token, 1))
    with pytest.raises(InvalidArgumentError, match=message):
        backend.migrate(cache, end, other, dst_end, torch.tensor([8]))
    assert_same_bytes(other, expected)

    if granularity not in (ScaleGranularity.PER_TENSOR, ScaleGranularity.PER_HEAD):
        expected = cache.clone()
        reference.write(expected.layers[-1], key, value, torch.tensor([0, -1]))
        backend.write(cache.layers[-1], key, value, torch.tensor([0, -1]))
        assert_same_bytes(cache, expected)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 1, 1, 1, 1)])
def test_one_scale_of_any_shape(backend: Backend, shape: tuple[int, ...]) -> None:
    cache = LAYOUTS["tgi"](Geometry(), E5M2, 1)
    scale = torch.full(shape, 0.7)
    cache = cache.with_scales(lambda half, name: (scale, ScaleGranularity.PER_TENSOR))
    expected = cache.clone()
    key, value = random_values((2, 5, 2, 16), torch.float32, 2)
    slots = tables.slots(cache, 5, 3)
    reference.write(expected.layers[-1], key, value, slots)
    backend.write(cache.layers[-1], key, value, slots)
    assert_same_bytes(cache, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_a_scale_of_one_is_welcome_on_any_cache(backend: Backend, dtype: torch.dtype) -> None:
    cache = LAYOUTS["nhd"](Geometry(), dtype, 1)
    one = cache.with_scales(lambda half, name: (torch.ones(1), ScaleGranularity.PER_TENSOR))
    expected = cache.clone()
    key, value = random_values((2, 5, 2, 16), dtype, 2)
    slots = tables.slots(cache, 5, 3)
    reference.write(expected.layers[-1], key, value, slots)
    backend.write(one.layers[-1], key, value, slots)
    assert_same_bytes(cache, expected)


# --- the floating point environment -----------------------------------------------------------


@pytest.mark.parametrize(("src", "dst"), PAIRS)
def test_every_value_with_flush_to_zero(
    backend: Backend, src: torch.dtype, dst: torch.dtype, request: pytest.FixtureRequest
) -> None:
    """The caller's MXCSR changes nothing, and is what it was afterwards."""
    values = inputs_for(src, dst)
    expected = reference.convert(values, dst)
    request.getfixturevalue("flush_denormal")
    got = convert(backend, values, dst)
    narrow = convert(backend, values, dst, dim=19, strided=True)
    still_flushing = (torch.tensor([1e-40]) * 1.0).item() == 0.0
    torch.set_flush_denormal(False)
    assert still_flushing
    assert_converted(got, values, expected)
    assert_converted(narrow, values, expected)


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_subnormal_scales_with_flush_to_zero(
    backend: Backend, scale_dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    """Half-precision scales are often below 2^-14, and then subnormal."""
    scale = torch.tensor(torch.finfo(scale_dtype).smallest_normal * 0.375).to(scale_dtype)
    assert scale.item() != 0
    values = every_pattern(E4M3)
    expected = reference.convert(values, torch.float32, scale.float())
    request.getfixturevalue("flush_denormal")
    got = convert(backend, values, torch.float32, src_scale=scale)
    torch.set_flush_denormal(False)
    assert_converted(got, values, expected)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="FE_UPWARD is x86's number")
def test_every_value_with_another_rounding_mode(backend: Backend) -> None:
    """The caller's rounding mode changes nothing, and is what it was afterwards."""
    upward = {"x86_64": 0x800, "aarch64": 0x400000}[platform.machine()]  # FE_UPWARD of fenv.h
    libm = ctypes.CDLL("libm.so.6")
    values, divisor = hard_floats(E4M3), torch.tensor(0.3)
    expected = {
        dtype: reference.convert(values, dtype, None, divisor if dtype in SCALED else None)
        for dtype in SMALL
    }
    try:
        for dtype in SMALL:
            scale = divisor if dtype in SCALED else None
            assert libm.fesetround(upward) == 0
            got = convert(backend, values, dtype, dst_scale=scale)
            kept = libm.fegetround()
            libm.fesetround(0)
            assert kept == upward
            assert_converted(got, values, expected[dtype])
    finally:
        libm.fesetround(0)


def test_threads_change_nothing(backend: Backend) -> None:
    values = random_values((1 << 20,), torch.float32, 1)
    results = []
    try:
        for threads in (1, 2, 3):
            abi.check(abi.library().kvx_set_num_threads(threads))
            results.append(convert(backend, values, E4M3, dst_scale=torch.tensor(0.3)))
    finally:
        abi.check(abi.library().kvx_set_num_threads(0))
    assert_converted(results[0], values, reference.convert(values, E4M3, None, torch.tensor(0.3)))
    for other in results[1:]:
        assert torch.equal(other.view(torch.uint8), results[0].view(torch.uint8))
