"""verify: it reports equal only what is equal, and names differences in every layout."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import kvx_core
from kvx_core import (
    BlockTable,
    CacheDesc,
    CacheView,
    Difference,
    DType,
    InvalidArgumentError,
    Layout,
    OutOfRangeError,
    PoolDesc,
    ScaleDesc,
    ScaleGranularity,
    UnsupportedError,
    Verification,
    describe,
    migrate,
    verify,
)
from tests.desc import dlpack
from tests.desc.dlpack import Producer
from tests.facts import SAME_MODEL

readers = sys.modules["kvx_core.ops.readers"]

LAYERS, BLOCKS, BLOCK_SIZE, HEADS, DIM, V_DIM = 2, 7, 4, 3, 10, 6
TABLE = [[4, 1, 3], [2, 6, 0]]
LENS = [11, 6]
FLOATS = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]

Layers = list[tuple[torch.Tensor, torch.Tensor]]


def make(*shape: int, dtype: torch.dtype, fill: float | None, layers: int = LAYERS) -> Layers:
    """K and V of every layer, V's head_dim its own; random if `fill` is None."""
    generator = torch.Generator().manual_seed(1)

    def tensor(dim: int) -> torch.Tensor:
        if fill is not None:
            return torch.full((*shape, dim), fill).to(dtype)
        return torch.randn(*shape, dim, generator=generator).to(dtype)

    return [(tensor(DIM), tensor(V_DIM)) for _ in range(layers)]


def view_of(layers: Any, layout: Layout, **options: Any) -> CacheView:
    caches = [CacheDesc.from_kv(describe(k, layout), describe(v, layout)) for k, v in layers]
    return CacheView(layers=tuple(caches), facts=SAME_MODEL, **options)


def paged(
    dtype: torch.dtype = torch.bfloat16, fill: float | None = None
) -> tuple[Layers, CacheView]:
    layers = make(BLOCKS, HEADS, BLOCK_SIZE, dtype=dtype, fill=fill)
    return layers, view_of(layers, Layout.BLOCK_HND)


def dense(dtype: torch.dtype = torch.bfloat16) -> tuple[Layers, CacheView]:
    layers = make(2, 12, HEADS, dtype=dtype, fill=9.0)
    return layers, view_of(layers, Layout.BLOCK_NHD, dense=True)


@pytest.fixture(params=[1, 100, 4 << 20], ids=lambda n: f"pieces of {n}")
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token at a time, a few at a time, all at once."""
    monkeypatch.setattr(readers, "PIECE_BYTES", request.param)


def change(tensor: torch.Tensor, place: tuple[int, ...]) -> None:
    """Flips the lowest bit that is stored at `place`."""
    storage = tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.itemsize])
    storage[place] ^= 1


@pytest.mark.usefixtures("pieces")
def test_what_migrate_moved_is_equal() -> None:
    _, src = paged()
    _, dst = dense()
    migrate(src.at(TABLE), dst, LENS)
    found = verify(src.at(TABLE), dst, LENS)
    assert found == Verification(
        ok=True,
        num_tokens=17,
        num_values=17 * LAYERS * HEADS * (DIM + V_DIM),
        difference=None,
    )
    assert found
    assert str(found) == "equal: 17 tokens, 1632 values"


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("end", ["src", "dst"])
def test_one_bit_anywhere_is_found_and_named(end: str) -> None:
    """At either end, in any layer, K or V, sequence, token, head and dim."""
    places = [
        (layer, kv, s, t, h, d)
        for layer, (kv, dim) in itertools.product(range(LAYERS), (("K", DIM), ("V", V_DIM)))
        for s, n in enumerate(LENS)
        for t, h, d in itertools.product(range(n), range(HEADS), range(dim))
    ]
    for layer, kv, s, t, h, d in random.Random(0).sample(places, 25):
        src_layers, src = paged()
        dst_layers, dst = dense()
        migrate(src.at(TABLE), dst, LENS)
        half = 0 if kv == "K" else 1
        if end == "dst":
            change(dst_layers[layer][half], (s, t, h, d))
        else:
            place = TABLE[s][t // BLOCK_SIZE], h, t % BLOCK_SIZE, d
            change(src_layers[layer][half], place)
        found = verify(src.at(TABLE), dst, LENS)
        assert not found
        assert found.difference is not None
        expected = Difference(
            layer,
            kv,
            s,
            t,
            h,
            d,
            float(src_layers[layer][half][TABLE[s][t // BLOCK_SIZE], h, t % BLOCK_SIZE, d]),
            float(dst_layers[layer][half][s, t, h, d]),
        )
        assert found.difference == expected


@pytest.mark.usefixtures("pieces")
def test_the_first_of_several_differences_is_named() -> None:
    """By layer, K before V, sequence, token, head, dim."""
    places = [
        (1, 1, (1, 5, 2, 5)),
        (1, 1, (1, 5, 2, 3)),
        (1, 1, (1, 5, 1, 4)),
        (1, 1, (1, 4, 2, 5)),
        (1, 1, (0, 10, 2, 5)),
        (1, 0, (1, 5, 2, 9)),
        (0, 1, (1, 5, 2, 5)),
        (0, 0, (1, 5, 2, 9)),
    ]
    _, src = paged()
    layers, dst = dense()
    migrate(src.at(TABLE), dst, LENS)
    for layer, half, place in places:
        change(layers[layer][half], place)
        difference = verify(src.at(TABLE), dst, LENS).difference
        assert difference is not None
        named = difference.layer, difference.kv, difference.sequence, difference.token
        assert (*named, difference.head, difference.dim) == (layer, "KV"[half], *place)


def test_a_difference_in_one_line() -> None:
    difference = Difference(3, "V", 1, 17, 2, 40, -0.25, 1.5)
    assert str(difference) == (
        "layer 3 V, sequence 1, token 17, head 2, dim 40: -0.25 at the source, 1.5 at the "
        "destination"
    )
    found = Verification(False, 20, 300, difference)
    assert str(found) == f"differs at {difference}"


def test_nothing_but_the_tokens_is_compared() -> None:
    src_layers, src = paged()
    dst_layers, dst = dense()
    migrate(src.at(TABLE), dst, LENS)
    for k, v in dst_layers:  # past the lengths
        for tensor in (k, v):
            tensor[0, 11:] = 1.0
            tensor[1, 6:] = 2.0
    for k, v in src_layers:
        for tensor in (k, v):
            tensor[3, :, 3] = 3.0
            tensor[0] = 4.0
    assert verify(src.at(TABLE), dst, LENS)


@pytest.mark.usefixtures("pieces")
def test_tokens_that_one_end_has_not_are_passed_over() -> None:
    """A null block at the source, skipped slots at the destination."""
    _, src = paged()
    src = replace(src, null_block_id=1)
    layers, dst = dense()
    slots = [*range(11), -1, -1, *range(14, 18)]
    at = src.at(BlockTable.packed(TABLE).with_holes())
    token_bytes = LAYERS * HEADS * (DIM + V_DIM) * 2
    assert migrate(at, dst.at(slots=slots), LENS) == (17 - 4 - 2) * token_bytes
    found = verify(at, dst.at(slots=slots), LENS)
    assert found
    assert (found.num_tokens, found.num_left_out) == (17 - 4 - 2, 4 + 2)
    assert str(found).endswith("; 6 tokens have no place at one of the ends")
    change(layers[1][0], (1, 2, 0, 0))  # slot 14: sequence 1, token 2
    difference = verify(at, dst.at(slots=slots), LENS).difference
    assert difference is not None
    assert (difference.sequence, difference.token) == (1, 2)
    nothing = BlockTable.packed([[1], [1]])
    assert verify(src.at(nothing.with_holes()), dst, [3, 4]) == Verification(True, 0, 0, None, 7)
    lost = verify(src.at(nothing), dst, [3, 4])
    assert lost == Verification(False, 0, 0, None, 7)
    assert str(lost).startswith("incomplete: 0 tokens")


@pytest.mark.usefixtures("pieces")
def test_every_kind_of_end() -> None:
    layers, src = paged()
    indices = [4, 4, 4, 4, 1, 1, 1, 1, 3, 3, 3, 2, 2, 2, 2, 6, 6]
    slots = [
        TABLE[s][t // BLOCK_SIZE] * BLOCK_SIZE + t % BLOCK_SIZE
        for s, n in enumerate(LENS)
        for t in range(n)
    ]
    ends = {
        "packed": src.at(TABLE),
        "ragged": src.at(BlockTable.ragged(indices, [0, 11, 17])),
        "slots": src.at(slots=slots),
    }
    for one, other in itertools.product(ends, repeat=2):
        assert verify(ends[one], ends[other], LENS), (one, other)
    _, dst = dense()
    begun = dst.at(starts=[1, 3])
    migrate(src.at(TABLE, starts=[2, 0]), begun, [9, 6])
    assert verify(src.at(TABLE, starts=[2, 0]), begun, [9, 6])
    difference = verify(src.at(TABLE, starts=[1, 0]), begun, [9, 6]).difference
    assert difference is not None
    assert (difference.layer, difference.sequence, difference.token) == (0, 0, 0)
    change(layers[0][1], (1, 0, 0, 0))
    difference = verify(src.at(TABLE, starts=[2, 0]), begun, [9, 6]).difference
    assert difference is not None
    assert (difference.kv, difference.sequence, difference.token) == ("V", 0, 2)


@pytest.mark.usefixtures("pieces")
def test_kv_offsets_with_beams() -> None:
    pool = torch.randn(5, 2, HEADS, BLOCK_SIZE, DIM)
    second = torch.randn(3, 2, HEADS, BLOCK_SIZE, DIM)
    cache = CacheDesc.from_kv(
        describe(pool[:, 0], Layout.BLOCK_HND),
        describe(pool[:, 1], Layout.BLOCK_HND),
        pool=PoolDesc.of(pool, pool[0, 0].nbytes, second),
    )
    src = CacheView((cache,), SAME_MODEL, secondary_num_blocks=3)
    in_second = -(2**31)
    table = torch.tensor(
        [
            [[[8, 2], [9, 3]], [[in_second + 4, -1], [in_second + 5, -1]]],
        ],
        dtype=torch.int32,
    )
    out = torch.zeros(2, 2, 7, HEADS, DIM)
    dst = view_of([tuple(out)], Layout.BLOCK_NHD, dense=True)
    span = src.at(BlockTable.kv_offsets(table).with_holes())
    assert migrate(span, dst, [7]) == (7 + 4) * 2 * HEADS * DIM * 4
    assert torch.equal(out[1, 1, :4], second[2, 1].transpose(0, 1))
    found = verify(span, dst, [7])
    assert found
    assert found.num_tokens == 7 + 4
    out[1, 1, 3, 0, 5] += 1
    difference = verify(span, dst, [7]).difference
    assert difference is not None
    assert difference == Difference(
        0, "V", 1, 3, 0, 5, float(second[2, 1, 0, 3, 5]), float(out[1, 1, 3, 0, 5])
    )


def test_a_range_of_heads() -> None:
    _, src = paged()
    layers = make(2, 12, 2, dtype=torch.bfloat16, fill=9.0)
    dst = view_of(layers, Layout.BLOCK_NHD, dense=True)
    migrate(src.at(TABLE, head_start=1), dst, LENS, num_heads=2)
    assert verify(src.at(TABLE, head_start=1), dst, LENS, num_heads=2)
    assert not verify(src.at(TABLE), dst, LENS, num_heads=2)
    assert verify(src.at(TABLE, head_start=2), dst.at(head_start=1), LENS, num_heads=1)


def test_a_cache_without_v() -> None:
    k = torch.randn(2, 8, 1, 576)
    src, dst = (
        CacheView((CacheDesc.from_kv(describe(t, Layout.BLOCK_NHD)),), SAME_MODEL, dense=True)
        for t in (k, k.clone())
    )
    found = verify(src, dst, [8, 8])
    assert found == Verification(True, 16, k.numel(), None)


def test_layers_may_differ() -> None:
    """Heads and head_dim of their own in each layer."""
    shapes = [(2, 8, 4, 10), (2, 8, 1, 30)]
    layers = [(torch.randn(shape), torch.randn(shape)) for shape in shapes]
    copies = [(k.clone(), v.clone()) for k, v in layers]
    src, dst = (view_of(of, Layout.BLOCK_NHD, dense=True) for of in (layers, copies))
    found = verify(src, dst, [8, 8])
    assert found == Verification(True, 16, sum(k.numel() * 2 for k, _ in layers), None)
    copies[1][1][1, 7, 0, 29] += 1
    difference = verify(src, dst, [8, 8]).difference
    assert difference is not None
    assert (difference.layer, difference.kv, difference.dim) == (1, "V", 29)


def test_layers_with_and_without_v() -> None:
    k = torch.randn(2, 8, 4, 10)
    without, with_v = (describe(k, Layout.BLOCK_NHD), None), (describe(k, Layout.BLOCK_NHD),) * 2
    layers = tuple(CacheDesc.from_kv(*h, shared_kv=True) for h in (without, with_v, without))
    view = CacheView(layers, SAME_MODEL, dense=True)
    assert verify(view, view, [8, 8]) == Verification(True, 16, 4 * k.numel(), None)


def pair(
    src: torch.Tensor, dst: torch.Tensor, scale: ScaleDesc | None = None
) -> tuple[CacheView, CacheView]:
    """Two caches of one layer without V; `scale` is the destination's."""
    one, other = (
        CacheView((CacheDesc.from_kv(describe(t, Layout.BLOCK_NHD)),), SAME_MODEL, dense=True)
        for t in (src, dst)
    )
    return one, replace(other, k_scales=None if scale is None else (scale,))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.uint8], ids=str)
def test_one_dtype_means_the_same_bytes(dtype: torch.dtype) -> None:
    """Every byte pattern equals itself, NaN included, and no other one, -0 and 0 included."""
    patterns = torch.arange(256, dtype=torch.uint8).repeat_interleave(dtype.itemsize)
    tensor = patterns.view(dtype).reshape(4, 4, 2, 8)
    src, dst = pair(tensor, tensor.clone())
    assert verify(src, dst, [4, 4, 4, 4])
    zero = torch.zeros(1, 1, 1, 8, dtype=dtype)
    other = zero.clone()
    other.view(torch.uint8)[..., -1] = 0x80  # -0.0; of U8 the byte 128
    difference = verify(*pair(zero, other), [1]).difference
    assert difference is not None
    assert difference.dim == 7
    assert difference.dst_value == (128.0 if dtype is torch.uint8 else 0.0)


@pytest.mark.parametrize("src_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("dst_dtype", FLOATS, ids=str)
def test_other_dtypes_mean_the_same_values(src_dtype: torch.dtype, dst_dtype: torch.dtype) -> None:
    values = torch.tensor([0.0, 1.0, -1.5, 448.0, float("nan"), 0.25, -0.0, 2.0**-6])
    src, dst = (values.to(dtype, copy=True).reshape(1, 1, 1, 8) for dtype in (src_dtype, dst_dtype))
    assert verify(*pair(src, dst), [1]), "these values are exact in every dtype, and NaN is NaN"
    if src_dtype is not dst_dtype:
        dst[..., 6] = 0.0
        assert verify(*pair(src, dst), [1]), "-0 and 0 are the same value"
    dst[..., 4] = 0.0
    difference = verify(*pair(src, dst), [1]).difference
    assert difference is not None
    assert difference.dim == 4
    assert np.isnan(difference.src_value)


def neighbours(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor with every number one step of its dtype up, then down in magnitude."""
    bits = tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.itemsize])
    yield (bits + 1).view(tensor.dtype)
    yield (bits - 1).view(tensor.dtype)


# Shapes of scales over (num_blocks, block_size, num_kv_heads, head_dim) of 3, 8, 4, 16.
GRANULARITIES = {
    ScaleGranularity.PER_TENSOR: (1, 1, 1, 1),
    ScaleGranularity.PER_HEAD: (1, 1, 4, 1),
    ScaleGranularity.PER_BLOCK: (3, 1, 1, 1),
    ScaleGranularity.PER_BLOCK_HEAD: (3, 1, 4, 1),
    ScaleGranularity.PER_TOKEN_HEAD: (3, 8, 4, 1),
}
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
CODECS: list[tuple[torch.dtype, ScaleGranularity | None]] = [
    *itertools.product(FLOATS, [None]),
    *itertools.product(FP8, GRANULARITIES),
]


@pytest.mark.parametrize("src_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("dst_dtype", "granularity"), CODECS, ids=str)
def test_codec_accepts_rounding_and_nothing_more(
    src_dtype: torch.dtype, dst_dtype: torch.dtype, granularity: ScaleGranularity | None
) -> None:
    """From subnormal numbers to saturation. The next number in either direction is refused."""
    generator = torch.Generator().manual_seed(3)
    magnitude = torch.randint(-14, 10, (3, 8, 4, 16), generator=generator)
    src = (torch.randn(3, 8, 4, 16, generator=generator) * 2.0**magnitude).to(src_dtype)
    dst = torch.zeros(3, 8, 4, 16, dtype=dst_dtype)
    scale, each = None, torch.ones(src.shape)
    if granularity is not None:
        factors = torch.rand(GRANULARITIES[granularity], generator=generator) * 0.5 + 0.05
        scale = ScaleDesc.of(factors.squeeze(), granularity)
        each = each * factors
    one, other = pair(src, dst, scale)
    lens = [8, 8, 8]
    migrate(one, other, lens)
    assert verify(one, other, lens, tolerance="codec")
    assert verify(other, one, lens, tolerance="codec"), "either end may be the rounded one"
    rounded = dst.clone()
    assert bool(verify(one, other, lens)) == torch.equal(rounded.float() * each, src.float())
    # One number that is not x rounded, nor x it rounded, is found wherever it is. (Ties, zeros
    # and saturated numbers are left to the tests below.)
    usable = (rounded.float().abs() < torch.finfo(dst_dtype).max / 2) & (rounded.float() != 0)
    found_differences = 0
    for moved in neighbours(rounded):
        for place in random.Random(4).sample(usable.nonzero().tolist(), 20):
            index = tuple(place)
            dst.copy_(rounded)
            dst[index] = moved[index]
            x, y = src[index].float(), dst[index].float() * each[index]
            is_tie = abs(x - y) <= abs(x - rounded[index].float() * each[index]) * (1 + 2**-20)
            if y.to(src_dtype).float() == x or is_tie:
                continue
            found_differences += 1
            difference = verify(one, other, lens, tolerance="codec").difference
            assert difference is not None, (index, x, y)
            found = difference.sequence, difference.token, difference.head, difference.dim
            assert found == index
    assert found_differences >= 20 or dst_dtype is src_dtype or torch.finfo(dst_dtype).bits >= 16


@pytest.mark.parametrize("dtype", FP8, ids=str)
@pytest.mark.parametrize("factor", [None, 0.5])
def test_codec_saturates(dtype: torch.dtype, factor: float | None) -> None:
    largest = torch.finfo(dtype).max * (factor or 1.0)
    src = torch.tensor([1e9, -1e9, largest, -largest, 1e5, float("inf"), float("nan"), 0.0])
    src = src.reshape(1, 1, 1, 8)
    dst = torch.zeros(1, 1, 1, 8, dtype=dtype)
    one, other = pair(src, dst, None if factor is None else ScaleDesc.of(factor))
    migrate(one, other, [1])
    assert float(dst[..., 0]) == torch.finfo(dtype).max
    assert verify(one, other, [1], tolerance="codec")
    dst[..., 1] = torch.finfo(dtype).max  # the sign
    difference = verify(one, other, [1], tolerance="codec").difference
    assert difference is not None
    assert difference.dim == 1
    dst[..., 1] = -torch.finfo(dtype).max
    dst[..., 2] = torch.finfo(dtype).max / 2
    difference = verify(one, other, [1], tolerance="codec").difference
    assert difference is not None
    assert difference.dim == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_codec_overflows_to_infinity(dtype: torch.dtype) -> None:
    src = torch.tensor([3.4e38, -3.4e38, 1.0, float("-inf")]).reshape(1, 1, 1, 4)
    dst = torch.zeros(1, 1, 1, 4, dtype=dtype)
    migrate(*pair(src, dst), [1])
    assert torch.equal(dst.flatten(), src.to(dtype).flatten())
    assert float(dst[..., 0]) == float("inf")
    assert verify(*pair(src, dst), [1], tolerance="codec")
    dst[..., 2] = float("inf")
    difference = verify(*pair(src, dst), [1], tolerance="codec").difference
    assert difference is not None
    assert difference.dim == 2


def test_codec_of_one_dtype_is_exact() -> None:
    _, src = paged()
    layers, dst = dense()
    migrate(src.at(TABLE), dst, LENS)
    change(layers[1][1], (1, 5, 2, 5))
    assert not verify(src.at(TABLE), dst, LENS, tolerance="codec")


def test_scales_count_although_the_bytes_are_the_same() -> None:
    stored = torch.randn(1, 8, 2, 8).to(torch.float8_e4m3fn)
    src, dst = pair(stored, stored.clone(), ScaleDesc.of(0.5))
    assert not verify(src, dst, [8])
    assert not verify(src, dst, [8], tolerance="codec")
    assert verify(replace(src, k_scales=dst.k_scales), dst, [8])


def test_scales_in_bfloat16() -> None:
    src = torch.randn(1, 8, 2, 8) * 2.0**-12  # far below what is stored: all zero but for the scale
    dst = torch.zeros(1, 8, 2, 8, dtype=torch.float8_e4m3fn)
    scales = torch.tensor([0.5, 0.125], dtype=torch.bfloat16)
    one, other = pair(src, dst, ScaleDesc.of(scales, ScaleGranularity.PER_HEAD))
    migrate(one, other, [8])
    assert verify(one, other, [8], tolerance="codec")
    src[0, 3, 1, 2] = 0.5 * 2.0**-9  # beyond half a step of the largest scale
    dst[0, 3, 1, 2] = 0
    difference = verify(one, other, [8], tolerance="codec").difference
    assert difference is not None
    assert (difference.token, difference.head, difference.dim) == (3, 1, 2)


def test_a_big_cache_is_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies stay as small as a piece, whatever the cache."""
    sizes: list[int] = []
    read = readers.KvReader._read

    def watched(self: Any, lo: int, out: Any, *args: Any, **options: Any) -> Any:
        sizes.append(out.nbytes)
        return read(self, lo, out, *args, **options)

    monkeypatch.setattr(readers.KvReader, "_read", watched)
    k = torch.randn(2, 20_000, 8, 32)
    v = k.clone()
    src, dst = (view_of([(of, v)], Layout.BLOCK_NHD, dense=True) for of in (k, k.clone()))
    assert verify(src, dst, [20_000, 19_999])
    assert max(sizes) <= readers.PIECE_BYTES
    assert sum(sizes) >= 2 * k.nbytes


@pytest.mark.parametrize(
    ("call", "error", "expected"),
    [
        (
            lambda src, dst: verify(src.at(TABLE), dst, LENS, tolerance="close"),  # type: ignore[arg-type]
            InvalidArgumentError,
            "tolerance is 'close', expected 'exact', 'codec' or a finite number of at least 0",
        ),
        (
            lambda src, dst: verify(src.at(TABLE), replace(dst, layers=dst.layers[:1]), LENS),
            InvalidArgumentError,
            "dst has 1 layers, expected as many as src has, 2, and not 0; describe at each end the "
            "layers that both hold (spec E.3)",
        ),
        (
            lambda src, dst: verify(*[CacheView((), SAME_MODEL, dense=True)] * 2, []),
            InvalidArgumentError,
            "dst has 0 layers, expected as many as src has, 0, and not 0; describe at each end the "
            "layers that both hold (spec E.3)",
        ),
        (
            lambda src, dst: verify(src.at(TABLE), dst, [3, -1]),
            OutOfRangeError,
            "seq_lens has -1, expected at least 0 (spec 5.3)",
        ),
        (
            lambda src, dst: verify(src.at(TABLE), dst.at(slots=[1, 2, 3]), [3, 1]),
            InvalidArgumentError,
            "dst.slots.token_count is 3, expected the sum of seq_lens 4 (spec E.3)",
        ),
        (
            lambda src, dst: verify(src.at(TABLE, starts=[1]), dst, [3, 1]),
            InvalidArgumentError,
            "src.starts.seq_count is 1, expected 2, one per row (spec E.3)",
        ),
        (
            lambda src, dst: verify(src.at([[7], [1]]), dst, [3, 1]),
            OutOfRangeError,
            "verify reads src as src: src.block_table.indices[0] is 7, expected below num_blocks 7",
        ),
        (
            lambda src, dst: verify(dst, src.at([[1], [7]]), [3, 1]),
            OutOfRangeError,
            "verify reads dst as src: src.block_table.indices[1] is 7, expected below num_blocks 7",
        ),
        (
            lambda src, dst: verify(src.at(TABLE), dst, LENS, num_heads=4),
            InvalidArgumentError,
            "num_heads is 4, expected at most 3 as src has (spec E.3)",
        ),
        (
            lambda src, dst: verify(
                src.at(TABLE),
                view_of(
                    make(2, 12, HEADS + 1, dtype=torch.half, fill=0), Layout.BLOCK_NHD, dense=True
                ),
                LENS,
            ),
            InvalidArgumentError,
            "dst.layers[0].num_kv_heads is 4, expected 3 as at src; give num_heads to compare a "
            "range (spec E.3)",
        ),
        (
            lambda src, dst: verify(
                src.at(TABLE),
                view_of(
                    [(k, k.clone()) for k, _ in make(2, 12, 3, dtype=torch.half, fill=0)],
                    Layout.BLOCK_NHD,
                    dense=True,
                ),
                LENS,
            ),
            InvalidArgumentError,
            "dst.layers[0].v_head_dim is 10, expected 6 as at src; describe a head without "
            "padding, and K and V of one tensor apart (spec E.3)",
        ),
        (
            lambda src, dst: verify(
                pair(
                    Producer(4096, (1, 1, 1, 8), device_type=dlpack.CUDA), torch.zeros(1, 1, 1, 8)
                )[0],
                pair(torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 1, 8))[1],
                [1],
            ),
            UnsupportedError,
            "src.layers[0].k is on a device and belongs to a Producer, expected a torch.Tensor",
        ),
    ],
)
def test_refused(call: Any, error: type[Exception], expected: str) -> None:
    _, src = paged()
    _, dst = dense()
    with pytest.raises(error) as raised:
        call(src, dst)
    assert str(raised.value).startswith(expected)


def test_verify_reads_memory_that_is_read_only() -> None:
    halves = np.ones((2, 2, 12, HEADS, DIM), np.float32)
    halves.setflags(write=False)
    view = view_of([tuple(halves)], Layout.BLOCK_NHD, dense=True)
    assert verify(view, view, [12, 12])
    assert kvx_core.verify is verify


def halves_of(tensor: torch.Tensor, **options: Any) -> CacheView:
    """A dense view of K and V, (2, 1, num_tokens, HEADS, elements)."""
    layer = CacheDesc.from_kv(*(describe(half, Layout.BLOCK_NHD, **options) for half in tensor))
    return CacheView((layer,), SAME_MODEL, dense=True)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "IQ4_NL", "MXFP4"])
def test_codec_of_units(name: str) -> None:
    """What a migration rounds to units is right; a bit more or less is not, either way."""
    for seed in range(3):
        drawn = torch.randn(2, 1, 7, HEADS, 64, generator=torch.Generator().manual_seed(seed))
        unit = DType[name].format
        num_bytes = 64 // unit.numbers * unit.itemsize
        stored = torch.zeros(2, 1, 7, HEADS, num_bytes, dtype=torch.uint8)
        exact, units = halves_of(drawn), halves_of(stored, dtype=name)
        migrate(exact, units, [7])
        found = verify(exact, units, [7], tolerance="codec")
        assert found.ok
        assert found.max_error > 0
        assert verify(exact, units, [7], tolerance=2 * found.max_error).ok
        assert not verify(exact, units, [7], tolerance=0.5 * found.max_error).ok
        assert not verify(exact, units, [7]).ok
        stored[seed % 2, 0, 5, 1, 9] ^= 1 << seed
        assert not verify(exact, units, [7], tolerance="codec").ok
