"""kvx-store.json: what makes a store, whose it is, and which are refused."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from kvx_core import Directory, InvalidArgumentError, StoreError
from kvx_core.snapshot.secrets import Key, Secrets
from kvx_core.stores import config as config_module
from kvx_core.stores.blob_store import Write
from kvx_core.stores.config import StoreConfig, read_config, stored_config
from tests.stores_memory import InMemory

NEW, OLD, OTHER = b"n" * 32, b"o" * 32, b"x" * 32
NAME = "kvx-store.json"
NONE = Secrets()
BOTH = Secrets.of(OLD, NEW)


def mac_of(secret: bytes) -> str:
    """The name of the MAC that this secret makes."""
    return f"kvx-store.{Key(secret).name[:16]}.mac"


def of(blobs: InMemory, secrets: Secrets = NONE, **options: Any) -> StoreConfig | None:
    options = {"requested": None, "otherwise": 128, "waits": False} | options
    return stored_config(blobs, secrets, **options)


def described(**fields: object) -> InMemory:
    """A store with this description."""
    blobs = InMemory()
    blobs.files[NAME] = json.dumps({"format": 3, "chunk_tokens": 128} | fields).encode()
    return blobs


def writing(data: bytes) -> Write:
    def write(file: BinaryIO) -> None:
        file.write(data)

    return write


def test_what_a_new_store_says() -> None:
    for options, fields in (
        ({}, {"chunk_tokens": 128}),
        ({"otherwise": 64}, {"chunk_tokens": 64}),
        ({"requested": 3, "otherwise": 64}, {"chunk_tokens": 3}),
        ({"requested": 65536}, {"chunk_tokens": 65536}),
    ):
        blobs = InMemory()
        assert of(blobs, **options) == StoreConfig(fields["chunk_tokens"], None, False)
        assert json.loads(blobs.files[NAME]) == {"format": 3} | fields
        assert list(blobs.files) == [NAME]
    blobs = InMemory(max_bytes=1000)
    assert of(blobs, Secrets.of(None, NEW)) == StoreConfig(128, 1000, True)
    assert json.loads(blobs.files[NAME]) == {
        "format": 3,
        "chunk_tokens": 128,
        "max_bytes": 1000,
        "encryption": "AES-256-GCM",
    }
    assert of(InMemory(), requested=16) == of(described(chunk_tokens=16))
    with pytest.raises(InvalidArgumentError, match="chunk_tokens is 65537, expected at most 65536"):
        of(blobs, requested=65537)


def test_its_mac_is_as_the_format_says() -> None:
    """One for each sort of keys: nobody goes on with one right key, and one that is wrong."""
    blobs = InMemory()
    of(blobs, BOTH)
    assert set(blobs.files) == {NAME, mac_of(OLD), mac_of(NEW)}
    for secret in (OLD, NEW):
        key = hashlib.blake2b(secret, digest_size=64, person=b"kvx key").digest()
        data = b"kvx-store.json\0" + blobs.files[NAME]
        mac = hashlib.blake2b(data, key=key, digest_size=32, person=b"kvx json")
        assert blobs.files[mac_of(secret)] == mac.hexdigest().encode()


def keys(sort: str, *secrets: bytes) -> Secrets:
    return Secrets.of(secrets) if sort == "signing" else Secrets.of(None, secrets)


@pytest.mark.parametrize("sort", ["signing", "encryption"])
def test_keys_change_while_engines_run(sort: str) -> None:
    blobs = InMemory()
    made = of(blobs, keys(sort, OLD))
    assert of(blobs, keys(sort, NEW, OLD)) == made
    assert set(blobs.files) == {NAME, mac_of(OLD), mac_of(NEW)}
    assert of(blobs, keys(sort, OLD)) == made  # an engine that still has the old key alone
    assert of(blobs, keys(sort, NEW)) == made
    del blobs.files[mac_of(OLD)]
    assert of(blobs, keys(sort, NEW)) == made
    for wrong in (keys(sort, OLD), keys(sort, OTHER), keys(sort, OTHER, OLD)):
        message = f"kvx-store.json is not authenticated by the {sort} key that is given: kvx-store"
        with pytest.raises(StoreError, match=message):
            of(blobs, wrong)
    assert set(blobs.files) == {NAME, mac_of(NEW)}


def test_a_wrong_mac_of_the_new_key_is_mended_by_who_has_the_old_one() -> None:
    blobs = InMemory()
    made = of(blobs, Secrets.of(OLD))
    for wrong in (b"", b"0" * 64, b"0" * 65):
        blobs.files[mac_of(NEW)] = wrong
        with pytest.raises(StoreError, match="not authenticated by the signing key"):
            of(blobs, Secrets.of(NEW))
        assert of(blobs, Secrets.of([NEW, OLD])) == made
        assert of(blobs, Secrets.of(NEW)) == made


def test_whoever_changes_a_description_keeps_engines_with_keys_from_the_store() -> None:
    for secrets in (Secrets.of(OLD), Secrets.of(None, OLD), BOTH):
        blobs = InMemory()
        of(blobs, secrets)
        good = dict(blobs.files)
        changed = good[NAME].replace(b"128", b"256")
        for files in (
            good | {NAME: changed},
            good | {NAME: good[NAME] + b" "},
            {NAME: good[NAME]},
            {NAME: good[NAME]} | {name: b"0" * 64 for name in good if name != NAME},
        ):
            blobs.files = dict(files)
            with pytest.raises(StoreError, match="Who has written it has another key, or none"):
                of(blobs, secrets)
            assert blobs.files == files
            assert read_config(blobs) is not None
        blobs.files = dict(good)
        assert of(blobs, secrets) is not None


def test_encrypted_or_not() -> None:
    encrypted = InMemory()
    of(encrypted, BOTH)
    with pytest.raises(StoreError, match=r"no encryption key is given, and the store is encrypted"):
        of(encrypted, Secrets.of(OLD))
    with pytest.raises(StoreError, match=r"an encryption key is given, and the store is not encry"):
        of(described(), Secrets.of(None, OLD))
    with pytest.raises(StoreError, match="not authenticated by the encryption key that is given"):
        of(encrypted, Secrets.of(OLD, OTHER))
    with pytest.raises(StoreError, match="not authenticated by the signing key that is given"):
        of(encrypted, Secrets.of(OTHER, NEW))
    assert read_config(encrypted) == StoreConfig(128, None, True)


@pytest.mark.parametrize("secrets", [NONE, BOTH], ids=["plain", "keys"])
@pytest.mark.parametrize(
    ("found", "number"), [(1, 1), (2, 2), ("1 AES-256-GCM", 1), ("2 AES-256-GCM", 2)]
)
def test_earlier_formats(found: object, number: int, secrets: Secrets) -> None:
    message = (
        f"kvx-store.json is that of a store of format {number}, which an earlier version of KVX "
        "has written, expected format 3. Delete the directory, or use another: what it holds is "
        "computed again"
    )
    with pytest.raises(StoreError, match=f"^{re.escape(message)}$"):
        of(described(format=found), secrets)


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b"7", b'"text"', b"null", b"{}", b'{"format": 3}', b"\xff", b"[" * 4000,
     b'{"format": 3, "chunk_tokens": 16, "chunk_tokens": 32}', b" " * 4097],
)  # fmt: skip
def test_what_is_no_description(text: bytes) -> None:
    blobs = InMemory()
    blobs.files[NAME] = text
    with pytest.raises(StoreError, match=r"kvx-store.json (is not the description|has more than)"):
        of(blobs)
    assert blobs.files == {NAME: text}


@pytest.mark.parametrize(
    "fields",
    [{"format": 4}, {"format": 0}, {"format": -1}, {"format": "3"}, {"format": 3.0},
     {"format": True}, {"format": None}, {"format": [3]}, {"format": {"3": 3}},
     {"chunk_tokens": 0}, {"chunk_tokens": -16}, {"chunk_tokens": 65537}, {"chunk_tokens": 16.0},
     {"chunk_tokens": "16"}, {"chunk_tokens": True}, {"chunk_tokens": [16]},
     {"max_bytes": 0}, {"max_bytes": -1}, {"max_bytes": 1.5}, {"max_bytes": True},
     {"max_bytes": "1GB"}, {"encryption": "AES"}, {"encryption": ""}, {"encryption": False},
     {"encryption": ["AES-256-GCM"]}],
    ids=str,
)  # fmt: skip
def test_fields_that_are_wrong(fields: dict[str, object]) -> None:
    (name,) = fields
    with pytest.raises(StoreError, match=f"kvx-store.json has .*{name} .*, expected"):
        of(described(**fields))


def test_chunks_that_nobody_asks_for() -> None:
    assert of(described(chunk_tokens=65536)) == StoreConfig(65536, None, False)
    assert of(described(chunk_tokens=5), requested=5) == StoreConfig(5, None, False)
    with pytest.raises(StoreError, match=r"has chunk_tokens 15, expected 16 to 65536\. Set chunk_"):
        of(described(chunk_tokens=15))
    with pytest.raises(StoreError, match=r"chunk_tokens is 64, expected 128 as kvx-store"):
        of(described(), requested=64)


def test_a_store_that_another_process_is_making_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its MAC comes a moment after its description."""
    monkeypatch.setattr(config_module, "_WAIT_SECONDS", 60.0)
    made = InMemory()
    of(made, BOTH)
    blobs = InMemory()
    blobs.files[NAME] = made.files[NAME]
    with pytest.raises(StoreError, match="not authenticated"):
        of(blobs, BOTH)

    def finish() -> None:
        for secret in (OLD, NEW):
            time.sleep(0.02)
            blobs.put(mac_of(secret), writing(made.files[mac_of(secret)]))

    thread = threading.Thread(target=finish)
    thread.start()
    assert of(blobs, BOTH, waits=True) == StoreConfig(128, None, True)
    thread.join()


def test_of_processes_that_make_a_store_at_once_all_use_it(tmp_path: Path) -> None:
    found: list[StoreConfig | None] = []
    ready = threading.Barrier(8)

    def make(i: int) -> None:
        blobs = Directory(tmp_path, max_bytes=1000 + i)
        ready.wait()
        found.append(stored_config(blobs, BOTH, None, 128))

    threads = [threading.Thread(target=make, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1


@pytest.mark.parametrize("secrets", [Secrets.of(OLD), BOTH])
def test_a_writer_may_end_after_any_of_its_files(secrets: Secrets) -> None:
    """Whoever comes next uses the store; also with other settings, which another MAC is of."""

    class Ending(InMemory):
        left = 0

        def put(self, name: str, write: Write, *, durable: bool = True) -> bool:
            if not self.left:
                raise StoreError(f"{name} cannot be written: No space left on device")
            self.left -= 1
            return super().put(name, write, durable=durable)

    num_files = len(made_by(secrets).files)
    for left in range(num_files + 1):
        for tokens in (64, 256):
            ending = Ending()
            ending.left = left
            stored_config(ending, secrets, None, 64)
            blobs = InMemory()
            blobs.files = ending.files
            config = stored_config(blobs, secrets, None, tokens)
            assert config is not None
            assert config.chunk_tokens == (64 if left == num_files else tokens)
            assert len(blobs.files) == num_files
            assert stored_config(blobs, secrets, None, 128) == config


def made_by(secrets: Secrets) -> InMemory:
    blobs = InMemory()
    assert stored_config(blobs, secrets, None, 128) is not None
    return blobs


def test_a_store_that_this_process_may_only_read() -> None:
    class ReadOnly(InMemory):
        def put(self, name: str, write: Write, *, durable: bool = True) -> bool:
            raise StoreError(f"{name} cannot be written: Permission denied")

    blobs = ReadOnly()
    assert of(blobs) is None
    made = InMemory()
    config = of(made, Secrets.of(OLD))
    blobs.files = made.files
    assert of(blobs, Secrets.of([NEW, OLD])) == config
