"""KVX_FLAG_FIND_SCALES against its definition, byte for byte, scales and gaps too. Spec: E.9"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from kvx_core._c.abi import FLAG_FIND_SCALES
from kvx_core.errors import InvalidArgumentError
from kvx_core.types import ScaleGranularity
from tests import reference, tables
from tests.caches import (
    DTYPES,
    LAYOUTS,
    SAME_HEAD_DIM,
    SCALE_SHAPES,
    Cache,
    Geometry,
    assert_same_bytes,
    assert_same_elements,
    scaled,
)
from tests.calls import Backend
from tests.found_scales import E4M3, E5M2, LARGEST, find_scales
from tests.reference import End, Half, Layer, Place

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
HEAD_DIMS = (1, 7, 8, 20, 64, 72, 80, 96, 128, 192, 256, 264, 576)


# --- the definition ---------------------------------------------------------------------------


def put(half: Half, place: Place, value: Tensor | None, head: int, count: int) -> None:
    """Stores rows [count, head_dim] of float32 and their scales; None: zeros."""
    room = half.scale
    assert room is not None
    dtype, scale = half.tensor.dtype, torch.ones(count)
    if value is None:
        stored = torch.zeros(count, half.head_dim).to(dtype)
    else:
        scale = find_scales(value, dtype, room.dtype)
        stored = reference.encode(value / scale[:, None], dtype)
    half.put(place, stored, head)
    room[place.block, place.offset, head : head + count] = scale.to(room.dtype)


def write(layer: Layer, key: Tensor, value: Tensor | None, slots: Tensor) -> None:
    for half, tokens in zip(layer.halves(), (key, value), strict=False):
        for i, slot in enumerate(slots.tolist()):
            place = reference.slot_place(slot, half.block_size)
            if place is not None:
                put(half, place, reference.decode(tokens[i]), 0, half.num_kv_heads)


def migrate(
    src: Cache,
    src_end: End,
    dst: Cache,
    dst_end: End,
    lengths: Sequence[int],
    *,
    starts: Sequence[int],
    heads: tuple[int, int, int],
    zero_fill: bool,
) -> None:
    src_head, dst_head, count = heads
    for src_layer, dst_layer in zip(src.layers, dst.layers, strict=True):
        halves = zip(src_layer.halves(), dst_layer.halves(), strict=True)
        for kv, (source, target) in enumerate(halves):
            for row, length in enumerate(lengths):
                for token in range(length):
                    here = src_end.place(row, token + starts[row], kv)
                    there = dst_end.place(row, token, kv)
                    if there is None or (here is None and not zero_fill):
                        continue
                    value = None
                    if here is not None:
                        value = reference.decode(source.read(here)[src_head : src_head + count])
                        scale = source.heads(source.scale_at(here), src_head, count)
                        value = value if scale is None else value * scale
                    put(target, there, value, dst_head, count)


# --- caches with room for scales, and what is stored in them ------------------------------------


def with_room(cache: Cache, dtype: torch.dtype = F32, *, strided: bool = False) -> Cache:
    """The cache with scales of any value, which the call is to replace."""
    return scaled(cache, ScaleGranularity.PER_TOKEN_HEAD, 11, dtype, strided)


def twin(cache: Cache) -> Cache:
    """The same bytes and views elsewhere, scales included."""

    def moved(half: Half | None, copy: Half | None) -> Half | None:
        if half is None or copy is None:
            return None
        assert half.scale is not None
        flat = memory_of(half.scale).clone().view(half.scale.dtype)
        scale = flat.as_strided(half.scale.shape, half.scale.stride(), half.scale.storage_offset())
        return replace(copy, scale=scale)

    clone = cache.clone()
    layers = []
    for layer, copy in zip(cache.layers, clone.layers, strict=True):
        k = moved(layer.k, copy.k)
        assert k is not None
        layers.append(Layer(k, moved(layer.v, copy.v)))
    return replace(clone, layers=tuple(layers))


def memory_of(scale: Tensor) -> Tensor:
    """Everything that was allocated for the scales, gaps included."""
    return torch.empty(0, dtype=torch.uint8).set_(scale.untyped_storage())


def assert_same(actual: Cache, expected: Cache) -> None:
    for index, (got, wanted) in enumerate(zip(actual.layers, expected.layers, strict=True)):
        for name, a, b in zip("KV", got.halves(), wanted.halves(), strict=False):
            assert a.scale is not None
            assert b.scale is not None
            where = f"layer {index}, {name} scales [block, token, head]"
            assert_same_elements(a.scale, b.scale, where)
            assert torch.equal(memory_of(a.scale), memory_of(b.scale)), (
                f"{where}: a gap was written"
            )
    assert_same_bytes(actual, expected)


def rows(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    """Rows of numbers of one size each, the sizes far apart; some rows are special."""
    generator = torch.Generator().manual_seed(seed)
    count, dim = math.prod(shape[:-1]), shape[-1]
    widest = {F16: 12, E4M3: 6, E5M2: 12, torch.int8: 6}.get(dtype, 100)
    exponent = torch.randint(-widest - 4, widest, (count, 1), generator=generator)
    values = torch.ldexp(torch.randn(count, dim, generator=generator), exponent)
    specials = (0.0, -0.0, math.nan, math.inf, -math.inf, 2.0**-149, 3.4e38)
    for row in range(0, count, 3):
        special = specials[row // 3 % len(specials)]
        whole = row // 3 // len(specials) % 2 == 1
        values[row, slice(None) if whole else row % dim] = special
    return reference.encode(values, dtype).reshape(*shape)


def check_write(
    backend: Backend,
    cache: Cache,
    src_dtype: torch.dtype,
    num_tokens: int = 17,
) -> None:
    layer, expected = cache.layers[-1], twin(cache)
    heads = layer.k.num_kv_heads
    key = rows((num_tokens, heads, layer.k.head_dim), src_dtype, 2)
    value = None if layer.v is None else rows((num_tokens, heads, layer.v.head_dim), src_dtype, 3)
    slots = tables.slots(cache, num_tokens, 4)
    write(expected.layers[-1], key, value, slots)
    backend.write(layer, key, value, slots, flags=FLAG_FIND_SCALES)
    assert_same(cache, expected)


# --- write ------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale_dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("fp8", LARGEST, ids=str)
@pytest.mark.parametrize("src", DTYPES, ids=str)
def test_write_every_dtype(
    backend: Backend, src: torch.dtype, fp8: torch.dtype, scale_dtype: torch.dtype
) -> None:
    for head_dim in (32, 20):
        cache = LAYOUTS["nhd"](Geometry(num_kv_heads=3, head_dim=head_dim), fp8, 1)
        check_write(backend, with_room(cache, scale_dtype, strided=True), src)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_write_every_head_dim(backend: Backend, head_dim: int) -> None:
    """Rows that a few lanes hold, or a warp, and those that none can."""
    for layout, num_heads in (("nhd", 5), ("vllm_BHLNC", 2), ("custom_padded_rows", 1)):
        g = Geometry(num_kv_heads=num_heads, head_dim=head_dim, v_head_dim=2 * head_dim)
        check_write(backend, with_room(LAYOUTS[layout](g, E4M3, 1)), BF16, num_tokens=9)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_write_every_layout(backend: Backend, layout: str) -> None:
    v_head_dim = None if layout in SAME_HEAD_DIM else 24
    cache = LAYOUTS[layout](Geometry(num_kv_heads=3, v_head_dim=v_head_dim), E4M3, 1)
    for strided in (False, True):
        check_write(backend, with_room(cache, strided=strided), BF16)


def test_write_many_tokens(backend: Backend) -> None:
    """More than one per warp, and more heads than a warp holds rows."""
    g = Geometry(num_blocks=70, block_size=8, num_kv_heads=9, head_dim=16, num_layers=1)
    check_write(backend, with_room(LAYOUTS["hnd"](g, E5M2, 1)), F32, num_tokens=500)


def test_keys_of_any_strides(backend: Backend) -> None:
    """Expanded over the heads, and reversed axes: vectors do not fit."""
    cache = with_room(LAYOUTS["nhd"](Geometry(num_kv_heads=4, head_dim=32), E4M3, 1))
    expected = twin(cache)
    key = rows((6, 1, 32), BF16, 2).expand(6, 4, 32)
    value = rows((32, 4, 6), BF16, 3).permute(2, 1, 0)
    slots = tables.slots(cache, 6, 4)
    write(expected.layers[0], key, value, slots)
    backend.write(cache.layers[0], key, value, slots, flags=FLAG_FIND_SCALES)
    assert_same(cache, expected)


def test_by_hand(backend: Backend) -> None:
    """Rows written out, so that definition and library cannot be wrong together."""
    nan, inf = math.nan, math.inf
    tokens = [
        ([896.0, -3.0], 2.0, [0x7E, 0xBC]),  # 448, -1.5
        ([0.0, -0.0], 1.0, [0x00, 0x80]),
        ([nan, 224.0], 0.5, [0x7F, 0x7E]),
        ([nan, nan], 1.0, [0x7F, 0x7F]),
        ([inf, 2.0], 1.0, [0x7E, 0x40]),  # infinity has no scale, and saturates
        ([-448.0, 1.0], 1.0, [0xFE, 0x38]),
        ([1e-45, 0.0], 1.0, [0x00, 0x00]),  # its scale would be 0
    ]
    cache = LAYOUTS["nhd"](Geometry(num_kv_heads=1, head_dim=2, num_layers=1), E4M3, 1)
    cache = with_room(cache)
    key = torch.tensor([values for values, _, _ in tokens])[:, None]
    slots = torch.arange(len(tokens))
    backend.write(cache.layers[0], key, key, slots, flags=FLAG_FIND_SCALES)
    for half in cache.layers[0].halves():
        assert half.scale is not None
        for i, (_, scale, codes) in enumerate(tokens):
            place = Place(i // 4, i % 4)
            assert half.scale[place.block, place.offset, 0].item() == scale
            assert half.read(place).view(torch.uint8).tolist() == [codes]


def test_what_is_read_back_is_near(backend: Backend) -> None:
    """A gather with the found scales: within half a unit of FP8, whatever the size of the row."""
    cache = with_room(LAYOUTS["vllm_LBNHC"](Geometry(num_kv_heads=4, head_dim=64), E4M3, 1))
    generator = torch.Generator().manual_seed(2)
    size = torch.ldexp(
        torch.ones(20, 4, 1), torch.randint(-90, 90, (20, 4, 1), generator=generator)
    )
    key, value = torch.randn(2, 20, 4, 64, generator=generator) * size
    backend.write(cache.layers[0], key, value, torch.arange(20), flags=FLAG_FIND_SCALES)
    out = torch.zeros(2, 1, 20, 4, 64)
    table = reference.Packed(torch.arange(5)[None], 4)
    backend.gather(cache.layers[0], table, torch.tensor([20]), *out, max_seq_len=20)
    for wanted, got in zip((key, value), out[:, 0], strict=True):
        error = (wanted - got).abs()
        amax = wanted.abs().amax(-1, keepdim=True)
        assert (error <= torch.maximum(wanted.abs() / 16, amax / 448 * 2**-10) * 1.0001).all()


# --- migrate ----------------------------------------------------------------------------------


@pytest.mark.parametrize("zero_fill", [False, True])
@pytest.mark.parametrize("granularity", [None, *SCALE_SHAPES])
def test_migrate(backend: Backend, granularity: ScaleGranularity | None, zero_fill: bool) -> None:
    """From a scaled FP8 cache or a BF16 one, with ranges of tokens and heads, and null blocks."""
    lengths, starts = [9, 0, 6, 11], [3, 0, 0, 5]
    g = Geometry(num_blocks=9, num_kv_heads=4, head_dim=40, v_head_dim=16)
    source = LAYOUTS["hnd"](g, BF16 if granularity is None else E5M2, 1).fill(2)
    if granularity is not None:
        source = scaled(source, granularity, 3)
    src_end = tables.packed(
        source, [n + s for n, s in zip(lengths, starts, strict=True)], 5, nulls=0.3, starts=starts
    )
    for layout, strided in (("nhd", False), ("custom_token_innermost", True), ("packed8", True)):
        target = LAYOUTS[layout](replace(g, num_blocks=12, num_kv_heads=6), E4M3, 4)
        target = with_room(target, strided=strided)
        dst_end = tables.packed(target, lengths, 6, shared=False, nulls=0.1)
        expected = twin(target)
        migrate(
            source, src_end, expected, dst_end, lengths,
            starts=starts, heads=(1, 2, 3), zero_fill=zero_fill,
        )  # fmt: skip
        backend.migrate(
            source, src_end, target, dst_end, torch.tensor(lengths),
            src_starts=torch.tensor(starts), src_head=1, dst_head=2, num_heads=3,
            zero_fill=zero_fill, flags=FLAG_FIND_SCALES,
        )  # fmt: skip
        assert_same(target, expected)


def test_scales_may_be_found_anew(backend: Backend) -> None:
    """Both ends FP8 of one dtype: not a copy, and the destination's own scales are not read."""
    source = scaled(LAYOUTS["nhd"](Geometry(), E4M3, 1).fill(2), ScaleGranularity.PER_TENSOR, 3)
    target = with_room(LAYOUTS["nhd"](Geometry(), E4M3, 4))
    for half in target.layers[0].halves():
        assert half.scale is not None
        half.scale.fill_(-1)
    expected, end = twin(target), tables.packed(source, [10], 5, shared=False)
    migrate(source, end, expected, end, [10], starts=[0], heads=(0, 0, 2), zero_fill=False)
    backend.migrate(source, end, target, end, torch.tensor([10]), flags=FLAG_FIND_SCALES)
    assert_same(target, expected)


@pytest.mark.parametrize("head_dim", [16, 20])
def test_an_unusable_source_scale(backend: Backend, head_dim: int) -> None:
    """Refused where it can be seen; a device skips the token of that head, and its scale."""
    g = Geometry(num_layers=1, head_dim=head_dim)
    source = scaled(LAYOUTS["nhd"](g, E4M3, 1).fill(2), ScaleGranularity.PER_TOKEN_HEAD, 3)
    bad = source.layers[0].k.scale
    assert bad is not None
    end = reference.Packed(torch.tensor([[0, 1]]), 4)
    target = with_room(LAYOUTS["nhd"](g, E5M2, 4))
    before, expected = twin(target), twin(target)
    migrate(source, end, expected, end, [8], starts=[0], heads=(0, 0, 2), zero_fill=False)
    bad[1, 2, 1] = math.inf
    with pytest.raises(InvalidArgumentError, match="K scale of block 1, head 1 is inf"):
        backend.migrate(source, end, target, end, torch.tensor([8]), flags=FLAG_FIND_SCALES)
    if backend.looks_first:
        expected = before
    else:
        skipped, kept = expected.layers[0].k, before.layers[0].k
        assert skipped.scale is not None
        assert kept.scale is not None
        skipped.tensor[1, 2, 1] = kept.tensor[1, 2, 1]
        skipped.scale[1, 2, 1] = kept.scale[1, 2, 1]
    assert_same(target, expected)


def test_the_definition_follows_ieee() -> None:
    """amax / 448 is a division of float32, as numpy makes it."""
    value = rows((400, 8), F32, 1)
    amax = np.nan_to_num(np.abs(value.numpy()), nan=0.0, posinf=np.inf).max(-1)
    with np.errstate(over="ignore"):
        exact = amax / np.float32(448)
    found = find_scales(value, E4M3, F32).numpy()
    usable = np.isfinite(exact) & (exact > 0)
    assert (found[usable] == exact[usable]).all()
    assert (found[~usable] == 1).all()
