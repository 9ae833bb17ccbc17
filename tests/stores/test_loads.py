"""Loads: any part of a prompt, bad files, ranks, threads and rooms."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvx_core import BlockTable, InvalidArgumentError, PrefixStore, Section, StoreError
from kvx_core.snapshot import CorruptError, Room
from kvx_core.stores import rooms
from kvx_core.stores.loads import Progress
from kvx_core.stores.match import Match
from kvx_core.stores.rooms import Rooms
from tests.snapshot.sections import section_of
from tests.stores.engine import DIM, HEADS, LAYERS, Engine, damage, ranks, save, store_in
from tests.stores.test_prefix import assert_same_bytes

CHUNK = 16
LENGTH = 4 * CHUNK + 6
PROMPTS = [range(1000 * i, 1000 * i + LENGTH) for i in range(4)]


def warm(root: Path, prompts: Sequence[range] = PROMPTS[:3], **options: Any) -> PrefixStore:
    """A store that has loaded files like all others."""
    store = store_in(root, **options)
    for prompt in prompts:
        save(store, prompt)
    for prompt in prompts[:2]:
        load(store, prompt, Engine(seed=2))
    return store


def load(store: PrefixStore, prompt: range, engine: Engine, parts: int = 1) -> None:
    match = store.lookup(prompt)
    assert match.num_tokens == len(prompt)
    store.load(match, 0, len(prompt), engine.sections(parts))


@pytest.mark.parametrize("layout", ["hnd", "nhd"])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_any_part_of_a_prompt(layout: str, parts: int, tmp_path: Path) -> None:
    store = warm(tmp_path)
    match = store.lookup(PROMPTS[2])
    token_bytes = LAYERS * 2 * HEADS * DIM * 4
    for start, stop in [(0, 1), (3, 17), (15, 66), (16, 64), (33, 47), (64, LENGTH), (69, LENGTH)]:
        engine = Engine(layout=layout, seed=1, dtype=torch.float32)
        num_bytes = store.load(match, start, stop, engine.sections(parts))
        assert num_bytes == (stop - start) * token_bytes
        engine.check(PROMPTS[2], start, stop)


def test_ranks_that_hold_a_part_of_a_file(tmp_path: Path) -> None:
    store = warm(tmp_path)
    for layers, heads in ((range(3), range(1, 3)), (range(1, 3), range(4))):
        (rank,) = ranks((layers, heads), seed=1)
        load(store, PROMPTS[2], rank)
        rank.check(PROMPTS[2], 0, LENGTH)


@pytest.mark.parametrize("index", range(5))
@pytest.mark.parametrize(
    "kind", ["cut", "empty", "foreign", "header", "folder", "pipe", "loop", "flipped", "longer"]
)
def test_a_bad_file_ends_a_load(kind: str, index: int, tmp_path: Path) -> None:
    store = warm(tmp_path)
    match = store.lookup(PROMPTS[2])
    (name,) = match.spans[index].names
    path = tmp_path / name
    data = path.read_bytes()
    if kind == "flipped":
        path.write_bytes(data[:-9] + bytes([data[-9] ^ 4]) + data[-8:])
    elif kind == "longer":
        path.write_bytes(data + b"\0")
    else:
        damage(kind)(path)
    bad = path.read_bytes() if kind not in ("folder", "pipe", "loop") else b""
    engine, progress = Engine(seed=1), Progress()
    with pytest.raises(StoreError) as found:
        store.load(match, 0, LENGTH, engine.sections(), progress=progress)
    assert progress.stop == match.spans[index].start
    engine.check(PROMPTS[2], 0, progress.stop)
    if kind in ("folder", "pipe", "loop"):
        return
    assert not path.exists()  # deleted, so that it can be stored again
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bad)
    with pytest.raises(StoreError) as expected:
        store_in(tmp_path).load(match, 0, LENGTH, engine.sections())
    assert (type(found.value), str(found.value)) == (type(expected.value), str(expected.value))
    assert name in str(found.value)


def test_a_file_under_the_name_of_another(tmp_path: Path) -> None:
    store = warm(tmp_path)
    match, other = store.lookup(PROMPTS[2]), store.lookup(PROMPTS[1])
    (name,), (of_other,) = match.spans[0].names, other.spans[0].names
    (tmp_path / name).write_bytes((tmp_path / of_other).read_bytes())
    engine = Engine(seed=1)
    with pytest.raises(CorruptError, match="has the tokens of"):
        store.load(match, 0, LENGTH, engine.sections())
    engine.check(PROMPTS[2], 0, 0)


def test_every_bad_file_of_a_prompt_is_found(tmp_path: Path) -> None:
    store = warm(tmp_path)
    match = store.lookup(PROMPTS[2])
    bad = [tmp_path / match.spans[i].names[0] for i in (1, 3, 4)]
    for path in bad:
        damage("cut")(path)
    with pytest.raises(CorruptError):
        store.load(match, 0, LENGTH, Engine(seed=1).sections())
    assert not any(path.exists() for path in bad)
    assert (tmp_path / match.spans[2].names[0]).exists()


def test_a_cache_that_cannot_take_them(tmp_path: Path) -> None:
    store = warm(tmp_path)
    match, engine = store.lookup(PROMPTS[2]), Engine(seed=1)
    with pytest.raises(StoreError, match="rotary is 'half' at the source"):
        store.load(match, 0, LENGTH, engine.sections(rotary="interleaved"))
    with pytest.raises(InvalidArgumentError, match="fingerprint"):
        store.load(match, 0, LENGTH, engine.sections(fingerprint="another"))
    with pytest.raises(StoreError, match="head_dim"):
        store.load(match, 0, LENGTH, Engine(seed=1, dim=16).sections())
    engine.check(PROMPTS[2], 0, 0)


@pytest.mark.parametrize("kind", ["packed", "ragged"])
@pytest.mark.parametrize(
    ("first", "again"), [(0, 1), (2, 5), (3, 4), (1, 16), (8, 16), (15, 16)], ids=str
)
def test_a_block_twice_in_the_table(first: int, again: int, kind: str, tmp_path: Path) -> None:
    """For tokens of one file, of two files that are copied together, and of two that are not."""
    store = warm(tmp_path)
    match = store.lookup(PROMPTS[2])

    def wrong() -> Engine:
        engine = Engine(seed=1)
        engine.blocks[again] = engine.blocks[first]
        return engine

    def sections(engine: Engine) -> list[Section]:
        found = engine.sections(2)
        if kind == "packed":
            return found
        ids = [block for block in engine.blocks for _ in range(engine.block_size)]
        ragged = BlockTable.ragged(ids, [0, len(ids)])
        return [replace(section, block_table=ragged) for section in found]

    engine = wrong()
    begin, end = first * engine.block_size, again * engine.block_size
    for start, stop in [(0, LENGTH), (begin + 2, end + 3)]:
        with pytest.raises(InvalidArgumentError, match=r"names block \d+ for two of the tokens"):
            store.load(match, start, stop, sections(engine))
    assert_same_bytes(engine.cache, Engine(seed=1).cache)
    # Up to the second place, and other tokens of the block.
    for start, stop in [(0, end), (begin + 2, end + 2)]:
        engine = wrong()
        store.load(match, start, stop, sections(engine))
        assert_same_bytes(engine.cache, wrong().compute(PROMPTS[2], start, stop).cache)


def test_heads_whose_first_blocks_are_null(tmp_path: Path) -> None:
    """Two sections take the same layers: chunks that only one of them takes are copied apart."""
    store, gone = warm(tmp_path), 2 * CHUNK
    match = store.lookup(PROMPTS[2])
    left, right = (Engine(heads=range(i, i + 2), seed=1) for i in (0, 2))
    null = next(i for i in range(len(right.blocks) + 2) if i not in right.blocks)
    num_null = gone // right.block_size
    blocks = [null] * num_null + right.blocks[num_null:]
    moved_on = section_of(
        right.cache, right.layers, blocks, heads=(2, HEADS), fingerprint="model", null_block_id=null
    )
    store.load(match, 0, LENGTH, [*left.sections(), moved_on])
    left.check(PROMPTS[2], 0, LENGTH)
    right.check(PROMPTS[2], gone, LENGTH)


def test_a_match_that_promises_too_much(tmp_path: Path) -> None:
    """It may come from another process."""
    store, engine = warm(tmp_path), Engine(seed=1)
    first, *_, last = store.lookup(PROMPTS[2]).spans
    for span, message in (
        (replace(last, stop=last.start + CHUNK), "hold 6 tokens, expected tokens 64 to 80"),
        (replace(first, start=3, stop=19), "holds tokens from 0, expected 3"),
    ):
        before = engine.cache.storages[0].clone()
        with pytest.raises(StoreError, match=message):
            store.load(Match(span.stop, (span,)), span.start, span.stop, engine.sections())
        assert torch.equal(engine.cache.storages[0], before)


def test_a_load_that_is_cancelled(tmp_path: Path) -> None:
    store = warm(tmp_path)
    match, engine = store.lookup(PROMPTS[2]), Engine(seed=1)
    with pytest.raises(StoreError, match="cancelled after 0 tokens"):
        store.load(match, 0, LENGTH, engine.sections(), progress=Progress(is_cancelled=True))
    load(store, PROMPTS[2], engine)
    engine.check(PROMPTS[2], 0, LENGTH)


def test_loads_in_threads(tmp_path: Path) -> None:
    """Each has a room of its own."""
    store = warm(tmp_path)
    for prompt in PROMPTS[3:]:
        save(store, prompt)
    engines = [Engine(seed=i) for i in range(8)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            list(pool.map(lambda i: load(store, PROMPTS[i % 4], engines[i]), range(8)))
    for i, engine in enumerate(engines):
        engine.check(PROMPTS[i % 4], 0, LENGTH)


def test_rooms_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Unless they are large, or a device may still read them."""
    found = Rooms()
    with found.room(CHUNK, pinned=False) as room, found.room(CHUNK, pinned=False) as other:
        assert room is not other
        room.take(4096)
    with found.room(CHUNK, pinned=False) as again:
        assert again is room
    with found.room(CHUNK + 1, pinned=False) as longer:
        assert longer is not again
        assert longer.num_tokens == CHUNK + 1
    with pytest.raises(StoreError), found.room(CHUNK, pinned=False) as again:
        raise StoreError("a bad file")
    with pytest.raises(ValueError, match="a bug"), found.room(CHUNK, pinned=False):
        raise ValueError("a bug")
    with found.room(CHUNK, pinned=False) as again:
        assert again is other
        monkeypatch.setattr(rooms, "_MAX_ROOM_BYTES", 4095)
        again.take(4096)
    made: list[Room] = []
    monkeypatch.setattr(
        rooms, "Room", lambda *args, **kw: made.append(Room(*args, **kw)) or made[0]
    )
    with found.room(CHUNK, pinned=False) as again:
        assert again is made[0]


def test_what_is_loaded_before_the_tokens_is_cancelled_with_them() -> None:
    progress = Progress(stop=7)
    states = progress.beside()
    assert (states.stop, states.is_cancelled) == (0, False)
    progress.cancel()
    assert states.is_cancelled
    assert progress.beside().is_cancelled
