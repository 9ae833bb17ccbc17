"""Each format of numbers has an oracle that is not KVX's: one that is new to the table fails here.

All pairs of formats are in test_formats.py, test_codecs.py, test_turboquant_formats.py,
test_affine.py and test_fp4.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvx_core import DType, migrate
from tests import affine, fp4
from tests.affine_values import from_dense
from tests.calls import CPU
from tests.format_moves import one_vector, values
from tests.turboquant_moves import decode, encode

FLOATS = [d for d in DType if d.format.rounding and d is not DType.S8]
NUMBERS = [d for d in DType if d.format.rounding or d.numbers > 1 or d.format.affine]
# Caches of the formats with scales beside the data; their `store` and `numbers` are the oracle.
BESIDE = {
    DType.U8_ZERO: affine.openvino_v,
    DType.U8_BIAS: affine.mlx,
    DType.F4_E2M1: fp4.page,
}


@pytest.mark.parametrize("dtype", NUMBERS, ids=lambda dtype: dtype.name)
def test_bytes_and_numbers_are_those_of_the_oracle(dtype: DType) -> None:
    dim = max(128, dtype.numbers)
    rows = values((9, dim), 1)
    if dtype not in BESIDE:
        stored = one_vector(CPU, rows.view(np.uint8), DType.F32, dtype)
        np.testing.assert_array_equal(stored, encode(rows, dtype))
        numbers = one_vector(CPU, stored, dtype, DType.F32).view(np.float32)
        np.testing.assert_array_equal(numbers, decode(stored, dtype))
        return
    tokens = torch.from_numpy(rows)[:, None]
    cache: Any = BESIDE[dtype](1, len(rows), 1, dim, 1)
    expected = cache.clone()
    for t, token in enumerate(tokens):
        expected.store(0, t, token)
    migrate(from_dense(tokens, torch.float32), cache.span([[0]]), [len(rows)], same_model=True)
    for found, wanted in zip(cache.raw, expected.raw, strict=True):
        assert torch.equal(found, wanted)
    out = torch.zeros_like(tokens)
    migrate(cache.span([[0]]), from_dense(out, torch.float32), [len(rows)], same_model=True)
    for t in range(len(rows)):
        assert torch.equal(out[t], expected.numbers(0, t))


def test_s8_is_what_pytorch_and_the_spec_say() -> None:
    """Nearest, ties to even; past 127 and -127, these; NaN is 0; -128 is read, not written."""
    given = [0.5, 1.5, -0.5, -2.5, 126.5, 127.5, -127.5, -128.0, 1e30, float("-inf"), float("nan")]
    codes = [0, 2, 0, -2, 126, 127, -127, -127, 127, -127, 0]
    row = np.array([given], np.float32)
    assert one_vector(CPU, row.view(np.uint8), DType.F32, DType.S8).view(np.int8).tolist() == [
        codes
    ]
    every = np.arange(256, dtype=np.uint8)[None]
    numbers = one_vector(CPU, every, DType.S8, DType.F32).view(np.float32)
    assert numbers[0].tolist() == [*range(128), *range(-128, 0)]


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.name)
def test_the_precision_of_a_float_is_torchs(dtype: DType) -> None:
    torchs = torch.finfo(getattr(torch, dtype.array_name))
    rounding = dtype.format.rounding
    assert rounding is not None
    assert rounding.largest == torchs.max
    assert 2.0**-rounding.mantissa == torchs.eps
    assert 2.0**rounding.smallest == torchs.smallest_normal


def test_sizes_are_torchs_and_what_has_a_precision_is_known() -> None:
    for dtype in DType:
        if hasattr(torch, dtype.label):
            assert dtype.itemsize == getattr(torch, dtype.array_name).itemsize
            assert dtype.numbers == 1
    assert [dtype.name for dtype in FLOATS] == [
        "F16", "BF16", "F32", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ",
    ]  # fmt: skip
    assert DType.S8.format.rounding == (6, 6, 127)  # integers: numbers of 7 bits, steps of 1
