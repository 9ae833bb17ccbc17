"""Layers with different heads, head_dims, dtypes and scales in one snapshot.

What a token's heads are in each layer is a tensor of the test, [token, head, dim]; caches around it
hold a sentinel.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvx_core import (
    CacheDesc,
    InvalidArgumentError,
    OutOfRangeError,
    Section,
    Snapshot,
    StoreError,
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
from tests.snapshot.layered import (
    BF16,
    BLOCKS,
    FP8,
    LAYERS,
    PER_HEAD,
    PLAIN,
    SENTINEL,
    START,
    STOP,
    Model,
    Rank,
)
from tests.snapshot_files import kind_in, rewritten

SEEDS = [1, 2, 3]
LO, HI = 5, 24  # those that are restored


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
