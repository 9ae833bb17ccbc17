"""A store in a real S3 server, and behind a proxy that makes faults."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest

from kvx_core import Directory, StoreError
from kvx_core.stores.blob_store import Content
from kvx_core.stores.tiers import ObjectStore, Tiered
from tests.stores.engine import Engine, store_in
from tests.tiers.servers import BUCKET, FaultyProxy, S3Server
from tests.tiers.test_lookups import CHUNK, LENGTH, PROMPT, load, save

DEADLINE = 1.0  # of stores whose server fails
Bucket = Callable[..., ObjectStore]
_numbers = count()


@pytest.fixture
def proxy(server: S3Server) -> Iterator[FaultyProxy]:
    found = FaultyProxy(server.port)
    yield found
    found.close()


@pytest.fixture
def bucket(server: S3Server, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """An empty place in the bucket, behind the proxy."""
    for name, value in server.environment(proxy.port).items():
        monkeypatch.setenv(name, value)
    url = f"s3://{BUCKET}/{next(_numbers)}"
    return lambda deadline=60.0: ObjectStore(url, deadline=deadline)


def test_files(bucket: Bucket) -> None:
    store, other = bucket(), bucket()
    assert store.put("a/b c", Content.of(b"one"))
    assert not other.put("a/b c", Content.of(b"two"))  # a condition that the server keeps
    assert other.read("a/b c", 3) == b"one"
    assert other.put("a/empty", Content.of(b""))
    assert store.read("a/empty", 0) == b""
    into = bytearray(2)
    found = store.fetch("a/b c", (into,), 0, 9)
    assert found is not None
    assert (bytes(into), found.num_bytes) == (b"on", 3)
    assert sorted(store.names("a")) == ["b c", "empty"]
    assert store.names("") == ["a"]
    assert store.are_there(["a/b c", "a", "a/b"]) == [True, False, False]
    assert other.replace("a/b c", Content.of(b"three"))
    assert store.read("a/b c", 9) == b"three"
    store.delete("a/b c")
    store.delete("a/b c")
    assert other.read("a/b c", 9) is None


def test_prefixes(bucket: Bucket, tmp_path: Path) -> None:
    save(store_in(bucket()), PROMPT)
    load(store_in(bucket()), PROMPT)
    tiers = Tiered([Directory(tmp_path), bucket()])
    load(store_in(tiers), PROMPT)
    assert tiers.settle(30)
    load(store_in(tmp_path), PROMPT)


def drop(proxy: FaultyProxy) -> None:
    proxy.drops = True
    proxy.cut()


def freeze(proxy: FaultyProxy) -> None:
    proxy.freezes = True


def busy(proxy: FaultyProxy) -> None:
    proxy.answers = b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\n\r\n"


def nonsense(proxy: FaultyProxy) -> None:
    proxy.answers = b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\nwhatnot"


@pytest.mark.parametrize("fault", [drop, freeze, busy, nonsense])
def test_a_server_that_fails(
    fault: Callable[[FaultyProxy], None],
    bucket: Bucket,
    proxy: FaultyProxy,
    tmp_path: Path,
) -> None:
    """It costs a deadline, then nothing; what was stored meanwhile reaches it in the end."""
    tiers = Tiered([Directory(tmp_path / "one"), bucket(DEADLINE)])
    store = store_in(tiers)
    save(store, PROMPT[: 2 * CHUNK])
    assert tiers.settle(30)
    fault(proxy)
    begun = time.monotonic()
    assert store.lookup(range(5000, 5000 + LENGTH)).num_tokens == 0
    save(store, PROMPT)
    load(store, PROMPT)
    assert time.monotonic() - begun < 3 * DEADLINE + 6
    tiers.settle(3 * DEADLINE)
    begun = time.monotonic()
    for i in range(20):
        assert store.lookup(range(9000 + 99 * i, 9050 + 99 * i)).num_tokens == 0
    assert time.monotonic() - begun < 4 * DEADLINE
    proxy.freezes = proxy.drops = False
    proxy.answers = b""
    proxy.cut()
    until = time.monotonic() + 120
    while True:
        save(store, range(7000, 7000 + 3 * CHUNK))
        if tiers.settle(1):
            break
        assert time.monotonic() < until
        time.sleep(0.2)
        save(store, range(8000 + time.monotonic_ns() % 1000, 10000)[:CHUNK])
    other = Tiered([Directory(tmp_path / "other"), bucket()])
    load(store_in(other), range(7000, 7000 + 3 * CHUNK))
    load(store_in(other), PROMPT)


def test_a_slow_server_delays_no_other_answer(bucket: Bucket, proxy: FaultyProxy) -> None:
    store = bucket(DEADLINE)
    store.put("a/b", Content.of(b"x"))
    proxy.delay = 5 * DEADLINE
    begun = time.monotonic()
    with pytest.raises(StoreError, match=f"s3://{BUCKET}/.*/a/b cannot be read"):
        store.read("a/b", 9)
    assert time.monotonic() - begun < 2 * DEADLINE
    begun = time.monotonic()
    with pytest.raises(StoreError, match="is left out until it answers again"):
        store.read("a/b", 9)
    assert time.monotonic() - begun < 0.5


def test_bits_that_flip_on_the_way(bucket: Bucket, proxy: FaultyProxy, tmp_path: Path) -> None:
    """What arrives is what was stored, or nothing is taken."""
    prompt = PROMPT[: 8 * CHUNK]
    save(store_in(bucket()), prompt)
    for kind in ("far", "disk"):
        levels = [Directory(tmp_path)] if kind == "disk" else []
        store = store_in(Tiered([*levels, bucket()]))
        assert store.lookup(prompt[: 3 * CHUNK]).num_tokens  # the records are read
        proxy.flips = True
        match = store.lookup(prompt)
        engine = Engine(seed=2, num_tokens=len(prompt))
        with suppress(StoreError):
            store.load(match, 0, match.num_tokens, engine.sections())
            engine.check(prompt, 0, match.num_tokens)
        proxy.flips = False
        left = store_in(Tiered([*levels, bucket()]))
        load(left, prompt, left.lookup(prompt).num_tokens)
        save(left, prompt)
        load(left, prompt)


def test_credentials_that_are_wrong(bucket: Bucket, proxy: FaultyProxy) -> None:
    store = bucket()
    proxy.answers = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n"
    with pytest.raises(StoreError, match="cannot be written"):
        store.put("a/b", Content.of(b"x"))


def test_a_process_that_was_forked_too_late(bucket: Bucket) -> None:
    """obstore hangs there: KVX says so, and leaves the store out."""
    store = bucket()
    assert store.put("a/b", Content.of(b"x"))
    child = os.fork()
    if not child:
        signal.alarm(20)
        status = 1
        try:
            store.read("a/b", 9)
        except StoreError as error:
            status = 0 if "forked off one that has used an object store" in str(error) else 2
        os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert store.read("a/b", 9) == b"x"
