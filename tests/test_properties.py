"""Random calls against the reference: one strategy per operation combines all options.

Hypothesis draws the calls and shrinks failures; numbers come from seeds that it draws too. Every
run is the same: once in hypothesis's own order and once from each of three seeds.
KVX_HYPOTHESIS_PROFILE=explore draws new calls each time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvx_core.types import Layout, ScaleGranularity
from tests import reference, tables
from tests.caches import (
    DTYPES,
    LAYOUTS,
    SAME_HEAD_DIM,
    SCALE_SHAPES,
    Allocation,
    Cache,
    Geometry,
    assert_same_bytes,
    random_values,
    scaled,
)
from tests.calls import Backend
from tests.reference import SCALED, Dense, End, Half, Layer, Slots

SEEDS = st.integers(0, 1 << 20)
INTEGERS = st.sampled_from((torch.int32, torch.int64))
HEAD_DIMS = st.integers(1, 40) | st.sampled_from((64, 80, 96, 128, 192))
BY_BLOCK = (
    ScaleGranularity.PER_BLOCK,
    ScaleGranularity.PER_BLOCK_HEAD,
    ScaleGranularity.PER_TOKEN_HEAD,
)


@dataclass(frozen=True)
class Case:
    """One random call; the description is what a failure shows."""

    description: str
    run: Callable[[Backend], None]

    def __repr__(self) -> str:
        return self.description


def check(strategy: st.SearchStrategy[Case], backend: Backend, seed: int | None) -> None:
    """Runs 150 cases in hypothesis's order, or 40 from a seed."""

    @given(case=strategy)
    def every_case_agrees(case: Case) -> None:
        case.run(backend)

    if seed is None:
        settings(max_examples=150)(every_case_agrees)()
    else:
        seeded = settings(max_examples=40, derandomize=False, database=None)(every_case_agrees)
        hypothesis.seed(seed)(seeded)()


@st.composite
def dtype_pairs(draw: st.DrawFn) -> tuple[torch.dtype, torch.dtype]:
    """Any two formats, the same one more often than chance would have it, or opaque bytes."""
    kind = draw(st.sampled_from(("any", "any", "same", "opaque")))
    if kind == "opaque":
        return torch.uint8, torch.uint8
    first = draw(st.sampled_from(DTYPES))
    return first, first if kind == "same" else draw(st.sampled_from(DTYPES))


@st.composite
def scales(draw: st.DrawFn) -> Callable[[Cache], Cache]:
    """What gives a cache scales, or none; by block only if there is no secondary pool."""
    granularity = draw(st.none() | st.sampled_from(list(SCALE_SHAPES)))
    dtype = draw(st.sampled_from((torch.float32, torch.float16, torch.bfloat16)))
    seed, strided = draw(SEEDS), draw(st.booleans())

    def give(cache: Cache) -> Cache:
        k = cache.layers[0].k
        if granularity is None or k.tensor.dtype not in SCALED:
            return cache
        if granularity in BY_BLOCK and k.secondary is not None:
            return scaled(cache, ScaleGranularity.PER_HEAD, seed, dtype, strided)
        return scaled(cache, granularity, seed, dtype, strided)

    return give


@st.composite
def layouts_and_dims(draw: st.DrawFn, count: int) -> tuple[list[str], int, int | None]:
    """`count` layouts that agree on having a V, K's head_dim, and V's if it differs."""
    with_v = sorted(set(LAYOUTS) - {"mla"})
    names = [draw(st.sampled_from(with_v)) for _ in range(count)]
    if draw(st.integers(0, 9)) == 0:
        names = ["mla"] * count
    head_dim = draw(HEAD_DIMS)
    equal = any(name in SAME_HEAD_DIM for name in names) or draw(st.booleans())
    return names, head_dim, None if equal else draw(HEAD_DIMS)


# --- write ------------------------------------------------------------------------------------


@st.composite
def writes(draw: st.DrawFn) -> Case:
    (layout,), head_dim, v_head_dim = draw(layouts_and_dims(1))
    g = Geometry(
        num_blocks=draw(st.integers(1, 7)),
        block_size=draw(st.integers(1, 33)),
        num_kv_heads=draw(st.integers(1, 5)),
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        num_layers=draw(st.integers(1, 2)),
    )
    dtype, io_dtype = draw(dtype_pairs())
    give, seed, count = draw(scales()), draw(SEEDS), draw(st.integers(0, 40))
    invalid_slot = draw(st.sampled_from((-1, 0, 5, -(1 << 31))))
    slot_dtype, padding = draw(INTEGERS), draw(st.integers(0, 3))
    style = draw(st.sampled_from(("dense", "fused", "transposed")))

    def tokens(half: Half, num_tokens: int, seed: int) -> Tensor:
        shape = (num_tokens + padding, half.num_kv_heads, half.head_dim)
        values = random_values(shape, io_dtype, seed)
        if style == "fused":  # a slice of a wider projection
            wide = torch.zeros(shape[0], shape[1], 2 * shape[2], dtype=io_dtype)
            values = wide[..., shape[2] :].copy_(values)
        elif style == "transposed":
            values = values.permute(2, 0, 1).contiguous().permute(1, 2, 0)
        return values

    def run(backend: Backend) -> None:
        cache = give(LAYOUTS[layout](g, dtype, seed))
        slots = tables.slots(cache, count, seed, invalid_slot=invalid_slot, dtype=slot_dtype)
        layer = cache.layers[-1]
        inputs = [tokens(h, len(slots), seed + i) for i, h in enumerate(layer.halves())]
        key, value = (*inputs, None)[:2]
        expected = cache.clone()
        reference.write(expected.layers[-1], key, value, slots, invalid_slot)
        backend.write(layer, key, value, slots, invalid_slot)
        assert_same_bytes(cache, expected)

    return Case(f"{layout} {g} {io_dtype}->{dtype} {style} {count=} {invalid_slot=} {seed=}", run)


@pytest.mark.parametrize("seed", [None, 1, 20, 300])
def test_write(backend: Backend, seed: int | None) -> None:
    check(writes(), backend, seed)


# --- gather -----------------------------------------------------------------------------------


@st.composite
def gathers(draw: st.DrawFn) -> Case:
    (layout,), head_dim, v_head_dim = draw(layouts_and_dims(1))
    kind = draw(st.sampled_from(("packed", "ragged", "kv_offsets")))
    block_sizes = st.integers(1, 33)
    if kind == "kv_offsets":
        layout, v_head_dim = "tensorrt_llm", None
        block_sizes = st.sampled_from((1, 2, 8, 32))
    g = Geometry(
        num_blocks=draw(st.integers(2, 7)),
        block_size=draw(block_sizes),
        num_kv_heads=draw(st.integers(1, 5)),
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        num_layers=draw(st.integers(1, 3)),
    )
    dtype, io_dtype = draw(dtype_pairs())
    lengths = draw(st.lists(st.integers(0, 40), max_size=3))
    max_seq_len = draw(st.integers(0, 45))
    beams = draw(st.integers(1, 3)) if kind == "kv_offsets" else 1
    null_block_id = draw(st.sampled_from((-1, 0))) if kind != "kv_offsets" else -1
    nulls = draw(st.sampled_from((0.0, 0.3, 1.0)))
    zero_fill, flat, aligned = draw(st.booleans()), draw(st.booleans()), draw(st.booleans())
    give, seed = draw(scales()), draw(SEEDS)
    index_dtype, length_dtype = draw(INTEGERS), draw(INTEGERS)

    def run(backend: Backend) -> None:
        cache = give(LAYOUTS[layout](g, dtype, seed)).fill(seed)
        if kind == "kv_offsets":
            end: Any = tables.kv_offsets(cache, lengths, seed, beams=beams, nulls=nulls)
        else:
            make = tables.packed if kind == "packed" else tables.ragged
            end = make(
                cache, lengths, seed, nulls=nulls, null_block_id=null_block_id, dtype=index_dtype
            )
        layer = cache.layers[-1]
        rows = len(lengths) * beams
        storages, halves = [], []
        for i, half in enumerate(layer.halves()):
            shape = (rows, max_seq_len, half.num_kv_heads, half.head_dim)
            shift = 0 if aligned else io_dtype.itemsize
            size = torch.Size(shape).numel() * io_dtype.itemsize
            memory = Allocation(size, seed + i, shift)
            halves.append(Half(memory.take(shape, io_dtype), Layout.BLOCK_CUSTOM))
            storages.append(memory.storage)
        result = Cache(tuple(storages), (Layer(*(*halves, None)[:2]),))
        expected, source = result.clone(), cache.clone()
        wanted = [half.tensor for half in expected.layers[0].halves()]
        row_lens = [min(n, max_seq_len) for n in lengths for _ in range(beams)]
        reference.gather(layer, end, row_lens, *(*wanted, None)[:2], zero_fill=zero_fill)
        got = [half.tensor.flatten(0, 1) if flat else half.tensor for half in halves]
        backend.gather(
            layer,
            end,
            torch.tensor(lengths, dtype=length_dtype),
            *(*got, None)[:2],
            max_seq_len=max_seq_len,
            zero_fill=zero_fill,
            bytes_per_block=cache.bytes_per_block if kind == "kv_offsets" else 0,
            secondary_num_blocks=g.num_blocks + 2,
            null_block_id=null_block_id,
        )
        assert_same_bytes(result, expected)
        assert_same_bytes(cache, source)

    return Case(
        f"{layout} {kind} {g} {dtype}->{io_dtype} {lengths=} {max_seq_len=} {beams=} {nulls=} "
        f"{null_block_id=} {zero_fill=} {flat=} {aligned=} {seed=}",
        run,
    )


@pytest.mark.parametrize("seed", [None, 1, 20, 300])
def test_gather(backend: Backend, seed: int | None) -> None:
    check(gathers(), backend, seed)


# --- migrate ----------------------------------------------------------------------------------


@st.composite
def migrations(draw: st.DrawFn) -> Case:
    layouts, head_dim, v_head_dim = draw(layouts_and_dims(2))
    kinds = [draw(st.sampled_from(("packed", "ragged", "slots", "dense", "kv_offsets")))] * 2
    kinds[1] = draw(st.sampled_from(("packed", "ragged", "slots", "dense", "kv_offsets")))
    if "kv_offsets" in kinds:
        layouts = ["tensorrt_llm" if kind == "kv_offsets" else "nhd" for kind in kinds]
        v_head_dim = None
    with_beams = "kv_offsets" in kinds and not {"packed", "ragged"} & set(kinds)
    beams = draw(st.integers(1, 3)) if with_beams else 1
    lengths = draw(st.lists(st.integers(0, 40 // beams), min_size=1, max_size=3))
    rows = [n for n in lengths for _ in range(beams)]
    num_layers = draw(st.integers(1, 2))
    num_heads = draw(st.integers(1, 4))
    heads = [num_heads + draw(st.integers(0, 3)) for _ in range(2)]
    first_heads = [draw(st.integers(0, held - num_heads)) for held in heads]
    dtypes, seed = draw(dtype_pairs()), draw(SEEDS)
    give = [draw(scales()) for _ in range(2)]
    nulls = draw(st.sampled_from((0.0, 0.3)))
    starts, geometries = [], []
    for kind, held in zip(kinds, heads, strict=True):
        moved = kind != "slots" and draw(st.booleans())
        own = [draw(st.integers(0, 20)) for _ in rows] if moved else None
        ends = [n + s for n, s in zip(rows, own or [0] * len(rows), strict=True)]
        power_of_two = st.sampled_from((1, 2, 4, 16, 32))
        block_size = draw(power_of_two if kind == "kv_offsets" else st.integers(1, 33))
        if kind == "dense":
            block_size = max(ends) + draw(st.integers(1, 3))
        num_blocks = sum(tables.blocks_for(n, block_size) for n in ends) + len(rows) + 1
        starts.append(own)
        geometries.append(Geometry(num_blocks, block_size, held, head_dim, v_head_dim, num_layers))
    index_dtypes = [draw(INTEGERS) for _ in range(2)]
    null_block_ids = [draw(st.sampled_from((-1, 0))) for _ in range(2)]
    zero_fill, all_heads = draw(st.booleans()), heads[0] == heads[1] == num_heads
    length_dtype = draw(INTEGERS)

    def end_of(side: int, cache: Cache) -> End:
        kind, own = kinds[side], starts[side]
        seq_ends = [n + s for n, s in zip(rows, own or [0] * len(rows), strict=True)]
        common = {"shared": side == 0, "nulls": nulls, "starts": own}
        if kind == "dense":
            return Dense()
        if kind == "slots":
            slots = tables.slots(cache, sum(rows), seed + side, dtype=index_dtypes[side])
            return Slots(slots, rows, cache.block_size)
        if kind == "kv_offsets":
            per_sequence = seq_ends[::beams]
            if own is None or beams == 1:
                return tables.kv_offsets(cache, per_sequence, seed + side, beams=beams, **common)
            common["starts"] = None  # beams of a sequence start at different tokens: fill them all
            longest = [max(seq_ends[i : i + beams]) for i in range(0, len(rows), beams)]
            return tables.kv_offsets(cache, longest, seed + side, beams=beams, **common)
        make = tables.packed if kind == "packed" else tables.ragged
        return make(
            cache,
            seq_ends,
            seed + side,
            dtype=index_dtypes[side],
            null_block_id=null_block_ids[side],
            **common,
        )

    def run(backend: Backend) -> None:
        src, dst = (
            give[i](LAYOUTS[layouts[i]](geometries[i], dtypes[i], seed + i)) for i in range(2)
        )
        src.fill(seed)
        src_end, dst_end = end_of(0, src), end_of(1, dst)
        expected, source = dst.clone(), src.clone()
        options = {"src_head": first_heads[0], "dst_head": first_heads[1], "zero_fill": zero_fill}
        reference.migrate(
            src.layers,
            src_end,
            expected.layers,
            dst_end,
            rows,
            src_starts=starts[0],
            dst_starts=starts[1],
            num_heads=num_heads,
            **options,
        )
        tensors = [None if own is None else torch.tensor(own) for own in starts]
        backend.migrate(
            src,
            src_end,
            dst,
            dst_end,
            torch.tensor(lengths, dtype=length_dtype),
            src_starts=tensors[0],
            dst_starts=tensors[1],
            num_heads=0 if all_heads else num_heads,
            **options,
        )
        assert_same_bytes(dst, expected)
        assert_same_bytes(src, source)

    return Case(
        f"{layouts} {kinds} {geometries} {dtypes} {lengths=} {beams=} {starts=} {first_heads=} "
        f"{num_heads=} {nulls=} {null_block_ids=} {zero_fill=} {seed=}",
        run,
    )


@pytest.mark.parametrize("seed", [None, 1, 20, 300])
def test_migrate(backend: Backend, seed: int | None) -> None:
    check(migrations(), backend, seed)


# --- there and back ---------------------------------------------------------------------------


def round_trip(case_dtypes: Sequence[torch.dtype]) -> st.SearchStrategy[Case]:
    """Written, migrated and gathered again: lossless whenever each cache can hold the values."""

    @st.composite
    def cases(draw: st.DrawFn) -> Case:
        layouts, head_dim, v_head_dim = draw(layouts_and_dims(2))
        heads, length = draw(st.integers(1, 3)), draw(st.integers(1, 50))
        block_sizes = [draw(st.integers(1, 17)) for _ in range(2)]
        dtypes = [draw(st.sampled_from(list(case_dtypes))) for _ in range(2)]
        seed = draw(SEEDS)

        def run(backend: Backend) -> None:
            caches = []
            for layout, block_size, dtype in zip(layouts, block_sizes, dtypes, strict=True):
                blocks = tables.blocks_for(length, block_size) + 2
                g = Geometry(blocks, block_size, heads, head_dim, v_head_dim, 1)
                caches.append(LAYOUTS[layout](g, dtype, seed))
            ends = [
                tables.packed(cache, [length], seed, shared=False, dtype=torch.int64)
                for cache in caches
            ]
            tokens = [
                random_values((length, heads, half.head_dim), torch.float8_e4m3fn, seed + i)
                for i, half in enumerate(caches[0].layers[0].halves())
            ]
            places = [ends[0].place(0, token, 0) for token in range(length)]
            slots = torch.tensor([p.block * block_sizes[0] + p.offset for p in places if p])
            backend.write(caches[0].layers[0], *(*tokens, None)[:2], slots)
            lengths = torch.tensor([length])
            backend.migrate(caches[0], ends[0], caches[1], ends[1], lengths)
            got = [torch.zeros_like(t)[None] for t in tokens]
            outputs = (*got, None)[:2]
            backend.gather(caches[1].layers[0], ends[1], lengths, *outputs, max_seq_len=length)
            for out, given_ in zip(got, tokens, strict=True):
                assert torch.equal(out[0].view(torch.uint8), given_.view(torch.uint8))

        return Case(f"{layouts} {dtypes} {block_sizes} {head_dim=} {length=} {seed=}", run)

    return cases()


@pytest.mark.parametrize("seed", [None, 1, 20, 300])
def test_there_and_back(backend: Backend, seed: int | None) -> None:
    """E4M3 numbers survive in every format that has them: all but E5M2."""
    holding = [dtype for dtype in DTYPES if dtype not in (torch.float8_e5m2, torch.int8)]
    check(round_trip(holding), backend, seed)
