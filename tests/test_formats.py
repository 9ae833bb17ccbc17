"""Formats: every pair at both ends of migrate. Spec: E.6, E.10

The oracle of AMD's FP8 is torch, that of the others is tests/reference.py.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from kvx_core import CacheDesc, CacheFacts, CacheView, DType, Layout, describe
from kvx_core.view import CacheSpan
from tests import reference
from tests.calls import Backend

FNUZ = torch.float8_e4m3fnuz
TORCH = {
    DType.F16: torch.float16,
    DType.BF16: torch.bfloat16,
    DType.F32: torch.float32,
    DType.F8_E4M3: torch.float8_e4m3fn,
    DType.F8_E5M2: torch.float8_e5m2,
    DType.F8_E4M3FNUZ: FNUZ,
}
FORMATS = [*TORCH]
NEW = (DType.F8_E4M3FNUZ,)  # the others' pairs are in test_codecs.py
PAIRS = [pair for pair in itertools.product(FORMATS, repeat=2) if set(pair) & set(NEW)]
SEEDS = (1, 2, 3)


def bytes_of(values: Tensor) -> np.ndarray:
    return values.contiguous().view(torch.uint8).numpy()


def encode(values: np.ndarray, dtype: DType) -> np.ndarray:
    """The bytes of float32 numbers, [..., numbers] to [..., bytes]."""
    values = np.ascontiguousarray(values, np.float32)
    numbers = torch.from_numpy(values)
    if dtype is DType.F8_E4M3FNUZ:
        return bytes_of(numbers.clamp(-240, 240).to(FNUZ))
    return bytes_of(reference.encode(numbers, TORCH[dtype]))


def decode(stored: np.ndarray, dtype: DType) -> np.ndarray:
    """The float32 numbers of bytes."""
    numbers = torch.from_numpy(stored.copy()).view(TORCH[dtype])
    return (numbers.float() if dtype is DType.F8_E4M3FNUZ else reference.decode(numbers)).numpy()


def values(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Numbers of many magnitudes, whole vectors of zeros and of one number among them."""
    random = np.random.default_rng(seed)
    found = random.standard_normal(shape) * 2.0 ** random.integers(-12, 6, (*shape[:-1], 1))
    found[..., ::7] = 0
    found[0] = 0
    found[1] = 3.5
    return found.astype(np.float32)


def memory(dtype: DType, lead: tuple[int, ...], dim: int, seed: int) -> np.ndarray:
    """Random bytes with room for vectors of `dim` numbers, [*lead, bytes]."""
    size = dim // dtype.numbers * dtype.itemsize
    return np.random.default_rng(seed).integers(0, 256, (*lead, size), np.uint8)


def span(raw: np.ndarray, dtype: DType, layout: Layout, table: list[list[int]]) -> CacheSpan:
    """A cache of one layer, whose K is in `raw`: [axes of the layout but dim, bytes]."""
    tensor = torch.from_numpy(raw)
    k = describe(tensor.view(TORCH[dtype]), layout, dtype=dtype)
    view = CacheView(layers=(CacheDesc.from_kv(k),), facts=CacheFacts())
    return view.at(block_table=table)


def move(
    backend: Backend, src: CacheSpan, dst: CacheSpan, lens: list[int], *raw: np.ndarray
) -> None:
    backend.migrate_spans(src, dst, lens, map(torch.from_numpy, raw))


# --- every pair ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("a", "b"), PAIRS, ids=lambda dtype: dtype.name)
def test_every_pair(backend: Backend, a: DType, b: DType) -> None:
    """NHD blocks of 5 tokens to HND blocks of 4; 3 heads of 96 numbers; nothing else changes."""
    heads, dim, lens = 3, 96, [13, 2]
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


# --- numbers ------------------------------------------------------------------------------------


def one_vector(backend: Backend, stored: np.ndarray, a: DType, b: DType) -> np.ndarray:
    """What vectors [n, bytes] become, each a token."""
    dim = stored.shape[-1] // a.itemsize * a.numbers
    source, target = stored[None, :, None], memory(b, (1, len(stored), 1), dim, 9)
    ends = (span(raw, dtype, Layout.BLOCK_NHD, [[0]]) for raw, dtype in ((source, a), (target, b)))
    move(backend, *ends, [len(stored)], source, target)
    return target[0, :, 0]


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
