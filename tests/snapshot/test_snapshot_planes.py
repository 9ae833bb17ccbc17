"""Snapshots of planes, of packed formats and of POINTERS tables: exact bytes, and what is refused.

Expected bytes are those of one vector at a time, by the names of axes alone (tests/planes.py).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvx_adapters.vllm import amx_planes
from kvx_core import (
    BlockTable,
    CacheDesc,
    CacheView,
    InvalidArgumentError,
    OutOfRangeError,
    Plane,
    PoolDesc,
    ScaleDesc,
    Section,
    Snapshot,
    StoreError,
    UnsupportedError,
    describe,
)
from kvx_core.snapshot import CorruptError
from tests.snapshot import store_reader
from tests.snapshot.sections import FACTS
from tests.snapshot.with_planes import (
    SENTINEL,
    Engine,
    assert_same,
    copy_by_hand,
    filled,
    raw,
    reopened,
    section,
)
from tests.snapshot_files import SnapshotFile, kind_in, row_of

SEEDS = [1, 2, 3]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("start", "count", "lo", "hi"),
    [(0, 53, 0, 53), (8, 45, 8, 53), (0, 53, 20, 53), (4, 3, 4, 7), (12, 40, 12, 52)],
)
def test_planes_of_all_kinds(
    seed: int, start: int, count: int, lo: int, hi: int, tmp_path: Path
) -> None:
    """From pages of 16 tokens into pages of 8, through a file; nothing else is written."""
    src, dst = Engine(16, 3, seed), Engine(8, 5, None, slot=4)
    expected = Engine(8, 5, None, slot=4)
    copy_by_hand(src, expected, lo, hi, state=True)
    before = [raw(t).clone() for t in src.tensors]
    captured = Snapshot.capture(
        range(count), [src.section(state_tokens=start + count)], start=start
    )
    assert all(torch.equal(raw(t), b) for t, b in zip(src.tensors, before, strict=True))
    read = reopened(captured, tmp_path / "file")
    num_bytes = read.restore(dst.section(), lo, hi)
    entries = (hi - lo) // 4
    assert num_bytes == (hi - lo) * (96 + 8 + 4) + entries * 24 + 2 * 21 * 4
    assert_same(dst, expected)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("count", [1, 3])
def test_fewer_tokens_than_an_entry_stands_for(seed: int, count: int, tmp_path: Path) -> None:
    """K is there and the only plane has no entry yet: K is restored, as where planes have some."""

    def only_entries(engine: Engine) -> Section:
        view = CacheView((engine.cache(),), FACTS, planes=engine.planes()[2:3])
        return section(view, engine.blocks)

    src, dst, expected = Engine(16, 3, seed), Engine(8, 5, None), Engine(8, 5, None)
    for t in range(count):
        expected.token(t)[0].copy_(src.token(t)[0])
    read = reopened(Snapshot.capture(range(count), [only_entries(src)]), tmp_path / "file")
    assert read.restore(only_entries(dst), 0, count) == count * 96
    assert_same(dst, expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_amx_pages_are_k_and_v(seed: int, tmp_path: Path) -> None:
    """Tiles of vLLM into a cache of another engine and back: K and V are K and V."""
    page = filled((4, 2, 32, 128), torch.bfloat16, seed)
    tiles = CacheView((), FACTS, planes=(*amx_planes(page, 0), *amx_planes(page.clone(), 1)))
    for plane in tiles.planes[2:]:
        raw(plane.owner).add_(1)
    blocks = [3, 0, 2]
    nhd = filled((2, 2, 20, 2, 7, 64), torch.bfloat16, None)  # [layer][K, V]
    layers = [CacheDesc.from_kv(*(describe(t, "BLOCK_HND") for t in kv)) for kv in nhd]
    plain = section(CacheView(tuple(layers), FACTS), list(range(13, -1, -1)), [0, 1])
    captured = Snapshot.capture(range(75), [section(tiles, blocks, [0, 1])])
    read = reopened(captured, tmp_path / "file")
    assert sorted(read.names_of([1])) == ["layers.1.k", "layers.1.v"]
    assert read.restore(plain, 0, 75) == 2 * 2 * 75 * 2 * 64 * 2
    back = CacheView(
        (), FACTS, planes=tuple(p for i in (0, 1) for p in amx_planes(torch.zeros_like(page), i))
    )
    again = Snapshot.capture(range(75), [plain])
    assert again is not None
    again.restore(section(back, blocks, [0, 1]), 0, 75)
    for layer in (0, 1):
        whole = tiles.planes[2 * layer].owner, back.planes[2 * layer].owner
        for t in range(75):
            for h in range(2):
                for d in (0, 1, 31, 63):
                    b, i = blocks[t // 32], t % 32
                    at = b, h, 0, i // 16, d // 2, i % 16, d % 2
                    k, k_back = (tensor[(at[0], at[1], *at[3:])] for tensor in whole)
                    found = nhd[layer, 0, 13 - t // 7, h, t % 7, d]
                    assert bits(k) == bits(found) == bits(k_back)
        v, v_back = tiles.planes[2 * layer + 1].owner, back.planes[2 * layer + 1].owner
        for t, h, d in [(0, 0, 0), (74, 1, 63), (33, 0, 17)]:
            at = blocks[t // 32], h, d // 16, t % 32 // 2, d % 16, t % 2
            found = nhd[layer, 1, 13 - t // 7, h, t % 7, d]
            assert bits(v[at]) == bits(found) == bits(v_back[at])
    untouched = nhd[:, :, 13 - 75 // 7, :, 75 % 7 :]
    assert (untouched.contiguous().view(torch.uint8) == SENTINEL).all()


def bits(number: Tensor) -> int:
    return int(number.view(torch.int16))


def test_some_layers_of_a_section_and_of_a_file(tmp_path: Path) -> None:
    """Layer by layer, as connectors capture; each takes its own planes."""
    engines = [Engine(16, 3, seed, layer=layer) for layer, seed in ((3, 1), (5, 2))]
    for engine in engines:
        engine.blocks = engines[0].blocks

    def both(of: list[Engine]) -> Section:
        one, two = (engine.section(state_tokens=30) for engine in of)
        view = replace(
            one.view,
            layers=(*one.view.layers, *two.view.layers),
            planes=(*two.view.planes, *one.view.planes),
        )
        return Section((3, 5), view, one.block_table, state_tokens=30)

    whole = both(engines)
    snapshot = Snapshot.reserve(range(30), [whole])
    assert snapshot is not None
    for layer in (5, 3):
        snapshot.fill(whole.of([layer]))
    into = [Engine(16, 3, None, layer=layer) for layer in (3, 5)]
    for engine in into:
        engine.blocks = into[0].blocks
    read = reopened(snapshot, tmp_path / "file", [5])
    read.restore(both(into), 0, 30)
    expected = [Engine(16, 3, None, layer=layer) for layer in (3, 5)]
    for engine in expected:
        engine.blocks = into[0].blocks
    copy_by_hand(engines[1], expected[1], 0, 30, state=True)
    for engine, wanted in zip(into, expected, strict=True):
        assert_same(engine, wanted)


def test_heads_of_ranks_and_planes_that_every_rank_has(tmp_path: Path) -> None:
    """Two ranks write a head each; one reader takes both, and the replicated plane from either."""
    axes = ("block", "token", "head", "dim")
    numbers = filled((4, 8, 2, 6), torch.float16, 1)
    shared = filled((4, 8, 5), torch.float32, 2)
    state = filled((3, 2, 4), torch.bfloat16, 3)

    def planes(cut: Tensor, whole: Tensor, of_state: Tensor) -> tuple[Plane, ...]:
        return (
            Plane.of(cut, axes, "compressed", 1),
            Plane.of(whole, ("block", "token", "dim"), 77, 1, replicated=True),
            Plane.of(of_state, ("block", "head", "dim"), 8, 1, tokens_per_entry=0, slots=[1]),
        )

    def at(view: CacheView, first: int, blocks: list[int]) -> Section:
        facts = replace(FACTS, first_kv_head=first, total_kv_heads=2)
        return section(replace(view, facts=facts), blocks, [1], state_tokens=13)

    files = []
    for rank in (0, 1):
        cut = numbers[:, :, rank : rank + 1], shared, state[:, rank : rank + 1]
        view = CacheView((), replace(FACTS, first_kv_head=rank), planes=planes(*cut))
        captured = Snapshot.capture(range(13), [at(view, rank, [2, 3])])
        files.append(reopened(captured, tmp_path / str(rank)))
    empty = [filled(t.shape, t.dtype, None) for t in (numbers, shared, state)]
    view = CacheView((), FACTS, planes=planes(*empty))
    for file in files:
        file.restore(at(view, 0, [1, 0]), 0, 13)
    expected = [filled(t.shape, t.dtype, None) for t in (numbers, shared, state)]
    for t in range(13):
        for to, of in zip(expected[:2], (numbers, shared), strict=True):
            to[[1, 0][t // 8], t % 8] = of[[2, 3][t // 8], t % 8]
    expected[2][1] = state[1]
    for found, wanted in zip(empty, expected, strict=True):
        assert torch.equal(raw(found), raw(wanted))


def test_scales_of_planes_go_with_them(tmp_path: Path) -> None:
    """FP8 with a scale per head, into FP8 with one for all: numbers are those of migrate."""
    axes = ("block", "token", "head", "dim")
    numbers = (torch.randn(3, 8, 2, 6) * 3).to(torch.float8_e4m3fn)
    of_heads = ScaleDesc.of(torch.tensor([0.5, 4.0]), "PER_HEAD")
    src = CacheView((), FACTS, planes=(Plane.of(numbers, axes, "latent", 3, scale=of_heads),))
    copy = torch.zeros(3, 8, 2, 6).to(torch.float8_e4m3fn)
    dst = CacheView((), FACTS, planes=(Plane.of(copy, axes, "latent", 3, scale=2.0),))
    read = reopened(Snapshot.capture(range(15), [section(src, [2, 0])]), tmp_path / "file")
    assert read.array("planes.3.latent.scale").tolist() == [0.5, 4.0]
    read.restore(section(dst, [1, 2]), 0, 15)
    values = numbers.float() * torch.tensor([0.5, 4.0])[:, None] / 2
    expected = values.clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(copy[1].view(torch.uint8), expected[2].view(torch.uint8))
    assert torch.equal(copy[2, :7].view(torch.uint8), expected[0, :7].view(torch.uint8))
    bare = replace(dst, planes=(replace(dst.planes[0], scale=None),))
    with pytest.raises(StoreError, match=r"planes\.3\.latent has a scale at one end alone"):
        read.restore(section(bare, [1, 2]), 0, 15)


# --- formats of several numbers in a unit ---------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("name", "size"), [("Q8_0", 34), ("Q4_0", 18), ("Q6_K", 210)])
def test_packed_formats_keep_their_bytes(name: str, size: int, seed: int, tmp_path: Path) -> None:
    """K in units, V in float16, NHD to HND; whatever the units hold."""
    k = filled((5, 4, 2, 3 * size), torch.uint8, seed)
    v = filled((5, 4, 2, 7), torch.float16, seed)
    src = CacheView(
        (CacheDesc.from_kv(describe(k, "BLOCK_NHD", dtype=name), describe(v, "BLOCK_NHD")),), FACTS
    )
    k_out = filled((3, 2, 9, 3 * size), torch.uint8, None)
    v_out = filled((3, 2, 9, 7), torch.float16, None)
    dst = CacheView(
        (
            CacheDesc.from_kv(
                describe(k_out, "BLOCK_HND", dtype=name), describe(v_out, "BLOCK_HND")
            ),
        ),
        FACTS,
    )
    captured = Snapshot.capture(range(11), [section(src, [4, 0, 2])], start=1)
    assert captured is not None
    assert captured.header.precision.name == f"f16+{name.lower()}"
    read = reopened(captured, tmp_path / "file")
    assert read.restore(section(dst, [2, 1]), 1, 12) == 11 * 2 * (3 * size + 14)
    expected = filled(k_out.shape, torch.uint8, None)
    for t in range(1, 12):
        expected[[2, 1][t // 9], :, t % 9] = k[[4, 0, 2][t // 4], t % 4]
        got = v_out[[2, 1][t // 9], :, t % 9].view(torch.int16)
        assert torch.equal(got, v[[4, 0, 2][t // 4], t % 4].view(torch.int16))
    assert torch.equal(k_out, expected)
    assert row_of(kind_in(tmp_path / "file"), "layers.3.k")[:2] == ["layers.3.k", name]


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5])
def test_planes_without_an_entry(num_tokens: int, tmp_path: Path) -> None:
    """A snapshot may be too short for an entry of a plane: then it says nothing of its shape."""
    engine, path = Engine(16, 3, 1), tmp_path / "file"
    held = engine.section(state_tokens=8 + num_tokens)
    captured = Snapshot.capture(range(num_tokens), [held], start=8)
    read = reopened(captured, path)
    assert [kind.tokens_per_entry for kind in read.header.parts[0].planes] == [1, 1, 0, 4]
    assert ("planes.3.role_40" in read.tensors) is (num_tokens >= 4)
    other = Engine(8, 5, None)
    read.restore(other.section(state_tokens=8 + num_tokens), 8, 8 + num_tokens)
    expected = Engine(8, 5, None)
    copy_by_hand(engine, expected, 8, 8 + num_tokens, state=True)
    assert_same(other, expected)
    found = store_reader.read(path.read_bytes(), None)
    assert found.tensors.keys() == read.tensors.keys()
    file = SnapshotFile.of(path.read_bytes())
    file.start = 9  # in the middle of an entry
    path.write_bytes(file.bytes())
    with pytest.raises(CorruptError, match="begins at token 9"):
        Snapshot.open(path)


def test_packed_planes(tmp_path: Path) -> None:
    axes = ("block", "token", "dim")
    raw_ = filled((4, 8, 68), torch.uint8, 1)
    copy = filled((4, 8, 68), torch.uint8, None)
    ends = [
        CacheView(
            (), FACTS, planes=(Plane.of(t, axes, "latent", 3, dtype="Q8_0", replicated=True),)
        )
        for t in (raw_, copy)
    ]
    read = reopened(Snapshot.capture(range(13), [section(ends[0], [3, 1])]), tmp_path / "file")
    read.restore(section(ends[1], [0, 2]), 0, 13)
    assert torch.equal(copy[0], raw_[3])
    assert torch.equal(copy[2, :5], raw_[1, :5])
    assert (copy[2, 5:] == SENTINEL).all()


# --- blocks that lie anywhere ---------------------------------------------------------------------


def stack(seed: int | None) -> tuple[Tensor, CacheView]:
    """Blocks of 3 layers, the second without V: (blocks, 5, 4, 2, 6)."""
    pool = filled((7, 5, 4, 2, 6), torch.bfloat16, seed)
    tensors = [describe(pool[:1, i], "BLOCK_NHD") for i in range(5)]
    caches = [tensors[:2], tensors[2:3], tensors[3:]]
    return pool, CacheView(tuple(CacheDesc.from_kv(*kv) for kv in caches), FACTS)


def pointers(pool: Tensor, row: list[int], nulls: Any = ()) -> BlockTable:
    """nulls: (column, plane)"""
    return BlockTable.pointers(
        [[[None if (c, p) in nulls else pool[b, p] for p in range(5)] for c, b in enumerate(row)]]
    )


@pytest.mark.parametrize("layers", [None, [2, 0], [1]])
@pytest.mark.parametrize("seed", SEEDS)
def test_pointers_at_either_end(seed: int, layers: list[int] | None, tmp_path: Path) -> None:
    (src_pool, src), (dst_pool, dst) = stack(seed), stack(None)
    rows = [4, 1, 3], [2, 5, 0]
    whole = section(src, pointers(src_pool, rows[0]), [0, 1, 2])
    snapshot = Snapshot.reserve(range(7), [whole], start=2)
    assert snapshot is not None
    for layer in (1, 0, 2):
        snapshot.fill(whole.of([layer]))
    read = reopened(snapshot, tmp_path / "file", layers)
    read.restore(section(dst, pointers(dst_pool, rows[1]), [0, 1, 2]), 2, 9)
    expected = filled(dst_pool.shape, torch.bfloat16, None)
    planes = {0: [0, 1], 1: [2], 2: [3, 4]}
    for t in range(2, 9):
        for layer in layers or (0, 1, 2):
            for p in planes[layer]:
                expected[rows[1][t // 4], p, t % 4] = src_pool[rows[0][t // 4], p, t % 4]
    assert torch.equal(raw(dst_pool), raw(expected))


def test_null_pointers_are_null_for_their_tensor_alone(tmp_path: Path) -> None:
    """A snapshot has all tokens of all tensors, or is none; restoring passes over null blocks."""
    (src_pool, src), (dst_pool, dst) = stack(1), stack(None)
    for null in ((0, 0), (0, 1), (1, 2), (1, 4)):
        table = pointers(src_pool, [4, 1, 3], {null})
        assert Snapshot.capture(range(8), [section(src, table, [0, 1, 2])]) is None
    table = pointers(src_pool, [4, 1, 3], {(2, 3)})  # past the tokens
    snapshot = Snapshot.capture(range(8), [section(src, table, [0, 1, 2])])
    assert snapshot is not None
    nulls = {(0, p) for p in range(5)} | {(1, p) for p in (0, 1, 2, 3)}
    into = section(dst, pointers(dst_pool, [2, 5], nulls), [0, 1, 2])
    assert into.has_null(0, 8)
    assert into.is_null(0, 4)
    assert not into.is_null(0, 8)
    snapshot.restore(into, 0, 8)
    expected = filled(dst_pool.shape, torch.bfloat16, None)
    expected[5, 4] = src_pool[1, 4]
    assert torch.equal(raw(dst_pool), raw(expected))


# --- what is refused ------------------------------------------------------------------------------


def refuses(error: type[Exception], sentence: str, call: Any) -> None:
    with pytest.raises(error) as caught:
        call()
    assert sentence in str(caught.value), str(caught.value)


def test_a_state_belongs_to_a_prefix_of_one_length(tmp_path: Path) -> None:
    src, dst = Engine(16, 3, 1), Engine(16, 3, None)
    for tokens in (None, 39, 41):
        section_ = src.section(state_tokens=tokens)
        sentence = (
            f"section.state_tokens is {tokens}, expected 40: STATE of layer 3 belongs to a prefix"
        )
        refuses(InvalidArgumentError, sentence, lambda s=section_: Snapshot.capture(range(40), [s]))
    read = reopened(Snapshot.capture(range(40), [src.section(state_tokens=40)]), tmp_path / "file")
    sentence = "stop is 39, expected 40: STATE of layer 3 is stored as it was after 40 tokens, and"
    refuses(StoreError, sentence, lambda: read.restore(dst.section(), 0, 39))
    sentence = "start is 6, expected a multiple of 4: an entry of role 40 of layer 3 stands for so"
    refuses(StoreError, sentence, lambda: read.restore(dst.section(), 6, 40))
    assert_same(dst, Engine(16, 3, None))
    assert read.restore(dst.section(), 40, 40) == 0


def test_entries_begin_where_snapshots_do() -> None:
    sentence = "start is 6, expected a multiple of 4: an entry of role 40 of layer 3 stands for so"
    sections = [Engine(16, 3, 1).section(state=False)]
    refuses(InvalidArgumentError, sentence, lambda: Snapshot.capture(range(9), sections, start=6))


def test_a_null_block_of_a_plane_leaves_nothing_to_capture() -> None:
    engine = Engine(16, 3, 1)
    good = engine.section(state_tokens=40)
    assert Snapshot.capture(range(40), [good]) is not None
    own = engine.own
    for row, is_there in (([-1, *own[1:]], False), ([*own[:3], own[3], -1], True), (own[:4], True)):
        engine.own = row
        captured = Snapshot.capture(range(40), [engine.section(state_tokens=40)])
        assert (captured is not None) is is_there
    engine.own, engine.slot = own, -1
    assert Snapshot.capture(range(40), [engine.section(state_tokens=40)]) is None


def test_tables_of_planes_are_checked_before_anything_is_written(tmp_path: Path) -> None:
    read = reopened(
        Snapshot.capture(range(40), [Engine(16, 3, 1).section(state_tokens=40)]), tmp_path / "file"
    )
    dst = Engine(16, 3, None)
    dst.own = [*dst.own[:3], 9]
    sentence = "src.planes[].block_table.indices[3] is 9, expected below num_blocks 9"
    refuses(OutOfRangeError, sentence, lambda: read.restore(dst.section(), 0, 40))
    dst.own = dst.own[:3]
    refuses(OutOfRangeError, "row 0 needs", lambda: read.restore(dst.section(), 0, 40))
    assert_same(dst, Engine(16, 3, None))


@pytest.mark.parametrize("what", ["layers[0].k", "planes[2]", "out of date"])
def test_memory_is_checked_before_anything_is_written(tmp_path: Path, what: str) -> None:
    read = reopened(
        Snapshot.capture(range(40), [Engine(16, 3, 1).section(state_tokens=40)]), tmp_path / "file"
    )
    dst = Engine(16, 3, None)
    view = dst.section().view
    error = f"{what} is read-only memory"
    if what == "layers[0].k":
        k = replace(view.layers[0].k, writable=False)
        view = replace(view, layers=(replace(view.layers[0], k=k),))
    elif what == "planes[2]":
        *first, compressed, state = view.planes
        view = replace(view, planes=(*first, replace(compressed, writable=False), state))
    else:
        view = replace(view, outdated=lambda: "its engine sleeps")
        error = "section.view is out of date: its engine sleeps"
    to = section(view, dst.blocks, [3])
    refuses(InvalidArgumentError, error, lambda: read.restore(to, 0, 40))
    assert_same(dst, Engine(16, 3, None))


def test_planes_that_differ(tmp_path: Path) -> None:
    engine = Engine(16, 3, 1)
    captured = Snapshot.capture(range(40), [engine.section(state=False)])
    read = reopened(captured, tmp_path / "file")
    good = engine.section(state=False)
    assert read.mismatch(good) == []

    def reasons(*planes: Plane) -> str:
        return "; ".join(read.mismatch(replace(good, view=replace(good.view, planes=planes))))

    k, scale, entries = good.view.planes
    assert reasons(scale, entries) == (
        "INDEX_K of layer 3 is stored, and the cache does not have it so: an entry for 1 tokens, "
        "whole on every rank. Expected the same planes at both ends"
    )
    assert reasons(k, entries, scale, replace(scale, role=6)).startswith(
        "COMPRESSED of layer 3 is in the cache, and is not stored so: an entry for 1 tokens, whole"
    )
    assert len(read.mismatch(replace(good, view=replace(good.view, planes=())))) == 3
    assert reasons(replace(k, dtype=replace(k).dtype.of("F8_E5M2")), scale, entries) == (
        "planes.3.index_k is F8_E4M3 (1, 8), expected F8_E5M2 (1, 8) as the cache has: planes are "
        "loaded as they were stored"
    )
    wide = Plane.of(torch.zeros(9, 16, 9, dtype=torch.uint8), ("block", "token", "dim"), 4, 3,
                    dtype="F8_E4M3", replicated=True)  # fmt: skip
    assert "expected F8_E4M3 (1, 9) as the cache has" in reasons(wide, scale, entries)
    plain = Snapshot.capture(range(40), [replace(good, view=replace(good.view, planes=()))])
    assert plain is not None
    assert len(plain.mismatch(good)) == 3


def test_sections_of_planes_that_are_refused() -> None:
    engine = Engine(16, 3, 1)
    good = engine.section(state_tokens=40)
    k, scale, entries, state = good.view.planes
    axes = ("block", "token", "head", "dim")
    tile = Plane.of(torch.zeros(2, 4, 2, 6), axes, "k", 3)
    other = replace(tile, layer=4)
    opaque = Plane.of(torch.zeros(9, 16, 8, dtype=torch.uint8), axes[:2] + axes[3:], 50, 3,
                      replicated=True)  # fmt: skip
    numbers = Plane.of(torch.zeros(2, 4, 2, 6).to(torch.float8_e4m3fn), axes, 40, 3)
    scales = ScaleDesc.of(torch.ones(2, 4, 2), "PER_TOKEN_HEAD")

    def of(*planes: Plane, layers: tuple[int, ...] = (3,), k: bool = True) -> Any:
        view = replace(good.view, planes=planes, layers=good.view.layers if k else ())
        return lambda: replace(good, view=view, layers=layers)

    cases: list[tuple[Any, type[Exception], str]] = [
        (of(replace(state, layer=4)), InvalidArgumentError, "planes[0].layer is 4, expected one"),
        (of(tile), InvalidArgumentError, "planes[0] is K of layer 3, expected it in a view"),
        (of(replace(tile, role=1), k=False), InvalidArgumentError, "and a K beside each V"),
        (of(tile, layers=(4,), k=False), InvalidArgumentError, "expected those of the p"),
        (of(tile, other, k=False), InvalidArgumentError, "expected those of the planes"),
        (of(opaque), InvalidArgumentError, "planes[0] (role 50) is U8 and section.encoding"),
        (of(replace(k, replicated=False)), InvalidArgumentError, "(INDEX_K) has 1 heads, expect"),
        (of(replace(entries, block_table=BlockTable.of([[1], [2]]))), InvalidArgumentError,
         "planes[0].block_table has 2 rows, expected the one of the sequence"),
        (of(replace(scale, slots=replace(state.slots))), UnsupportedError,
         "planes[0] (INDEX_K_SCALE) has slots, expected a block_table"),
        (of(replace(state, slots=replace(state.slots, token_count=0))), InvalidArgumentError,
         "planes[0].slots has 0 entries, expected the one of the sequence"),
        (of(replace(numbers, scale=scales)), UnsupportedError,
         "planes[0].scale is PER_TOKEN_HEAD, expected PER_TENSOR or PER_HEAD"),
    ]  # fmt: skip
    for call, error, sentence in cases:
        refuses(error, sentence, call)


def test_kv_offsets_and_planes_with_tables_of_their_own(tmp_path: Path) -> None:
    """TensorRT-LLM's table names K and V; the planes have tables."""
    pool = filled((6, 2, 2, 8, 16), torch.bfloat16, 1)  # [block][K, V][head][token][dim]
    halves = [describe(pool[:, i], "BLOCK_HND") for i in (0, 1)]
    cache = CacheDesc.from_kv(*halves, pool=PoolDesc.of(pool, 2 * 8 * 16 * 2))
    engine = Engine(16, 3, 1)
    plane = engine.planes()[2]
    view = CacheView((cache,), FACTS, planes=(plane,))
    indices = torch.tensor([[[[4 * 2, 1 * 2], [4 * 2 + 1, 1 * 2 + 1]]]], dtype=torch.int32)
    captured = Snapshot.capture(range(13), [section(view, BlockTable.kv_offsets(indices))])
    assert captured is not None
    read = reopened(captured, tmp_path / "file")
    for t in range(13):
        block = pool[[4, 1][t // 8]]
        for kind, half in zip("kv", block, strict=True):
            found = torch.from_numpy(read.array(f"layers.3.{kind}")[t].view("i2"))
            assert torch.equal(found, half[:, t % 8].view(torch.int16))
    for e in range(3):
        found = torch.from_numpy(read.array("planes.3.role_40")[e].view("i2"))
        assert torch.equal(found, engine.entry(e).view(torch.int16))


def test_damage_is_found(tmp_path: Path) -> None:
    path = tmp_path / "file"
    reopened(Snapshot.capture(range(40), [Engine(16, 3, 1).section(state_tokens=40)]), path)
    good = path.read_bytes()
    with Snapshot.open(path) as file:
        tensors = dict(file.tensors)
    assert {name.split(".")[2] for name in tensors} == {
        "k", "index_k", "index_k_scale", "role_40", "state",
    }  # fmt: skip
    first = 8 + int.from_bytes(good[:8], "little")
    for stored in tensors.values():
        data = bytearray(good)
        data[first + stored.offset + stored.num_bytes - 1] ^= 1
        path.write_bytes(data)
        with Snapshot.open(path) as file, pytest.raises(CorruptError, match="have changed since"):
            file.read([3])
