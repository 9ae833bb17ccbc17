"""migrate with hadamard_k and hadamard_v: numbers that are rotated on their way. Spec: E.17

What a rotation is says kvx_hadamard, which tests/test_hadamard.py compares with the definition.
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
    FactsMismatchError,
    InvalidArgumentError,
    Layout,
    Plan,
    ScaleDesc,
    UnsupportedError,
    describe,
    migrate,
)
from kvx_core.encodings import hadamard
from tests import test_formats as formats
from tests.calls import CPU, HOSTGRID, Backend
from tests.format_moves import span, values
from tests.turboquant_moves import decode, encode

SEEDS = (1, 2, 3)
FORMATS = (DType.F32, DType.BF16, DType.F8_E4M3, DType.Q8_0, DType.IQ4_NL, DType.Q6_K, DType.TQ3)
PAIRS = [(a, b) for a in FORMATS for b in FORMATS if DType.F32 in (a, b) or a is b]


def rotated(numbers: np.ndarray, order: int) -> np.ndarray:
    found = np.ascontiguousarray(numbers)
    hadamard(found, order)
    return found


@pytest.mark.parametrize(("a", "b"), PAIRS, ids=lambda dtype: dtype.name)
def test_it_is_a_rotation_between_two_conversions(backend: Backend, a: DType, b: DType) -> None:
    """NHD blocks of 5 to HND blocks of 4, every order; units of the same format, too."""
    dim, lens = 256, [8, 2]
    tables = [[2, 0], [1, -1]], [[3, 0], [2, -1]]
    for seed, order in zip(SEEDS, (2, 64, 256), strict=True):
        source = encode(values((3, 5, 3, dim), seed), a)
        target = formats.memory(b, (4, 3, 4), dim, seed)
        expected = target.copy()
        for row, length in enumerate(lens):
            for t in range(length):
                numbers = decode(source[tables[0][row][t // 5], t % 5], a)
                moved = encode(rotated(numbers, order), b)
                expected[tables[1][row][t // 4], :, t % 4] = moved
        src = span(source, a, Layout.BLOCK_NHD, tables[0])
        dst = span(target, b, Layout.BLOCK_HND, tables[1])
        raw = map(torch.from_numpy, (source, target))
        backend.migrate_spans(src, dst, lens, raw, hadamard=(order, 0))
        np.testing.assert_array_equal(target, expected)


def test_scales_lie_outside(backend: Backend) -> None:
    """Numbers are multiplied by the source's scale, rotated, divided by the destination's."""
    stored = torch.arange(2 * 4 * 3 * 64).remainder(100).to(torch.uint8).view(2, 4, 3, 64)
    src_k = stored.view(torch.float8_e4m3fn)
    dst_k = torch.zeros_like(src_k)
    scales = [torch.rand(2, 3) + 0.5 for _ in range(2)]
    ends = []
    for k, scale in zip((src_k, dst_k), scales, strict=True):
        desc = ScaleDesc.of(scale, "PER_BLOCK_HEAD")
        layers = (CacheDesc.from_kv(describe(k, Layout.BLOCK_NHD)),)
        view = CacheView(layers=layers, facts=CacheFacts(), k_scales=(desc,))
        ends.append(view.at(block_table=[[1, 0]]))
    backend.migrate_spans(*ends, [8], [src_k, dst_k, *scales], hadamard=(64, 0))
    numbers = src_k.float() * scales[0][:, None, :, None]
    expected = torch.from_numpy(rotated(numbers.numpy(), 64)) / scales[1][:, None, :, None]
    expected = expected.clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(dst_k.view(torch.uint8), expected.view(torch.uint8))


def caches(
    dim: int = 64, dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,) * 2, **facts: Any
) -> list[Any]:
    """Two caches of two layers: random numbers and zeros. All facts are of the first."""
    random = torch.Generator().manual_seed(1)
    found = []
    for i, dtype in enumerate(dtypes):
        kv = [torch.randn(3, 4, 2, dim, generator=random).to(dtype) * (1 - i) for _ in range(4)]
        layers = tuple(
            CacheDesc.from_kv(*(describe(t, Layout.BLOCK_NHD) for t in kv[i : i + 2]))
            for i in (0, 2)
        )
        found.append((CacheView(layers=layers, facts=CacheFacts(**facts if not i else {})), kv))
    return found


def test_k_and_v_and_back() -> None:
    """As llama.cpp stores them: K by 128, V by 64; the same again undoes it but for rounding."""
    dtypes = torch.bfloat16, torch.float32
    (src, kv), (dst, moved) = caches(128, dtypes)
    tables = [[2, 0]], [[1, 2]]
    how: Any = {"same_model": True, "hadamard_k": 128, "hadamard_v": 64}
    migrate(src.at(tables[0]), dst.at(tables[1]), [8], **how)
    for i, (was, now) in enumerate(zip(kv, moved, strict=True)):
        expected = rotated(was[[2, 0]].float().numpy(), 64 if i % 2 else 128)
        np.testing.assert_array_equal(now[[1, 2]].numpy(), expected)
        assert not now[0].any()
    kept = [t.clone() for t in kv]
    for t in kv:
        t[[2, 0]] = 7
    migrate(dst.at(tables[1]), src.at(tables[0]), [8], **how)
    for was, now in zip(kept, kv, strict=True):
        torch.testing.assert_close(was, now, rtol=2**-8, atol=1e-6)  # float32 between


def test_a_plan_says_so() -> None:
    (src, kv), (dst, moved) = caches()
    plan = Plan.migrate(src.at([[2, 0]]), dst.at([[1, 2]]), [8], same_model=True, hadamard_v=32)
    info = plan.describe()
    assert [plane.hadamard for plane in info.planes] == [0, 32, 0, 32]
    assert [plane.exact for plane in info.planes] == [True, False, True, False]
    assert not info.exact
    assert "convert, rotates 32" in repr(info)
    plan.run()
    assert torch.equal(moved[0][[1, 2]], kv[0][[2, 0]])
    expected = torch.from_numpy(rotated(kv[1][[2, 0]].float().numpy(), 32)).bfloat16()
    assert torch.equal(moved[1][[1, 2]], expected)
    sentence = "V of layer 0 has another rotation at each end, but ranges are copies of bytes"
    with pytest.raises(UnsupportedError, match=sentence):
        list(plan.ranges())


def test_facts_say_which_end_is_rotated() -> None:
    for of_src, of_dst in ((False, True), (True, False), (None, None)):
        (src, _), (dst, _) = caches(hadamard=of_src)
        dst = replace(dst, facts=CacheFacts(hadamard=of_dst))
        migrate(src.at([[0]]), dst.at([[0]]), [4], same_model=True, hadamard_k=64)
    (src, _), (dst, _) = caches(hadamard=True)
    dst = replace(dst, facts=CacheFacts(hadamard=True))
    migrate(src.at([[0]]), dst.at([[0]]), [4], same_model=True)
    sentence = "after the rotation, hadamard is False at the source and True at the destination"
    with pytest.raises(FactsMismatchError, match=sentence):
        migrate(src.at([[0]]), dst.at([[0]]), [4], same_model=True, hadamard_k=64)
    dims = {"rotary_dim": 64, "hadamard": False}
    (src, _), (dst, _) = caches(rotary="half", **dims)
    dst = replace(dst, facts=CacheFacts(rotary="interleaved", rotary_dim=64, hadamard=True))
    with pytest.raises(FactsMismatchError, match="rotary is 'half' at the source"):
        Plan.migrate(src.at([[0]]), dst.at([[0]]), [4], same_model=True, hadamard_k=64)


@pytest.mark.parametrize("order", [1, 3, 8192, -2])
def test_wrong_orders(order: int) -> None:
    (src, _), (dst, _) = caches()
    with pytest.raises(InvalidArgumentError, match=f"hadamard_v is {order}, expected"):
        migrate(src.at([[0]]), dst.at([[0]]), [4], same_model=True, hadamard_v=order)


def test_a_device_rotates_1024_numbers_at_most() -> None:
    numbers = np.ones((1, 2, 1, 2048), np.float32).view(np.uint8)
    target = np.zeros_like(numbers)
    ends = [span(raw, DType.F32, Layout.BLOCK_NHD, [[0]]) for raw in (numbers, target)]
    raw = [*map(torch.from_numpy, (numbers, target))]
    sentence = (
        "K is rotated in groups of 2048 numbers, and calls on DEVICE memory rotate 1024 at most; "
        "migrate in HOST memory (spec E.17)"
    )
    with pytest.raises(UnsupportedError, match=re.escape(sentence)):
        HOSTGRID.migrate_spans(*ends, [2], raw, hadamard=(2048, 0))
    for order in (1024, 512):
        target[:] = 0
        HOSTGRID.migrate_spans(*ends, [2], raw, hadamard=(order, 0))
        on_device = target.copy()
        CPU.migrate_spans(*ends, [2], raw, hadamard=(order, 0))
        np.testing.assert_array_equal(on_device, target)
