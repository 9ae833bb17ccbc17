"""Files that were broken or written to deceive: nothing but StoreError, no memory, no descriptor.

tests/hostile.py makes them.
"""

from __future__ import annotations

import hashlib
import os
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kvx_core import Snapshot, StoreError
from kvx_core.snapshot import CorruptError
from kvx_core.snapshot.record import MAX_HEADER_BYTES
from kvx_core.stores.strict_json import strict_json
from tests.descriptors import open_files
from tests.hostile import hostile_files
from tests.hostile_entries import hostile_entries
from tests.snapshot import store_reader
from tests.stores.engine import Engine, save, store_in
from tests.stores.test_prefix import files_of

NUM_TOKENS = 5
MAX_SECONDS = 5  # of the processor, for one file
MAX_BYTES = 160 << 20  # more than the longest header and what is made of it


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A snapshot."""
    path = tmp_path_factory.mktemp("good") / "snapshot.safetensors"
    snapshot = Snapshot.capture(range(NUM_TOKENS), Engine().compute(range(NUM_TOKENS)).sections())
    assert snapshot is not None
    snapshot.save(path)
    return path


@pytest.fixture(scope="module")
def entry(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of an entry of a store."""
    root = tmp_path_factory.mktemp("entry")
    save(store_in(root), range(NUM_TOKENS))
    (path,) = files_of(root)
    return path


@pytest.fixture(autouse=True)
def descriptors() -> Iterator[None]:
    """No test leaves a descriptor open."""
    before = open_files()
    yield
    assert not open_files() - before


def bytes_of(engine: Engine) -> bytes:
    return engine.cache.storages[0].numpy().tobytes()


def is_short(name: str, error: Exception) -> None:
    """And is one line that controls no terminal."""
    assert len(str(error)) < 10_000, name
    assert str(error).isprintable(), name


@pytest.mark.parametrize("kind", ["good", "entry"])
def test_the_same_files_every_time(kind: str, request: pytest.FixtureRequest) -> None:
    data = request.getfixturevalue(kind).read_bytes()
    files = hostile_files if kind == "good" else hostile_entries
    digests = {name: hashlib.sha256(file).digest() for name, file in files(data)}
    assert len(digests) > 500
    assert hashlib.sha256(data).digest() not in digests.values()
    for name, file in files(data):
        assert hashlib.sha256(file).digest() == digests.pop(name), name
    assert not digests


def test_numbers_of_more_than_64_bits_are_none() -> None:
    """Nor do they take long: Python's integers have any number of digits."""
    assert strict_json(b'{"a": [999999999999999999, -999999999999999999, "%s"]}' % (b"9" * 99)) == {
        "a": [10**18 - 1, 1 - 10**18, "9" * 99]
    }
    for text in (b"9" * 19, b"-" + b"1" * 19, b'{"a": %s}' % (b"9" * 4000), b"0.%s" % (b"1" * 19)):
        with pytest.raises(ValueError, match="does not fit into 64 bits"):
            strict_json(text)


def test_snapshots_of_hostile_files(good: Path, tmp_path: Path) -> None:
    """What is taken is what the page's own reader finds in the file, too."""
    path = tmp_path / "file"
    refused = peak = 0
    for name, data in hostile_files(good.read_bytes()):
        path.write_bytes(data)
        tracemalloc.start()
        begin = time.process_time()
        try:
            with Snapshot.open(path) as snapshot:
                found = snapshot.read(snapshot.header.layers)
        except StoreError as error:
            is_short(name, error)
            refused += 1
        except Exception as error:
            raise AssertionError(name) from error
        else:
            is_same(name, found, data)
        assert time.process_time() - begin < MAX_SECONDS, name
        peak = max(peak, tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert refused > 1000
    assert peak < MAX_BYTES


def is_same(name: str, found: Snapshot, data: bytes) -> None:
    expected = store_reader.read(data, None)
    assert (found.header.start, found.header.prefix) == (expected.start, expected.kind["prefix"])
    assert found.tokens.tolist() == expected.tokens, name
    assert found.tensors.keys() == expected.tensors.keys(), name
    for tensor, each in expected.tensors.items():
        assert found.array(tensor).tobytes() == each.data, name


@pytest.mark.parametrize("num_tokens", [NUM_TOKENS + 1, MAX_HEADER_BYTES // 16, (1 << 32) - 1])
def test_tokens_that_are_none_of_a_disk(num_tokens: int, good: Path, tmp_path: Path) -> None:
    """A file with holes may say any number, and have any length."""
    path = tmp_path / "file"
    data = bytearray(good.read_bytes())
    at = 8 + len(b'{"__metadata__":{"kvx":"') + 24
    data[at : at + 8] = num_tokens.to_bytes(4, "little").hex().encode()
    path.write_bytes(data)
    os.truncate(path, 1 << 40)
    tracemalloc.start()
    with pytest.raises(CorruptError) as caught:
        Snapshot.open(path, num_tokens=NUM_TOKENS)
    assert f"has {num_tokens} tokens, expected {NUM_TOKENS}" in str(caught.value)
    with pytest.raises(CorruptError) as caught:
        Snapshot.open(path)
    more = num_tokens > NUM_TOKENS + 1
    assert (f"has {num_tokens} tokens and " in str(caught.value)) == more
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    data[:8] = (MAX_HEADER_BYTES + 1).to_bytes(8, "little")
    path.write_bytes(data)
    os.truncate(path, 1 << 40)
    with pytest.raises(CorruptError, match=f"expected one of at most {MAX_HEADER_BYTES}"):
        Snapshot.open(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_stores_of_hostile_files(entry: Path, tmp_path: Path) -> None:
    """A lookup finds nothing, or the load that follows is refused, or right to the byte."""
    store, tokens = store_in(tmp_path), range(NUM_TOKENS)
    save(store, tokens)
    (path,) = files_of(tmp_path)
    match = store.lookup(tokens)
    empty, whole = bytes_of(Engine(seed=1)), bytes_of(Engine(seed=1).compute(tokens))
    engine = Engine(seed=1)
    for name, data in hostile_entries(entry.read_bytes()):
        begin = time.process_time()
        for found in (None, match):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            try:
                found = found or store_in(tmp_path).lookup(tokens)
                if found.num_tokens and not name.startswith("forged"):
                    store.load(found, 0, found.num_tokens, engine.sections())
                    assert bytes_of(engine) == whole, name
                    engine = Engine(seed=1)
            except StoreError as error:
                is_short(name, error)
                assert bytes_of(engine) == empty, name
            except Exception as error:
                raise AssertionError(name) from error
        assert time.process_time() - begin < MAX_SECONDS, name


def test_a_hostile_file_makes_room_for_a_good_one(entry: Path, tmp_path: Path) -> None:
    """What is found to be of no use is gone, by the lookup or by the load, and stored again."""
    store, tokens, engine = store_in(tmp_path), range(NUM_TOKENS), Engine(seed=1)
    save(store, tokens)
    (path,) = files_of(tmp_path)
    for name, data in hostile_entries(entry.read_bytes(), mutations=0):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        # Another start is refused by the load, and not bad; none that is this large.
        is_good = name.startswith("forged") or (name.startswith("start") and len(name) < 25)
        reader = store_in(tmp_path)
        if match := reader.lookup(tokens):
            with suppress(StoreError):
                reader.load(match, 0, match.num_tokens, engine.sections())
        assert path.exists() is (is_good and "unsealed" not in name), name
    path.unlink(missing_ok=True)
    save(store, tokens)
    assert store_in(tmp_path).lookup(tokens).num_tokens == NUM_TOKENS


def test_pipes_and_other_things_that_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "other")
    (tmp_path / "other").write_bytes(b"")
    for path in (tmp_path / "pipe", tmp_path, tmp_path / "link", Path("/dev/zero")):
        with pytest.raises(StoreError, match=str(path)) as caught:
            Snapshot.open(path)
        assert not isinstance(caught.value, CorruptError)


def test_a_store_whose_description_is_hostile(good: Path, tmp_path: Path) -> None:
    for name, data in hostile_files(good.read_bytes(), header_limit=1 << 16, mutations=50):
        (tmp_path / "kvx-store.json").write_bytes(data)
        try:
            store_in(tmp_path, chunk_tokens=None)
        except StoreError as error:
            is_short(name, error)
        else:
            raise AssertionError(name)
