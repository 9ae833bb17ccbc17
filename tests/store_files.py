"""The files of prefix stores, for tests: which lie in a folder, and what their kinds say."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import safe_open

from kvx_core.snapshot import Snapshot
from kvx_core.snapshot.chunk_file import chunk_parts, open_chunk
from kvx_core.snapshot.kind import Kind
from kvx_core.snapshot.secrets import Secrets


def entry_files(root: Path) -> list[Path]:
    """The files of entries, sorted by name."""
    return sorted(root.rglob("*.safetensors"))


def kind_of(path: Path) -> dict[str, Any]:
    """The record of the kind of an entry's file."""
    kind = path.name.split(".")[1]
    text = (path.parent.parent / "kinds" / f"{kind}.json").read_text()
    found: dict[str, Any] = json.loads(text)
    return found


def layers_of(path: Path) -> list[int]:
    """The layers of an entry's file."""
    return sorted(layer for group in kind_of(path)["groups"] for layer in group["layers"])


def heads_of(path: Path) -> tuple[int, int]:
    """The first head of the first layer of an entry's file, and one past the last."""
    first, last = kind_of(path)["groups"][0]["heads"]
    return first, last


def precision_of(path: Path) -> str:
    """The precision of the first layers of an entry's file."""
    found: str = kind_of(path)["groups"][0]["precision"]
    return found


def snapshot_of(path: Path) -> Snapshot:
    """What a plain entry's file holds."""
    kind = _kind(path)
    with path.open("rb", buffering=0) as file:
        chunk = open_chunk(file, kind, Secrets(), name=path.name)
        return Snapshot.of_file(chunk.read(kind.layers))


def record_of(path: Path) -> bytes:
    """The record of a plain entry's file: see docs/store_format.md."""
    with safe_open(path, "np") as file:
        return bytes.fromhex(file.metadata()["kvx"])


def tokens_of(path: Path) -> list[int]:
    """The token ids of a plain entry's file."""
    record = record_of(path)
    (count,) = struct.unpack_from("<I", record, 12)
    return list(struct.unpack_from(f"<{count}q", record, 140))


def rewrite(path: Path, change: Callable[[Snapshot], object]) -> None:
    """Changes the values of a plain entry's file, checks and all."""
    snapshot = snapshot_of(path)
    change(snapshot)
    _write(path, snapshot, _kind(path))


def change_facts(path: Path, **facts: Any) -> Path:
    """Rewrites a plain entry's file as of a cache of which this is true: one of another kind, whose
    record is written too. Returns the new file, which is there instead.
    """
    snapshot, old = snapshot_of(path), _kind(path)
    parts = tuple(
        replace(part, facts=replace(part.facts, **facts)) for part in snapshot.header.parts
    )
    full = old.layout(1024).tensors  # more than an entry of any plane
    kind = Kind.of(parts, full, 1024, keyed=old.keyed, encrypted=old.encrypted)
    path.parent.parent.joinpath("kinds", f"{kind.id}.json").write_bytes(kind.text)
    path.unlink()
    path = path.with_name(path.name.replace(old.id, kind.id))
    _write(path, replace(snapshot, header=replace(snapshot.header, parts=parts)), kind)
    return path


def _kind(path: Path) -> Kind:
    id = path.name.split(".")[1]
    return Kind.parse((path.parent.parent / "kinds" / f"{id}.json").read_bytes(), id)


def _write(path: Path, snapshot: Snapshot, kind: Kind) -> None:
    path.write_bytes(b"".join(chunk_parts(snapshot, kind, Secrets())))
