"""A remote store: what is asked ahead, the breaker, and processes that fork."""

from __future__ import annotations

import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from kvx_core import Directory, StoreError
from kvx_core.stores.blob_store import Content
from kvx_core.stores.tiers import MemoryStore, Tiered
from tests.tiers.far import Far

DATA = bytes(range(200))


def far(count: int = 8, **options: float) -> Far:
    return Far({f"a/{i}": DATA + bytes([i % 256]) for i in range(count)}, **options)


def test_what_is_expected_is_asked_for_once() -> None:
    store = far(300)
    names = [f"a/{i}" for i in range(300)]
    store.expect([*names, "a/none"], 10)
    for i, name in enumerate(names):
        if i % 2:
            into = bytearray(9)
            assert store.fetch(name, (into,), 0, 999) is not None
            assert bytes(into) == DATA[:9]
        else:
            assert store.is_there(name)
    assert not store.is_there("a/none")
    assert store.calls.total() == 301


def test_an_answer_that_is_too_short_does_not_count() -> None:
    store = far()
    store.expect(["a/1"], 10)
    assert store.read("a/1", 999) == DATA + b"\1"
    store.expect(["a/1"], 999, whole=True)
    into = bytearray(5)
    found = store.fetch("a/1", (into,), 0, 999)
    assert found is not None
    with found:
        assert os.pread(found.fileno(), 999, 0) == DATA + b"\1"


def test_an_answer_is_forgotten_with_its_file() -> None:
    store = far()
    for change in (
        lambda: store.delete("a/1"),
        lambda: store.replace("a/1", Content.of(b"new")),
    ):
        store.expect(["a/1"], 10)
        time.sleep(0.02)
        change()
        assert store.read("a/1", 999) == store.files.get("a/1")


def test_threads_that_expect_the_same() -> None:
    """No thread waits for another one that waits for it."""
    store = far(500, delay=0.0005)
    names = [f"a/{i}" for i in range(500)]

    def look(seed: int) -> bool:
        own = random.Random(seed)
        some = own.sample(names, 200)
        store.expect(some, own.choice([999, 10]), whole=own.random() < 0.5)
        flags = store.are_there(own.sample(names, 100))
        return all(flags) and all(store.read(name, 999) for name in some)

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(look, range(32)))


def test_a_dead_store_costs_one_deadline() -> None:
    store = far(delay=0.5)
    store.is_dead = True
    begun = time.monotonic()
    with pytest.raises(StoreError, match="far://bucket/a/1 cannot be read: the server is dead"):
        store.read("a/1", 999)
    for _ in range(50):
        with pytest.raises(StoreError, match="far://bucket is left out until it answers again"):
            store.read("a/1", 999)
        with pytest.raises(StoreError, match="is left out"):
            store.put("a/1", Content.of(b""))
    assert store.names("a") == []
    assert time.monotonic() - begun < 1.0
    assert store.calls["get"] == 1
    store.is_dead = False
    until = time.monotonic() + 5
    while store._breaker.is_open:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert store.read("a/1", 999) == DATA + b"\1"


def test_a_forked_child_uses_the_store() -> None:
    store = far()
    store.expect(["a/1"], 999)
    assert store.read("a/1", 999)
    child = os.fork()
    if not child:
        good = store.are_there(["a/1", "a/2", "a/x"]) == [True, True, False]
        os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("seed", range(3))
def test_random_calls_on_levels_that_fail(seed: int, tmp_path: Path) -> None:
    """What is read is what was put, or nothing; what was put durably is read as long as its level
    lives.
    """
    chance = random.Random(seed)
    server = Far()
    (tmp_path / "shm").mkdir()
    disk = Directory(tmp_path / "disk")
    tiers = Tiered([MemoryStore("m", 20_000, folder=tmp_path / "shm"), disk, server])
    put: dict[str, bytes] = {}
    lock = threading.Lock()

    def act(i: int) -> None:
        own = random.Random(f"{seed} {i}")
        name = f"{own.randrange(4)}/{own.randrange(40)}"
        content = name.encode() * own.randrange(1, 400) if name not in put else put[name]
        with lock:
            content = put.setdefault(name, content)
        server.is_dead = own.random() < 0.2
        match own.randrange(6):
            case 0 | 1:
                tiers.put(name, Content.of(content), durable=own.random() < 0.7)
            case 2:
                tiers.expect([name, *put][:9], 1 << 20, whole=own.random() < 0.7)
            case 3:
                try:
                    assert tiers.read(name, 1 << 20) in (None, content)
                except StoreError:
                    assert not disk.is_there(name)
            case 4:
                file = None
                try:
                    file = tiers.open(name)
                except StoreError:
                    assert not disk.is_there(name)
                if file is not None:
                    with file:
                        assert file.read() == content
            case 5:
                with suppress(StoreError):
                    tiers.delete(name)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(act, range(chance.randrange(300, 500))))
    server.is_dead = False
    time.sleep(0.1)
    for name, content in put.items():
        assert tiers.put(name, Content.of(content)) in (True, False)
    assert tiers.settle(20)
    for name, content in put.items():
        assert tiers.read(name, 1 << 20) == content
        assert disk.read(name, 1 << 20) == content
        assert server.files.get(name, content) == content
