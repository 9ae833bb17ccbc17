"""`kvx store` on stores of several models and salts, on damaged ones, and over a month."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from kvx_adapters.cli.commands import app
from kvx_core import CacheDesc, CacheFacts, CacheView, InvalidArgumentError, describe
from kvx_core.connector.settings import StoreSettings
from kvx_core.snapshot import Precision, Section
from kvx_core.stores import Directory, PrefixStore
from kvx_core.stores.inventory import num_bytes_of
from kvx_core.types import DType
from tests.documents import Document

CHUNK = 16
DAY = 86400
KEY = bytes(range(32))


def prefix_store(
    path: Path, model: str = "a", salt: str = "", max_bytes: int | None = None, **options: Any
) -> PrefixStore:
    return PrefixStore(
        Directory(path, max_bytes),
        fingerprint=model * 64,
        num_layers=2,
        total_kv_heads=3,
        precision=Precision.of(DType.F32),
        chunk_tokens=CHUNK,
        salt=salt,
        **options,
    )


def save(store: PrefixStore, seed: int, num_tokens: int = 40) -> None:
    """Stores a prompt: three chunks, the last one of 8 tokens."""
    generator = torch.Generator().manual_seed(seed)
    caches = torch.randn(2, 2, 1, num_tokens, 3, 8, generator=generator)
    facts = CacheFacts(
        rotary="half", rotary_dim=8, rope_applied=True, first_kv_head=0, compute_dtype=DType.F32
    )
    layers = (
        CacheDesc.from_kv(describe(k, "BLOCK_NHD"), describe(v, "BLOCK_NHD")) for k, v in caches
    )
    section = Section((0, 1), CacheView(tuple(layers), facts, dense=True), None)
    tokens = np.random.default_rng(seed).integers(0, 1000, num_tokens)
    for start, stop in store.spans(num_tokens):
        part = store.capture(tokens, start, stop, [section])
        assert part is not None
        store.commit(part)


def kvx(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["store", *map(str, arguments)])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


def listed(path: Path, *arguments: object) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(kvx("ls", path, "--json", *arguments).stdout)
    return found


def files(path: Path) -> list[Path]:
    return sorted(path.rglob("*.safetensors"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Two models; the first has two salts."""
    save(prefix_store(tmp_path), 1)
    save(prefix_store(tmp_path), 2)
    save(prefix_store(tmp_path, salt="tenant"), 3)
    save(prefix_store(tmp_path, "b"), 4)
    return tmp_path


def test_ls_and_stat(path: Path) -> None:
    spaces = {(s["model"], s["has_default_salt"]): s for s in listed(path)}
    assert spaces.keys() == {("a" * 64, True), ("a" * 64, False), ("b" * 64, True)}
    first = spaces["a" * 64, True]
    assert (first["num_files"], first["num_entries"], first["num_tokens"]) == (6, 6, 80)
    assert first["precisions"] == ["f32"]
    lines = kvx("ls", path).stdout.splitlines()
    assert lines[0].split() == [
        *("space", "model", "salt", "entries", "tokens", "size", "precision", "last", "used"),
    ]
    assert len(lines) == 4
    totals = json.loads(kvx("stat", path, "--json").stdout)
    assert totals["num_files"] == len(files(path)) == 12
    assert (totals["num_spaces"], totals["num_models"], totals["num_tokens"]) == (3, 2, 160)
    assert totals["bytes"] == sum(f.stat().st_blocks * 512 for f in files(path))
    assert totals["free_bytes"] > 0
    assert "free" in kvx("stat", path).stdout


def test_verify(path: Path) -> None:
    assert kvx("verify", path).stdout == "12 of 12 files are good.\n"
    bad = files(path)[5]
    raw = bytearray(bad.read_bytes())
    raw[-1] ^= 1
    bad.write_bytes(raw)
    files(path)[7].write_bytes(b"no snapshot")
    other = files(path)[3]
    other.rename(other.with_name(other.name.replace(".l0-2.", ".l0-1.")))
    found = json.loads(kvx("verify", path, "--json", code=1).stdout)
    assert (found["num_files"], len(found["bad"]), found["deleted"]) == (12, 3, False)
    assert str(bad.relative_to(path)) in {wrong["file"] for wrong in found["bad"]}
    output = kvx("verify", path, "--delete", code=1).stdout
    assert "9 of 12 files are good." in output
    assert kvx("verify", path).stdout == "9 of 9 files are good.\n"


def test_rm_by_salt(path: Path) -> None:
    said = kvx("rm", path, "--salt", "tenant", "--dry-run").stdout
    assert said.startswith("Would delete 3 files, ")
    assert len(files(path)) == 12
    assert kvx("rm", path, "--salt", "tenant").stdout.startswith("Deleted 3 files, ")
    assert [s["has_default_salt"] for s in listed(path)] == [True, True]
    assert kvx("rm", path, "--salt", "tenant").stdout.startswith("Deleted 0 files, ")
    kvx("rm", path, "--salt", "", "--model", "bbbb")
    assert [s["model"] for s in listed(path)] == ["a" * 64]
    kvx("rm", path, "--salt", "")
    assert files(path) == []
    assert kvx("ls", path).stdout == f"{path} holds no entries.\n"


def test_rm_by_model_and_age(path: Path) -> None:
    old = files(path)[::2]
    for file in old:
        os.utime(file, (time.time() - 8 * DAY,) * 2)
    kvx("rm", path, "--older", "7d", "--model", "a")
    assert set(files(path)) & set(old) == {f for f in old if f in files(path)}
    (space,) = (s for s in listed(path) if s["model"] == "b" * 64)
    kvx("rm", path, "--older", "1w")
    assert not set(files(path)) & set(old)
    kvx("rm", path, "--model", space["space"][:10])
    assert {s["model"] for s in listed(path)} == {"a" * 64}


def test_trim_deletes_what_was_used_least_recently(path: Path) -> None:
    all_of_them = files(path)
    for age, file in enumerate(all_of_them):
        os.utime(file, (time.time() - age * DAY,) * 2)
    each = all_of_them[0].stat().st_blocks * 512
    kvx("trim", path, 5 * each)
    assert files(path) == all_of_them[:5]
    kvx("trim", path, "1GB")
    assert files(path) == all_of_them[:5]
    kvx("trim", path, "1B")
    assert files(path) == []


def test_signed_files(tmp_path: Path) -> None:
    path, key_file = tmp_path / "store", tmp_path / "key"
    key_file.write_bytes(KEY)
    key_file.chmod(0o600)
    save(prefix_store(path, salt="tenant", key=KEY), 1)
    (space,) = listed(path)
    assert (space["is_signed"], space["model"]) == (True, None)
    kvx("verify", path, code=1)
    kvx("verify", path, "--key-file", key_file)
    assert kvx("rm", path, "--salt", "tenant").stdout.startswith("Deleted 0 files")
    said = kvx("rm", path, "--salt", "tenant", "--key-file", key_file).stdout
    assert said.startswith("Deleted 3 files")


def test_lossy_formats_have_salts_too(tmp_path: Path) -> None:
    save(prefix_store(tmp_path, salt="tenant", format="f16"), 1)
    assert kvx("rm", tmp_path, "--salt", "").stdout.startswith("Deleted 0 files")
    assert kvx("rm", tmp_path, "--salt", "tenant").stdout.startswith("Deleted 3 files")


def test_what_is_not_kvx_stays(path: Path) -> None:
    (path / "notes").mkdir()
    (path / "notes/mine.txt").write_text("mine")
    (path / "link").symlink_to(path.parent)
    (path / ("0" * 64)).mkdir()
    (path / ("0" * 64) / "x.safetensors").write_bytes(b"")
    good = files(path)[-1]
    for raw in (b"", b"\xff" * 100, (1 << 62).to_bytes(8, "little")):
        good.with_name(good.name.replace(".l0-2.", ".l0-7.")).write_bytes(raw)
        assert len(listed(path)) == 3
        kvx("verify", path, code=1)
    assert json.loads(kvx("stat", path, "--json").stdout)["num_other_files"] == 2
    kvx("trim", path, "1B")
    assert (path / "notes/mine.txt").read_text() == "mine"
    assert (path / "kvx-store.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ls", "nowhere"), "path is nowhere, expected the directory of a store"),
        (("trim", ".", "much"), "to is 'much', expected a number of bytes greater than 0"),
        (("trim", ".", "0"), "to is '0', expected"),
        (("rm", "."), "expected at least one of them: what is to go"),
        (("rm", ".", "--older", "soon"), "older is 'soon', expected a number and a unit"),
        (("verify", ".", "--key-file", "none"), "none"),
    ],
)
def test_wrong_input_is_one_sentence(
    arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in kvx(*arguments, code=2).stderr


@pytest.mark.parametrize(
    ("text", "expected"),
    [("50GB", 50 * 10**9), ("1.5TiB", 3 << 39), ("512", 512), (7, 7), ("2 mib", 2 << 20)],
)
def test_sizes(text: str | int, expected: int) -> None:
    assert num_bytes_of(text) == expected


@pytest.mark.parametrize("wrong", ["", "GB", "-1", "1e9", "1 XB", 0, -5, 1.5, None, True, "0.1"])
def test_no_sizes(wrong: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"'50GB' or '1\.5TiB'"):
        num_bytes_of(wrong)


def test_settings_take_sizes(tmp_path: Path) -> None:
    settings = StoreSettings(path=tmp_path, max_bytes="50GB", max_pending_bytes="1GiB")  # type: ignore[arg-type]
    assert (settings.max_bytes, settings.max_pending_bytes) == (50 * 10**9, 1 << 30)
    assert StoreSettings(path=tmp_path, max_bytes=None).max_bytes is None
    with pytest.raises(ValueError, match="max_bytes is '50 parsecs', expected a number of bytes"):
        StoreSettings(path=tmp_path, max_bytes="50 parsecs")  # type: ignore[arg-type]


def test_what_a_start_tells(tmp_path: Path) -> None:
    settings = StoreSettings(path=tmp_path / "not/yet", max_bytes=50 * 10**9)
    assert re.fullmatch(
        rf"KVX keeps prefixes in {tmp_path}/not/yet: model aaaaaaaaaaaa, chunks of 128 tokens, "
        r"at most 50\.0 GB, free there: [0-9.]+ GB",
        settings.told("a" * 64, 128),
    )
    assert ", no limit, " in StoreSettings(path=tmp_path).told("a" * 64, 128)


def test_the_document(path: Path) -> None:
    """Every command of docs/operations.md runs on a store."""
    commands = [
        line.strip().partition("#")[0].split()
        for snippet in Document("operations.md").snippets("bash")
        for line in snippet.splitlines()
        if line.strip().startswith("kvx store")
    ]
    assert {words[2] for words in commands} == {"ls", "stat", "verify", "trim", "rm"}
    for words in commands:
        assert words[3] == "/srv/kvx", words
        kvx(words[2], path, *(word.strip("'") for word in words[4:]))


def test_a_month(tmp_path: Path) -> None:
    """Saves of 30 days stay within max_bytes, and are inspected, trimmed and emptied by salt."""
    most = 400 << 10
    store = prefix_store(tmp_path, max_bytes=most)
    shops = store, store.salted("shop")
    for day in range(30):
        for file in files(tmp_path):
            status = file.stat()
            os.utime(file, (status.st_atime - DAY, status.st_mtime - DAY))
        for i in range(4):
            save(shops[i % 2], seed=100 * day + i)
        totals = json.loads(kvx("stat", tmp_path, "--json").stdout)
        assert totals["bytes"] <= most
    assert totals["num_spaces"] == 2
    assert totals["least_recently_used_seconds"] >= 2 * DAY
    kvx("rm", tmp_path, "--older", "5d")
    assert json.loads(kvx("stat", tmp_path, "--json").stdout)["least_recently_used_seconds"] < (
        5 * DAY
    )
    kvx("verify", tmp_path)
    kvx("trim", tmp_path, "100kB")
    assert json.loads(kvx("stat", tmp_path, "--json").stdout)["bytes"] <= 100_000
    kvx("rm", tmp_path, "--salt", "shop")
    assert all(space["has_default_salt"] for space in listed(tmp_path))
    kvx("rm", tmp_path, "--salt", "")
    assert files(tmp_path) == []
