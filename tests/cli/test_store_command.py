"""`kvx store` on stores of several models and salts, on damaged ones, and over a month.

test_store_copies.py has export and import, test_store_hostile.py what others may have written.
"""

from __future__ import annotations

import hashlib
import json
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from kvx_core import (
    CacheDesc,
    CacheFacts,
    CacheView,
    InvalidArgumentError,
    ModelRecord,
    describe,
)
from kvx_core.snapshot import Precision, Section, Snapshot
from kvx_core.stores import Directory
from kvx_core.stores.inventory import Inventory, num_bytes_of
from kvx_core.types import DType
from tests.cli.stores import (
    CHUNK,
    DAY,
    KEY,
    NEW_KEY,
    SECRET,
    all_files,
    entries,
    key_files,
    kvx,
    listed,
    prefix_store,
    prompt_of,
    save,
    section,
    totals,
)
from tests.native import ROOT


def marks(path: Path) -> list[Path]:
    return sorted(path.rglob("*.mark"))


def salt_of(text: str) -> str:
    """As docs/store_format.md has it."""
    return hashlib.sha256(b"kvx salt" + text.encode()).hexdigest()


def test_ls_and_stat(path: Path) -> None:
    spaces = {(s["model"], s["salt"]): s for s in listed(path)}
    tenant = salt_of("tenant")
    assert spaces.keys() == {("a" * 64, ""), ("a" * 64, tenant), ("b" * 64, "")}
    first = spaces["a" * 64, ""]
    assert (first["num_entries"], first["num_tokens"], first["num_marks"]) == (6, 80, 6)
    assert first["num_files"] == 6 + 6 + 2  # entries, marks, space.json and a kind
    assert first["precisions"] == ["f32"]
    (kind,) = first["kinds"]
    assert kind["layers"] == [{"layers": "0-1", "heads": [0, 3], "precision": "f32"}]
    assert (kind["is_signed"], kind["is_encrypted"], kind["num_files"]) == (False, False, 6)
    lines = kvx("ls", path).stdout.splitlines()
    assert lines[0].split() == [
        *("space", "model", "salt", "entries", "tokens", "size", "precision", "last", "used"),
    ]
    assert len(lines) == 4
    assert {line.split()[2] for line in lines[1:]} == {"none", tenant[:12]}
    found = totals(path)
    assert found["num_entries"] == len(entries(path)) == 12
    assert found["num_files"] == len(all_files(path)) == 12 + 12 + 6
    assert (found["num_spaces"], found["num_models"], found["num_tokens"]) == (3, 2, 160)
    assert (found["chunk_tokens"], found["max_bytes"]) == (CHUNK, None)
    assert found["bytes"] == sum(f.stat().st_blocks * 512 for f in all_files(path))
    assert found["free_bytes"] > 0
    assert "free" in kvx("stat", path).stdout


def test_ls_finds_models_and_salts(path: Path) -> None:
    assert [s["model"] for s in listed(path, "--salt", "tenant")] == ["a" * 64]
    assert listed(path, "--salt", "nobody") == []
    assert {s["model"] for s in listed(path, "--salt", "")} == {"a" * 64, "b" * 64}
    assert [s["salt"] for s in listed(path, "--model", "bb")] == [""]
    assert kvx("ls", path, "--salt", "nobody").stdout == f"{path} holds nothing of it.\n"


def test_ls_of_kinds(tmp_path: Path) -> None:
    """Two halves of the heads, as two ranks write them, are one entry in two files."""
    for rank in range(2):
        save(prefix_store(tmp_path, total_kv_heads=6), 1, first_kv_head=3 * rank)
    head, *lines = kvx("ls", tmp_path, "--kinds").stdout.splitlines()
    assert head.split() == ["space", "kind", "layers", "heads", "precision", "files", "size"]
    assert sorted(line.split()[2:6] for line in lines) == [
        ["0-1", "0-2", "f32", "3"],
        ["0-1", "3-5", "f32", "3"],
    ]
    (space,) = listed(tmp_path)
    assert (space["num_entries"], space["num_tokens"]) == (3, 40)
    assert [kind["num_files"] for kind in space["kinds"]] == [3, 3]


def test_epochs(path: Path) -> None:
    """Weights that are not those of the model's files."""
    store = prefix_store(path).of_weights("a" * 64, "said:7")
    save(store, 5)
    (space,) = listed(path, "--epoch", "said")
    assert (space["model"], space["epoch"], space["num_entries"]) == ("a" * 64, "said:7", 3)
    assert len(listed(path, "--epoch", "")) == 3
    assert kvx("ls", path).stdout.split()[2] == "epoch"
    assert kvx("rm", path, "--epoch", "said:7").stdout.startswith("Deleted 3 entries in 8 files, ")
    assert listed(path, "--epoch", "said") == []
    assert len(entries(path)) == 12


@pytest.mark.parametrize("columns", [130, 60])
def test_on_a_terminal(columns: int, path: Path) -> None:
    """Nothing is cut off, and progress leaves nothing behind."""
    ours, theirs = pty.openpty()
    shown = b""
    with subprocess.Popen(
        [sys.executable, "-c", "from kvx_adapters.cli import main; main()", "store", "ls", path],
        env=os.environ | {"COLUMNS": str(columns), "TERM": "xterm", "PYTHONPATH": str(ROOT)},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    ) as process:
        os.close(theirs)
        with suppress(OSError):  # the other end is closed
            while chunk := os.read(ours, 1 << 16):
                shown += chunk
    os.close(ours)
    assert process.returncode == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    *_, head, first, second, third = [line.rstrip() for line in text.splitlines() if line.strip()]
    assert head.split()[:3] == ["space", "model", "salt"]
    assert all(line.endswith("s ago") for line in (first, second, third))
    assert "…" not in text
    assert max(map(len, (head, first, second, third))) <= columns


def test_the_record_of_a_model(path: Path) -> None:
    """Beside its entries, for people; who writes next mends it."""
    rope = {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    record = ModelRecord(files="f" * 64, architecture="qwen3", rope=rope, adapters=("sql",))
    save(prefix_store(path, record), 1)
    (space,) = listed(path, "--model", record.fingerprint)
    assert space["model"] == record.fingerprint
    assert (space["model_record"]["architecture"], space["model_record"]["adapters"]) == (
        *("qwen3", ["sql"]),
    )
    assert [s["model_record"] for s in listed(path, "--model", "b")] == [None]
    assert "qwen3" in kvx("ls", path).stdout
    file = path / space["space"] / "model.json"
    assert hashlib.sha256(file.read_bytes()).hexdigest() == record.fingerprint
    kvx("verify", path)
    for wrong in (b"", b"{}", file.read_bytes().replace(b"qwen3", b"llama"), bytes(2 << 20)):
        file.write_bytes(wrong)
        (space,) = listed(path, "--model", record.fingerprint)
        assert space["model_record"] is None
        found = json.loads(kvx("verify", path, "--json", code=1).stdout)
        assert [bad["file"] for bad in found["bad"]] == [str(file.relative_to(path))]
    save(prefix_store(path, record), 2)
    assert listed(path, "--model", record.fingerprint)[0]["model_record"]["rope"] == rope
    kvx("verify", path)


def test_verify(path: Path) -> None:
    num_files = len(all_files(path))
    assert kvx("verify", path).stdout == f"{num_files} of {num_files} files are good.\n"
    bad, short, mark, moved = entries(path)[5], entries(path)[7], marks(path)[2], entries(path)[3]
    for file in (bad, mark):
        raw = bytearray(file.read_bytes())
        raw[-1] ^= 1
        file.write_bytes(raw)
    short.write_bytes(b"no entry")
    other = entries(path)[4]
    moved.rename(moved.with_name(f"{moved.name[:3]}{other.name[3:64]}{moved.name[64:]}"))
    found = json.loads(kvx("verify", path, "--json", code=1).stdout)
    assert (found["num_files"], found["num_good"], found["deleted"]) == (30, 26, False)
    assert {str(file.relative_to(path)) for file in (bad, short, mark)} <= {
        wrong["file"] for wrong in found["bad"]
    }
    assert found["unknown"] == []
    output = kvx("verify", path, "--delete", code=1).stdout
    assert "26 of 30 files are good." in output
    assert kvx("verify", path).stdout == "26 of 26 files are good.\n"


def test_verify_of_records(path: Path) -> None:
    """Entries of a kind whose record is damaged stay: whoever writes that kind next mends it."""
    space = prefix_store(path, "b")
    (kind,) = (path / listed(path, "--model", "b")[0]["space"] / "kinds").iterdir()
    raw = kind.read_bytes()
    kind.write_bytes(raw.replace(b'"f32"', b'"f16"'))
    found = json.loads(kvx("verify", path, "--json", code=1).stdout)
    assert [wrong["file"] for wrong in found["bad"]] == [str(kind.relative_to(path))]
    assert len(found["unknown"]) == 3
    assert "cannot be read without its kind" in found["unknown"][0]["reason"]
    assert totals(path)["num_unread_records"] == 1
    kvx("verify", path, "--delete", code=1)
    assert not kind.exists()
    save(space, 99)
    assert kind.read_bytes() == raw
    kvx("verify", path)


def test_rm_by_salt(path: Path) -> None:
    said = kvx("rm", path, "--salt", "tenant", "--dry-run").stdout
    assert said.startswith("Would delete 3 entries in 8 files, ")
    assert len(entries(path)) == 12
    assert kvx("rm", path, "--salt", "tenant").stdout.startswith("Deleted 3 entries in 8 files, ")
    assert [s["salt"] for s in listed(path)] == ["", ""]
    assert salt_of("tenant") not in "".join(f.read_text() for f in path.rglob("*.json"))
    assert kvx("rm", path, "--salt", "tenant").stdout.startswith("Deleted 0 entries in 0 files, ")
    kvx("rm", path, "--salt", "", "--model", "bbbb")
    assert [s["model"] for s in listed(path)] == ["a" * 64]
    kvx("rm", path, "--salt", "")
    assert all_files(path) == []
    assert kvx("ls", path).stdout == f"{path} holds no entries.\n"


def test_rm_by_model_and_age(path: Path) -> None:
    old = entries(path)[::2]
    for file in old:
        os.utime(file, (time.time() - 8 * DAY,) * 2)
    kvx("rm", path, "--older", "7d", "--model", "a")
    assert set(entries(path)) & set(old) == {f for f in old if f in entries(path)}
    (space,) = listed(path, "--model", "b")
    kvx("rm", path, "--older", "1w")
    assert not set(entries(path)) & set(old)
    kvx("rm", path, "--model", space["space"][:10])
    assert {s["model"] for s in listed(path)} == {"a" * 64}


def test_an_engine_goes_on_after_rm(path: Path) -> None:
    """It writes the records again that went with the last entry."""
    store = prefix_store(path, "b")
    save(store, 5)
    kvx("rm", path, "--model", "b")
    assert listed(path, "--model", "b") == []
    save(store, 6)
    assert prefix_store(path, "b").lookup(prompt_of(6)).num_tokens == 40
    kvx("verify", path)


def test_trim_deletes_what_was_used_least_recently(path: Path) -> None:
    all_of_them = entries(path)
    for file in marks(path):
        os.utime(file, (time.time() - 30 * DAY,) * 2)
    for age, file in enumerate(all_of_them):
        os.utime(file, (time.time() - age * DAY,) * 2)
    records = [f for f in path.rglob("*.json") if f.parent != path]
    to = sum(f.stat().st_blocks * 512 for f in [*all_of_them[:5], *records])
    for dry_run in (True, False):
        words = ["--json", "--dry-run"][: 1 + dry_run]
        said = json.loads(kvx("trim", path, to, *words).stdout)
        assert (said["num_entries"], said["num_files"]) == (7, 7 + 12)
        assert (said["dry_run"], said["bytes_left"]) == (dry_run, to)
        assert entries(path) == (all_of_them if dry_run else all_of_them[:5])
    kvx("trim", path, "1GB")
    assert entries(path) == all_of_them[:5]
    left = json.loads(kvx("rm", path, "--json", "--older", "90s").stdout)
    assert left["num_entries"] == 4
    assert entries(path) == all_of_them[:1]
    kvx("trim", path, "1B")
    assert entries(path) == []


def test_signed_files(tmp_path: Path) -> None:
    path = tmp_path / "store"
    (key_file,) = key_files(tmp_path, KEY)
    save(prefix_store(path, salt="tenant", key=KEY), 1)
    (space,) = listed(path)  # records can be read without the key
    assert (space["is_signed"], space["model"], space["salt"]) == (
        *(True, "a" * 64, salt_of("tenant")),
    )
    assert kvx("ls", path).stdout.splitlines()[1].split()[8] == "signed"
    said = kvx("verify", path, "--delete", code=1).stdout
    assert "6 cannot be judged here: they stay. Give --key-file" in said
    num_files = len(all_files(path))
    good = f"{num_files} of {num_files} files are good.\n"
    assert kvx("verify", path, "--key-file", key_file).stdout == good
    said = kvx("verify", path, "--key-file", key_files(tmp_path, NEW_KEY)[0], code=2).stderr
    assert "is not authenticated by the signing key that is given" in " ".join(said.split())
    assert kvx("rm", path, "--salt", "tenant").stdout.startswith("Deleted 3 entries in ")
    assert all_files(path) == []


def test_keys_are_rotated(tmp_path: Path) -> None:
    """Files of the old key and of the new one, and commands that have both."""
    path = tmp_path / "store"
    new, old = key_files(tmp_path, NEW_KEY, KEY)
    save(prefix_store(path, key=KEY, encryption_key=KEY), 1)
    both = {"key": [NEW_KEY, KEY], "encryption_key": [NEW_KEY, KEY]}
    save(prefix_store(path, **both), 2)
    words = [
        *("--key-file", new, "--key-file", old),
        *("--encryption-key-file", new, "--encryption-key-file", old),
    ]
    num_files = len(all_files(path))
    said = kvx("verify", path, *words).stdout
    assert said == f"{num_files} of {num_files} files are good.\n"
    said = kvx("verify", path, *words[:2], *words[4:6], code=1).stdout
    assert "6 cannot be judged here: they stay." in said  # three entries, and their marks
    (space,) = listed(path)
    assert (space["num_entries"], space["is_encrypted"]) == (6, True)


def test_encrypted_files(tmp_path: Path) -> None:
    path = tmp_path / "store"
    (key_file,) = key_files(tmp_path, SECRET)
    save(prefix_store(path, encryption_key=SECRET), 1)
    (space,) = listed(path)
    assert (space["model"], space["num_tokens"]) == ("a" * 64, 40)  # lengths tell
    assert totals(path)["is_encrypted"]
    said = kvx("verify", path, "--delete", code=1).stdout
    assert "6 cannot be judged here: they stay. Give --encryption-key-file" in said
    num_files = len(all_files(path))
    good = f"{num_files} of {num_files} files are good.\n"
    assert kvx("verify", path, "--encryption-key-file", key_file).stdout == good
    said = kvx("verify", path, "--key-file", key_file, code=2).stderr
    assert "Give the key: --encryption-key-file" in " ".join(said.split())


def test_tokens_of_encoded_files_are_read(tmp_path: Path) -> None:
    """Their lengths do not tell: stat reads what the files say, and ls reads none."""
    store = prefix_store(
        tmp_path, precision=Precision.of(DType.BF16, DType.F32), format="lossless_bf16"
    )
    tokens = prompt_of(1)
    keys = torch.linspace(-1, 1, 2 * 2 * 40 * 3 * 8).bfloat16().reshape(2, 2, 1, 40, 3, 8)
    layers = (
        CacheDesc.from_kv(describe(k, "BLOCK_NHD"), describe(v, "BLOCK_NHD")) for k, v in keys
    )
    facts = CacheFacts(rotary="half", rotary_dim=8, rope_applied=True, first_kv_head=0)
    held = Section((0, 1), CacheView(tuple(layers), facts, dense=True), None)
    for span in store.spans(40):
        part = store.capture(tokens, *span, [held])
        assert part is not None
        store.commit(part)
    (space,) = listed(tmp_path)
    assert (space["num_tokens"], space["num_entries_of_unknown_length"]) == (0, 3)
    assert kvx("ls", tmp_path).stdout.splitlines()[1].split()[4] == "?"
    assert totals(tmp_path)["num_tokens"] == 40
    kvx("verify", tmp_path)


def test_what_vanishes_meanwhile_is_not_bad(path: Path) -> None:
    inventory = Inventory(Directory(path))
    entries(path)[4].unlink()
    marks(path)[4].unlink()
    assert [error for _, error in inventory.verify()] == [None] * 28


def test_a_space_was_used_when_its_entries_were_or_without_any_its_files(path: Path) -> None:
    for when, files in ((1000, entries(path)), (2000, set(all_files(path)) - set(entries(path)))):
        for i, file in enumerate(sorted(files)):
            os.utime(file, (when + i, when + i))
    count = len(entries(path))
    assert max(space.used for space in Inventory(Directory(path)).spaces()) == 1000 + count - 1
    for file in entries(path):
        file.unlink()
    assert all(space.used >= 2000 for space in Inventory(Directory(path)).spaces())


def test_reading_is_no_use(path: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in all_files(path)}
    for command in ("ls", "stat", "verify"):
        kvx(command, path)
    assert {file: file.stat().st_mtime_ns for file in all_files(path)} == before


def test_trim_deletes_what_dead_writers_left(path: Path) -> None:
    left = path / ".tmp" / ".0123456789abcdef-0.tmp"
    left.parent.mkdir(exist_ok=True)
    left.write_bytes(b"half a file")
    os.utime(left, (time.time() - 2 * DAY,) * 2)
    kvx("trim", path, "1GB", "--dry-run")
    assert left.exists()
    kvx("trim", path, "1GB")
    assert not left.exists()
    assert len(entries(path)) == 12


def test_lossy_formats_have_salts_too(tmp_path: Path) -> None:
    save(prefix_store(tmp_path, salt="tenant", format="f16"), 1)
    assert listed(tmp_path)[0]["lossy"] == "f16"
    assert kvx("rm", tmp_path, "--salt", "").stdout.startswith("Deleted 0 entries")
    assert kvx("rm", tmp_path, "--salt", "tenant").stdout.startswith("Deleted 3 entries")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ls", "nowhere"), "PATH is nowhere, expected the directory of a store"),
        (("ls", "."), "is no store: it has no kvx-store.json"),
        (("stat", "."), "is no store: it has no kvx-store.json"),
        (("verify", "."), "is no store: it has no kvx-store.json"),
        (("trim", ".", "1GB"), "is no store: it has no kvx-store.json"),
        (("rm", ".", "--older", "1d"), "is no store: it has no kvx-store.json"),
        (("ls", ".", "--model", ""), "--model is '', expected the beginning of a model"),
        (("trim", ".", "much"), "TO is 'much', expected a number of bytes greater than 0"),
        (("trim", ".", "0"), "TO is '0', expected"),
        (("rm", "."), "none of --salt, --model, --epoch and --older is given"),
        (("rm", ".", "--model", ""), "--model is '', expected the beginning of a model"),
        (("rm", ".", "--older", "soon"), "--older is 'soon', expected a number and a unit"),
        (("verify", ".", "--key-file", "none"), "--key-file none cannot be read"),
        (
            ("verify", ".", "--encryption-key-file", "none"),
            "--encryption-key-file none cannot be read",
        ),
    ],
)
def test_wrong_input_is_one_sentence(
    arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.txt").write_text("mine")
    assert message in kvx(*arguments, code=2).stderr
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("format", [1, 2, "2 AES-256-GCM"])
def test_stores_of_earlier_formats_are_refused(format: object, tmp_path: Path) -> None:
    text = json.dumps({"format": format, "chunk_tokens": CHUNK})
    (tmp_path / "kvx-store.json").write_text(text)
    for command in (("ls",), ("stat",), ("verify", "--delete"), ("trim",), ("rm",)):
        more = {"trim": ["1B"], "rm": ["--older", "1d"]}.get(command[0], [])
        said = kvx(command[0], tmp_path, *command[1:], *more, code=2).stderr
        assert "which an earlier version of KVX has written, expected format 3" in said
    assert (tmp_path / "kvx-store.json").read_text() == text


def test_a_model_that_is_not_there(path: Path) -> None:
    said = kvx("rm", path, "--model", "cc", code=1).stderr
    assert said.startswith("--model is cc, expected the beginning of a model or of a space")
    assert len(entries(path)) == 12


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("50GB", 50 * 10**9),
        ("1.5TiB", 3 << 39),
        ("512", 512),
        (7, 7),
        ("2 mib", 2 << 20),
        (5e10, 5 * 10**10),
    ],
)
def test_sizes(text: object, expected: int) -> None:
    assert num_bytes_of(text) == expected


@pytest.mark.parametrize("wrong", ["", "GB", "-1", "1e9", "1 XB", 0, -5, 1.5, None, True, "0.1"])
def test_no_sizes(wrong: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"'50GB' or '1\.5TiB'"):
        num_bytes_of(wrong)


def test_a_month(tmp_path: Path) -> None:
    """Saves of 30 days stay within max_bytes, and are inspected, trimmed and emptied by salt."""
    most = 300 << 10
    store = prefix_store(tmp_path, max_bytes=most)
    shops = store, store.salted("shop")
    for day in range(30):
        for file in all_files(tmp_path):
            status = file.stat()
            os.utime(file, (status.st_atime - DAY, status.st_mtime - DAY))
        for i in range(2):
            save(shops[i], seed=100 * day + i)
        found = totals(tmp_path)
        assert found["bytes"] <= most
    assert found["num_spaces"] == 2
    assert found["least_recently_used_seconds"] >= 2 * DAY
    kvx("rm", tmp_path, "--older", "5d")
    assert totals(tmp_path)["least_recently_used_seconds"] < 5 * DAY
    kvx("verify", tmp_path)
    kvx("trim", tmp_path, "100kB")
    assert totals(tmp_path)["bytes"] <= 100_000
    kvx("rm", tmp_path, "--salt", "shop")
    assert all(space["salt"] == "" for space in listed(tmp_path))
    kvx("rm", tmp_path, "--salt", "")
    assert entries(tmp_path) == []


@pytest.mark.parametrize("num_entries", [240, pytest.param(6_000, marks=pytest.mark.slow)])
def test_a_large_store(num_entries: int, tmp_path: Path) -> None:
    """Two weeks bring a tenth more than fits; then it is inspected, trimmed and emptied by salt."""
    stores = [prefix_store(tmp_path, salt=salt) for salt in ("", "shop")]
    held = section(0, CHUNK)
    save(stores[0], 0, CHUNK)
    each = sum(file.stat().st_blocks * 512 for file in entries(tmp_path) + marks(tmp_path))
    most, weekly = num_entries * each, num_entries * 11 // 20
    for week in range(2):
        used = time.time() - (2 - week) * 7 * DAY
        for first in range(0, weekly, 64):
            for i, store in enumerate(stores):
                numbers = range(first + i, min(first + 64, weekly), 2)
                parts = [store.capture([week, n, *range(14)], 0, CHUNK, [held]) for n in numbers]
                store.commit_all([part for part in parts if isinstance(part, Snapshot)])
        for file in all_files(tmp_path):
            if file.stat().st_mtime > time.time() - 6 * DAY:
                os.utime(file, (used, used))
        # A server starts, saves a prompt, and so trims.
        save(prefix_store(tmp_path, max_bytes=most), 100 + week, CHUNK)
    found = totals(tmp_path)
    assert found["bytes"] <= most
    assert found["num_entries"] > num_entries * 8 // 10
    assert [space["num_entries"] > num_entries // 3 for space in listed(tmp_path)] == [True, True]
    said = kvx("rm", tmp_path, "--older", "8d", "--dry-run").stdout
    assert said.startswith("Would delete ")
    assert totals(tmp_path)["num_files"] == found["num_files"]
    kvx("trim", tmp_path, most // 10)
    assert kvx("verify", tmp_path).stdout.endswith(" files are good.\n")
    kvx("rm", tmp_path, "--salt", "shop")
    (space,) = listed(tmp_path)
    assert space["salt"] == ""
    assert 0 < space["bytes"] <= most // 10
    kvx("rm", tmp_path, "--salt", "")
    assert all_files(tmp_path) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_folders_that_cannot_be_read_are_named() -> None:
    path = Path(tempfile.mkdtemp())
    try:
        save(prefix_store(path), 1)
        save(prefix_store(path, "b"), 2)
        for folder in (path, *path.rglob("*")):
            folder.chmod(0o755 if folder.is_dir() else 0o644)
        hidden = path / entries(path)[0].relative_to(path).parts[0]
        hidden.chmod(0o700)
        os.seteuid(65534)
        try:
            result = kvx("stat", path, "--json")
        finally:
            os.seteuid(0)
        expected = f"1 folder cannot be read, and nothing in there is counted: {hidden.name} (Perm"
        assert expected in result.stderr
        found = json.loads(result.stdout)
        assert (found["num_entries"], found["num_unread_folders"]) == (3, 1)
    finally:
        shutil.rmtree(path)
