"""E4M3, E2M1 and their scales as these calls write them: all codes, ties, the golden row."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from kvx_core.hybrid import ops
from tests.hybrid_ops import oracle
from tests.hybrid_ops.conftest import On


def e4m3_by_append(on: On, numbers: Tensor) -> Tensor:
    """Codes of rows of float32 numbers whose largest magnitude is 448: their scale is 1."""
    rows, dim = numbers.shape
    entry = torch.cat([numbers, torch.zeros(rows, 64)], -1)
    fp8 = torch.zeros(rows, 1, dim, dtype=torch.uint8)
    rope = torch.zeros(rows, 1, 64, dtype=torch.bfloat16)
    tensors = on(fp8, rope, torch.zeros(rows, 1))
    table = torch.arange(rows, dtype=torch.int32)[:, None]
    ids = torch.zeros(rows, dtype=torch.int32)
    ops.flush_write_hca(on(entry), None, on(ids), None, on(table), *tensors)
    assert (tensors[2] == 1).all()
    return tensors[0].cpu()[:, 0]


def keys_by_flush(
    on: On, keys: Tensor, kind: str, rounding: str = "nearest_even"
) -> tuple[Tensor, Tensor]:
    rows, dim = keys.shape
    group = 16 if kind == "nvfp4" else 32
    entry, u8 = torch.ones(rows, 65), torch.uint8
    pool = on(
        torch.zeros(rows, 1, 1, dtype=u8),
        torch.zeros(rows, 1, 64, dtype=torch.bfloat16),
        torch.zeros(rows, 1),
        torch.zeros(rows, 1, dim // 2, dtype=u8),
        torch.zeros(rows, 1, dim // group, dtype=u8),
    )
    table = torch.arange(rows, dtype=torch.int32)[:, None]
    ids = torch.zeros(rows, dtype=torch.int32)
    rest = on(ids), None, on(table), *pool
    ops.flush_write_csa(*on(entry, keys), None, *rest, keys=kind, rounding=rounding)
    return pool[3].cpu()[:, 0], pool[4].cpu()[:, 0]


def test_all_codes_of_e4m3_are_their_own(on: On) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    finite = codes[(codes & 0x7F) != 0x7F]
    values = oracle.e4m3_decode(finite)
    assert torch.equal(values, finite.view(torch.float8_e4m3fn).float())
    assert torch.equal(e4m3_by_append(on, values[None])[0], finite)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_e4m3_rounds_to_nearest_and_ties_to_even(on: On, seed: int) -> None:
    steps = oracle.e4m3_decode(torch.arange(0x7F, dtype=torch.uint8))
    ties = (steps[1:] + steps[:-1]) / 2
    made = torch.Generator().manual_seed(seed)
    some = torch.exp2(torch.rand(400, generator=made) * 19.8 - 11)
    near = torch.cat([ties.nextafter(torch.tensor(0.0)), ties.nextafter(torch.tensor(1e9))])
    numbers = torch.cat([ties, near, some, torch.tensor([448.0])])
    numbers = torch.cat([numbers, -numbers])[None]
    assert torch.equal(oracle.e4m3_decode(e4m3_by_append(on, numbers)), oracle.e4m3_value(numbers))


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("dim", [1, 77, 128, 300])
def test_fp8_keys_are_the_oracles(on: On, dim: int, seed: int) -> None:
    made = torch.Generator().manual_seed(seed)
    keys = torch.randn(9, dim, generator=made) * 10.0 ** torch.arange(-5, 4)[:, None]
    keys[0], keys[1, 0] = 0, 448
    entry, u8 = torch.ones(9, 65), torch.uint8
    pool = on(
        torch.zeros(9, 1, 1, dtype=u8),
        torch.zeros(9, 1, 64, dtype=torch.bfloat16),
        torch.zeros(9, 1),
        torch.zeros(9, 1, dim, dtype=u8),
        torch.zeros(9, 1),
    )
    table = torch.arange(9, dtype=torch.int32)[:, None]
    where = None, on(torch.zeros(9, dtype=torch.int32)), None, on(table)
    ops.flush_write_csa(*on(entry, keys), *where, *pool, keys="fp8")
    codes, scales = oracle.fp8_key(keys)
    assert torch.equal(pool[4].cpu()[:, 0], scales)
    assert torch.equal(pool[3].cpu()[:, 0], codes)


GOLDEN = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6, 0]


def test_the_golden_row(on: On) -> None:
    codes, scales = keys_by_flush(on, torch.tensor([GOLDEN]), "nvfp4")
    assert bytes(codes[0].tolist()).hex(" ") == "10 32 54 76 a9 cb ed 0f"
    assert scales.tolist() == [[0x38]]


def e2m1_codes(keys: Tensor) -> list[int]:
    codes: list[int] = torch.stack([keys & 15, keys >> 4], -1).flatten().tolist()
    return codes


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize(("rounding", "minus_zero"), [("nearest_even", 8), ("thresholds", 0)])
def test_all_codes_of_e2m1_are_their_own(on: On, kind: str, rounding: str, minus_zero: int) -> None:
    numbers = torch.cat([oracle.E2M1, -oracle.E2M1])
    codes, _ = keys_by_flush(on, numbers.repeat(2)[None], kind, rounding)
    assert e2m1_codes(codes) == [*range(8), minus_zero, *range(9, 16)] * 2


@pytest.mark.parametrize(
    ("rounding", "expected"),
    [
        ("nearest_even", [7, 0, 2, 2, 4, 4, 6, 6, 15, 8, 10, 10, 12, 12, 14, 14]),
        ("thresholds", [7, 0, 1, 2, 3, 4, 5, 6, 15, 0, 9, 10, 11, 12, 13, 14]),
    ],
)
def test_ties_of_e2m1(on: On, rounding: str, expected: list[int]) -> None:
    """To even codes, as vLLM's; or down, as SGLang's. Their neighbours go to the nearest code."""
    ties = [6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5]
    row = torch.tensor([ties + [-x for x in ties]])
    codes, _ = keys_by_flush(on, row, "nvfp4", rounding)
    assert e2m1_codes(codes) == expected
    for towards, past in ((0.0, 0), (9.0, 1)):
        near = row.abs().nextafter(torch.tensor(towards)).copysign(row)
        near[:, 0], near[:, 8] = 6, -6
        codes, _ = keys_by_flush(on, near, "nvfp4", rounding)
        signs = [8] * 8 if past or rounding == "nearest_even" else [8, 0, *[8] * 6]
        steps = [past + i for i in range(7)]
        assert e2m1_codes(codes) == [
            7,
            *steps,
            *(s | c for s, c in zip(signs, [7, *steps], strict=True)),
        ]


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("rounding", ["nearest_even", "thresholds"])
@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("dim", [32, 128, 288])
def test_keys_are_the_oracles(on: On, kind: str, dim: int, rounding: str, seed: int) -> None:
    made = torch.Generator().manual_seed(seed)
    keys = torch.randn(9, dim, generator=made) * 10.0 ** torch.arange(-5, 4)[:, None]
    keys[0, :32] = 0
    keys[5:] = (keys[5:] * 4).round() / 4  # ties
    encode = oracle.nvfp4 if kind == "nvfp4" else oracle.mxfp4
    found = keys_by_flush(on, keys, kind, rounding)
    for got, expected in zip(found, encode(keys, rounding), strict=True):
        assert torch.equal(got, expected)


def test_keys_that_are_no_numbers(on: On) -> None:
    """NaN becomes 0 and is left out of the scale; infinity is the largest number."""
    keys = torch.zeros(3, 32)
    keys[0, :2] = torch.tensor([torch.nan, 6.0])
    keys[1, :2] = torch.tensor([torch.inf, -torch.inf])
    for kind, rounding in product(("nvfp4", "mxfp4"), ("nearest_even", "thresholds")):
        codes, scales = keys_by_flush(on, keys, kind, rounding)
        assert codes[0, 0] == 0x70
        assert not codes[0, 1:].any()
        assert codes[1, 0] == 0xF7
        assert scales[0, 0] == (0x38 if kind == "nvfp4" else 127)
        assert not codes[2].any()
