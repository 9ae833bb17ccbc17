"""U8_ZERO and U8_BIAS, numbers with zero points, at either end of migrate. Spec: E.14

The oracle, tests/affine.py, is E.14 in plain torch.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvx_core import (
    BlockTable,
    CacheDesc,
    CacheFacts,
    CacheView,
    DType,
    InvalidArgumentError,
    Layout,
    OutOfRangeError,
    Plan,
    Plane,
    ScaleDesc,
    UnsupportedError,
    describe,
    gather_kv,
    migrate,
    set_num_threads,
    verify,
    write_kv,
)
from kvx_core.desc.view import CacheSpan
from tests import reference
from tests.affine import Affine, mlx, openvino_k, openvino_v
from tests.affine_values import Plain, from_dense, plain, values
from tests.calls import CPU, Backend

SEEDS = (1, 2, 3)


Cache = Affine | Plain
Make = Callable[[int, int, int, int, int], Cache]
HND = Layout.BLOCK_HND
ENDS: dict[str, Make] = {
    "openvino K": openvino_k,
    "openvino V": openvino_v,
    "mlx f32": mlx,
    "mlx f16": partial(mlx, group=32, dtype=torch.float16),
    "mlx bf16": partial(mlx, dtype=torch.bfloat16),
    "F16": partial(plain, dtype=DType.F16),
    "BF16": partial(plain, dtype=DType.BF16, layout=HND),
    "F32": partial(plain, dtype=DType.F32, layout=HND),
    "F8_E4M3": partial(plain, dtype=DType.F8_E4M3),
    "Q8_0": partial(plain, dtype=DType.Q8_0),
}
AFFINE = [name for name, make in ENDS.items() if "o" in name or "mlx" in name]
PAIRS = [(a, b) for a in ENDS for b in ENDS if a in AFFINE or b in AFFINE]
ENDS["mlx 16"] = partial(mlx, group=16)
PAIRS.append(("Q8_0", "mlx 16"))  # groups of half a unit


def fill(cache: Cache, blocks: Sequence[int], tokens: int, x: Tensor) -> None:
    """Tokens 0, 1, ... of a sequence in these blocks of `tokens`."""
    for i, block in enumerate(blocks):
        part = x[i * tokens : (i + 1) * tokens]
        if isinstance(cache, Affine) and cache.covers_tokens:
            if len(part):
                cache.store_tokens(block, range(len(part)), part)
        else:
            for t, vector in enumerate(part):
                cache.store(block, t, vector)


def check(
    backend: Backend,
    src: Cache,
    dst: Cache,
    expected: Cache,
    ends: Any,
    lens: list[int],
    **how: Any,
) -> None:
    backend.migrate_spans(*ends, lens, [*src.raw, *dst.raw], **how)
    for got, wanted in zip(dst.raw, expected.raw, strict=True):
        differing = (got != wanted).nonzero()
        assert not len(differing), (differing[0], got[got != wanted][0], wanted[got != wanted][0])


def same(a: Cache, b: Cache) -> bool:
    """Whether units at both ends are alike, so that whole ones are copied."""
    if not isinstance(a, Affine) or not isinstance(b, Affine):
        return isinstance(a, Plain) and isinstance(b, Plain) and a.dtype is b.dtype
    return (
        a.dtype is b.dtype
        and a.covers_tokens == b.covers_tokens
        and a.scales.dtype is b.scales.dtype
        and a.scales.shape[-1] == b.scales.shape[-1]
    )


# --- every pair ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, *(pytest.param(s, marks=pytest.mark.slow) for s in (2, 3))])
@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_every_pair(backend: Backend, a: str, b: str, seed: int) -> None:
    """Blocks of 5 tokens to blocks of 4, of which the last ones are part-filled; 3 heads of 64."""
    heads, dim, lens = 3, 64, [13, 2, 0]
    tables = [[4, 0, 2], [1, -1, -1], [-1, -1, -1]], [[5, 1, 3, 0], [2, -1, -1, -1], [-1] * 4]
    src, dst = ENDS[a](5, 5, heads, dim, seed), ENDS[b](6, 4, heads, dim, seed + 10)
    x = values((max(lens), heads, dim), seed)
    for row, length in enumerate(lens):
        fill(src, [b for b in tables[0][row] if b >= 0], 5, x[:length])
    expected = dst.clone()
    for row, length in enumerate(lens):
        moved = [src.numbers(tables[0][row][t // 5], t % 5) for t in range(length)]
        if moved:
            blocks = [b for b in tables[1][row] if b >= 0]
            if same(src, dst) and isinstance(src, Affine) and not src.covers_tokens:
                copy_tokens(src, expected, row, length, tables)
            else:
                fill(expected, blocks, 4, torch.stack(moved))
    ends = src.span(tables[0]), dst.span(tables[1])
    check(backend, src, dst, expected, ends, lens)


def copy_tokens(src: Affine, dst: Cache, row: int, length: int, tables: Any) -> None:
    assert isinstance(dst, Affine)
    for t in range(length):
        to, at = (tables[1][row][t // 4], t % 4), (tables[0][row][t // 5], t % 5)
        dst.q[to], dst.scales[to], dst.zeros[to] = src.q[at], src.scales[at], src.zeros[at]


# --- the engines' own bytes -----------------------------------------------------------------------


def engine_values() -> Tensor:
    """[7 tokens, 2 heads, 64], the same on every machine."""
    count = np.arange(7 * 2 * 64, dtype=np.int64)
    x = ((count * 2654435761 % 4093 - 2046) / np.float32(317)).astype(np.float32)
    x = x.reshape(7, 2, 64)
    x[..., 5], x[..., 6], x[1] = 2.75, 0, -1.5
    x[..., 1, :] = np.abs(x[..., 1, :])
    return torch.from_numpy(x)


def digest(*parts: Tensor) -> str:
    data = b"".join(part.contiguous().numpy().tobytes() for part in parts)
    return hashlib.sha256(data).hexdigest()


def test_openvino_bytes(backend: Backend) -> None:
    """What its paged attention stores for these keys and values: blocks 1, 7 of 32 tokens.

    Source: OpenVINO 2026.4.1, CPU, KV_CACHE_PRECISION u8, measured on AVX-512
    """
    x = engine_values()
    k, v = openvino_k(2, 32, 2, 64, 1), openvino_v(2, 32, 2, 64, 2)
    for cache, given in ((k, x), (v, x.flip(0))):
        src = from_dense(given, torch.float32)
        source = src.view.layers[0].k.owner
        backend.migrate_spans(src, cache.span([[1]]), [7], [source, *cache.raw])
    assert digest(k.raw[0][1, :, : 8 + 7]) == (
        "1a1f45c8bcf82626f69ad95465a6b26c60a0881f1178ebd79fef29041d4d151c"
    )
    assert digest(v.raw[0][1, :, :7]) == (
        "98a7baf2966626d8c39b1464d12db55e6ab4db014757807bb51a2bd715e7f213"
    )


MLX_DIGESTS = {  # of mx.quantize, group 64, 8 bits: packed, scales, biases
    torch.float32: "76c7b8b1636a157a2350259b55ceb2f286b6ce2ae5885af80868ec30be6b5179",
    torch.float16: "1dc9d69f9730ec8a5f516062bb4d06a390dd99701730fe347086bd5b40ac4275",
    torch.bfloat16: "0f5f7642a8e2e4d96e44412247d6f997ac2288c60579c71cb792c5bfbf47714d",
}


@pytest.mark.parametrize("dtype", MLX_DIGESTS, ids=str)
def test_mlx_bytes(backend: Backend, dtype: torch.dtype) -> None:
    """What mx.quantize makes of the same numbers, and mx.dequantize of its float32 ones.

    Source: MLX 0.32.4, CPU
    """
    cache = mlx(1, 2, 7, 64, 1, dtype=dtype)  # heads and tokens change places
    q, *beside = (raw.view(torch.uint8).unflatten(-1, (-1,)) for raw in cache.raw)
    tokens = [of.view(1, 7, 2, -1) for of in (q, *beside)]
    cache = Affine(
        DType.U8_BIAS, tokens[0], tokens[1].view(dtype), tokens[2].view(dtype), cache.raw
    )
    src = from_dense(engine_values(), dtype)
    source = src.view.layers[0].k.owner
    backend.migrate_spans(src, cache.span([[0]]), [7], [source, *cache.raw])
    assert digest(*cache.raw) == MLX_DIGESTS[dtype]
    if dtype is torch.float32:
        back = torch.zeros(1, 7, 2, 64)
        dst = from_dense(back[0], dtype)
        raw = dst.view.layers[0].k.owner
        backend.migrate_spans(cache.span([[0]]), dst, [7], [*cache.raw, raw])
        assert digest(raw) == "467772578199a9bd426e8025e3dbfe8c484c3a8e08a429cb4b90a3cffc817786"


# --- units that cover the tokens of a block -------------------------------------------------------


def test_units_begin_at_a_block(backend: Backend) -> None:
    """Without REQUANTIZE a row that begins within a block is refused; a device skips it."""
    src, dst = ENDS["F16"](2, 4, 2, 64, 1), openvino_k(4, 4, 2, 64, 2)
    x = values((4, 2, 64), 1)
    fill(src, [0], 4, x), fill(src, [1], 4, x)
    expected = dst.clone()
    if not backend.looks_first:
        fill(expected, [1], 4, torch.stack([src.numbers(0, t) for t in range(3)]))
    ends = src.span([[0], [1]]), dst.span([[0, 1], [2, 3]], starts=[4, 3])
    sentence = (
        r"dst.starts.lengths\[1\] is 3, expected a multiple of block_size 4: a scale of the "
        r"destination covers all tokens of a block \(PER_CHANNEL\); begin at a block, or give "
        r"REQUANTIZE \(spec E.14\)"
    )
    with pytest.raises(OutOfRangeError, match=sentence):
        check(backend, src, dst, expected, ends, [3, 2])
    for got, wanted in zip(dst.raw, expected.raw, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("name", ["F32", "mlx f32", "openvino K"])
@pytest.mark.parametrize("seed", SEEDS)
def test_requantize(backend: Backend, name: str, seed: int) -> None:
    """Tokens behind others in a block: all of them are quantized anew, with one scale."""
    heads, dim, tokens = 2, 64, 5
    src, dst = ENDS[name](6, 3, heads, dim, seed), openvino_k(5, tokens, heads, dim, seed + 1)
    x, old = values((11, heads, dim), seed), values((8, heads, dim), seed + 2) * 3
    fill(src, [2, 0, 1, 4], 3, x)
    fill(dst, [4, 1], tokens, old)
    expected = dst.clone()
    assert isinstance(expected, Affine)
    moved = [src.numbers([2, 0, 1, 4][t // 3], t % 3) for t in range(9)]
    kept = [dst.numbers(1, t) for t in range(3)]
    expected.store_tokens(1, range(5), torch.stack([*kept, *moved[:2]]))
    expected.store_tokens(0, range(5), torch.stack(moved[2:7]))
    expected.store_tokens(3, range(2), torch.stack(moved[7:]))
    ends = src.span([[2, 0, 1, 4]]), dst.span([[4, 1, 0, 3]], starts=[8])
    check(backend, src, dst, expected, ends, [9], requantize=True)


@pytest.mark.parametrize("zero_fill", [False, True])
@pytest.mark.parametrize("requantize", [False, True])
def test_null_blocks_within_a_unit(backend: Backend, zero_fill: bool, requantize: bool) -> None:
    """Tokens without a source: zeros with ZERO_FILL, else kept with REQUANTIZE, else nothing."""
    heads, dim = 2, 36
    src, dst = ENDS["F32"](3, 2, heads, dim, 1), openvino_k(4, 6, heads, dim, 2)
    x = values((6, heads, dim), 3)
    fill(src, [0, 1], 2, x[:4])
    fill(dst, [2, 0], 6, values((12, heads, dim), 4))
    expected = dst.clone()
    assert isinstance(expected, Affine)
    moved = {0: x[0], 1: x[1], 4: x[2], 5: x[3]}
    for t in (2, 3):
        if zero_fill:
            moved[t] = torch.zeros(heads, dim)
        elif requantize:
            moved[t] = dst.numbers(2, t)
    at = sorted(moved)
    expected.store_tokens(2, at, torch.stack([moved[t] for t in at]))
    if zero_fill:  # a unit of zeros
        expected.store_tokens(0, range(2), torch.zeros(2, heads, dim))
    holed = BlockTable.packed([[0, -1, 1, -1]]).with_holes()
    ends = src.span(holed), dst.span([[2, 0]])
    how = {"zero_fill": zero_fill, "requantize": requantize}
    check(backend, src, dst, expected, ends, [8], **how)


def test_tokens_without_source_beside_units_of_a_token(backend: Backend) -> None:
    """With ZERO_FILL their bytes, scales and zero points are zero, converted or copied."""
    heads, dim = 2, 64
    for name in ("F16", "mlx f32"):
        src, dst = ENDS[name](2, 2, heads, dim, 1), mlx(2, 3, heads, dim, 2)
        x = values((2, heads, dim), 3)
        fill(src, [1], 2, x)
        expected = dst.clone()
        assert isinstance(expected, Affine)
        assert isinstance(src, Affine | Plain)
        for t in (0, 1):
            expected.q[1, t], expected.scales[1, t], expected.zeros[1, t] = 0, 0, 0
        if isinstance(src, Affine):
            expected.q[1, 2] = src.q[1, 0]
            expected.scales[1, 2], expected.zeros[1, 2] = src.scales[1, 0], src.zeros[1, 0]
        else:
            expected.store(1, 2, src.numbers(1, 0))
        ends = src.span([[-1, 1]]), dst.span([[1]])
        check(backend, src, dst, expected, ends, [3], zero_fill=True)


@pytest.mark.parametrize("starts", [None, (4, 0)], ids=["whole", "cut"])
def test_whole_units_are_copied(backend: Backend, starts: tuple[int, int] | None) -> None:
    """Blocks of one size: bytes, scales and zero points as they are, not-a-number ones included."""
    heads, dim, lens = 2, 64, [11, 3]
    src, dst = openvino_k(6, 4, heads, dim, 1), openvino_k(7, 4, heads, dim, 2)
    expected = dst.clone()
    first = starts or (0, 0)
    tables = [[3, 1, 0, 5], [4, -1, -1, -1]], [[6, 2, 1], [0, -1, -1]]
    for row, length in enumerate(lens):
        for t in range(length):
            at = tables[0][row][(first[row] + t) // 4], (first[row] + t) % 4
            to = tables[1][row][t // 4], t % 4
            expected.q[to] = src.q[at]
            expected.scales[to[0]] = src.scales[at[0]]
            expected.zeros[to[0]] = src.zeros[at[0]]
    ends = src.span(tables[0], starts=starts and list(starts)), dst.span(tables[1])
    check(backend, src, dst, expected, ends, lens)


def test_a_source_of_slots(backend: Backend) -> None:
    """Tokens of many units, one by one, into a dense end of one unit per sequence."""
    heads, dim = 3, 64
    src, dst = openvino_k(3, 4, heads, dim, 1), openvino_k(2, 9, heads, dim, 2)
    fill(src, [0, 1, 2], 4, values((12, heads, dim), 3))
    expected = dst.clone()
    slots = [7, 0, 11, 3, -1, 5]
    fill(expected, [0], 9, torch.stack([src.numbers(s // 4, s % 4) for s in slots[:3]]))
    fill(expected, [1], 9, torch.stack([src.numbers(s // 4, s % 4) for s in (3, 5)]))
    # Token 1 of the second sequence has no source: it stays as it was, and holds nothing.
    expected.q[1, :3] = dst.q[1, :3]
    expected.store_tokens(1, [0, 2], torch.stack([src.numbers(s // 4, s % 4) for s in (3, 5)]))
    ends = src.span(slots=slots), dst.span()
    check(backend, src, dst, expected, ends, [3, 3])


@pytest.mark.parametrize("starts", [[0, 0], [0, 4], [4, 6]])
@pytest.mark.parametrize("table", [[[2, 1], [3, 2]], [[2, 1], [2, 3]], [[2, 2], [0, 1]]])
def test_a_block_is_filled_once(table: list[list[int]], starts: list[int]) -> None:
    """Two units in one block would overwrite each other's scale: refused, nothing written."""
    src, dst = ENDS["F16"](4, 4, 2, 64, 1), openvino_k(4, 4, 2, 64, 2)
    for block in range(4):
        fill(src, [block], 4, values((4, 2, 64), block))
    lens = [8 - start for start in starts]
    filled = [table[r][t // 4] for r in (0, 1) for t in {max(starts[r], 4 * c) for c in (0, 1)}]
    ends = src.span([[0, 1], [2, 3]]), dst.span(table, starts=starts)
    expected = dst.clone()
    if len(set(filled)) == len(filled):
        CPU.migrate_spans(*ends, lens, [*src.raw, *dst.raw], requantize=True)
        return
    with pytest.raises(InvalidArgumentError, match="block 2 is a destination of row"):
        check(CPU, src, dst, expected, ends, lens, requantize=True)
    for got, wanted in zip(dst.raw, expected.raw, strict=True):
        assert torch.equal(got, wanted)


def test_other_tables_lie_beside_units() -> None:
    """A plan refuses a table in memory of the scales of its second layer, which a run writes."""
    caches = [mlx(4, 4, 2, 64, seed) for seed in (1, 2, 3, 4)]
    spans = []
    for pair in (caches[:2], caches[2:]):
        single = [cache.span([[0, 1]]).view for cache in pair]
        view = CacheView(
            tuple(view.layers[0] for view in single),
            CacheFacts(),
            k_scales=tuple(view.k_scales[0] for view in single),
            k_zeros=tuple(view.k_zeros[0] for view in single),
        )
        spans.append(view)
    table = caches[3].raw[1].view(torch.int32).flatten()[-2:].view(1, 2)
    table[0] = torch.tensor([2, 3])
    ends = [view.at(block_table=[[0, 1]]) for view in spans]
    plan = Plan.migrate(*ends, [8], same_model=True)
    before = [raw.clone() for raw in caches[3].raw]
    with pytest.raises(InvalidArgumentError, match=r"indices is .* meet dst.k_scales\[1\]"):
        plan.run(dst_block_table=table)
    for got, wanted in zip(caches[3].raw, before, strict=True):
        assert torch.equal(got, wanted)


# --- units beside other memory --------------------------------------------------------------------


def two_planes(
    q: Tensor, units: Sequence[Tensor], granularity: str = "PER_GROUP", table: Any = None
) -> CacheSpan:
    """K and V of U8_BIAS, [2, blocks, tokens, heads, dim]; K's scales and zero points, and V's."""
    k, v = (describe(half, Layout.BLOCK_NHD, dtype=DType.U8_BIAS) for half in q)
    beside = [(ScaleDesc.of(unit, granularity),) for unit in units]
    view = CacheView(
        (CacheDesc.from_kv(k, v),),
        CacheFacts(),
        k_scales=beside[0],
        k_zeros=beside[1],
        v_scales=beside[2],
        v_zeros=beside[3],
    )
    return view.at(block_table=table)


SHARED_UNITS = {  # which share memory with which, and the second one's place in floats
    "K's scales are V's": (2, 0, 0),
    "zero points one token behind the scales": (1, 0, 2),
    "zero points one block before the scales": (1, 0, -6),
    "V's zero points one block on, one token back": (3, 1, 6 - 2),
    "bytes of two numbers": (3, 0, 0.5),
}


@pytest.mark.parametrize("which", SHARED_UNITS)
def test_units_share_no_memory(backend: Backend, which: str) -> None:
    """Scales and zero points that would be written over each other are refused, nothing written."""
    second, first, offset = SHARED_UNITS[which]
    names = "k_scales", "k_zeros", "v_scales", "v_zeros"
    x = torch.ones(2, 4, 3, 2, 64)
    src = CacheView(
        (CacheDesc.from_kv(*(describe(half, Layout.BLOCK_NHD) for half in x)),), CacheFacts()
    )
    q = torch.full((2, 4, 3, 2, 64), 7, dtype=torch.uint8)
    at = [96 + 384 * i for i in range(4)]  # bytes
    flat = torch.full((4 * 384 + 192,), 7, dtype=torch.uint8)
    at[second] = at[first] + int(offset * 4)
    dtypes = [torch.float32] * 4
    if at[second] % 4:
        dtypes[second] = torch.float16
    units = [
        flat.view(dtype)[a // dtype.itemsize :][:24].view(4, 3, 2, 1)
        for a, dtype in zip(at, dtypes, strict=True)
    ]
    dst = two_planes(q, units, table=[[0, 1]])
    sentence = r"dst.\w+\[0\].data is .*: it shares memory with dst.\w+\[0\], and the call writes"
    with pytest.raises(InvalidArgumentError, match=sentence) as refusal:
        backend.migrate_spans(src.at(block_table=[[1, 0]]), dst, [6], [x, q, flat])
    assert {first, second} <= {i for i, name in enumerate(names) if name in str(refusal.value)}
    for memory in (q, flat):
        assert bool((memory == 7).all())


def test_units_of_one_pool(backend: Backend) -> None:
    """In one pool both ends may have the same units, and no others that share memory with them."""
    cache = mlx(5, 4, 2, 64, 1)
    fill(cache, [4, 1], 4, values((8, 2, 64), 2))
    expected = cache.clone()
    for t in range(8):
        to, at = ([0, 2][t // 4], t % 4), ([4, 1][t // 4], t % 4)
        expected.q[to], expected.scales[to] = cache.q[at], cache.scales[at]
        expected.zeros[to] = cache.zeros[at]
    ends = cache.span([[4, 1]]), cache.span([[0, 2]])
    check(backend, cache, cache, expected, ends, [8])
    scales, zeros = (torch.zeros(6, 4, 2, 1) for _ in range(2))
    src, dst = (
        replace(cache, scales=scales[i : i + 5], zeros=zeros[:5], raw=[cache.raw[0], scales, zeros])
        for i in (0, 1)
    )
    with pytest.raises(InvalidArgumentError, match=r"dst.k_scales\[0\].*shares.*src.k_scales\[0\]"):
        check(backend, src, dst, dst.clone(), (src.span([[4, 1]]), dst.span([[0, 2]])), [8])
    assert torch.equal(cache.raw[0], expected.raw[0])


# --- numbers that are no usual ones ---------------------------------------------------------------


def odd_values(dim: int) -> Tensor:
    """[tokens, 1 head, dim]: NaN, infinities, huge and tiny ones, signed zeros."""
    most = torch.finfo(torch.float32).max
    rows = [
        [torch.nan] * dim,
        [torch.nan, 1.0, -2.0, torch.nan],
        [torch.inf, 0.0, 1.0, -3.0],
        [-torch.inf, torch.inf, 0.0, torch.nan],
        [most, -most, 1.0, 0.0],
        [most] * dim,
        [-most] * dim,
        [1e-45, -1e-45, 0.0, -0.0],
        [-0.0] * dim,
        [65504.0, 65536.0, -1e9, 3.0],
    ]
    return torch.tensor([(row * dim)[:dim] for row in rows])[:, None]


def as_spec(dtype: DType, x: Tensor, covers_tokens: bool = False) -> tuple[float, float, list[int]]:
    """Scale, zero point and bytes of one unit by the words of E.14, in float32 of numpy."""
    f = np.float32
    most = np.finfo(f).max
    numbers = [f(n) for n in x.tolist()]
    bounds = [f(min(max(n, -most), most)) + f(0) for n in numbers if n == n] or [f(0)]
    least, largest = min(bounds), max(bounds)
    with np.errstate(all="ignore"):
        step = (largest - least) * (f(1) / f(255)) if covers_tokens else (largest - least) / f(255)
        if not np.isfinite(step):
            step = largest / f(255) - least / f(255)
        if dtype is DType.U8_ZERO:
            scale = f(0.0001) if np.isinf(f(1) / step) else step
            zero = -least / scale
            if not np.isfinite(zero):
                scale, zero = abs(least), f(1) if least < 0 else f(-1)
            inverse = np.float64(f(1) / scale)
            q = [f(np.float64(0 if n != n else n) * inverse + zero) for n in numbers]
        else:
            width = max(step, f(1e-7))
            scale, edge = (width, least) if abs(least) > abs(largest) else (-width, largest)
            count = np.rint(edge / scale)
            if count == 0:
                zero = f(0)
            else:
                scale, zero = scale if np.isinf(count) else edge / count, edge
            q = [((f(0) if n != n else n) - zero) / scale for n in numbers]
    return float(scale), float(zero), [int(min(max(np.rint(n), 0), 255)) for n in q]


@pytest.mark.parametrize("dim", [4, 84])
@pytest.mark.parametrize("name", ["zero", "bias"])
def test_odd_numbers(backend: Backend, name: str, dim: int) -> None:
    """All that is stored is finite, and constants come back as they were."""
    x = odd_values(dim)
    make = openvino_v if name == "zero" else partial(mlx, group=dim)
    dst = make(1, len(x), 1, dim, 1)
    assert isinstance(dst, Affine)
    src = from_dense(x, torch.float32)
    raw = src.view.layers[0].k.owner
    backend.migrate_spans(src, dst.span([[0]]), [len(x)], [raw, *dst.raw])
    for t, row in enumerate(x[:, 0]):
        scale, zero, q = as_spec(dst.dtype, row)
        found = dst.scales[0, t, 0, 0].item(), dst.zeros[0, t, 0, 0].item()
        assert (*found, dst.q[0, t, 0].tolist()) == (scale, zero, q), t
        assert np.isfinite(found).all()
    for t in (5, 6, 8):
        assert torch.equal(dst.numbers(0, t), x[t])


def test_numbers_past_float16(backend: Backend) -> None:
    """Scales and biases saturate instead of becoming infinite."""
    for dtype in (torch.float16, torch.bfloat16):
        dst = mlx(1, 2, 1, 64, 1, dtype=dtype)
        x = torch.stack([torch.linspace(-1e9, 3.4e38, 64), torch.full((64,), -3.4e38)])[:, None]
        src = from_dense(x, torch.float32)
        raw = src.view.layers[0].k.owner
        backend.migrate_spans(src, dst.span([[0]]), [2], [raw, *dst.raw])
        most = torch.finfo(dtype).max
        for t, row in enumerate(x[:, 0]):
            scale, zero, _ = as_spec(dst.dtype, row)
            expected = torch.tensor([scale, zero], dtype=torch.float64).clamp(-most, most).to(dtype)
            found = torch.stack([dst.scales[0, t, 0, 0], dst.zeros[0, t, 0, 0]])
            assert torch.equal(found, expected), (dtype, t)


# --- whole calls ----------------------------------------------------------------------------------


def model(layers: int, blocks: int, seed: int) -> tuple[CacheView, list[Affine]]:
    """OpenVINO's K and V of each layer: blocks of 32 tokens, 2 heads of 64."""
    ks = [openvino_k(blocks, 32, 2, 64, seed + i) for i in range(layers)]
    vs = [openvino_v(blocks, 32, 2, 64, seed + 100 + i) for i in range(layers)]

    def lists(caches: list[Affine], granularity: str) -> list[tuple[ScaleDesc, ...]]:
        return [
            tuple(ScaleDesc.of(getattr(c, name), granularity) for c in caches)
            for name in ("scales", "zeros")
        ]

    k_scales, k_zeros = lists(ks, "PER_CHANNEL")
    v_scales, v_zeros = lists([replace_groups(v) for v in vs], "PER_TOKEN_HEAD")
    layer = [
        CacheDesc.from_kv(*(describe(c.q, Layout.BLOCK_NHD, dtype=c.dtype) for c in pair))
        for pair in zip(ks, vs, strict=True)
    ]
    view = CacheView(
        tuple(layer),
        CacheFacts(),
        k_scales=k_scales,
        v_scales=v_scales,
        k_zeros=k_zeros,
        v_zeros=v_zeros,
    )
    return view, [*ks, *vs]


def replace_groups(cache: Affine) -> Affine:
    """Scales of one group as PER_TOKEN_HEAD has them."""
    return replace(cache, scales=cache.scales[..., 0], zeros=cache.zeros[..., 0])


def test_a_kept_plan() -> None:
    """OpenVINO to bfloat16 and back with plans that run twice, with other tables."""
    layers, view, caches = 2, *model(2, 5, 1)
    random = torch.Generator().manual_seed(7)
    dense = torch.randn(layers, 2, 2, 2, 80, 64, generator=random).bfloat16()
    kv = [[describe(t, Layout.BLOCK_HND) for t in layer] for layer in dense]
    hf = CacheView(tuple(CacheDesc.from_kv(*pair) for pair in kv), CacheFacts(), dense=True)
    into = Plan.migrate(hf.at(), view.at(block_table=[[0], [1]]), [1, 1], same_model=True)
    back = Plan.migrate(view.at(block_table=[[0], [1]]), hf.at(), [1, 1], same_model=True)
    for tables, lens in (([[3, 0, 1], [2, -1, -1]], [40, 9]), ([[4, 1], [0, 2]], [5, 33])):
        before = dense.clone()
        into.run(lens, dst_block_table=tables)
        expected = dense.clone()
        for i, cache in enumerate(caches):
            for row, length in enumerate(lens):
                x = before[i % layers, i // layers, row, :, :length].transpose(0, 1).float()
                copy = cache.clone()
                fill(copy, tables[row][: -(-length // 32)], 32, x)
                assert torch.equal(copy.raw[0], cache.raw[0])
                got = [cache.numbers(tables[row][t // 32], t % 32) for t in range(length)]
                expected[i % layers, i // layers, row, :, :length] = (
                    torch.stack(got).transpose(0, 1).bfloat16()
                )
        back.run(lens, src_block_table=tables)
        assert torch.equal(dense, expected)


def test_what_a_plan_says() -> None:
    """Copies of bytes, scales and zero points are planes; conversions are named and not exact."""
    a, b = mlx(2, 4, 2, 64, 1), mlx(3, 4, 2, 64, 2)
    info = Plan.migrate(a.span([[1]]), b.span([[2]]), [3], same_model=True).describe()
    assert [plane.name for plane in info.planes] == ["K", "K scales", "K zeros"]
    assert [plane.bytes_written for plane in info.planes] == [3 * 2 * 64, 3 * 2 * 4, 3 * 2 * 4]
    assert info.exact
    assert not any(p.converts or p.finds_scales for p in info.planes)
    c, d = openvino_k(2, 4, 2, 64, 1), openvino_k(3, 4, 2, 64, 2)
    plan = Plan.migrate(c.span([[1]]), d.span([[2]]), [3], same_model=True)
    (plane,) = plan.describe().planes
    assert plane.exact
    assert plane.finds_scales
    assert plan.describe().exact
    with pytest.raises(UnsupportedError, match="cover all tokens of a block"):
        plan.ranges()
    (plane,) = Plan.migrate(c.span([[1]]), b.span([[2]]), [3], same_model=True).describe().planes
    assert plane.converts
    assert plane.finds_scales
    assert not plane.exact
    assert (plane.src_dtype, plane.dst_dtype) == (DType.U8_ZERO, DType.U8_BIAS)


def test_ranges_of_copies() -> None:
    """A transport that carries out the ranges moves scales and zero points with the bytes."""
    src, dst = mlx(3, 4, 2, 64, 1), mlx(4, 3, 2, 64, 2)
    expected, ends = dst.clone(), (src.span([[2, 0]]), dst.span([[3, 1, 0]]))
    for t in range(7):
        at, to = ([2, 0][t // 4], t % 4), ([3, 1, 0][t // 3], t % 3)
        expected.q[to], expected.scales[to] = src.q[at], src.scales[at]
        expected.zeros[to] = src.zeros[at]
    for piece in Plan.migrate(*ends, [7], same_model=True).ranges():
        ctypes.memmove(int(piece["dst"]), int(piece["src"]), int(piece["bytes"]))
    for got, wanted in zip(dst.raw, expected.raw, strict=True):
        assert torch.equal(got, wanted)


def test_planes(backend: Backend) -> None:
    """As planes beside the layers, with heads cut: the second of three to the first of two."""
    dim, tokens = 64, 4
    src, dst = mlx(3, tokens, 3, dim, 1), openvino_k(3, tokens, 2, dim, 2)
    fill(src, [1, 2], tokens, values((7, 3, dim), 3))
    expected = dst.clone()
    axes = ["block", "token", "head", "dim"]

    def plane(cache: Affine, groups: str) -> Plane:
        return Plane.of(
            cache.q,
            axes,
            "index_k",
            dtype=cache.dtype,
            scale=ScaleDesc.of(cache.scales, groups),
            zero=ScaleDesc.of(cache.zeros, groups),
        )

    x = torch.stack([src.numbers([1, 2][t // tokens], t % tokens)[1:2] for t in range(7)])
    for block, part in ((2, x[:4]), (0, x[4:])):
        one = replace(
            expected,
            q=expected.q[:, :, :1],
            scales=expected.scales[:, :1],
            zeros=expected.zeros[:, :1],
        )
        one.store_tokens(block, range(len(part)), part)
    views = [
        CacheView((), CacheFacts(), planes=(plane(cache, groups),))
        for cache, groups in ((src, "PER_GROUP"), (dst, "PER_CHANNEL"))
    ]
    ends = views[0].at(block_table=[[1, 2]], head_start=1), views[1].at(block_table=[[2, 0]])
    check(backend, src, dst, expected, ends, [7], num_heads=1)


def test_found_scales_of_fp8() -> None:
    """FIND_SCALES into FP8 from numbers with zero points, on host memory."""
    heads, dim = 2, 64
    src = openvino_k(2, 4, heads, dim, 1)
    fill(src, [1, 0], 4, values((6, heads, dim), 2))
    raw, scales = torch.zeros(2, 4, heads, dim, dtype=torch.uint8), torch.zeros(2, 4, heads)
    k = describe(raw.view(torch.float8_e4m3fn), Layout.BLOCK_NHD)
    view = CacheView(
        (CacheDesc.from_kv(k),), CacheFacts(), k_scales=(ScaleDesc.of(scales, "PER_TOKEN_HEAD"),)
    )
    migrate(
        src.span([[1, 0]]), view.at(block_table=[[0, 1]]), [6], same_model=True, find_scales=True
    )
    for t in range(6):
        x = src.numbers([1, 0][t // 4], t % 4)
        scale = x.abs().amax(-1) / 448
        assert torch.equal(scales[t // 4, t % 4], scale)
        stored = reference.encode(x / scale[:, None], torch.float8_e4m3fn)
        assert torch.equal(raw[t // 4, t % 4], stored.view(torch.uint8))


def test_many_tokens_among_threads() -> None:
    """As one thread moves them: units are not cut between threads."""
    heads, dim, tokens = 4, 64, 3000
    x = torch.randn(1, heads, tokens, dim, generator=torch.Generator().manual_seed(1))
    view = CacheView((CacheDesc.from_kv(describe(x, Layout.BLOCK_HND)),), CacheFacts(), dense=True)
    for make in (openvino_k, openvino_v, mlx):
        table = torch.randperm(120, generator=torch.Generator().manual_seed(2))[:101]
        dst = make(120, 32, heads, dim, 1)
        alone = dst.clone()
        set_num_threads(1)
        from_ = view.at(first_positions=32)
        migrate(from_, alone.span(table[None], starts=[32]), [tokens], same_model=True)
        set_num_threads(4)
        migrate(from_, dst.span(table[None], starts=[32]), [tokens], same_model=True)
        set_num_threads(0)
        assert all(map(torch.equal, dst.raw, alone.raw))


def test_verify_reads_both() -> None:
    """verify compares numbers, so that a copy passes and a conversion says which number differs."""
    src, dst = openvino_k(2, 4, 2, 64, 1), openvino_k(3, 4, 2, 64, 2)
    fill(src, [1, 0], 4, values((6, 2, 64), 2))
    ends = src.span([[1, 0]]), dst.span([[2, 0]])
    migrate(*ends, [6], same_model=True)
    assert verify(*ends, [6])
    dst.q[2, 1, 0, 7] ^= 16
    found = verify(*ends, [6])
    assert not found
    assert found.difference is not None
    assert found.difference.dim == 7


# --- refused --------------------------------------------------------------------------------------


def test_calls_without_zero_points() -> None:
    cache = openvino_v(2, 4, 2, 64, 1).span([[0]]).view.layers[0]
    key = torch.zeros(3, 2, 64)
    sentence = r"cache.k.dtype is U8_ZERO, whose zero points this call has no fields for; migrate"
    with pytest.raises(UnsupportedError, match=sentence):
        write_kv(cache, key, None, [0, 1, 2])
    with pytest.raises(UnsupportedError, match=sentence):
        gather_kv(cache, [[0]], [3], dtype="float32")


def test_zero_points_of_a_list() -> None:
    span = openvino_v(2, 4, 2, 64, 1).span([[0]])
    with pytest.raises(InvalidArgumentError, match="k_zeros has 2 entries, expected 1, one per"):
        replace(span.view, k_zeros=(*(span.view.k_zeros or ()),) * 2)


def test_read_only_scales_are_refused() -> None:
    src, dst = ENDS["F16"](2, 4, 2, 64, 1), mlx(2, 4, 2, 64, 2)
    scales = dst.raw[1].numpy().view(np.float32).transpose(0, 2, 1, 3)
    scales.flags.writeable = False
    view = replace(dst.span([[0]]).view, k_scales=(ScaleDesc.of(scales, "PER_GROUP"),))
    with pytest.raises(InvalidArgumentError, match=r"dst.k_scales\[0\]"):
        migrate(src.span([[0]]), view.at(block_table=[[1]]), [2], same_model=True)
