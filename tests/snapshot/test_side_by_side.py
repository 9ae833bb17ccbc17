"""Snapshots that lie side by side are restored as each of them is, with one copy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvx_core import CacheDesc, CacheFacts, CacheView, Snapshot, StoreError, describe
from kvx_core.desc.tables import BlockTable
from kvx_core.ops.migrate import copy_rows, copy_tokens
from kvx_core.snapshot import Room, Section, can_join, restore_all, side_by_side
from kvx_core.snapshot import room as room_module

CHUNK, CHUNKS, HEADS, DIM = 8, 4, 8, 32
STOP = CHUNK * CHUNKS - 3  # the last chunk is not full
FACTS = CacheFacts(
    fingerprint="m", rotary="half", rotary_dim=DIM, rope_applied=True, first_kv_head=0
)


def caches(seed: int, dtype: torch.dtype, layout: str, heads: int = HEADS) -> list[torch.Tensor]:
    """K and V of 3 layers in 13 blocks of 4 tokens."""
    shape = (13, 4, heads, DIM) if layout == "BLOCK_NHD" else (13, heads, 4, DIM)
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, *shape, generator=generator).to(dtype) for _ in range(3)]


def section(held: list[torch.Tensor], layout: str, seed: int, facts: CacheFacts = FACTS) -> Section:
    pairs = ((describe(k, layout), describe(v, layout)) for k, v in held)
    view = CacheView(tuple(CacheDesc.from_kv(*pair) for pair in pairs), facts)
    blocks = np.random.default_rng(seed).permutation(13)[:10]
    return Section((0, 1, 2), view, BlockTable.packed(blocks[None]))


def read_side_by_side(
    source: Section, folder: Path, stop: int = STOP, room: Room | None = None, **options: Any
) -> list[Snapshot]:
    """Chunks out of files, as a load reads them."""
    read: list[Snapshot] = []
    room = Room(CHUNK) if room is None else room
    room.clear(1 << 20)
    for start in range(0, stop, CHUNK):
        ids = range(start, min(start + CHUNK, stop))
        chunk = Snapshot.capture(ids, [source], start=start, **options)
        assert chunk is not None
        chunk.save(folder / "one")
        with Snapshot.open(folder / "one") as file:
            read.append(file.read(file.header.layers, room))
    return read


def copies(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Gets an element for each copy of snapshots that are joined."""
    found: list[Any] = []

    def counted(copy: Any) -> Any:
        return lambda *arguments, **options: found.append(arguments) or copy(*arguments, **options)

    monkeypatch.setattr(side_by_side, "copy_tokens", counted(copy_tokens))
    monkeypatch.setattr(side_by_side, "copy_rows", counted(copy_rows))
    return found


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("layout", ["BLOCK_NHD", "BLOCK_HND"])
@pytest.mark.parametrize(
    ("dtype", "format", "is_together"),
    [
        (torch.float32, None, True),
        (torch.bfloat16, "lossless_bf16", True),
        (torch.float32, "f16", True),
        (torch.float32, "q8_0", True),
        (torch.float32, "f8_e4m3", False),  # with scales
        (torch.float32, "q4_k", False),  # whose units span heads
    ],
)
def test_as_one_by_one(
    seed: int,
    layout: str,
    dtype: torch.dtype,
    format: str | None,
    is_together: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = section(caches(seed, dtype, "BLOCK_NHD"), "BLOCK_NHD", seed)
    read = read_side_by_side(source, tmp_path, format=format)
    made = copies(monkeypatch)
    start, stop = np.random.default_rng(seed).integers((0, 25), (8, STOP + 1))
    expected, found = (caches(seed + 9, dtype, layout) for _ in range(2))
    one_by_one = section(expected, layout, seed + 1)
    counts = [
        chunk.restore(one_by_one, max(start, i * CHUNK), min(stop, (i + 1) * CHUNK))
        for i, chunk in enumerate(read)
    ]
    assert restore_all(read, section(found, layout, seed + 1), start, stop) == sum(counts)
    assert len(made) == is_together
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("most", [1, 2, 3])
def test_however_few_kinds_are_remembered(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of one kind are blocks of one cache, whatever was forgotten between them."""
    monkeypatch.setattr(room_module, "_MAX_PLACED", most)
    source = section(caches(0, torch.float32, "BLOCK_NHD"), "BLOCK_NHD", 0)
    assert can_join(read_side_by_side(source, tmp_path))


def test_some_heads_and_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = section(caches(0, torch.float32, "BLOCK_NHD"), "BLOCK_NHD", 0)
    read = read_side_by_side(source.of([2, 0]), tmp_path)
    made = copies(monkeypatch)
    facts = replace(FACTS, first_kv_head=1)
    expected, found = (caches(5, torch.float32, "BLOCK_HND", heads=2) for _ in range(2))
    for i, chunk in enumerate(read):
        chunk.restore(
            section(expected, "BLOCK_HND", 1, facts), i * CHUNK, min(STOP, (i + 1) * CHUNK)
        )
    restore_all(read, section(found, "BLOCK_HND", 1, facts), 0, STOP)
    assert len(made) == 1
    assert all(map(torch.equal, expected, found))
    assert torch.equal(found[1], caches(5, torch.float32, "BLOCK_HND", heads=2)[1])


def test_null_blocks_keep_what_they_hold(tmp_path: Path) -> None:
    source = section(caches(0, torch.float32, "BLOCK_NHD"), "BLOCK_NHD", 0)
    read = read_side_by_side(source, tmp_path)
    expected, found = (caches(5, torch.float32, "BLOCK_NHD") for _ in range(2))
    table = BlockTable.packed([[3, -1, 5, 1, -1, 0, 12, 7, 8, 9]])
    into = [replace(section(held, "BLOCK_NHD", 0), block_table=table) for held in (expected, found)]
    for i, chunk in enumerate(read):
        chunk.restore(into[0], i * CHUNK, min(STOP, (i + 1) * CHUNK))
    restore_all(read, into[1], 0, STOP)
    assert all(map(torch.equal, expected, found))


def test_a_cache_of_another_kind_is_refused_untouched(tmp_path: Path) -> None:
    source = section(caches(0, torch.float32, "BLOCK_NHD"), "BLOCK_NHD", 0)
    read = read_side_by_side(source, tmp_path)
    held = caches(5, torch.float32, "BLOCK_NHD")
    other = section(held, "BLOCK_NHD", 0, replace(FACTS, rotary="interleaved"))
    with pytest.raises(StoreError, match="rotary"):
        restore_all(read, other, 0, STOP)
    assert all(map(torch.equal, held, caches(5, torch.float32, "BLOCK_NHD")))


def test_a_room_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of other prompts, for other blocks: nothing stays of those before."""
    monkeypatch.setattr("kvx_core.snapshot.room._blocks", {})  # some are known, others are not
    room = Room(CHUNK)
    held = caches(5, torch.float32, "BLOCK_NHD")
    into = section(held, "BLOCK_NHD", 0)
    views = []
    for seed, stop in enumerate((STOP, 5, STOP, 2 * CHUNK, CHUNK + 1)):
        source = section(caches(seed, torch.float32, "BLOCK_HND"), "BLOCK_HND", seed)
        read = read_side_by_side(source, tmp_path, stop, room)
        assert can_join(read)
        expected = caches(5, torch.float32, "BLOCK_NHD")
        blocks = np.random.default_rng(seed).permutation(13)[:10]
        again = into.of_sequence(BlockTable.packed(blocks[None]))
        one_by_one = section(expected, "BLOCK_NHD", seed)
        for i, chunk in enumerate(read):
            chunk.restore(one_by_one, i * CHUNK, min(stop, (i + 1) * CHUNK))
        for layer, whole in enumerate(caches(5, torch.float32, "BLOCK_NHD")):
            held[layer].copy_(whole)
        made = copies(monkeypatch)
        restore_all(read, again, 0, stop)
        monkeypatch.undo()
        assert all(map(torch.equal, expected, held))
        ((cache, *_),) = made
        views.append(cache)
    assert len({id(cache) for cache in views}) == 1  # described once


def test_a_full_room_is_not_taken_from_others(tmp_path: Path) -> None:
    room = Room(CHUNK)
    room.clear(4096)
    assert room.take(4096)[0] == 0
    assert not room.has(1)
    with pytest.raises(ValueError, match="expected `clear` before"):
        room.take(1)
    room.give_back(0)
    assert room.take(4096)[0] == 0
    assert len(Room(CHUNK).take(5000)[1]) == 5000


def test_others_are_not_joined(tmp_path: Path) -> None:
    """Snapshots that do not follow one another, in the sequence or in memory, or that differ."""
    source = section(caches(0, torch.float32, "BLOCK_NHD"), "BLOCK_NHD", 0)
    read = read_side_by_side(source, tmp_path)
    assert can_join(read)
    assert can_join(read[1:3])
    assert can_join(read[:1])
    assert can_join(read[-1:])
    assert can_join([]) is False
    assert not can_join([read[3], read[0]])
    assert not can_join([read[0], read[2]])
    assert not can_join([read[0], read[1], read[3]])
    assert not can_join(read[::-1])
    assert not can_join([read[0], read[0]])
    other = read_side_by_side(source, tmp_path)
    assert not can_join([read[0], read[1], other[2]])
    moved = [replace(one, header=replace(one.header, start=one.header.start + 1)) for one in read]
    assert not can_join([read[0], moved[1]])
    (part,) = read[0].header.parts
    others = (replace(part, heads=(1, 9)),)
    heads = [replace(one, header=replace(one.header, parts=others)) for one in read]
    assert not can_join([read[0], heads[1]])
    with Snapshot.open(tmp_path / "one") as file:
        fewer = file.read([0, 1], Room(CHUNK))
        assert not can_join([replace(fewer, room=read[0].room), read[1]])
        of_its_own = file.read(file.header.layers)
        assert not can_join([of_its_own, read[0]])
        assert not can_join([file])  # its data is in no room
    short = [replace(one, tokens=one.tokens[:-1]) for one in read]
    assert not can_join([short[0], read[1]])
