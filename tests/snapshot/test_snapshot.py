"""Snapshot: tokens captured from caches of one kind are restored into caches of another.

Bytes are compared with tests/reference.py, around the tokens too; files are broken in every place.
"""

from __future__ import annotations

import json
import os
import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvx_core import (
    BlockTable,
    CacheDesc,
    CacheView,
    DType,
    InvalidArgumentError,
    OutOfRangeError,
    PoolDesc,
    ScaleDesc,
    ScaleGranularity,
    Section,
    Snapshot,
    StoreError,
    UnsupportedError,
    describe,
)
from kvx_core.snapshot import CorruptError, UnsignedError
from tests import reference, tables
from tests.caches import (
    DTYPES,
    LAYOUTS,
    Cache,
    Geometry,
    assert_same_bytes,
    scaled,
)
from tests.reference import FP8, Dense, End, Packed
from tests.snapshot import store_reader
from tests.snapshot.sections import FACTS, section_of
from tests.snapshot_files import SnapshotFile, kind_in, rewritten, row_of

PER_TOKEN_HEAD = ScaleGranularity.PER_TOKEN_HEAD
WITHOUT_POOL = sorted(set(LAYOUTS) - {"mla"})


def cache_of(
    layout: str, dtype: torch.dtype, seed: int, granularity: ScaleGranularity, **sizes: Any
) -> Cache:
    cache = LAYOUTS[layout](Geometry(**sizes), dtype, seed).fill(seed)
    return cache if granularity is ScaleGranularity.NONE else scaled(cache, granularity, seed)


# --- What is captured here and restored there -----------------------------------------------------


@dataclass(frozen=True)
class Rank:
    """Some layers and heads of a model in one cache, and where the sequence lies there."""

    cache: Cache
    table: Packed
    layers: tuple[int, ...]
    heads: tuple[int, int]
    num_sections: int  # that the layers are dealt out to

    def sections(self, total_kv_heads: int) -> list[Section]:
        return [
            section_of(
                self.cache,
                self.layers[i :: self.num_sections],
                BlockTable.packed(self.table.indices),
                heads=(self.heads[0], total_kv_heads),
                at=range(len(self.layers))[i :: self.num_sections],
            )
            for i in range(min(self.num_sections, len(self.layers)))
        ]


def pieces(draw: st.DrawFn, count: int) -> list[tuple[int, int]]:
    """Ranges that make up [0, count)."""
    cuts = sorted(draw(st.sets(st.integers(1, count - 1), max_size=2))) if count > 1 else []
    return list(zip([0, *cuts], [*cuts, count], strict=True))


@dataclass(frozen=True)
class RoundTrip:
    """Producers write a file each; consumers take tokens [lo, hi) from all of them."""

    producers: list[Rank]
    consumers: list[Rank]
    total_kv_heads: int
    start: int
    stop: int
    lo: int
    hi: int


@st.composite
def round_trips(draw: st.DrawFn) -> RoundTrip:
    num_layers, total = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    head_dim = draw(st.sampled_from((2, 8, 16, 24)))
    start, count = draw(st.integers(0, 9)), draw(st.integers(1, 20))
    lo = draw(st.integers(start, start + count - 1))
    hi = draw(st.integers(lo + 1, start + count))

    def ranks(end: int, nulls: float) -> list[Rank]:
        granularity = draw(st.sampled_from((None, "PER_TENSOR", "PER_HEAD", "PER_TOKEN_HEAD")))
        dtype = draw(st.sampled_from(FP8 if granularity else DTYPES))
        layout, seed = draw(st.sampled_from(WITHOUT_POOL)), draw(st.integers(0, 1 << 20))
        found = []
        for layers in pieces(draw, num_layers):
            for heads in pieces(draw, total):
                seed += 1
                block_size = draw(st.integers(1, 7))
                cache = cache_of(
                    layout,
                    dtype,
                    seed,
                    ScaleGranularity[granularity or "NONE"],
                    num_blocks=-(-end // block_size) + 3,
                    block_size=block_size,
                    num_kv_heads=heads[1] - heads[0],
                    head_dim=head_dim,
                    num_layers=layers[1] - layers[0],
                )
                table = tables.packed(cache, [end], seed, shared=False, nulls=nulls)
                num_sections = draw(st.integers(1, 2))
                found.append(Rank(cache, table, tuple(range(*layers)), heads, num_sections))
        return found

    return RoundTrip(
        producers=ranks(start + count, 0),
        consumers=ranks(start + count, draw(st.sampled_from((0, 0, 0.3)))),
        total_kv_heads=total,
        start=start,
        stop=start + count,
        lo=lo,
        hi=hi,
    )


@settings(max_examples=150)
@given(case=round_trips())
def test_what_is_captured_here_is_restored_there(
    case: RoundTrip, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("files")
    tokens = range(100, 100 + case.stop - case.start)
    files = []
    for i, rank in enumerate(case.producers):
        before = rank.cache.clone()
        sections = rank.sections(case.total_kv_heads)
        snapshot = Snapshot.capture(tokens, sections, start=case.start, prefix="x")
        assert snapshot is not None
        assert_same_bytes(rank.cache, before)
        rank.cache.storages[0].zero_()  # what was captured is a copy
        snapshot.save(folder / str(i))
        rank.cache.storages[0].copy_(before.storages[0])
        files.append(Snapshot.open(folder / str(i)))
        assert files[-1].header == snapshot.header
        assert files[-1].tokens.tolist() == list(tokens)
    for rank in case.consumers:
        expected = rank.cache.clone()
        finds_scales = rank.cache.layers[0].k.granularity is PER_TOKEN_HEAD
        for source in case.producers if not finds_scales else ():
            migrate_like(case, source, replace(rank, cache=expected))
        for section in rank.sections(case.total_kv_heads):
            for file in files:
                read = file.read(set(section.layers) & set(file.header.layers))
                read.restore(section, case.lo, case.hi)
        if finds_scales:
            check_found_scales(case, rank, expected)
        assert_same_bytes(rank.cache, expected)


def migrate_like(case: RoundTrip, source: Rank, target: Rank) -> None:
    """What restoring should do, by the reference."""
    first = max(source.heads[0], target.heads[0])
    num_heads = min(source.heads[1], target.heads[1]) - first
    layers = sorted(set(source.layers) & set(target.layers))
    if num_heads > 0:
        reference.migrate(
            [source.cache.layers[source.layers.index(i)] for i in layers],
            source.table,
            [target.cache.layers[target.layers.index(i)] for i in layers],
            target.table,
            [case.hi - case.lo],
            src_starts=[case.lo],
            dst_starts=[case.lo],
            src_head=first - source.heads[0],
            dst_head=first - target.heads[0],
            num_heads=num_heads,
        )


def check_found_scales(case: RoundTrip, rank: Rank, expected: Cache) -> None:
    """Values in a cache with scales of its own per token and head: within a step of FP8.

    Copies them to `expected`.
    """
    steps = {torch.float8_e4m3fn: 2.0**-3, torch.float8_e5m2: 2.0**-2}
    for source in case.producers:
        first, last = (f(source.heads[i], rank.heads[i]) for i, f in enumerate((max, min)))
        for layer in set(source.layers) & set(rank.layers):
            ours = rank.cache.layers[rank.layers.index(layer)].halves()
            theirs = source.cache.layers[source.layers.index(layer)].halves()
            for kv, (half, origin) in enumerate(zip(ours, theirs, strict=True)):
                for token in range(case.lo, case.hi):
                    place = rank.table.place(0, token, kv)
                    there = source.table.place(0, token, kv)
                    if place is None or first >= last:
                        continue
                    assert there is not None
                    layer_there = expected.layers[rank.layers.index(layer)]
                    layer_there.halves()[kv].put(place, half.read(place))
                    cut = slice(first - rank.heads[0], last - rank.heads[0])
                    cut_there = slice(first - source.heads[0], last - source.heads[0])
                    got = values(half, place)[cut]
                    wanted = values(origin, there)[cut_there]
                    if origin.granularity is PER_TOKEN_HEAD and (
                        origin.tensor.dtype == half.tensor.dtype
                    ):
                        assert torch.equal(got, wanted)
                    else:
                        top = wanted.abs().amax(-1, keepdim=True)
                        step = steps[half.tensor.dtype]
                        bound = wanted.abs() * step + top * 2e-5 + 1e-36
                        assert ((got - wanted).abs() <= bound).all()


def values(half: reference.Half, place: reference.Place) -> torch.Tensor:
    scale = half.scale_at(place)
    stored = reference.decode(half.read(place)).double()
    return stored if scale is None else stored * scale.double()


# --- Tables, windows, encodings -------------------------------------------------------------------


def small(seed: int = 1, dtype: torch.dtype = torch.bfloat16, **sizes: Any) -> Cache:
    return LAYOUTS["hnd"](Geometry(**sizes), dtype, seed).fill(seed)


def capture(cache: Cache, blocks: Sequence[int] | BlockTable, count: int, **options: Any) -> Any:
    section = section_of(cache, range(len(cache.layers)), blocks, **options)
    return Snapshot.capture(range(count), [section])


def reopened(snapshot: Snapshot | None, path: Path) -> Snapshot:
    """The snapshot, written and read."""
    assert snapshot is not None
    snapshot.save(path)
    file = Snapshot.open(path)
    return file.read(file.header.layers)


def test_latent_attention_has_no_v(tmp_path: Path) -> None:
    sizes = Geometry(num_kv_heads=1, head_dim=24)
    src, dst = (LAYOUTS["mla"](sizes, torch.bfloat16, seed).fill(seed) for seed in (1, 2))
    expected = dst.clone()
    ends = [Packed(torch.tensor([ids]), 4) for ids in ([3, 1], [0, 4])]
    reference.migrate(src.layers, ends[0], expected.layers, ends[1], [7])
    snapshot = reopened(capture(src, [3, 1], 7), tmp_path / "file")
    num_bytes = snapshot.restore(section_of(dst, (0, 1), [0, 4]), 0, 7)
    assert num_bytes == 2 * 7 * 24 * 2
    assert_same_bytes(dst, expected)


def test_a_dense_cache_is_block_0(tmp_path: Path) -> None:
    src, dst = small(num_blocks=1, block_size=9), small(2)
    expected = dst.clone()
    reference.migrate(src.layers, Dense(), expected.layers, Packed(torch.tensor([[3, 1]]), 4), [7])
    section = section_of(src, (0, 1))
    snapshot = reopened(Snapshot.capture(range(7), [section]), tmp_path / "file")
    snapshot.restore(section_of(dst, (0, 1), [3, 1]), 0, 7)
    assert_same_bytes(dst, expected)


def test_every_format_of_table(tmp_path: Path) -> None:
    cache = LAYOUTS["tensorrt_llm"](Geometry(), torch.bfloat16, 1).fill(1)
    packed = Packed(torch.tensor([[3, 1]]), 4)
    offsets = tables.kv_offsets(cache, [7], 3)
    ragged = BlockTable.ragged([3] * 4 + [1] * 3, [0, 7])
    plain = small(5)
    layers = tuple(
        CacheDesc.from_kv(
            *(describe(half.tensor, half.layout) for half in layer.halves()),
            pool=PoolDesc.of(layer.k.tensor, cache.bytes_per_block, layer.k.secondary),
        )
        for layer in cache.layers
    )
    facts = replace(FACTS, first_kv_head=0, total_kv_heads=2)
    view = CacheView(layers, facts, secondary_num_blocks=7)
    cases: list[tuple[Section, Cache, End]] = [
        (section_of(plain, (0, 1), ragged), plain, packed),
        (
            Section((0, 1), view, BlockTable.kv_offsets(offsets.indices)),
            cache,
            offsets,
        ),
    ]
    for section, source, end in cases:
        dst = small(2)
        expected = dst.clone()
        reference.migrate(source.layers, end, expected.layers, packed, [7])
        snapshot = reopened(Snapshot.capture(range(7), [section]), tmp_path / "file")
        snapshot.restore(section_of(dst, (0, 1), [3, 1]), 0, 7)
        assert_same_bytes(dst, expected)
    nulls = offsets.indices.clone()
    nulls[0, 0, 1, 1] = -1  # a block of V
    assert Snapshot.capture(range(7), [Section((0, 1), view, BlockTable.kv_offsets(nulls))]) is None
    for token in (0, 4):  # Spec E.8: the null block id is compared with the block of an index
        place = offsets.place(0, token, 0)
        assert place is not None
        null = Section(
            (0, 1), replace(view, null_block_id=place.block), BlockTable.kv_offsets(offsets.indices)
        )
        assert Snapshot.capture(range(7), [null]) is None
    assert capture(plain, BlockTable.ragged([3] * 4 + [-1] * 3, [0, 7]), 7) is None


@pytest.mark.parametrize("null", [-1, 0])
def test_null_blocks_are_not_captured(null: int) -> None:
    cache = small()
    assert capture(cache, [null, 1, 2], 12, null_block_id=0) is None
    section = section_of(cache, (0, 1), [null, 1, 2], null_block_id=0)
    assert Snapshot.capture(range(5), [section], start=4) is not None
    assert Snapshot.capture(range(5), [section], start=3) is None
    other = section_of(small(2), (2, 3), [3, 1, 2])
    assert Snapshot.capture(range(12), [other, section]) is None


def test_null_blocks_are_skipped_where_it_is_restored(tmp_path: Path) -> None:
    dst = small(2)
    snapshot = reopened(capture(small(), [3, 1, 2], 12), tmp_path / "file")
    expected = dst.clone()
    end = Packed(torch.tensor([[0, 4, -1]]), 4, null_block_id=0)
    source = Packed(torch.tensor([[3, 1, 2]]), 4)
    reference.migrate(small().layers, source, expected.layers, end, [12])
    snapshot.restore(section_of(dst, (0, 1), [0, 4, -1], null_block_id=0), 0, 12)
    assert_same_bytes(dst, expected)


def test_more_heads_than_the_model_has_are_not_captured() -> None:
    """A cache of fewer would take a part of them without a word."""
    section = section_of(small(), (0, 1), [3, 1], heads=(1, 2))
    with pytest.raises(InvalidArgumentError, match="total_kv_heads is 2, expected at least 3"):
        Snapshot.capture(range(7), [section])


def test_a_table_that_is_too_short_is_refused() -> None:
    with pytest.raises(OutOfRangeError, match="holds 8 tokens, expected at least 9"):
        capture(small(), [3, 1], 9)
    with pytest.raises(OutOfRangeError, match="holds 4 tokens, expected at least 5"):
        Snapshot.capture(range(5), [section_of(small(), (0, 1))])


@pytest.mark.parametrize("row", [[], (), np.empty(0, np.int64)], ids=["list", "tuple", "array"])
@pytest.mark.parametrize("new", [BlockTable.packed, BlockTable.ring])
def test_tokens_without_a_block_are_not_passed_over(
    tmp_path: Path, row: Any, new: Callable[..., BlockTable]
) -> None:
    """Not of a block's tokens either, which would fit into the one column of the table."""
    dst, snapshot = small(2), capture(small(), [3, 1, 2], 12)
    section, before = section_of(dst, (0, 1), new([row])), dst.clone()
    for one, stop in product((snapshot, reopened(snapshot, tmp_path / "file")), (1, 4, 5)):
        with pytest.raises(OutOfRangeError):
            one.restore(section, 0, stop)
        with pytest.raises(OutOfRangeError):
            Snapshot.capture(range(stop), [section])
        assert one.restore(section, 0, 0) == 0
    assert_same_bytes(dst, before)


@pytest.mark.parametrize("span", [(2, 1), (7, 6), (8, 8), (-1, -1), (0, 8), (1.0, 2), ("0", 2)])
def test_tokens_that_a_snapshot_does_not_have(span: Any) -> None:
    snapshot = capture(small(), [3, 1], 7)
    with pytest.raises(InvalidArgumentError, match=r"^st(art|op) is .*, expected .*[0-7] to 7$"):
        snapshot.restore(section_of(small(), (0, 1), [3, 1]), *span)
    assert snapshot.restore(section_of(small(), (0, 1), [3, 1]), 7, 7) == 0


def test_opaque_rows_go_to_the_same_encoding_only(tmp_path: Path) -> None:
    src, dst = (small(seed, torch.uint8, head_dim=20) for seed in (1, 2))
    snapshot = reopened(capture(src, [3, 1], 7, encoding="rows of 20"), tmp_path / "file")
    with pytest.raises(StoreError, match="stored as 'rows of 20', expected 'other rows'"):
        snapshot.restore(section_of(dst, (0, 1), [3, 1], encoding="other rows"), 0, 7)
    numbers = small(3, head_dim=20)
    with pytest.raises(StoreError, match="stored as 'rows of 20', expected 'values'"):
        snapshot.restore(section_of(numbers, (0, 1), [3, 1]), 0, 7)
    assert_same_bytes(numbers, small(3, head_dim=20))
    snapshot.restore(section_of(dst, (0, 1), [3, 1], encoding="rows of 20"), 0, 7)
    assert torch.equal(dst.layers[1].v.tensor[3], src.layers[1].v.tensor[3])  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"window": 512}, "window is 0 at the source .here 1.0. and 512 at the destination"),
        ({"rotary": "interleaved"}, "rotary is 'half'"),
        ({"fingerprint": None}, "fingerprint is 'abc' at the source .* and unknown"),
        ({"hadamard": True}, "hadamard is False"),
        ({"heads": (0, 8)}, "total_kv_heads is 2 .* and 8"),
    ],
)
def test_facts_that_differ_are_named_and_nothing_is_written(
    facts: dict[str, Any], message: str, tmp_path: Path
) -> None:
    snapshot = reopened(capture(small(), [3, 1], 7), tmp_path / "file")
    dst = small(2)
    with pytest.raises(StoreError, match=f"file: .*{message}"):
        snapshot.restore(section_of(dst, (0, 1), [3, 1], **facts), 0, 7)
    assert_same_bytes(dst, small(2))


def test_facts_are_those_of_the_layers_that_both_have(tmp_path: Path) -> None:
    """Layers 0 and 2 have a window, layer 1 has none; each consumer's section is like them."""
    cache = small(num_layers=3)
    sections = [
        section_of(cache, (0, 2), [3, 1], at=(0, 2), window=6, num_layers=2, first_layer=0),
        section_of(cache, (1,), [2, 4], at=(1,), num_layers=1, first_layer=1),
    ]
    snapshot = reopened(Snapshot.capture(range(7), sections), tmp_path / "file")
    dst = small(2, num_layers=3)
    for section in (
        section_of(dst, (2,), [0, 1], at=(0,), window=6),
        section_of(dst, (1,), [0, 1], at=(1,)),
    ):
        assert snapshot.restore(section, 0, 7) == 7 * 2 * 2 * 16 * 2
    expected = small(2, num_layers=3)
    for layer, to, blocks in ((2, 0, [3, 1]), (1, 1, [2, 4])):
        ends = Packed(torch.tensor([blocks]), 4), Packed(torch.tensor([[0, 1]]), 4)
        reference.migrate([cache.layers[layer]], ends[0], [expected.layers[to]], ends[1], [7])
    assert_same_bytes(dst, expected)
    with pytest.raises(StoreError, match=r"window is 0 .* and 6"):
        snapshot.restore(section_of(dst, (1, 2), [0, 1], at=(1, 2), window=6), 0, 7)


def test_rows_of_another_size_are_named(tmp_path: Path) -> None:
    snapshot = reopened(capture(small(), [3, 1], 7), tmp_path / "file")
    for sizes, message in (
        ({"head_dim": 8}, "layers.0.k has head_dim 16, expected 8 as the cache has"),
        ({"v_head_dim": 8}, "layers.1.v has head_dim 16, expected 8 as the cache has"),
    ):
        with pytest.raises(StoreError, match=message):
            snapshot.restore(section_of(small(**sizes), (0, 1), [3, 1]), 0, 7)
    latent = LAYOUTS["mla"](Geometry(), torch.bfloat16, 1)
    with pytest.raises(StoreError, match=r"layers.0.v has head_dim 16, expected 0"):
        snapshot.restore(section_of(latent, (0, 1), [3, 1]), 0, 7)


def test_scales_by_block_are_refused() -> None:
    cache = scaled(small(dtype=torch.float8_e4m3fn), ScaleGranularity.PER_BLOCK, 1)
    with pytest.raises(UnsupportedError, match="scales PER_BLOCK, expected PER_TENSOR"):
        capture(cache, [3, 1], 7)


def test_scales_that_are_none(tmp_path: Path) -> None:
    """vLLM's layers have a scale of 1 whatever the dtype of their cache."""
    one = ScaleDesc.of(1.0)
    src, dst = small(), small(2)
    views = [section_of(cache, (0, 1), [3, 1]) for cache in (src, dst)]
    scaled_views = [
        replace(s, view=replace(s.view, k_scales=(one, one), v_scales=(one, one))) for s in views
    ]
    snapshot = reopened(Snapshot.capture(range(7), scaled_views[:1]), tmp_path / "file")
    assert "layers.0.k_scale" not in snapshot.tensors
    snapshot.restore(scaled_views[1], 0, 7)
    expected = small(2)
    end = Packed(torch.tensor([[3, 1]]), 4)
    reference.migrate(src.layers, end, expected.layers, end, [7])
    assert_same_bytes(dst, expected)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_that_cannot_be(scale: float) -> None:
    section = section_of(small(dtype=torch.float8_e5m2), (0, 1), [3, 1])
    view = replace(section.view, k_scales=(None, ScaleDesc.of(scale)))
    with pytest.raises(InvalidArgumentError, match=r"scale of the cache is .*, expected it finite"):
        Snapshot.capture(range(7), [replace(section, view=view)])


def test_some_layers_of_a_section(tmp_path: Path) -> None:
    cache, dst = small(num_layers=3), small(2, num_layers=3)
    section = section_of(cache, (4, 5, 6), [3, 1])
    assert section.of((6, 4)).view.layers == (section.view.layers[2], section.view.layers[0])
    assert section.of((6, 5, 4)).view.layers == section.view.layers[::-1]
    snapshot = Snapshot.reserve(range(7), [section])
    assert snapshot is not None
    for layers in ((6, 4), (5,)):
        snapshot.fill(section.of(layers))
    snapshot.settle([section])
    snapshot.save(tmp_path / "file")
    Snapshot.open(tmp_path / "file").read((5, 6)).restore(section_of(dst, (4, 5, 6), [3, 1]), 0, 7)
    expected = small(2, num_layers=3)
    end = Packed(torch.tensor([[3, 1]]), 4)
    reference.migrate(cache.layers[1:], end, expected.layers[1:], end, [7])
    assert_same_bytes(dst, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": (0,)}, r"layers is \(0,\), expected one index for each of the 2 layers"),
        ({"layers": (0, 0)}, r"layers is \(0, 0\), expected one index"),
        ({"layers": (0, -1)}, "expected indices of layers"),
        ({"block_table": BlockTable.packed([[1], [2]])}, "has 2 rows, expected the one"),
        ({"encoding": "rows"}, "encoding is 'rows' and k of layer 0 is BF16, expected U8"),
    ],
)
def test_a_section_that_cannot_be(change: dict[str, Any], message: str) -> None:
    section = section_of(small(), (0, 1), [3, 1])
    with pytest.raises(InvalidArgumentError, match=message):
        replace(section, **change)


def test_a_section_needs_to_know_its_heads() -> None:
    section = section_of(small(), (0, 1), [3, 1])
    view = replace(section.view, facts=replace(section.view.facts, first_kv_head=None))
    with pytest.raises(InvalidArgumentError, match="first_kv_head is None, expected the index"):
        replace(section, view=view)
    others = small(num_kv_heads=1)
    view = replace(
        section.view, layers=(section.view.layers[0], section_of(others, (0, 1)).view.layers[0])
    )
    with pytest.raises(
        InvalidArgumentError, match=r"layers with \[2, 1\] heads, expected the same"
    ):
        replace(section, view=view)


def test_captures_that_cannot_be() -> None:
    section = section_of(small(), (0, 1), [3, 1])
    with pytest.raises(InvalidArgumentError, match="tokens is empty"):
        Snapshot.capture([], [section])
    with pytest.raises(InvalidArgumentError, match="sections is empty"):
        Snapshot.capture([1], [])
    with pytest.raises(InvalidArgumentError, match=r"layers \[0, 1, 0, 1\], expected each once"):
        Snapshot.capture([1], [section, section])
    with pytest.raises(InvalidArgumentError, match=r"tokens\[0\] is .*, expected an integer of"):
        Snapshot.capture(["a"], [section])  # type: ignore[list-item]
    with pytest.raises(
        InvalidArgumentError, match="array of float64 with 1 axes, expected integers"
    ):
        Snapshot.capture(np.zeros(3), [section])
    divides = section_of(small(), (0, 1), [3, 1], scale_convention="divide")
    with pytest.raises(InvalidArgumentError, match="scale_convention is 'divide'"):
        Snapshot.capture([1], [divides])


def test_more_than_a_thread_reads_and_writes_large_snapshots(tmp_path: Path) -> None:
    sizes = {"num_blocks": 3, "block_size": 512, "num_kv_heads": 8, "head_dim": 128}
    cache = small(**sizes)
    dst = small(2, **sizes)
    snapshot = reopened(capture(cache, [2, 0], 1024), tmp_path / "file")
    assert snapshot.num_bytes == 8 << 20
    assert snapshot.memory is not None
    assert snapshot.memory.__array_interface__["data"][0] % 4096 == 0
    snapshot.restore(section_of(dst, (0, 1), [0, 1]), 0, 1024)
    for ours, theirs in zip(dst.layers, cache.layers, strict=True):
        for half, origin in zip(ours.halves(), theirs.halves(), strict=True):
            assert torch.equal(half.tensor[:2], origin.tensor[[2, 0]])


# --- Broken files ---------------------------------------------------------------------------------


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """A file with FP8 and its scales, and BF16."""
    quantised = scaled(small(dtype=torch.float8_e4m3fn), ScaleGranularity.PER_HEAD, 1)
    sections = [
        section_of(quantised, (0, 2), [3, 1, 0]),
        section_of(small(2), (1, 3), [1, 2, 4]),
    ]
    snapshot = Snapshot.capture(range(7), sections, start=3, prefix="before")
    assert snapshot is not None
    snapshot.save(tmp_path / "good")
    return tmp_path / "good"


def content(path: Path) -> dict[str, Any]:
    """All of a file. Raises StoreError."""
    file = Snapshot.open(path)
    read = file.read(file.header.layers)
    arrays = {name: read.array(name).tobytes() for name in read.tensors}
    return {"header": file.header, "tokens": file.tokens.tolist(), **arrays}


def broken(path: Path, data: bytes) -> Path:
    other = path.with_name("broken")
    other.write_bytes(data)
    return other


def test_a_change_of_any_byte_is_noticed(good: Path) -> None:
    data = good.read_bytes()
    assert content(good)["tokens"] == list(range(7))
    dice = random.Random(1)
    first = 8 + int.from_bytes(data[:8], "little")
    places = [*range(8), *range(8, first, 4), *dice.sample(range(first, len(data)), 100)]
    for place in places:
        changed = bytearray(data)
        changed[place] ^= 1 << dice.randrange(8)
        with pytest.raises((CorruptError, UnsignedError)):  # a flag says that it is signed
            content(broken(good, bytes(changed)))


def test_a_file_of_any_other_length_is_noticed(good: Path) -> None:
    data = good.read_bytes()
    for length in [*range(40), *range(40, len(data), 97), len(data) - 1]:
        with pytest.raises(CorruptError, match="broken"):
            content(broken(good, data[:length]))
    for more in (b"\0", data):
        with pytest.raises(CorruptError, match="broken"):
            content(broken(good, data + more))


def raw(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    size = len(header) if length is None else length
    return size.to_bytes(8, "little") + header + data


def entry(dtype: str, shape: list[int], begin: int, end: int) -> bytes:
    tensor = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    return json.dumps({"__metadata__": {"header": "{}"}, "tokens": tensor}).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 8,
        b"not a file of tensors at all",
        raw(b"{}"),
        raw(b"{}", length=2**63),
        raw(b"{}", length=2**64 - 8),
        raw(b"{}", length=1 << 40),
        raw(b"[]"),
        raw(b"\xff\xfe"),
        raw(b"[" * 5000),
        raw(entry("I64", [2], 0, 16), b"\0" * 16),
        raw(entry("I64", [2], 8, 24), b"\0" * 16),
        raw(entry("I64", [2], 16, 0), b"\0" * 16),
        raw(entry("I64", [2], 0, 2**62), b"\0" * 16),
        raw(entry("I64", [2**61], 0, 16), b"\0" * 16),
        raw(entry("I64", [2**32, 2**32], 0, 0)),
        raw(entry("I64", [-2], 0, 16), b"\0" * 16),
        raw(entry("WHAT", [2], 0, 16), b"\0" * 16),
        raw(entry("BOOL", [16], 0, 16), b"\0" * 16),
    ],
    ids=repr,
)
def test_foreign_files(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(data)
    with pytest.raises(CorruptError, match=str(path)):
        Snapshot.open(path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path in (tmp_path / "none", tmp_path, tmp_path / "loop", tmp_path / "none" / "none"):
        with pytest.raises(StoreError, match=str(path)) as caught:
            Snapshot.open(path)
        assert not isinstance(caught.value, CorruptError)


def test_a_file_that_shrinks_after_it_was_opened(good: Path) -> None:
    file = Snapshot.open(good)
    os.truncate(good, good.stat().st_size - 1000)
    with pytest.raises(CorruptError, match="became shorter while it was read"):
        file.read(file.header.layers)


Change = Callable[[dict[str, Any]], object]


def without(name: str) -> Change:
    return lambda kind: kind["tensors"].remove(row_of(kind, name))


def with_tensor(name: str, dtype: str, *shape: int) -> Change:
    def change(kind: dict[str, Any]) -> None:
        kind["tensors"] = [row for row in kind["tensors"] if row[0] != name]
        kind["tensors"].append([name, dtype, list(shape), "", ""])
        # Those with larger elements are first.
        kind["tensors"].sort(key=lambda row: -store_reader.DTYPES.get(row[1], (1,))[0])

    return change


def with_group(i: int, **changes: Any) -> Change:
    """Group 1 has layers 1 and 3."""
    return lambda kind: kind["groups"][i].update(changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("layers.2.k"), "layers.2.k is U8"),
        (with_tensor("layers.1.k", "BF16", 7, 2), "layers.1.k is BF16"),
        (with_tensor("layers.1.k", "BF16", 7, 2, 0), r"layers.1.k has shape \[7, 2, 0\]"),
        (with_tensor("layers.1.k", "BF16", 7, 1, 16), "layers.1.k is BF16"),
        (with_tensor("layers.1.k", "BF16", 6, 2, 16), r"layers.1.k is .* expected \(7, 2\)"),
        (with_tensor("layers.1.k", "BF16"), r"layers.1.k has shape \[\]"),
        (with_tensor("layers.1.v", "F16", 8, 2, 16), "layers.1.v is F16"),
        (with_tensor("layers.1.v", "S64", 7, 2, 2), "layers.1.v is S64"),
        (with_tensor("layers.1.v", "U8", 7, 2, 2), "layers.1.v is U8"),
        (with_tensor("layers.1.k_scale", "F32", 1), "k_scale is F32 .* for layers.1.k of BF16"),
        (with_tensor("layers.0.k_scale", "F32", 3), "k_scale is F32"),
        (with_tensor("layers.0.k_scale", "F16", 1), "k_scale is F16"),
        (with_tensor("tokens", "U8", 56), "tokens belongs to none of its layers"),
        (with_group(1, heads=[2, 2]), r"heads are \[\(0, 2\), \(2, 2\)\]"),
        (with_group(1, heads=[-1, 1]), "heads are"),
        (with_group(1, heads=[0, 1 << 24 | 1]), "heads are"),
        (with_group(1, heads=[0, 1]), r"layers.1.k is BF16 \(7, 2, 16\), expected \(7, 1\)"),
        (with_group(1, layers=[0, 1, 1]), r"layers are \[0, 2, 0, 1, 1\]"),
        (with_group(1, layers=[-1]), r"layers are \[0, 2, -1\]"),
        (with_group(0, encoding="rows"), "of a dtype of 'rows'"),
        (lambda kind: kind.update(groups=[]), r"layers are \[\]"),
        (lambda kind: kind["tensors"].reverse(), "do not begin with those of larger elements"),
        (lambda kind: kind["tensors"].append(kind["tensors"][0]), "has a tensor twice"),
        (lambda kind: kind.pop("prefix"), "it has a prefix, or none"),
        (lambda kind: kind.update(kvx_kind=4), "not written as KVX writes it"),
        (lambda kind: kind.update(keyed=True), "does not begin as files of kind"),
        (lambda kind: kind.update(encrypted=True), "does not begin as files of kind"),
    ],
)
def test_files_that_were_written_to_deceive(change: Change, message: str, good: Path) -> None:
    """Their checks are right."""
    kind = kind_in(good)
    change(kind)
    with pytest.raises(CorruptError, match=message):
        content(rewritten(good, kind))


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_that_were_written_to_deceive(scale: float, good: Path) -> None:
    file = SnapshotFile.of(good.read_bytes())
    begin, end = file.piece("layers.0.k_scale")
    assert (begin, end) == (0, 8 * 4)  # two heads of K and V of two layers
    data = struct.pack("<f", scale) + file.data[4:]
    with pytest.raises(CorruptError, match=r"layers\.0\.k_scale has a number that is no scale"):
        content(rewritten(good, data=data))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"start": (1 << 62) + 1}, "begins at token 4611686018427387905"),
        ({"start": (1 << 64) - 1}, "begins at token"),
        ({"parent": bytes(31) + b"x"}, "has a parent, expected none"),
        ({"ids": bytes(8 * 6)}, r"layers.0.k is .* expected \(6, 2\)"),
        ({"ids": b""}, "does not begin as one of format 3"),
        ({"data": b""}, "bytes, expected"),
    ],
)
def test_records_that_were_written_to_deceive(
    fields: dict[str, Any], message: str, good: Path
) -> None:
    file = SnapshotFile.of(good.read_bytes())
    for name, value in fields.items():
        setattr(file, name, value)
    with pytest.raises(CorruptError, match=message):
        content(broken(good, file.bytes()))


def test_an_entry_of_a_store_is_no_snapshot(good: Path) -> None:
    """Nor is one that has got the kind of another file."""
    file = SnapshotFile.of(good.read_bytes())
    with pytest.raises(CorruptError, match="is an entry of a store, expected a snapshot"):
        content(broken(good, file.bytes(literal="")))
    other = store_reader.kind_text(file.kind | {"prefix": "another"})
    with pytest.raises(CorruptError, match="its kind has changed since it was written"):
        content(broken(good, file.bytes(literal=other)))


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    snapshot = capture(small(), [3, 1], 7)
    with pytest.raises(StoreError, match="none/file cannot be written"):
        snapshot.save(tmp_path / "none" / "file")


def test_nothing_is_written_that_no_reader_takes(good: Path, tmp_path: Path) -> None:
    file = Snapshot.open(good)
    read, before = file.read([1, 3]), good.read_bytes()
    header = read.header
    for wrong, message in (
        (read, "layers.0.k is U8"),  # some layers alone
        (replace(read, header=replace(header, start=-1)), "7 tokens from -1 on"),
        (replace(read, header=replace(header, start=1 << 63)), "7 tokens from"),
        (replace(file.read(range(4)), header=replace(header, prefix="\ud800")), "kind of files"),
    ):
        with pytest.raises(StoreError, match=f"good cannot be written: .*{message}"):
            wrong.save(good)
    assert good.read_bytes() == before


@pytest.mark.parametrize("num_tokens", [70_000, 100_001])
def test_more_tokens_than_an_entry_has(num_tokens: int, tmp_path: Path) -> None:
    path, count = tmp_path / "file", num_tokens
    cache = small(num_blocks=1, block_size=count + 5, num_kv_heads=1, head_dim=2)
    snapshot = Snapshot.capture(range(7, 7 + count), [section_of(cache, (0, 1))], start=5)
    assert snapshot is not None
    snapshot.save(path)
    with Snapshot.open(path, num_tokens=count) as file:
        assert file.header == snapshot.header
        assert file.tokens.tolist() == list(range(7, 7 + count))
        assert file.read((0, 1)).digest() == snapshot.digest()
    found = store_reader.read(path.read_bytes(), None)
    assert (found.start, found.tokens[-1]) == (5, 6 + count)
    assert found.tensors["layers.1.v"].data == snapshot.array("layers.1.v").tobytes()
    with pytest.raises(CorruptError, match="expected one of at most 1048576"):
        Snapshot.open(path, max_header_bytes=1 << 20)


def test_other_tools_can_read_the_file(good: Path) -> None:
    """safetensors finds the very bytes, and all of it aligned to its elements."""
    from safetensors import safe_open

    with Snapshot.open(good) as snapshot:
        whole = snapshot.read(snapshot.header.layers)
        first = 8 + int.from_bytes(good.read_bytes()[:8], "little")
        assert first == 4096
        offsets = {name: first + stored.offset for name, stored in snapshot.tensors.items()}
    with safe_open(good, "pt") as file:
        assert set(file.keys()) == set(whole.tensors)
        for name, tensor in whole.tensors.items():
            found = file.get_tensor(name)
            assert tuple(found.shape) == tensor.shape
            assert DType.of(found.dtype) is tensor.dtype
            data = whole.array(name).tobytes()
            assert found.contiguous().view(torch.uint8).numpy().tobytes() == data, name
            assert good.read_bytes()[offsets[name] :][: len(data)] == data
            assert offsets[name] % tensor.dtype.itemsize == 0
        assert file.metadata().keys() == {"kvx", "kvx_kind"}
        kind = json.loads(file.metadata()["kvx_kind"])
        assert kind["groups"][0]["facts"]["rotary"] == "half"
        assert kind["groups"][0]["facts"]["fingerprint"] == "abc"
        assert kind["prefix"] == "before"
    found = store_reader.read(good.read_bytes(), None)
    assert found.start == 3
    assert {n: t.data for n, t in found.tensors.items()} == {
        name: whole.array(name).tobytes() for name in whole.tensors
    }
