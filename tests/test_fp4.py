"""MXFP4 and F4_E2M1: NVFP4 and MX, at either end of migrate. Spec: E.10, E.18

The oracle of MXFP4 is gguf-py (and tests/test_formats.py has every pair of it), that of F4_E2M1 is
ml_dtypes and vLLM's reference quantizer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import ml_dtypes
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
    Plan,
    Plane,
    ScaleDesc,
    UnsupportedError,
    describe,
    gather_kv,
    migrate,
    write_kv,
)
from tests.affine import mlx, openvino_k
from tests.affine_values import plain, values
from tests.calls import Backend
from tests.fp4 import Fp4, decode, encode, page, swap_fours, swapped

SEEDS = (1, 2, 3)
E4M3, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu
HND = Layout.BLOCK_HND
LEAST = 2.0**-128 + 2.0**-149  # the least tensor_scale whose inverse is finite
Make = Callable[[int, int, int, int, int], Any]
FP4: dict[str, Make] = {
    "nvfp4": page,
    "nvfp4 nhd": partial(page, hnd=False, tensor_scale=0.37),
    "nvfp4 4x4": partial(swapped, tensor_scale=0.37),
    "mx": partial(page, kind=E8M0),
}
OTHERS: dict[str, Make] = {
    "F16": partial(plain, dtype=DType.F16),
    "BF16": partial(plain, dtype=DType.BF16, layout=HND),
    "F32": partial(plain, dtype=DType.F32, layout=HND),
    "F8_E4M3": partial(plain, dtype=DType.F8_E4M3),
    "Q8_0": partial(plain, dtype=DType.Q8_0),
    "mlx": mlx,
}
ENDS = FP4 | OTHERS
PAIRS = [(a, b) for a in ENDS for b in ENDS if a in FP4 or b in FP4]


def are_copied(a: Any, b: Any) -> bool:
    """Whether bytes and scales move as they are."""
    return (
        isinstance(a, Fp4)
        and isinstance(b, Fp4)
        and a.scales.dtype == b.scales.dtype
        and a.tensor_scale == b.tensor_scale
    )


def refused_by_devices(a: Any, b: Any) -> str:
    """The sentence, or ""."""
    if not (isinstance(a, Fp4) and isinstance(b, Fp4) and a.scales.dtype == b.scales.dtype):
        return ""
    if not are_copied(a, b):
        return "whose scales of the tensor cannot be compared"
    return "PER_GROUP_4X4 are not copied" if a.is_swapped or b.is_swapped else ""


def move(
    backend: Backend, src: Any, dst: Any, expected: Any, ends: Any, lens: list[int], **how: Any
) -> None:
    backend.migrate_spans(*ends, lens, [*src.raw, *dst.raw], **how)
    for got, wanted in zip(dst.raw, expected.raw, strict=True):
        differing = (got.view(torch.uint8) != wanted.view(torch.uint8)).nonzero()
        assert not len(differing), (differing[0], len(differing))


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_every_pair(backend: Backend, a: str, b: str) -> None:
    """Blocks of 8 tokens to blocks of 4, part-filled; 3 heads of 64; nothing else changes."""
    heads, dim, lens = 3, 64, [13, 2, 0]
    tables = [[3, 0], [1, -1], [-1, -1]], [[5, 1, 3, 0], [2, -1, -1, -1], [-1] * 4]
    for seed in SEEDS:
        src, dst = ENDS[a](4, 8, heads, dim, seed), ENDS[b](6, 4, heads, dim, seed + 10)
        if are_copied(src, dst):  # a device compares addresses
            dst.raw[1:] = src.raw[1:]
        x = values((max(lens), heads, dim), seed)
        expected = dst.clone()
        for row, length in enumerate(lens):
            for t in range(length):
                at, to = (tables[0][row][t // 8], t % 8), (tables[1][row][t // 4], t % 4)
                src.store(*at, x[t])
                if are_copied(src, dst):
                    expected.store_bytes(*to, *src.bytes_of(*at))
                else:
                    expected.store(*to, src.numbers(*at))
        ends = src.span(tables[0]), dst.span(tables[1])
        refused = "" if backend.looks_first else refused_by_devices(src, dst)
        if refused:
            with pytest.raises(UnsupportedError, match=refused):
                move(backend, src, dst, dst.clone(), ends, lens)
            continue
        move(backend, src, dst, expected, ends, lens)


def test_to_units_that_cover_tokens(backend: Backend) -> None:
    """Into OpenVINO's K; devices refuse."""
    src, dst = page(2, 4, 2, 64, 1), openvino_k(3, 4, 2, 64, 2)
    x, expected = values((4, 2, 64), 1), dst.clone()
    for t in range(4):
        src.store(1, t, x[t])
    ends = src.span([[1]]), dst.span([[2]])
    if backend.looks_first:
        expected.store_tokens(2, range(4), torch.stack([src.numbers(1, t) for t in range(4)]))
        return move(backend, src, dst, expected, ends, [4])
    with pytest.raises(UnsupportedError, match=r"goes from F4_E2M1 to U8_ZERO with scales that ar"):
        move(backend, src, dst, expected, ends, [4])


def test_another_scale_of_the_tensor(backend: Backend) -> None:
    """Of the same value at another address bytes are copied, else encoded anew; devices refuse."""
    for scale in (0.5, 0.25):
        src, dst = page(2, 4, 2, 64, 1, tensor_scale=0.5), page(2, 4, 2, 64, 2, tensor_scale=scale)
        x = values((4, 2, 64), 1)
        expected = dst.clone()
        for t in range(4):
            src.store(0, t, x[t] * 0.7)
            if scale == 0.5:
                expected.store_bytes(1, t, *src.bytes_of(0, t))
            else:
                expected.store(1, t, src.numbers(0, t))
        ends = src.span([[0]]), dst.span([[1]])
        if backend.looks_first:
            move(backend, src, dst, expected, ends, [4])
            continue
        with pytest.raises(UnsupportedError, match="whose scales of the tensor cannot be compared"):
            move(backend, src, dst, dst.clone(), ends, [4])


# --- numbers ------------------------------------------------------------------------------------


def one_row(backend: Backend, x: np.ndarray, **how: Any) -> Fp4:
    """[tokens, dim] float32 as F4_E2M1 of one head."""
    dst = page(1, len(x), 1, x.shape[1], 5, **how)
    source = torch.from_numpy(np.ascontiguousarray(x[None, :, None], np.float32))
    k = describe(source, Layout.BLOCK_NHD)
    src = CacheView((CacheDesc.from_kv(k),), CacheFacts(), dense=True).at()
    backend.migrate_spans(src, dst.span([[0]]), [len(x)], [source, *dst.raw])
    return dst


@pytest.mark.parametrize("kind", [E4M3, E8M0], ids=["nvfp4", "mx"])
def test_all_codes_and_scales(backend: Backend, kind: Any) -> None:
    """Every code with every scale, NaN among them."""
    src = page(1, 256, 1, 64, 1, kind=kind)
    src.q[0, :, 0] = np.arange(256, dtype=np.uint8)[:, None] + np.arange(32, dtype=np.uint8) * 8
    src.scales[0, :, 0] = np.arange(256, dtype=np.uint8)[:, None].view(kind)
    expected = decode(src.q[0, :, 0], src.scales[0, :, 0])
    target = torch.zeros(1, 256, 1, 64)
    dst = CacheView(
        (CacheDesc.from_kv(describe(target, Layout.BLOCK_NHD)),), CacheFacts(), dense=True
    ).at()
    backend.migrate_spans(src.span([[0]]), dst, [256], [*src.raw, target])
    got = target[0, :, 0].numpy()
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
    same = ~np.isnan(expected)
    np.testing.assert_array_equal(got[same].view(np.uint32), expected[same].view(np.uint32))


@pytest.mark.parametrize("tensor_scale", [None, 1.0, 0.0123, 77.0, 2.0**-40, LEAST])
@pytest.mark.parametrize("kind", [E4M3, E8M0], ids=["nvfp4", "mx"])
def test_ties_signs_and_extremes(backend: Backend, kind: Any, tensor_scale: float | None) -> None:
    """Halfway between numbers, in units of every power of two that a scale has, and past them."""
    if kind is E8M0 and tensor_scale is not None:
        return
    halves = np.array([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 5.5, 6])
    near = np.concatenate([halves, -halves, halves * (1 + 2.0**-22), -halves * (1 - 2.0**-22)])
    rows = [near * 2.0**power for power in range(-149, 125, 3)]
    random = np.random.default_rng(1)
    rows += list(random.standard_normal((200, 64)) * 2.0 ** random.integers(-30, 30, (200, 1)))
    rows += [np.zeros(64), np.full(64, -0.0), np.full(64, np.nan), np.full(64, np.inf)]
    rows += [np.where(np.arange(64) % 3 == 1, bad, 1.0) for bad in (np.nan, np.inf, -np.inf)]
    rows += [np.where(np.arange(64) % 5 == 1, 3.4e38, -3.4e38)]
    x = np.array(rows).astype(np.float32)
    dst = one_row(backend, x, kind=kind, tensor_scale=tensor_scale)
    q, scales = encode(x, kind, tensor_scale or 1.0)
    np.testing.assert_array_equal(dst.scales[0, :, 0].view(np.uint8), scales.view(np.uint8))
    np.testing.assert_array_equal(dst.q[0, :, 0], q)


def test_the_facts_of_nvfp4(backend: Backend) -> None:
    """A row whose scale is 1: its codes are those of the numbers, the first in the low half."""
    row = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6, 0]
    dst = one_row(backend, np.array([row]))
    assert dst.q[0, 0, 0].tobytes().hex() == "10325476a9cbed0f"
    assert dst.scales[0, 0, 0].view(np.uint8).tolist() == [0x38]


@pytest.mark.slow  # the import of vllm
@pytest.mark.parametrize("tensor_scale", [1.0, 0.0123, 2.0, 0.75])
def test_vllm_s_reference(tensor_scale: float) -> None:
    """Its reference quantizer and dequantizer, and its split of a page into data and scales."""
    emulation = pytest.importorskip(
        "vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils"
    )
    from vllm.utils.torch_utils import nvfp4_kv_cache_full_dim, nvfp4_split_data_scale

    blocks, tokens, heads, dim = 3, 4, 2, 64
    for seed in SEEDS:
        x = values((blocks * tokens, heads, dim), seed)
        pages = torch.zeros(
            blocks, 2 * heads, tokens, nvfp4_kv_cache_full_dim(dim), dtype=torch.uint8
        )
        side = pages.split(heads, dim=1)[1]  # V
        data, scale = nvfp4_split_data_scale(side)
        layer = CacheDesc.from_kv(
            describe(data, Layout.BLOCK_HND, dtype=DType.F4_E2M1),
        )
        view = CacheView(
            (layer,),
            CacheFacts(),
            k_scales=(ScaleDesc.of(scale.transpose(1, 2), "PER_GROUP"),),
            k_zeros=(ScaleDesc.of(tensor_scale),),
        )
        source = describe(x[None], Layout.BLOCK_NHD)
        src = CacheView((CacheDesc.from_kv(source),), CacheFacts(), dense=True).at()
        migrate(src, view.at(block_table=[[0, 1, 2]]), [len(x)], same_model=True)
        numbers, scales = emulation.ref_nvfp4_quant(
            x.reshape(-1, dim), torch.tensor(1 / np.float32(tensor_scale)), 16
        )
        stored = data.transpose(1, 2).reshape(-1, dim // 2)
        assert torch.equal(emulation.break_fp4_bytes(stored, torch.float32), numbers)
        kept = scale.transpose(1, 2).reshape(-1, dim // 16)
        assert torch.equal(kept.float(), scales)
        back = torch.zeros(1, len(x), heads, dim)
        dst = CacheView(
            (CacheDesc.from_kv(describe(back, Layout.BLOCK_NHD)),), CacheFacts(), dense=True
        ).at()
        migrate(view.at(block_table=[[0, 1, 2]]), dst, [len(x)], same_model=True)
        expected = emulation.dequantize_to_dtype(
            stored.contiguous(),
            kept.contiguous(),
            torch.tensor(np.float32(tensor_scale)),
            torch.float32,
            swizzle=False,
        )
        assert torch.equal(back.view(-1, dim), expected)


def test_sm100_keeps_v_s_scales_in_fours() -> None:
    """The kernel's formula: scale 7 of token 5, of 16 groups, is kept at token 5, group 13."""
    tokens, groups = swap_fours(8, 16)
    assert (tokens[5, 7], groups[5, 7]) == (5, 13)
    assert len({*zip(tokens.flat, groups.flat, strict=True)}) == 8 * 16


@pytest.mark.parametrize("dim", [96, 320])
def test_units_of_the_source_may_span_groups(backend: Backend, dim: int) -> None:
    """Q8_0, of 32 numbers in a unit, and F4_E2M1, of 2, to groups of 48, 80 and 3 numbers."""
    for a in ("Q8_0", "nvfp4", "mx"):
        for groups in {dim // 48, dim // 80, dim // 3} - {0}:
            if dim % groups:
                continue
            src = ENDS[a](2, 4, 2, dim, 1)
            dst = mlx(2, 4, 2, dim, 2, group=dim // groups)
            x = values((4, 2, dim), 3)
            expected = dst.clone()
            for t in range(4):
                src.store(1, t, x[t])
                expected.store(0, t, src.numbers(1, t))
            move(backend, src, dst, expected, (src.span([[1]]), dst.span([[0]])), [4])


# --- null, zeros, plans, planes -------------------------------------------------------------------


def test_zero_fill(backend: Backend) -> None:
    """A null block at the source: zero bytes and zero scales, of the heads that move."""
    src, dst = page(2, 4, 2, 64, 1), page(3, 4, 2, 64, 2)
    x = values((4, 2, 64), 1)
    for t in range(4):
        src.store(1, t, x[t])
    expected = dst.clone()
    for t in range(4):
        expected.store_bytes(2, t, *src.bytes_of(1, t))
    expected.q[0], expected.scales[0] = 0, 0
    ends = src.span([[-1, 1]]), dst.span([[0, 2]])
    move(backend, src, dst, expected, ends, [8], zero_fill=True)
    other = OTHERS["F16"](2, 4, 2, 64, 3)
    for t in range(4):
        other.store(0, t, x[t])
        expected.store(1, t, other.numbers(0, t))
    ends = other.span([[-1, 0]]), dst.span([[2, 1]])
    expected.q[2], expected.scales[2] = 0, 0
    move(backend, other, dst, expected, ends, [8], zero_fill=True)


@pytest.mark.parametrize("make", [page, swapped])
def test_a_plan_lists_data_and_scales(make: Make) -> None:
    src, dst = page(2, 4, 2, 64, 1), make(3, 4, 2, 64, 2)
    plan = Plan.migrate(src.span([[1, 0]]), dst.span([[0, 2]]), [7], same_model=True)
    info = plan.describe()
    assert [plane.beside for plane in info.planes] == [None, "scales"]
    assert info.exact
    ranges = plan.ranges()
    for one in ranges:
        ctypes.memmove(int(one["dst"]), int(one["src"]), int(one["bytes"]))
    for t in range(7):
        at, to = ([1, 0][t // 4], t % 4), ([0, 2][t // 4], t % 4)
        for got, wanted in zip(dst.bytes_of(*to), src.bytes_of(*at), strict=True):
            np.testing.assert_array_equal(got.view(np.uint8), wanted.view(np.uint8))
    converts = Plan.migrate(
        src.span([[1, 0]]), OTHERS["F16"](3, 4, 2, 64, 3).span([[0, 2]]), [7], same_model=True
    )
    assert not converts.describe().exact


def test_indexer_keys_of_deepseek_v4() -> None:
    """A plane of MX keys, an entry per four tokens: to bfloat16 and back, byte for byte."""
    src = page(3, 8, 1, 128, 1, kind=E8M0)
    x = values((16, 1, 128), 1)
    for e in range(16):
        src.store([2, 0][e // 8], e % 8, x[e])

    def planes(q: Any, scales: Any, dtype: Any = None) -> CacheView:
        plane = Plane.of(
            q,
            ("block", "token", "head", "dim"),
            role="index_k",
            layer=0,
            tokens_per_entry=4,
            dtype=dtype,
            scale=None if scales is None else ScaleDesc.of(scales, "PER_GROUP"),
        )
        return CacheView(layers=(), facts=CacheFacts(), planes=(plane,))

    wide = torch.zeros(2, 8, 1, 128, dtype=torch.bfloat16)
    back = page(3, 8, 1, 128, 2, kind=E8M0)
    first = planes(src.q, src.scales, "F4_E2M1")
    migrate(
        first.at(block_table=[[2, 0]]),
        planes(wide, None).at(block_table=[[0, 1]]),
        [64],
        same_model=True,
    )
    for e in range(16):
        wanted = src.numbers([2, 0][e // 8], e % 8)
        assert torch.equal(wide[e // 8, e % 8].float(), wanted)
    last = planes(back.q, back.scales, "F4_E2M1")
    migrate(
        planes(wide, None).at(block_table=[[0, 1]]),
        last.at(block_table=[[1, 2]]),
        [64],
        same_model=True,
    )
    for e in range(16):
        torch.testing.assert_close(
            back.numbers(1 + e // 8, e % 8), src.numbers([2, 0][e // 8], e % 8)
        )


# --- what is refused ----------------------------------------------------------------------------


def scaled(cache: Fp4, **fields: Any) -> CacheView:
    view = cache.view()
    assert view.k_scales is not None
    assert view.k_scales[0] is not None
    return replace(view, k_scales=(replace(view.k_scales[0], **fields),))


def refuse(sentence: str, view: CacheView) -> None:
    """At either end, before anything is written."""
    other = OTHERS["F16"](2, 8, 2, 64, 1)
    kept = other.raw[0].clone()
    for name in ("src", "dst"):
        ends = [view.at(block_table=[[0]]), other.span([[0]])]
        with pytest.raises(InvalidArgumentError) as raised:
            migrate(*(ends if name == "src" else ends[::-1]), [3], same_model=True)
        assert str(raised.value) == sentence.format(name)
    assert torch.equal(other.raw[0], kept)


def test_every_rule() -> None:
    nvfp4 = page(2, 8, 2, 64, 1, tensor_scale=0.5)
    mx = page(2, 8, 2, 64, 1, kind=E8M0)
    refuse(
        "{}.k_scales[0] is NULL, but {}.layers[0].k.dtype is F4_E2M1: each group of numbers has a "
        "scale (spec E.18)".replace("{}", "{0}"),
        replace(nvfp4.view(), k_scales=None),
    )
    refuse(
        "{}.k_scales[0].dtype is 10 (U8), expected F8_E4M3 (NVFP4) or F8_E8M0 (MX) (spec E.18)",
        scaled(nvfp4, dtype=DType.U8),
    )
    refuse(
        "{}.k_scales[0].granularity is 1, expected PER_GROUP (33) or PER_GROUP_4X4 (34) for "
        "F4_E2M1 (spec E.18)",
        replace(nvfp4.view(), k_scales=(ScaleDesc.of(nvfp4.scales[:1, :1, :1, :1]),)),
    )
    refuse(
        "{}.k_scales[0].shape[3] is 3, expected 4: [num_blocks, block_size, num_kv_heads, groups "
        "of 16 numbers] (spec E.18)",
        scaled(nvfp4, shape=(2, 8, 2, 3)),
    )
    refuse(
        "{}.k_scales[0].ndim is 3, expected 4 for granularity 33 (spec E.18)",
        replace(nvfp4.view(), k_scales=(ScaleDesc.of(nvfp4.scales[..., 0], "PER_GROUP"),)),
    )
    refuse(
        "{}.k_scales[0].granularity is PER_GROUP_4X4 (34) with 8 tokens of a block and 2 groups, "
        "expected multiples of 4 (spec E.18)",
        replace(mx.view(), k_scales=(ScaleDesc.of(mx.scales, "PER_GROUP_4X4"),)),
    )
    refuse(
        "{0}.k_zeros[0] is given, but {0}.k_scales[0].dtype is F8_E8M0, expected none: MX has no "
        "such scale (spec E.18)",
        replace(mx.view(), k_zeros=(ScaleDesc.of(1.0),)),
    )
    refuse(
        "{}.k_zeros[0] is F32 of granularity 3, expected one F32 (PER_TENSOR, 1), the scale of all "
        "numbers (spec E.18)",
        replace(nvfp4.view(), k_zeros=(ScaleDesc.of(torch.ones(2), "PER_HEAD"),)),
    )
    for bad in (0.0, -1.0, float("inf"), 2.0**-149, 2.0**-128):
        refuse(
            f"{{}}.k_zeros[0] is {bad:g}, expected a finite scale above 0 whose inverse is finite, "
            "above 2^-128 (spec E.18)",
            replace(nvfp4.view(), k_zeros=(ScaleDesc.of(bad),)),
        )
    half = CacheDesc.from_kv(
        describe(torch.from_numpy(nvfp4.q[..., :28]), Layout.BLOCK_NHD, dtype="F4_E2M1")
    )
    view = replace(nvfp4.view(), layers=(half,))
    with pytest.raises(
        InvalidArgumentError,
        match=r"^src.k_scales\[0\].dtype is F8_E4M3, a scale for each 16 numbers, but head_dim is "
        r"56, expected a multiple \(spec E.18\)$",
    ):
        migrate(
            view.at(block_table=[[0]]),
            OTHERS["F16"](2, 8, 2, 56, 1).span([[0]]),
            [3],
            same_model=True,
        )


def test_scales_are_written_apart() -> None:
    """Scales in the memory of others, and read-only ones, are refused at the destination."""
    src, dst = OTHERS["F16"](2, 8, 2, 64, 1), page(2, 8, 2, 64, 2)
    stride = tuple(step if axis else 0 for axis, step in enumerate(dst.scales.strides))
    with pytest.raises(InvalidArgumentError, match=r"^dst.k_scales\[0\].* overlap"):
        migrate(
            src.span([[0]]), scaled(dst, stride=stride).at(block_table=[[0]]), [3], same_model=True
        )
    view = scaled(dst, writable=False)
    with pytest.raises(InvalidArgumentError, match=r"k_scales\[0\] is read-only memory"):
        migrate(src.span([[0]]), view.at(block_table=[[0]]), [3], same_model=True)
    kept = dst.clone()
    scale = ScaleDesc.of(np.broadcast_to(np.float32(1), ()))  # read-only: it is not written
    view = replace(dst.view(), k_zeros=(scale,))
    migrate(src.span([[0]]), view.at(block_table=[[0]]), [3], same_model=True)
    for t in range(3):
        kept.store(0, t, src.numbers(0, t))
    assert torch.equal(dst.raw[0], kept.raw[0])


@pytest.mark.parametrize(("layer", "block"), [("data", 0), ("data", 1), ("scales", 0)])
def test_the_scale_of_the_tensor_lies_apart(backend: Backend, layer: str, block: int) -> None:
    """Within a page's data or scales it would be overwritten; behind them it may lie."""
    source = plain(1, 4, 1, 64, 1, dtype=DType.F32)
    dst = page(2, 4, 1, 64, 2)
    flat = dst.raw[0][block]
    begin = {"data": 8, "scales": 4 * 32}[layer]
    scale = flat[begin : begin + 4].view(torch.float32)
    scale.fill_(0.5)
    kept = dst.raw[0].clone()
    ends = source.span([[0]]), replace(dst.view(), k_zeros=(ScaleDesc.of(scale),))
    written = {"data": r"layers\[0\].k", "scales": r"k_scales\[0\]"}[layer]
    with pytest.raises(
        InvalidArgumentError,
        match=rf"^dst.{written}.data is .* it shares memory with dst.k_zeros\[0\], and the call",
    ):
        backend.migrate_spans(ends[0], ends[1].at(block_table=[[1]]), [4], [*source.raw, *dst.raw])
    assert torch.equal(dst.raw[0], kept)
    behind = flat[-4:].view(torch.float32)  # V's scales, which the view does not name
    behind.fill_(0.5)
    view = replace(dst.view(), k_zeros=(ScaleDesc.of(behind),))
    backend.migrate_spans(ends[0], view.at(block_table=[[1]]), [4], [*source.raw, *dst.raw])
    assert float(behind[0]) == 0.5


def test_write_and_gather_have_no_fields_for_scales() -> None:
    cache = page(2, 8, 2, 64, 1).view().layers[0]
    with pytest.raises(UnsupportedError, match=r"whose group scales this call has no fields for"):
        write_kv(cache, torch.zeros(1, 2, 64), None, torch.tensor([0]))
    with pytest.raises(UnsupportedError, match=r"whose group scales this call has no fields for"):
        gather_kv(cache, [[0]], [1], dtype="float32")
