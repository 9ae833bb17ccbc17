"""A store in a real Valkey server, and in one that fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from kvx_core import Directory, InvalidArgumentError, StoreError
from kvx_core.stores.blob_store import Content
from kvx_core.stores.tiers import Tiered, ValkeyStore
from tests.cli.stores import kvx
from tests.stores.engine import store_in
from tests.tiers.servers import FaultyProxy, valkey_server
from tests.tiers.test_lookups import CHUNK, PROMPT, load, save

DEADLINE = 1.0
_numbers = count()
Place = Callable[..., ValkeyStore]


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with valkey_server(tmp_path_factory.mktemp("valkey")) as found:
        yield found


@pytest.fixture
def proxy(port: int) -> Iterator[FaultyProxy]:
    found = FaultyProxy(port)
    yield found
    found.close()


@pytest.fixture
def place(proxy: FaultyProxy) -> Place:
    url = f"valkey://127.0.0.1:{proxy.port}/kvx*{next(_numbers)}"
    return lambda deadline=60.0: ValkeyStore(url, deadline=deadline)


def test_files(place: Place) -> None:
    store, other = place(), place()
    assert store.put("a/b c", Content.of(b"one"))
    assert not other.put("a/b c", Content.of(b"two"))
    assert other.put("a/d/e", Content.of(b""))
    assert store.read("a/d/e", 0) == b""
    assert store.read("a/none", 5) is None
    into = bytearray(2)
    found = store.fetch("a/b c", (into,), 0, 9)
    assert found is not None
    assert (bytes(into), found.num_bytes) == (b"on", 3)
    assert sorted(store.names("a")) == ["b c", "d"]
    assert other.names("") == ["a"]
    assert store.are_there(["a/b c", "a", "a/d/e"]) == [True, False, True]
    assert {each[1:] for each in store.files()} == {(3, "a/b c"), (0, "a/d/e")}
    assert all(abs(each[0] - time.time()) < 60 for each in store.files())
    assert other.replace("a/b c", Content.of(b"three"))
    assert store.read("a/b c", 9) == b"three"
    store.delete("a/d/e")
    assert store.names("a") == ["b c"]
    store.delete("a/b c")
    store.delete("a/b c")
    assert store.names("") == []


def test_prefixes(place: Place, tmp_path: Path) -> None:
    save(store_in(place()), PROMPT)
    load(store_in(place()), PROMPT)
    tiers = Tiered([Directory(tmp_path), place()])
    load(store_in(tiers), PROMPT)
    assert tiers.settle(30)
    load(store_in(tmp_path), PROMPT)


def test_commands(place: Place, tmp_path: Path) -> None:
    save(store_in(tmp_path), PROMPT)
    url = place().where
    kvx("copy", tmp_path, url)
    load(store_in(place()), PROMPT)
    assert "files are good" in kvx("verify", url).stdout
    assert "Deleted 101 entries" in kvx("trim", url, "1B").stdout
    assert store_in(place()).lookup(PROMPT).num_tokens == 0


@pytest.mark.parametrize("fault", ["drops", "freezes", "answers"])
def test_a_server_that_fails(fault: str, place: Place, proxy: FaultyProxy, tmp_path: Path) -> None:
    tiers = Tiered([Directory(tmp_path / "one"), place(DEADLINE)])
    store = store_in(tiers)
    save(store, PROMPT[: 2 * CHUNK])
    assert tiers.settle(30)
    setattr(proxy, fault, b"-ERR nonsense\r\n" if fault == "answers" else True)
    if fault == "drops":
        proxy.cut()
    begun = time.monotonic()
    assert store.lookup(range(5000, 5000 + 9 * CHUNK)).num_tokens == 0
    save(store, PROMPT)
    load(store, PROMPT)
    assert time.monotonic() - begun < 3 * DEADLINE + 6
    setattr(proxy, fault, b"" if fault == "answers" else False)
    proxy.cut()
    until = time.monotonic() + 120
    while True:
        save(store, range(8000 + time.monotonic_ns() % 1000, 10000)[:CHUNK])
        if tiers.settle(1):
            break
        assert time.monotonic() < until
    load(store_in(Tiered([Directory(tmp_path / "other"), place()])), PROMPT)


def test_values_that_are_too_large(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvx_core.stores.tiers import valkey

    monkeypatch.setattr(valkey, "_MOST_BYTES", 9)
    with pytest.raises(StoreError, match="it has 10 bytes, expected at most 9"):
        place().put("a/b", Content.of(bytes(10)))


def test_passwords(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with valkey_server(tmp_path, "a secret") as port:
        url = f"redis://127.0.0.1:{port}/kvx"
        with pytest.raises(StoreError, match=f"{url}/a/b cannot be read: .*[Aa]uth"):
            ValkeyStore(url).read("a/b", 9)
        monkeypatch.setenv("VALKEY_PASSWORD", "a secret")
        assert ValkeyStore(url).read("a/b", 9) is None


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("valkey://host", "names no place, expected one such as valkey://host:6379/kvx"),
        ("valkey:///kvx", "names no place"),
        ("valkey://host:x/kvx", "names no place"),
        ("http://host/kvx", "names no place"),
        ("valkey://me:secret@host/kvx", "the address of host/kvx has a user or a password in it"),
        ("valkey://host/kvx?db=3", "names no place"),
    ],
)
def test_urls_that_are_none(url: str, sentence: str) -> None:
    with pytest.raises(InvalidArgumentError, match=sentence) as raised:
        ValkeyStore(url)
    assert "secret" not in str(raised.value)
