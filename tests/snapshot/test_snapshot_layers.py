"""Layers with different heads, head_dims, dtypes and scales in one snapshot.

What a token's heads are in each layer is a tensor of the test, [token, head, dim]; caches around it
hold a sentinel.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvx_core import (
    BlockTable,
    CacheDesc,
    CacheView,
    InvalidArgumentError,
    OutOfRangeError,
    ScaleDesc,
    ScaleGranularity,
    Section,
    Snapshot,
    StoreError,
    describe,
)
from kvx_core.snapshot import (
    Chunks,
    CorruptError,
    MemoryPool,
    Precision,
    Room,
    can_join,
    restore_all,
)
from tests.snapshot.sections import FACTS
from tests.snapshot_files import kind_in, rewritten

SEEDS = [1, 2, 3]
START, STOP = 3, 26  # the tokens of the snapshots
LO, HI = 5, 24  # those that are restored
BLOCKS = [6, 2, 9, 4, 0, 7, 1]
SENTINEL = 0xA5
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
PER_HEAD, PER_TOKEN_HEAD = ScaleGranularity.PER_HEAD, ScaleGranularity.PER_TOKEN_HEAD


@dataclass(frozen=True)
class Model:
    """A layer of a model, and all that a sequence has there."""

    layer: int
    heads: int
    dim: int
    dtype: torch.dtype
    scales: ScaleGranularity | None = None
    kv: dict[str, Tensor] = field(default_factory=dict)  # [token, head, dim], and their scales

    def filled(self, seed: int) -> Model:
        """With numbers of its own: bytes of which none is a NaN."""
        random = torch.Generator().manual_seed(seed * 10 + self.layer)
        found = {}
        for kind in "kv":
            shape = STOP, self.heads, self.dim * self.dtype.itemsize
            raw = torch.randint(0, 0x7E, shape, generator=random, dtype=torch.uint8)
            found[kind] = raw.view(self.dtype)
            scales = 2.0 ** torch.randint(-3, 3, (STOP, self.heads), generator=random)
            if self.scales is PER_HEAD:
                found[f"{kind}_scale"] = scales[0]
            elif self.scales is PER_TOKEN_HEAD:
                found[f"{kind}_scale"] = scales
        return replace(self, kv=found)


# As Gemma 4's layers, and layers that are skipped when a cache is quantised.
LAYERS = [
    Model(0, 1, 64, BF16),
    Model(1, 4, 32, FP8, PER_HEAD),
    Model(2, 2, 96, FP8, PER_TOKEN_HEAD),
]
PLAIN = [Model(0, 1, 64, BF16), Model(1, 4, 32, BF16), Model(2, 2, 96, torch.float16)]


class Rank:
    """Some heads of layers in caches of blocks, which hold the sequence, or nothing yet."""

    def __init__(
        self,
        model: list[Model],
        size: int,
        layout: str,
        rank: int = 0,
        ranks: int = 1,
        **given: Any,
    ) -> None:
        """size: of a block; a layer with fewer heads than ranks shares them out as vLLM does"""
        self.model, self.size, self.layout = model, size, layout
        self.heads = [
            (rank * m.heads // ranks, rank * m.heads // ranks + max(1, m.heads // ranks))
            for m in model
        ]
        self.blocks = given.get("blocks", BLOCKS)
        self.held = [
            {kind: self._memory(m, heads, kind) for kind in m.kv}
            for m, heads in zip(model, self.heads, strict=True)
        ]

    def _memory(self, model: Model, heads: tuple[int, int], kind: str) -> Tensor:
        whole = model.kv[kind]
        if whole.ndim == 1:
            return whole[slice(*heads)].clone()  # scales of heads are the engine's own
        shape = len(BLOCKS) + 3, self.size, heads[1] - heads[0], *whole.shape[2:]
        found = torch.empty(shape, dtype=whole.dtype)
        found.view(torch.uint8).fill_(SENTINEL if kind in "kv" else 0x3F)
        if self.layout == "BLOCK_HND" and whole.ndim == 3:
            found = found.transpose(1, 2).contiguous().transpose(1, 2)
        return found

    def put(self, lo: int, hi: int) -> Rank:
        """Writes tokens of the sequence."""
        for model, heads, held in zip(self.model, self.heads, self.held, strict=True):
            for kind, memory in held.items():
                for t in range(lo, hi) if memory.ndim > 1 else ():
                    at = self.blocks[t // self.size], t % self.size
                    memory[at] = model.kv[kind][t, slice(*heads)]
        return self

    def sections(self, **facts: Any) -> list[Section]:
        """A section of each layer."""
        return [self.section([i], **facts) for i in range(len(self.model))]

    def section(self, at: list[int], **facts: Any) -> Section:
        model, heads = [self.model[i] for i in at], self.heads[at[0]]
        caches = [
            CacheDesc.from_kv(*(describe(self._stored(i, kind), self.layout) for kind in "kv"))
            for i in at
        ]
        scales: dict[str, Any] = {}
        for kind in ("k_scale", "v_scale"):
            found = [
                ScaleDesc.of(self.held[i][kind], m.scales) if m.scales else None
                for i, m in zip(at, model, strict=True)
            ]
            scales[f"{kind}s"] = tuple(found) if any(found) else None
        facts = {"first_kv_head": heads[0], "total_kv_heads": model[0].heads} | facts
        view = CacheView(tuple(caches), replace(FACTS, **facts), **scales)
        return Section(tuple(m.layer for m in model), view, BlockTable.packed([self.blocks]))

    def _stored(self, i: int, kind: str) -> Tensor:
        tensor = self.held[i][kind]
        return tensor.transpose(1, 2) if self.layout == "BLOCK_HND" else tensor

    def assert_same(self, other: Rank) -> None:
        for i, (one, two) in enumerate(zip(self.held, other.held, strict=True)):
            for kind in one:
                found, wanted = (t[kind].contiguous().view(torch.uint8) for t in (one, two))
                assert torch.equal(found, wanted), (i, kind)


def captured(sections: list[Section], **options: Any) -> Snapshot:
    found = Snapshot.capture(range(STOP - START), sections, start=START, **options)
    assert found is not None
    return found


def through_a_file(snapshot: Snapshot, path: Path) -> Snapshot:
    snapshot.save(path)
    with Snapshot.open(path) as file:
        assert file.header == snapshot.header
        return file.read(file.header.layers)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(("producers", "consumers"), [(1, 1), (1, 2), (2, 1), (4, 2), (1, 4)])
def test_unequal_layers_round_trip(
    producers: int, consumers: int, together: bool, seed: int, tmp_path: Path
) -> None:
    """Captured together and apart, from ranks and into ranks that have some of the heads."""
    model = [m.filled(seed) for m in LAYERS]
    files = []
    for rank in range(producers):
        src = Rank(model, 4, "BLOCK_NHD", rank, producers).put(0, STOP)
        for sections in [src.sections()] if together else [[one] for one in src.sections()]:
            files.append(through_a_file(captured(sections), tmp_path / "file"))
        src.assert_same(Rank(model, 4, "BLOCK_NHD", rank, producers).put(0, STOP))
    if together:
        assert [part.heads for part in files[-1].header.parts] == src.heads
        assert files[0].array("layers.0.k").shape == (STOP - START, 1, 64)
    for rank in range(consumers):
        dst, expected = (Rank(model, 7, "BLOCK_HND", rank, consumers) for _ in range(2))
        for i, section in enumerate(dst.sections()):
            num_bytes = sum(file.restore(section, LO, HI) for file in files)
            of_token = LAYERS[i].dim * LAYERS[i].dtype.itemsize
            num_heads = section.heads[1] - section.heads[0]
            copies = max(1, producers // LAYERS[i].heads)  # of each head, among the ranks
            assert num_bytes == (HI - LO) * 2 * num_heads * of_token * copies
        dst.assert_same(expected.put(LO, HI))


@pytest.mark.parametrize("format", [None, "q8_0", "q4_k", "f16", "nvfp4", "f8_e4m3"])
def test_captured_together_is_what_is_captured_apart(format: str | None, tmp_path: Path) -> None:
    """Q4_K has 256 numbers in a unit: of four heads of 64, of two of 128, and of one of 256."""
    model = [Model(0, 4, 64, BF16), Model(1, 2, 128, BF16), Model(2, 1, 256, BF16)]
    sections = Rank([m.filled(1) for m in model], 4, "BLOCK_NHD").put(0, STOP).sections()
    whole = through_a_file(captured(sections, format=format), tmp_path / "file")
    apart = [captured([section], format=format) for section in sections]
    assert whole.tensors.keys() == {name for one in apart for name in one.tensors}
    for one in apart:
        for name in one.tensors:
            stored = one.tensors[name]
            assert whole.tensors[name].type == stored.type
            assert whole.array(name).tobytes() == one.array(name).tobytes()
    two = [Rank([m.filled(1) for m in model], 7, "BLOCK_HND") for _ in range(2)]
    for i, one in enumerate(apart):
        assert whole.restore(two[0].sections()[i], LO, HI) > 0
        one.restore(two[1].sections()[i], LO, HI)
    two[0].assert_same(two[1])
    assert any((held["k"].view(torch.uint8) != SENTINEL).any() for held in two[0].held)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("format", [None, "q8_0"])
def test_chunks_of_unequal_layers_in_a_pool_and_a_room(
    format: str | None, seed: int, tmp_path: Path
) -> None:
    """As a store captures and loads them: many chunks with one copy of each section."""
    model, step = [m.filled(seed) for m in PLAIN], 8
    sections = Rank(model, 4, "BLOCK_NHD").put(0, STOP).sections()
    chunks = Chunks(sections, 0, STOP, pool=MemoryPool(step), format=format)
    room, read = Room(step), []
    room.clear(1 << 20)
    snapshots = []
    for start in range(0, STOP, step):
        ids = torch.arange(start, min(start + step, STOP)).numpy()
        one = Snapshot.reserve_of(chunks, ids, start=start)
        assert one is not None
        assert one.lease is not None
        snapshots.append(one)
    for section in sections:
        Snapshot.fill_all(snapshots, section)
    for one in snapshots:
        one.settle(sections)
        one.save(tmp_path / "file")
        with Snapshot.open(tmp_path / "file") as file:
            read.append(file.read(file.header.layers, room))
    assert can_join(read)
    two = [Rank(model, 7, "BLOCK_HND", 1, 2) for _ in range(2)]
    for section, other in zip(two[0].sections(), two[1].sections(), strict=True):
        num_bytes = restore_all(read, section, LO, HI)
        assert num_bytes == sum(
            one.restore(other, max(LO, one.header.start), min(HI, one.header.start + step))
            for one in read
        )
    two[0].assert_same(two[1] if format else Rank(model, 7, "BLOCK_HND", 1, 2).put(LO, HI))


def equal(seed: int) -> list[Model]:
    """Two layers of four heads."""
    return [Model(i, 4, 32, BF16).filled(seed) for i in range(2)]


def with_other_halves(model: list[Model]) -> Snapshot:
    """Of the first layer the first two heads, of the second one the last two."""
    of = [Rank(model, 4, "BLOCK_NHD", rank, 2).put(0, STOP).section([rank]) for rank in range(2)]
    return captured(of)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_section_takes_other_heads_in_each_of_its_layers(seed: int) -> None:
    model = equal(seed)
    snapshot = with_other_halves(model)
    assert [part.heads for part in snapshot.header.parts] == [(0, 2), (2, 4)]
    assert snapshot.header.heads == {0: (0, 2), 1: (2, 4)}
    for joined in (False, True):
        dst, expected = (Rank(model, 7, "BLOCK_HND") for _ in range(2))
        section = dst.section([0, 1])
        num_bytes = (
            restore_all([snapshot], section, LO, HI)
            if joined
            else snapshot.restore(section, LO, HI)
        )
        assert num_bytes == (HI - LO) * 2 * (2 + 2) * 32 * 2
        expected.put(LO, HI)
        for i, others in enumerate((slice(2, 4), slice(0, 2))):  # nobody has stored these
            for kind in "kv":
                expected.held[i][kind][:, :, others].view(torch.uint8).fill_(SENTINEL)
        dst.assert_same(expected)
    # A rank that shares heads with one of its layers alone.
    dst, expected = (Rank(model, 7, "BLOCK_HND", 0, 2) for _ in range(2))
    assert snapshot.restore(dst.section([0, 1]), LO, HI) == (HI - LO) * 2 * 2 * 32 * 2
    expected.put(LO, HI)
    for kind in "kv":
        expected.held[1][kind].view(torch.uint8).fill_(SENTINEL)
    dst.assert_same(expected)


def test_nothing_is_written_if_the_last_layer_cannot_be() -> None:
    model = equal(1)
    snapshot = with_other_halves(model)
    short = Rank(model, 7, "BLOCK_HND", blocks=BLOCKS[:2])
    with pytest.raises(OutOfRangeError, match="holds 14 tokens, expected at least 24"):
        snapshot.restore(short.section([0, 1]), LO, HI)
    short.assert_same(Rank(model, 7, "BLOCK_HND"))
    dst = Rank(model, 7, "BLOCK_HND")
    section = dst.section([0, 1])
    last = section.view.layers[1]
    locked = CacheDesc.from_kv(last.k, replace(last.tensors["v"], writable=False))
    view = replace(section.view, layers=(section.view.layers[0], locked))
    with pytest.raises(InvalidArgumentError, match="writable"):
        snapshot.restore(replace(section, view=view), LO, HI)
    dst.assert_same(Rank(model, 7, "BLOCK_HND"))


def test_layers_of_other_head_dims_are_refused() -> None:
    model = [m.filled(1) for m in PLAIN]
    snapshot = captured(Rank(model, 4, "BLOCK_NHD").put(0, STOP).sections())
    wide = [replace(m, dim=m.dim * 2).filled(1) for m in PLAIN]
    dst = Rank(wide, 7, "BLOCK_NHD")
    for i, section in enumerate(dst.sections()):
        name, dim = f"layers.{i}.k", PLAIN[i].dim
        with pytest.raises(
            StoreError, match=f"{name} has head_dim {dim}, expected {2 * dim} as the cache has"
        ):
            snapshot.restore(section, LO, HI)
    dst.assert_same(Rank(wide, 7, "BLOCK_NHD"))


def test_files_with_one_range_of_heads_for_all_layers_are_refused(tmp_path: Path) -> None:
    """Each group of layers has its own."""
    model = [m.filled(1) for m in PLAIN]
    captured(Rank(model, 4, "BLOCK_NHD").put(0, STOP).sections()).save(tmp_path / "file")
    kind, good = kind_in(tmp_path / "file"), (tmp_path / "file").read_bytes()
    once = json.loads(json.dumps(kind))
    once["heads"] = [group.pop("heads") for group in once["groups"]].pop()
    with pytest.raises(CorruptError, match="is no kind of files"):
        Snapshot.open(rewritten(tmp_path / "file", once))
    (tmp_path / "file").write_bytes(good)
    kind["groups"][1]["heads"] = [0, 2]
    with pytest.raises(CorruptError, match=r"layers\.1\.k is BF16 \(23, 4, 32\), expected \(23, 2"):
        Snapshot.open(rewritten(tmp_path / "file", kind))


# --- precision ------------------------------------------------------------------------------------


def test_each_layer_has_its_own_precision() -> None:
    """Also layers of one section, and where a list says what values were before."""
    model = [Model(0, 2, 32, FP8, PER_HEAD), Model(1, 2, 32, BF16), Model(2, 2, 32, FP8, PER_HEAD)]
    section = Rank([m.filled(1) for m in model], 4, "BLOCK_NHD").put(0, STOP).section([0, 1, 2])
    bf16, fp8 = Precision.of("bfloat16"), Precision.of("float8_e4m3fn")
    assert section.precision == fp8
    assert section.precisions == {0: fp8, 1: bf16, 2: fp8}

    def parts(**options: Any) -> dict[tuple[int, ...], str]:
        return {part.layers: part.precision for part in captured([section], **options).header.parts}

    assert parts() == {(0, 2): "f8_e4m3", (1,): "bf16"}
    f16 = Precision.of("float16")
    assert parts(precision=f16) == {(0, 2): "f8_e4m3", (1,): "bf16+f16"}
    each = [Precision(), fp8, Precision.of("float8_e5m2")]
    assert parts(precision=each) == {(0,): "f8_e4m3", (2,): "f8_e4m3+f8_e5m2", (1,): "f8_e4m3"}
    assert parts(precision=each, format="q8_0") == {
        (0,): "f8_e4m3+q8_0",
        (2,): "f8_e4m3+f8_e5m2+q8_0",
        (1,): "f8_e4m3+q8_0",
    }
    with pytest.raises(InvalidArgumentError, match="precision has 2 layers, expected one for each"):
        captured([section], precision=each[:2])
    with pytest.raises(
        InvalidArgumentError, match=r"precision\[1\] is 'f16', expected a Precision"
    ):
        captured([section], precision=[f16, "f16", f16])
    with pytest.raises(InvalidArgumentError, match="precision is 'f16', expected a list or tuple"):
        captured([section], precision="f16")
