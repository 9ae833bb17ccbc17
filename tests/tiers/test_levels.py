"""What `tiers` may name, and what the levels of a store have to agree on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import obstore
import pytest
from pydantic import ValidationError

from kvx_core import Directory, InvalidArgumentError, StoreError
from kvx_core.connector.settings import StoreSettings
from kvx_core.stores.blob_store import Content
from kvx_core.stores.config import read_config
from kvx_core.stores.tiers import MemoryStore, ObjectStore, Tiered, Tiers, objects
from kvx_core.stores.tiers.levels import join_levels
from tests.documents import blocks
from tests.native import ROOT
from tests.stores.engine import store_in
from tests.tiers.far import Far


def test_tiers() -> None:
    found = Tiers.parse(["memory:8GB", "/nvme/kvx", "s3://bucket/prefix"])
    assert found == (8 * 10**9, Path("/nvme/kvx"), ("s3://bucket/prefix",))
    assert Tiers.parse(["~/kvx"]).path == Path.home() / "kvx"
    assert Tiers.parse(["gs://bucket"]) == (None, None, ("gs://bucket",))
    assert Tiers.parse(["valkey://h/x", "s3://b"]).urls == ("valkey://h/x", "s3://b")
    assert Tiers.parse(["memory:1", "az://account/container/x"]).memory == 1


@pytest.mark.parametrize(
    ("tiers", "sentence"),
    [
        ([], "tiers is [], expected a directory or a URL in it"),
        (["memory:8GB"], "expected a directory or a URL in it: memory alone"),
        ([""], "tiers[0] is '', expected \"memory:8GB\", a directory, or a URL"),
        (["memory:"], "tiers[0] is '', expected a number of bytes greater than 0"),
        (["memory:lots", "/x"], "tiers[0] is 'lots', expected a number of bytes"),
        (
            ["ftp://host/x"],
            "tiers[0] is 'ftp://host/x', expected one of s3, gs, az, valkey",
        ),
        (["http://host/x"], "expected one of s3, gs, az, valkey, valkeys, redis, rediss before"),
        (["file:///x"], "expected one of s3, gs, az, valkey, valkeys, redis, rediss before"),
        (["s3://b", "/x"], "tiers[1] is '/x' behind 's3://b', expected memory, then a directory"),
        (["/x", "memory:1GB"], "tiers[1] is 'memory:1GB' behind '/x'"),
        (["/x", "/y"], "tiers[1] is '/y' behind '/x', expected memory, then a directory, a"),
        (["s3://b", "s3://c"], "each at most once"),
        (["s3://b", "valkey://h/x"], "tiers[1] is 'valkey://h/x' behind 's3://b'"),
    ],
)
def test_tiers_that_are_none(tiers: list[str], sentence: str) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        Tiers.parse(tiers)
    assert sentence in str(raised.value)
    with pytest.raises((ValidationError, InvalidArgumentError)) as of_settings:
        StoreSettings(tiers=tuple(tiers))
    assert sentence in str(of_settings.value)


def test_a_path_or_tiers() -> None:
    with pytest.raises(ValidationError, match="neither path nor tiers is set, expected one of"):
        StoreSettings()
    with pytest.raises(ValidationError, match="path and tiers are both set, expected one of them"):
        StoreSettings(path=Path("/x"), tiers=("/y",))


def settings(**fields: Any) -> StoreSettings:
    return StoreSettings.model_validate(fields)


def test_settings_open_their_tiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = tmp_path / "shm"
    shared.mkdir()
    monkeypatch.setattr(MemoryStore.__init__, "__kwdefaults__", {"folder": shared})
    tiers = ["memory:1MB", str(tmp_path / "disk")]
    opened = settings(tiers=tiers, max_bytes="1GB")
    blobs = opened._blobs()
    assert isinstance(blobs, Tiered)
    assert blobs.max_bytes == 10**9
    assert isinstance(blobs.levels[0], MemoryStore)
    assert blobs.levels[0].max_bytes == 10**6
    assert not blobs.is_far
    told = opened.told("f" * 64, 128)
    assert f"in memory (0.0 GB), {tmp_path}/disk: model" in told
    assert isinstance(settings(tiers=[str(tmp_path / "disk")])._blobs(), Directory)
    bucket = settings(tiers=["s3://bucket/prefix"], tier_seconds=2.5)
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    far = bucket._blobs()
    assert isinstance(far, ObjectStore)
    assert far.deadline == 2.5
    assert far.is_far
    assert "in s3://bucket/prefix: model" in bucket.told("f" * 64, 128)
    assert bucket.limit_warning() == ""
    bucket.check(writes=True)


def test_the_page(tmp_path: Path) -> None:
    """docs/tiers.md: the settings are read, and the store is made."""
    said = {block.language: block.text for block in blocks(ROOT / "docs" / "tiers.md")}
    assert settings(**json.loads(said["json"]))._tiers.urls == ("s3://bucket/kvx",)
    code = said["python"].replace("/nvme/kvx", str(tmp_path / "disk"))
    code = code.replace("MemoryStore(", "memory_store(").replace("8 * 10**9", "8 * 10**6")
    names: dict[str, Any] = {
        "memory_store": lambda *of: MemoryStore(*of, folder=tmp_path),
    }
    exec(code, names)
    assert store_in(names["blobs"]).chunk_tokens == 16


def test_tiers_that_were_made_with_other_chunks(tmp_path: Path) -> None:
    far = Far()
    store_in(far, chunk_tokens=32)
    store_in(tmp_path, chunk_tokens=16)
    tiers = Tiered([Directory(tmp_path), far])
    config = read_config(tiers)
    assert config is not None
    with pytest.raises(StoreError, match=r"far://bucket/kvx-store.json has chunk_tokens 32"):
        join_levels(tiers, config)
    far.is_dead = True
    join_levels(tiers, config)  # what does not answer is not judged


def test_an_order_that_is_none() -> None:
    with pytest.raises(InvalidArgumentError, match="a far store before a near one"):
        Tiered([Far(), Directory("/nowhere")])
    with pytest.raises(InvalidArgumentError, match="levels is empty"):
        Tiered([])


def test_memory_of_others(tmp_path: Path) -> None:
    """A folder in shared memory that others can write is not used."""
    own = tmp_path / f"kvx-{os.geteuid()}"
    own.mkdir(mode=0o755)
    with pytest.raises(InvalidArgumentError, match="mode 0755, expected a directory of user"):
        MemoryStore("x", 1, folder=tmp_path)
    own.rmdir()
    own.symlink_to(tmp_path)
    with pytest.raises(InvalidArgumentError, match="expected a directory of user"):
        MemoryStore("x", 1, folder=tmp_path)
    own.unlink()
    own.write_bytes(b"")
    with pytest.raises(InvalidArgumentError, match="File exists"):
        MemoryStore("x", 1, folder=tmp_path)


def test_memory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="larger --shm-size, or give the tier less"):
        MemoryStore("x", 1 << 60, folder=tmp_path)
    with pytest.raises(InvalidArgumentError, match="cannot be used: No such file"):
        MemoryStore("x", 1, folder=tmp_path / "none")


def test_a_url_that_is_none() -> None:
    for url in ("s3:///", "gs://", "az://"):
        with pytest.raises(InvalidArgumentError, match="Expected a URL such as s3://bucket"):
            ObjectStore(url)


def test_large_objects_are_sent_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "_MULTIPART_BYTES", 1 << 20)
    store = ObjectStore("memory://bucket", client=obstore.store.MemoryStore())
    data = bytes(range(256)) * 8192
    assert store.put("a/b", Content.of(data))
    assert not store.put("a/b", Content.of(data[:-1]))
    assert store.read("a/b", len(data)) == data


def test_each_level_can_be_used_alone(tmp_path: Path) -> None:
    """So that a server that is dead at the next start does not change the chunks."""
    far = Far()
    store_in(far, chunk_tokens=32)
    tiers = Tiered([Directory(tmp_path), far])
    config = read_config(tiers)
    assert config is not None
    join_levels(tiers, config)
    assert read_config(Directory(tmp_path)) == config
    other = Far()
    tiers = Tiered([Directory(tmp_path), other])
    join_levels(tiers, config)
    assert tiers.settle(10)
    assert read_config(other) == config


def test_files_without_an_end_are_not_copied(tmp_path: Path) -> None:
    """Who may write to a level makes files as large as it likes."""
    far = Far({"a/b": bytes(5000)})
    tiers = Tiered([Directory(tmp_path), far])
    tiers.expect(["a/b"], 4999, whole=True)
    assert tiers.settle(10)
    assert not Directory(tmp_path).is_there("a/b")
    views = bytearray(10), bytearray(10)
    found = far.fetch("a/b", views, 20, 4999)
    assert found is not None
    assert (found.num_bytes, bytes(views[0])) == (5000, bytes(10))


def test_a_right_that_is_missing_ends_no_reading() -> None:
    class ReadOnly(Far):
        refusals = (PermissionError,)

        def _call_put(self, name: str, parts: Any) -> bool:
            raise PermissionError("no right to put")

    far = ReadOnly({"a/b": b"x"})
    with pytest.raises(StoreError, match="far://bucket/a/c cannot be written: no right to put"):
        far.put("a/c", Content.of(b"x"))
    assert far.read("a/b", 9) == b"x"
