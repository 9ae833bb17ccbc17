"""`kvx store` on a store in S3, and copies between it and a directory."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from kvx_core.snapshot import Precision
from kvx_core.stores import Directory, PrefixStore
from kvx_core.stores.blob_store import Content
from kvx_core.stores.tiers import ObjectStore
from kvx_core.types import DType
from tests.cli.stores import all_files, kvx, prefix_store, prompt_of, save
from tests.tiers.servers import BUCKET, S3Server

_numbers = count()


@pytest.fixture
def url(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/cli-{next(_numbers)}"


def facts(*arguments: object, code: int = 0) -> Any:
    return json.loads(kvx(*arguments, "--json", code=code).stdout)


def by_space(spaces: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(spaces, key=lambda space: str(space["space"]))


def test_a_store_goes_to_s3_and_back(url: str, tmp_path: Path) -> None:
    here, back = tmp_path / "here", tmp_path / "back"
    store = prefix_store(here)
    save(store, 1)
    save(store.salted("tenant"), 2)
    files = all_files(here)
    assert facts("copy", here, url)["num_copied"] == len(files)
    assert "0 files, 0 B; " in kvx("copy", here, url).stdout
    for ours, theirs in zip(*(by_space(facts("ls", place)) for place in (here, url)), strict=True):
        for name in ("space", "model", "salt", "num_entries", "num_tokens", "precisions"):
            assert ours[name] == theirs[name], name
    ours, theirs = facts("stat", here), facts("stat", url)
    assert theirs["path"] == url
    assert theirs["free_bytes"] is None
    for name in ("num_spaces", "num_files", "num_entries", "num_marks", "num_tokens"):
        assert ours[name] == theirs[name], name
    assert f"{len(files)} of {len(files)} files are good." in kvx("verify", url).stdout
    assert facts("copy", url, back, "--salt", "tenant")["failed"] == []
    assert prefix_store(back).salted("tenant").lookup(prompt_of(2)).num_tokens == 40
    assert prefix_store(back).lookup(prompt_of(1)).num_tokens == 0
    kvx("copy", url, back)
    assert {path.relative_to(back): path.read_bytes() for path in all_files(back)} == {
        path.relative_to(here): path.read_bytes() for path in files
    }


def test_what_is_wrong_in_s3_is_found_and_deleted(url: str, tmp_path: Path) -> None:
    store = prefix_store(tmp_path)
    save(store, 1)
    kvx("copy", tmp_path, url)
    bucket = ObjectStore(url)
    name = store.lookup(prompt_of(1)).spans[0].names[0]
    raw = bucket.read(name, 1 << 20)
    assert raw is not None
    bucket.replace(name, Content.of(raw[:-1] + bytes([raw[-1] ^ 1])))
    found = facts("verify", url, code=1)
    assert [one["file"] for one in found["bad"]] == [name]
    kvx("verify", url, "--delete", code=1)
    assert not bucket.is_there(name)
    kvx("verify", url)
    kvx("copy", tmp_path, url)
    assert bucket.read(name, 1 << 20) == raw


def test_files_go_from_s3(url: str, tmp_path: Path) -> None:
    store = prefix_store(tmp_path)
    for seed in range(4):
        save(store.salted(f"{seed}"), seed)
    kvx("copy", tmp_path, url)
    assert facts("rm", url, "--salt", "1")["num_entries"] == 3
    assert len(facts("ls", url)) == 3
    before = facts("stat", url)["bytes"]
    kvx("trim", url, f"{before // 2}B")
    assert facts("stat", url)["bytes"] < before
    assert facts("rm", url, "--older", "1h")["num_files"] == 0


def test_places_that_are_none(url: str, tmp_path: Path) -> None:
    said = " ".join(kvx("ls", url, code=2).output.split())
    assert f"{url} is no store: it has no kvx-store.json" in said
    assert "expected one of s3, gs, az, valkey" in kvx("ls", "ftp://x/y", code=2).output
    save(prefix_store(tmp_path / "a"), 1)
    PrefixStore(
        Directory(tmp_path / "b"),
        fingerprint="b" * 64,
        num_layers=2,
        total_kv_heads=3,
        precision=Precision.of(DType.F32),
        chunk_tokens=32,
    )
    said = " ".join(kvx("copy", tmp_path / "a", tmp_path / "b", code=2).output.split())
    assert "TO has chunk_tokens 32 and is not encrypted, expected 16 and not encrypted" in said
    said = " ".join(kvx("copy", tmp_path / "a", url, "--model", "f" * 64, code=2).output.split())
    assert "expected the beginning of a model or of a space" in said
