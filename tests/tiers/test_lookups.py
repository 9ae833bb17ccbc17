"""Lookups and loads through tiers: round trips, levels that fail, files that are wrong."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvx_core import Directory, PrefixStore, StoreError
from kvx_core.stores import BlobStore
from kvx_core.stores.tiers import MemoryStore, Tiered
from tests.stores.engine import Engine, store_in
from tests.stores.engine import save as save_computed
from tests.tiers.far import Far

CHUNK = 16
LENGTH = 100 * CHUNK + 6
PROMPT = range(LENGTH)
DELAY = 0.2


def save(store: PrefixStore, prompt: range) -> None:
    save_computed(store, prompt, Engine(num_tokens=len(prompt)))


def load(store: PrefixStore, prompt: range, num_tokens: int | None = None) -> None:
    """What is found is loaded, and is right."""
    engine = Engine(seed=2, num_tokens=len(prompt))
    match = store.lookup(prompt)
    assert match.num_tokens == (len(prompt) if num_tokens is None else num_tokens)
    store.load(match, 0, match.num_tokens, engine.sections())
    engine.check(prompt, 0, match.num_tokens)


def far_of(prompt: range = PROMPT) -> dict[str, bytes]:
    """The files of a far store that has a prompt."""
    far = Far()
    save(store_in(far), prompt)
    return far.files


def test_a_lookup_takes_a_few_round_trips_at_any_length() -> None:
    files = far_of()
    for length in (8 * CHUNK, LENGTH):
        store = store_in(Far(files, DELAY))
        store.lookup(range(5, 9))  # reads the records
        begun = time.monotonic()
        assert store.lookup(PROMPT[:length]).num_tokens == length
        assert time.monotonic() - begun < 12 * DELAY  # two for the chunks, and for the end
        assert store.lookup(range(7000, 7000 + length)).num_tokens == 0


def test_a_lookup_of_what_is_not_stored_asks_for_every_sixteenth_chunk() -> None:
    far = Far(far_of())
    store = store_in(far)
    store.lookup(range(5, 9))
    far.calls.clear()
    assert store.lookup(range(7000, 7000 + LENGTH)).num_tokens == 0
    assert far.calls["size"] == 7  # of 100 chunks
    assert far.calls["get"] <= 1 + 8  # the first chunk, and marks


@pytest.mark.parametrize("lacking", [0, 1, 15, 16, 17, 50, 99])
def test_a_chunk_that_is_gone_ends_the_match(lacking: int) -> None:
    far = Far(far_of())
    store = store_in(far)
    (name,) = store.lookup(PROMPT).spans[lacking].names
    del far.files[name]
    assert store_in(far).lookup(PROMPT).num_tokens == lacking * CHUNK


def test_a_load_asks_for_files_together() -> None:
    store = store_in(Far(far_of(), DELAY))
    match = store.lookup(PROMPT)
    engine = Engine(seed=2, num_tokens=LENGTH)
    begun = time.monotonic()
    store.load(match, 0, LENGTH, engine.sections())
    assert time.monotonic() - begun < 20 * DELAY  # of 101 files
    engine.check(PROMPT, 0, LENGTH)


def levels(kind: str, tmp_path: Path, far: Far) -> list[BlobStore]:
    tmp_path.mkdir(exist_ok=True)
    memory = MemoryStore("memory", 1 << 24, folder=tmp_path)
    near: dict[str, list[BlobStore]] = {
        "far": [],
        "disk, far": [Directory(tmp_path / "disk")],
        "memory, disk, far": [memory, Directory(tmp_path / "disk")],
        "memory, far": [memory],
    }
    return [*near[kind], far]


KINDS = ["far", "disk, far", "memory, disk, far", "memory, far"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_one_machine_stores_another_one_loads(kind: str, tmp_path: Path) -> None:
    files: dict[str, bytes] = {}
    writer = Tiered(levels(kind, tmp_path / "writer", Far(files)))
    save(store_in(writer), PROMPT)
    assert writer.settle(30)
    far = Far(files)
    reader = Tiered(levels(kind, tmp_path / "reader", far))
    load(store_in(reader), PROMPT)
    assert reader.settle(30)
    far.calls.clear()
    load(store_in(reader), PROMPT)
    if kind != "far":
        assert far.calls["get"] <= 1  # kvx-store.json, which `join_levels` copies
        assert not far.calls["size"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_dead_server_costs_what_it_alone_has(kind: str, tmp_path: Path) -> None:
    far = Far()
    tiers = Tiered(levels(kind, tmp_path, far))
    store = store_in(tiers)
    save(store, PROMPT[: 10 * CHUNK])
    assert tiers.settle(30)
    far.is_dead, far.delay = True, 0.5
    begun = time.monotonic()
    near = kind != "far"
    load(store_in(tiers, chunk_tokens=CHUNK) if near else store, PROMPT, 10 * CHUNK * near)
    assert time.monotonic() - begun < 5 * far.delay
    if kind in ("far", "memory, far"):
        with pytest.raises(StoreError, match="far://bucket"):
            save(store, PROMPT)
    else:
        save(store, PROMPT)
        assert not tiers.settle(0.1)
        load(store, PROMPT)
    begun = time.monotonic()
    for i in range(20):
        assert not store.lookup(range(9000 + 99 * i, 9000 + 99 * i + 50)).num_tokens
    assert time.monotonic() - begun < 2 * far.delay
    far.is_dead, far.delay = False, 0.0
    until = time.monotonic() + 20
    while far._breaker.is_open:  # the next probe sees that it answers
        assert time.monotonic() < until
        time.sleep(0.02)
    save(store, range(5000, 5000 + LENGTH))
    assert tiers.settle(30)
    other = store_in(Tiered([Directory(tmp_path / "other"), far]))
    load(other, range(5000, 5000 + LENGTH))
    if near and kind != "memory, far":
        load(other, PROMPT)  # what was stored while the server was dead


def test_a_tier_that_is_added_gets_the_records(tmp_path: Path) -> None:
    """So that others can read what is stored from then on."""
    save(store_in(tmp_path / "disk"), PROMPT)
    far = Far()
    tiers = Tiered([Directory(tmp_path / "disk"), far])
    store = store_in(tiers)
    assert store.lookup(PROMPT).num_tokens == LENGTH
    save(store, range(5000, 5000 + LENGTH))
    assert tiers.settle(30)
    load(store_in(Tiered([Directory(tmp_path / "other"), far])), range(5000, 5000 + LENGTH))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["flipped", "cut", "longer", "empty", "other"])
def test_a_file_that_is_wrong_in_the_far_store(kind: str, way: str, tmp_path: Path) -> None:
    """It is found bad, deleted there too, and stored again."""
    far = Far(far_of(PROMPT[: 5 * CHUNK]))
    (name,) = store_in(far).lookup(PROMPT).spans[2].names
    (another,) = store_in(far).lookup(PROMPT).spans[3].names
    data = far.files[name]
    far.files[name] = {
        "flipped": data[:-9] + bytes([data[-9] ^ 4]) + data[-8:],
        "cut": data[:-1],
        "longer": data + b"\0",
        "empty": b"",
        "other": far.files[another],
    }[way]
    store = store_in(Tiered(levels(kind, tmp_path, far)))
    prompt, engine = PROMPT[: 5 * CHUNK], Engine(seed=2, num_tokens=LENGTH)
    match = store.lookup(prompt)
    assert match.num_tokens == (5 * CHUNK if way == "flipped" else 2 * CHUNK)
    if way == "flipped":
        with pytest.raises(StoreError, match="have changed since they were written"):
            store.load(match, 0, 5 * CHUNK, engine.sections())
        engine.check(prompt, 0, 2 * CHUNK)
    assert store.lookup(prompt).num_tokens == 2 * CHUNK
    assert name not in far.files
    save(store, prompt)
    load(store, prompt)


@pytest.mark.parametrize("kind", KINDS)
def test_keys_are_the_same_on_every_level(kind: str, tmp_path: Path) -> None:
    """Nobody without them reads or forges what a server has."""
    files: dict[str, bytes] = {}
    keys = {"key": bytes(range(32)), "encryption_key": bytes(range(1, 33))}
    prompt = PROMPT[: 5 * CHUNK + 3]
    writer = Tiered(levels(kind, tmp_path / "writer", Far(files)))
    save(store_in(writer, **keys), prompt)
    assert writer.settle(30)
    load(store_in(Tiered(levels(kind, tmp_path / "reader", Far(files))), **keys), prompt)
    ids = prompt[0].to_bytes(8, "little") + prompt[1].to_bytes(8, "little")
    assert not any(ids in raw for name, raw in files.items() if "/" in name)
    with pytest.raises(StoreError, match="the store is encrypted"):
        store_in(Far(files))
    with pytest.raises(StoreError, match="is not authenticated by the signing key"):
        store_in(Far(files), **{**keys, "key": bytes(32)})
