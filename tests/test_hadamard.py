"""kvx_hadamard: the matrix product, its bits, rows and what lies between. Spec: E.17"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import quantize

from kvx_core import (
    CacheDesc,
    CacheFacts,
    CacheView,
    DType,
    InvalidArgumentError,
    Layout,
    UnsupportedError,
    describe,
    migrate,
    set_num_threads,
)
from kvx_core._c import abi, abi_encode
from kvx_core.encodings import hadamard

ROOT = Path(__file__).parents[1]
ORDERS = [2**bits for bits in range(1, 13)]
SEEDS = (1, 2, 3)


def matrix(order: int) -> np.ndarray:
    """Sylvester's matrix by its definition, normalized, in float64."""
    ones = np.bitwise_count(np.arange(order)[:, None] & np.arange(order))
    return np.where(ones % 2, -1.0, 1.0) / np.sqrt(order)


def in_float32(values: np.ndarray, order: int) -> np.ndarray:
    """The rotation with the sums and the rounding that the spec says, number by number."""
    groups = values.reshape(-1, order).copy()
    for bit in range(order.bit_length() - 1):
        pairs = groups.reshape(len(groups), -1, 2, 1 << bit)
        pairs[:] = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], 2)
    return (groups * np.float32(1 / np.sqrt(order))).reshape(values.shape)


def numbers(shape: tuple[int, ...], seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    return (random.standard_normal(shape) * 2.0 ** random.integers(-9, 9, shape)).astype(np.float32)


@pytest.mark.parametrize("order", ORDERS)
def test_it_is_the_matrix_and_undoes_itself(order: int) -> None:
    by = matrix(order) if order <= 1024 else None  # of larger ones the bits below are enough
    for seed in SEEDS:
        values = numbers((3, 5 * order), seed)
        rotated = values.copy()
        hadamard(rotated, order)
        most = np.abs(values).max()
        if by is not None:
            expected = (values.reshape(-1, order).astype(np.float64) @ by).reshape(3, -1)
            np.testing.assert_allclose(rotated, expected, rtol=0, atol=1e-6 * np.sqrt(order) * most)
        np.testing.assert_array_equal(
            rotated.view(np.uint32), in_float32(values, order).view(np.uint32)
        )
        hadamard(rotated, order)
        np.testing.assert_allclose(rotated, values, rtol=0, atol=2e-6 * most)


BITS = """
import numpy as np
from kvx_core.encodings import hadamard
found = []
for order in [2**bits for bits in range(1, 13)]:
    values = np.random.default_rng(order).standard_normal((2, order)).astype(np.float32)
    hadamard(values, order)
    found.append(values.tobytes().hex())
"""


@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512"])
def test_every_instruction_set_has_the_same_bits(isa: str) -> None:
    """In a process of its own, which reads KVX_CPU_ISA once; here the best is used."""
    here: dict[str, list[str]] = {}
    exec(BITS, here)
    command = [sys.executable, "-c", f"{BITS}\nprint(*found)"]
    got = subprocess.check_output(command, cwd=ROOT, env=os.environ | {"KVX_CPU_ISA": isa})
    assert got.decode().split() == here["found"]


@pytest.mark.parametrize(("dim", "order"), [(64, 64), (96, 32), (80, 16), (576, 64), (128, 128)])
def test_the_largest_power_of_two_is_the_default(dim: int, order: int) -> None:
    values = numbers((4, 3, dim), 1)
    named, default = values.copy(), torch.from_numpy(values.copy())
    hadamard(named, order)
    hadamard(default)
    np.testing.assert_array_equal(default.numpy(), named)
    np.testing.assert_array_equal(named, in_float32(values, order))


def test_nothing_between_the_rows_changes() -> None:
    """Rows of 96 numbers, 101 apart, from an odd address on."""
    memory = np.full(101 * 7 + 1, np.float32(-77.25))
    rows = memory[1:].reshape(7, 101)[:, 2:98]
    rows[:] = values = numbers((7, 96), 2)
    hadamard(rows)
    expected = np.full_like(memory, -77.25)
    expected[1:].reshape(7, 101)[:, 2:98] = in_float32(values, 32)
    np.testing.assert_array_equal(memory, expected)


def test_threads_share_rows() -> None:
    """5 MB in rows of an odd number of groups: as many threads as there are, and one."""
    values = numbers((4_500, 3 * 96), 3)
    alone = values.copy()
    hadamard(values)
    try:
        set_num_threads(1)
        hadamard(alone)
    finally:
        set_num_threads(0)
    np.testing.assert_array_equal(values, alone)
    np.testing.assert_array_equal(values[-1], in_float32(alone := numbers((4_500, 288), 3), 32)[-1])


def test_no_rows() -> None:
    hadamard(np.zeros((0, 64), np.float32))
    hadamard(np.zeros((3, 0, 64), np.float32))


@pytest.mark.parametrize("dtype", [DType.Q8_0, DType.Q4_0], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_llama_cpp_s_rotated_cache(dtype: DType, head_dim: int) -> None:
    """Rotate, then encode: the bytes of gguf-py's encoding of the matrix product.

    Numbers are multiples of 1/64 and the order is 64, so that the products are exact, as V is
    stored; a quarter of K's order 128 is one of them.
    """
    for seed in SEEDS:
        whole = np.random.default_rng(seed).integers(-999, 999, (1, 7, 3, head_dim))
        values = (whole / 64).astype(np.float32)
        product = (values.reshape(-1, 64) @ matrix(64)).astype(np.float32).reshape(values.shape)
        expected = quantize(product, GGMLQuantizationType[dtype.name])
        hadamard(values, 64)
        stored = np.full(expected.shape, 0xA5, np.uint8)
        ends = [
            CacheView((CacheDesc.from_kv(tensor),), CacheFacts(), dense=True)
            for tensor in (
                describe(values, Layout.BLOCK_NHD),
                describe(stored, Layout.BLOCK_NHD, dtype=dtype),
            )
        ]
        migrate(ends[0].at(), ends[1].at(), [7], same_model=True)
        np.testing.assert_array_equal(stored, expected)


# --- what is refused ----------------------------------------------------------------------------

PART = "name an order that divides dim, or rotate a part of each row (spec E.17)"
ORDER = "expected a power of two from 2 to 4096, or 0 (spec E.17)"
SHARED = "expected at least dim 96: rows would share numbers (spec E.17)"
PAST = "they reach past the end of the address space (spec E.17)"
SENTENCES = {
    "dim is 0, expected at least 2 (spec E.17)": {"dim": 0},
    f"dim is 63, whose largest power of two is 1, expected 2 to 4096; {PART}": {
        "dim": 63,
        "order": 0,
    },
    f"dim is 8192, whose largest power of two is 8192, expected 2 to 4096; {PART}": {
        "dim": 8192,
        "order": 0,
    },
    f"order is 48, {ORDER}": {"order": 48},
    f"order is 1, {ORDER}": {"order": 1},
    f"order is 8192, {ORDER}": {"order": 8192},
    "order is 64, which does not divide dim 96; expected at most 32 (spec E.17)": {"order": 64},
    "values is NULL, expected 96 numbers per row (spec E.17)": {"values": None},
    f"row_stride is 95, {SHARED}": {"row_stride": 95},
    f"row_stride is -96, {SHARED}": {"row_stride": -96},
    f"rows is 18446744073709551615 and row_stride 96: {PAST}": {"rows": 2**64 - 1},
    f"rows is 2 and row_stride 4611686018427387904: {PAST}": {"row_stride": 2**62},
}


@pytest.mark.parametrize("sentence", SENTENCES)
def test_every_rule(sentence: str) -> None:
    memory = numbers((2, 96), 1)
    kept = memory.copy()
    usual = {"values": memory.ctypes.data, "rows": 2, "dim": 96, "row_stride": 96, "order": 32}
    call = usual | SENTENCES[sentence]
    with pytest.raises(InvalidArgumentError) as raised:
        abi.check(abi_encode.functions().kvx_hadamard(*call.values()))
    assert str(raised.value) == sentence
    np.testing.assert_array_equal(memory, kept)


def test_an_odd_address_is_refused() -> None:
    memory = numbers((2, 96), 1)
    with pytest.raises(InvalidArgumentError, match=r"^values is 0x\w+, expected a multiple of 4"):
        abi.check(abi_encode.functions().kvx_hadamard(memory.ctypes.data + 2, 1, 96, 96, 32))


def test_tensors_that_are_refused() -> None:
    values = np.zeros((4, 3, 64), np.float32)
    with pytest.raises(InvalidArgumentError, match=r"^values\.dtype is F16, expected F32"):
        hadamard(values.astype(np.float16))
    with pytest.raises(InvalidArgumentError, match=r"^values\.stride\[2\] is 2, expected 1: pass"):
        hadamard(values[..., ::2])
    with pytest.raises(
        InvalidArgumentError,
        match=r"^values\.stride\[0\] is 192, expected 128 after 2 rows 64 apart: pass",
    ):
        hadamard(values[:, :2])
    with pytest.raises(InvalidArgumentError, match=r"^values has no axes"):
        hadamard(np.zeros((), np.float32))
    with pytest.raises(InvalidArgumentError, match=r"^order is 0, expected 1 to"):
        hadamard(values, 0)
    values.setflags(write=False)
    with pytest.raises(InvalidArgumentError, match=r"^values is read-only memory"):
        hadamard(values)
    with pytest.raises(UnsupportedError):
        hadamard(torch.zeros(4, 64, device="meta"))
