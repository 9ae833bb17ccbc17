"""The files of prefix stores, for tests: which lie in a folder, and what their kinds say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


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
