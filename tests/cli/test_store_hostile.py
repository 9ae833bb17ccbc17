"""`kvx store` in directories that others may write to: nothing is trusted, and costs little."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from xxhash import xxh3_128_digest

from kvx_core.snapshot import Snapshot
from kvx_core.snapshot.kind import Kind
from kvx_core.snapshot.record import Record
from kvx_core.snapshot.sealing import Sealing
from kvx_core.snapshot.secrets import Secrets
from kvx_core.stores import Directory
from kvx_core.stores.inventory import Inventory
from tests.cli.stores import (
    CHUNK,
    all_files,
    entries,
    kvx,
    listed,
    prefix_store,
    prompt_of,
    save,
    totals,
    two_models,
)

COMMANDS = (("ls",), ("ls", "--kinds"), ("stat",), ("verify",))


GROUP = {"encoding": "values", "facts": {}, "layers": [0], "planes": [], "precision": "f32"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return two_models(tmp_path / "store")


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    """No test here takes long on an idle machine."""
    begun = time.process_time()
    yield
    assert time.process_time() - begun < 20


def space_of(path: Path, model: str = "b") -> Path:
    (space,) = listed(path, "--model", model)
    return path / str(space["space"])


def canonical(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


def forged_space(path: Path, **fields: Any) -> Path:
    """A space whose record is what its name says, as whoever writes to the store can make it."""
    known = {"kvx_space": 3, "fingerprint": "f", "epoch": "", "kv_heads": [3, 3], "planes": []}
    record = canonical(known | {"lossy": "", "salt": "", "state_heads": []} | fields)
    folder = path / hashlib.sha256(record).hexdigest()
    (folder / "kinds").mkdir(parents=True)
    (folder / "space.json").write_bytes(record)
    return folder


def put_kind(space: Path, raw: bytes) -> str:
    """Writes the record of a kind; returns its id."""
    id = hashlib.sha256(raw).hexdigest()[:32]
    (space / "kinds" / f"{id}.json").write_bytes(raw)
    return id


def put_entry(space: Path, key: str, kind: str, size: int) -> Path:
    """A file with a hole of this size."""
    file = space / key[:2] / f"{key}.{kind}.safetensors"
    file.parent.mkdir(exist_ok=True)
    with file.open("wb") as raw:
        raw.truncate(size)
    return file


def wide_kind(head_dim: int) -> Kind:
    """Keys and values of one layer and head."""
    group = GROUP | {"heads": [0, 1]}
    tensors = [[f"layers.0.{name}", "F32", ["n", 1, head_dim], "", ""] for name in "kv"]
    fields = {"encrypted": False, "groups": [group], "keyed": False, "kvx_kind": 3}
    return Kind.parse(canonical(fields | {"tensors": tensors}), "a kind")


def test_records_that_lie(path: Path) -> None:
    """Their names are not their SHA-256: shown as damaged, and not trusted."""
    space = space_of(path)
    (space / "space.json").write_bytes((space_of_a(path) / "space.json").read_bytes())
    lines = kvx("ls", path)
    (line,) = (line for line in lines.stdout.splitlines() if line.startswith(space.name[:12]))
    assert line.split()[1:3] == ["?", "?"]
    assert f"{space.name}/space.json is not what its folder is named after" in lines.stderr
    said = kvx("rm", path, "--salt", "tenant", code=1)
    assert said.stdout.startswith("Deleted 3 entries in ")
    assert (
        f"8 files of space {space.name[:12]} stay: what they are of cannot be told" in said.stderr
    )
    assert len(entries(space)) == 3
    found = json.loads(kvx("verify", path, "--json", code=1).stdout)
    assert [wrong["file"] for wrong in found["bad"]] == [f"{space.name}/space.json"]
    assert kvx("rm", path, "--model", space.name[:12]).stdout.startswith("Deleted 3 entries in 8 f")
    assert not space.exists()


def space_of_a(path: Path) -> Path:
    """That of the salt."""
    (space,) = listed(path, "--salt", "tenant")
    return path / str(space["space"])


def test_text_in_records_does_not_reach_a_terminal(path: Path) -> None:
    forged_space(path, fingerprint="\x1b[2J\x07[red]\u202e", epoch="said:\x9b31m" + "x" * 4000)
    for command in (*COMMANDS, ("rm", "--dry-run", "--model", "\x1b")):
        shown = kvx(command[0], path, *command[1:]).stdout
        assert all(letter.isprintable() for line in shown.splitlines() for letter in line)
        assert max(map(len, shown.splitlines())) <= 240
    assert r"\x1b[2J\x07[red]\u202e" in kvx("ls", path).stdout
    (space,) = listed(path, "--model", "\x1b[2J")
    assert space["num_entries"] == 0


@pytest.mark.parametrize("words", ["layers", "tensors", "groups"])
def test_kinds_of_a_million_layers(words: str, path: Path) -> None:
    """As much as 1 MiB can say."""
    space = forged_space(path)
    group = GROUP | {"heads": [0, 3]}
    fields: dict[str, Any] = {"encrypted": False, "keyed": False, "kvx_kind": 3}
    groups, tensors = [group], [["layers.0.k", "F32", ["n", 3, 8], "", ""]]
    if words == "layers":
        groups = [group | {"layers": list(range(150_000))}]
    elif words == "groups":
        groups = [group | {"layers": [layer]} for layer in range(5_600)]
    else:
        groups = [group | {"layers": list(range(16_000))}]
    if words != "layers":
        num_layers = 5_600 if words == "groups" else 16_000
        tensors = [[f"layers.{i}.k", "F32", ["n", 3, 8], "", ""] for i in range(num_layers)]
    raw = canonical(fields | {"groups": groups, "tensors": tensors})
    assert 700_000 < len(raw) <= 1 << 20
    kind = put_kind(space, raw)
    for number in range(20):
        put_entry(space, hashlib.sha256(b"%d" % number).hexdigest(), kind, 10_000 * (1 + number))
    for command in COMMANDS[2:]:
        shown = kvx(command[0], path, *command[1:], code=command == ("verify",))
        assert max(map(len, shown.stdout.splitlines())) <= 1000
    assert len(listed(path)) == 4


def test_many_kinds(path: Path) -> None:
    """At most 256 of a space are read."""
    space = forged_space(path)
    for number in range(300):
        put_kind(space, b"{%d}" % number)
    kinds = next(s["kinds"] for s in listed(path) if s["space"] == space.name)
    assert len(kinds) == 300
    assert sum("more than 256 kinds" in kind["problem"] for kind in kinds) == 44


def test_files_with_holes(path: Path) -> None:
    """As long as they like on no disk at all: their lengths are compared before they are read."""
    space = space_of(path)
    (kind,) = (file.stem for file in (space / "kinds").iterdir())
    for number, size in enumerate((0, 1, 4096, 1 << 40)):
        put_entry(space, hashlib.sha256(b"%d" % number).hexdigest(), kind, size)
    for name in ("x.mark", "space.0123456789abcdef.mac"):
        name = name.replace("x.", "0" * 64 + ".")
        file = space / ("00" if name.endswith(".mark") else "") / name
        file.parent.mkdir(exist_ok=True)
        with file.open("wb") as raw:
            raw.truncate(1 << 40)
    (found,) = listed(path, "--model", "b")
    assert (found["num_entries"], found["num_tokens"]) == (7, 40)
    assert totals(path)["num_entries_of_unknown_length"] == 4
    judged = json.loads(kvx("verify", path, "--json", "--delete", code=1).stdout)
    assert (len(judged["bad"]), judged["unknown"]) == (6, [])
    kvx("verify", path)
    assert len(entries(path)) == 12


def test_a_layer_that_takes_all_memory(path: Path) -> None:
    """A file that is right in every byte, with a hole for 1 GiB of zeros."""
    space, kind = forged_space(path), wide_kind(head_dim=1 << 23)
    id = put_kind(space, kind.text)
    layout, ids = kind.layout(16), np.arange(16, dtype=np.int64)
    assert layout.most_bytes > 1 << 30
    text = layout.head.record
    sealing = Sealing.new(text, Secrets())
    zeros = {piece.num_bytes: xxh3_128_digest(bytes(piece.num_bytes)) for piece in layout.pieces}
    sizes = tuple(piece.num_bytes for piece in layout.pieces)
    checks = tuple(zeros[size] for size in sizes)
    parent = bytes.fromhex(space.name)
    record = Record(parent, kind.digest, 0, ids.tobytes(), sizes, checks)
    head = layout.head.text(
        sealing.sealed_record(text.packed(sealing.clear, record)), layout.num_bytes
    )
    key = hashlib.sha256(parent + ids.tobytes()).hexdigest()
    file = put_entry(space, key, id, layout.most_bytes)
    with file.open("r+b") as raw:
        raw.write(head)
    found = json.loads(kvx("verify", path, "--json", code=1).stdout)
    assert [wrong["file"] for wrong in found["unknown"]] == [str(file.relative_to(path))]
    assert "of layer 0, expected at most" in found["unknown"][0]["reason"]
    assert totals(path)["num_tokens"] == 160 + 16


def test_links_and_fifos(path: Path, tmp_path: Path) -> None:
    """Links are not followed, and nothing is waited for."""
    space = space_of(path)
    outside = tmp_path / "outside"
    space.rename(outside)
    space.symlink_to(outside)
    assert [s["model"] for s in listed(path)] == ["a" * 64, "a" * 64]
    space.unlink()
    outside.rename(space)

    (kind,) = (space / "kinds").iterdir()
    for file in (kind, space / "space.json"):
        target = tmp_path / file.name
        file.rename(target)
        file.symlink_to(target)
        (found,) = [s for s in listed(path) if s["space"] == space.name]
        problem = found["problem"] or found["kinds"][0]["problem"]
        assert "cannot be read" in problem or "does not exist" in problem
        file.unlink()
        target.rename(file)

    entry = entries(space)[0]
    for make in (entry.symlink_to, lambda _: os.mkfifo(entry)):
        target = entry.rename(tmp_path / "entry")
        make(target)
        assert listed(path, "--model", "b")[0]["num_entries"] == 2
        kvx("verify", path)
        kvx("rm", path, "--model", "b", "--dry-run")
        entry.unlink()
        target.rename(entry)
    kvx("verify", path)


def test_what_is_swapped_while_it_is_read(path: Path, tmp_path: Path) -> None:
    """A file that becomes a link or a FIFO behind the listing."""
    inventory = Inventory(Directory(path))
    link, fifo, gone = entries(path)[:3]
    link.rename(tmp_path / "entry")
    link.symlink_to(tmp_path / "entry")
    fifo.unlink()
    os.mkfifo(fifo)
    gone.unlink()
    judged = [(file.name, str(error)) for file, error in inventory.verify() if error]
    assert {name for name, _ in judged} == {str(file.relative_to(path)) for file in (link, fifo)}


def test_what_is_not_kvx_stays(path: Path) -> None:
    (path / "notes").mkdir()
    (path / "notes/mine.txt").write_text("mine")
    (path / "link").symlink_to(path.parent)
    folder = path / ("0" * 64)
    (folder / "kinds").mkdir(parents=True)
    others = [
        *("x.safetensors", "kinds/x.json", "kinds/" + "0" * 31 + ".json", "other.json"),
        *("abc/def", "\x1b[2J", "kinds/\u202e.json"),
    ]
    for name in others:
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"")
    key = "abc" + "0" * 61
    for name in (f"abd/{key}.mark", f"abd/{key}.{'0' * 32}.safetensors", f"abc/{key}.mark2"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"")
        others.append(name)
    assert len(listed(path)) == 3
    assert totals(path)["num_other_files"] == 1 + len(others) - 2  # two have no names of blobs
    kvx("verify", path)
    kvx("trim", path, "1B")
    kvx("rm", path, "--older", "0s")
    assert (path / "notes/mine.txt").read_text() == "mine"
    assert all((folder / name).exists() for name in others)
    assert (path / "kvx-store.json").exists()


@pytest.mark.parametrize(
    "raw",
    [b"", b"\xff" * 100, b"[" * (1 << 20), b"{" + b'"a":1,' * 100_000],
    ids=["nothing", "no text", "too deep", "no end"],
)
def test_records_of_any_bytes(raw: bytes, path: Path) -> None:
    space = space_of(path)
    record = path / hashlib.sha256(raw).hexdigest() / "space.json"
    record.parent.mkdir()
    record.write_bytes(raw)  # its name is right
    put_kind(space, raw)
    (space / "space.json").write_bytes(raw)
    for command in COMMANDS:
        kvx(command[0], path, *command[1:], code=command == ("verify",))
    found = json.loads(kvx("verify", path, "--json", "--delete", code=1).stdout)
    assert len(found["bad"]) == 3
    assert (path / "kvx-store.json").exists()
    kvx("verify", path)
    save(prefix_store(path, "b"), 7)
    assert len(listed(path, "--model", "b")) == 1


def test_an_entry_of_another_prompt_is_not_exported(path: Path, tmp_path: Path) -> None:
    """A file under a name that its tokens do not have."""
    space = space_of(path)
    first, second = entries(space)[:2]
    second.write_bytes(first.read_bytes())
    result = json.loads(kvx("export", path, "b", tmp_path / "out", "--json", code=1).stdout)
    assert len(result["failed"]) == 1
    for file in (tmp_path / "out").glob("*/*.safetensors"):
        with Snapshot.open(file) as snapshot:
            start = snapshot.header.start
            expected = prompt_of(4)[start : start + len(snapshot.tokens)]
            assert snapshot.tokens.tolist() == expected.tolist()
    assert len(all_files(path)) == 30
    assert CHUNK == 16
