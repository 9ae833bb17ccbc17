"""The files of prefix stores, for tests: which lie in a folder, and what their kinds say."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from safetensors import safe_open

from kvx_core import Snapshot
from kvx_core.stores.chunk_file import open_chunk
from kvx_core.stores.kind import Kind
from kvx_core.stores.secrets import Secrets


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
    id = path.name.split(".")[1]
    kind = Kind.parse((path.parent.parent / "kinds" / f"{id}.json").read_bytes(), id)
    with path.open("rb", buffering=0) as file:
        return open_chunk(file, kind, Secrets(), name=path.name).read(kind.layers)


def record_of(path: Path) -> bytes:
    """The record of a plain entry's file: see docs/store_format.md."""
    with safe_open(path, "np") as file:
        return bytes.fromhex(file.metadata()["kvx"])


def tokens_of(path: Path) -> list[int]:
    """The token ids of a plain entry's file."""
    record = record_of(path)
    (count,) = struct.unpack_from("<I", record, 12)
    return list(struct.unpack_from(f"<{count}q", record, 140))
