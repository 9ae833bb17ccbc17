"""Makes and parses the names of a store's files. Format: docs/store_format.md, "Files"."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]

RUNGS = 8  # per chunk
FOLDER_DIGITS = 2  # the first digits of a file's name are its folder: at most 256 folders
_RUNG = b"kvx rung"
_ID_BYTES = 8
_KEY = re.compile("[0-9a-f]{64}")
_ENTRY = re.compile(
    r"([0-9a-f]{64})/([0-9a-f]{2})/"  # space, folder
    r"(\2[0-9a-f]{62})\.([0-9a-f]{32})\.safetensors"  # key, kind
)
_MARK = re.compile(r"[0-9a-f]{64}/(?P<folder>[0-9a-f]{2})/(?P=folder)[0-9a-f]{62}\.mark")


class EntryName(NamedTuple):
    """The parts of the name of an entry's file."""

    name: str
    space: str
    key: str
    kind: str


def key_of(parent: str, ids: Ids) -> str:
    """Returns the key of `ids` and all tokens before them: after a full chunk, the parent of the
    next chunk.

    parent: the key of all tokens before `ids`, or the space if there are none
    ids: (n,), int64, contiguous
    """
    digest = hashlib.sha256(bytes.fromhex(parent))
    digest.update(ids.data)
    return digest.hexdigest()


def rung_of(parent: str, ids: Ids) -> str:
    """Returns the rung that entries below a parent have if they begin with `ids`.

    ids: (d,), int64, contiguous
    """
    digest = hashlib.sha256(_RUNG + bytes.fromhex(parent))
    digest.update(ids.data)
    return digest.hexdigest()


def rungs(parent: str, ids: Ids, chunk_tokens: int) -> Iterator[tuple[int, str]]:
    """Yields the rungs of an entry, or of the rest of a prompt: (d, rung of the first d ids)."""
    data, digest, hashed = ids.data.cast("B"), hashlib.sha256(_RUNG + bytes.fromhex(parent)), 0
    for i in range(RUNGS):
        length = i * chunk_tokens // RUNGS
        if length >= len(ids):
            break
        digest.update(data[hashed * _ID_BYTES : length * _ID_BYTES])
        yield length, digest.copy().hexdigest()
        hashed = length


def entry_name(space: str, key: str, kind: str) -> str:
    """Returns the name of the file of one kind of an entry."""
    return f"{space}/{key[:FOLDER_DIGITS]}/{key}.{kind}.safetensors"


def mark_name(space: str, rung: str) -> str:
    """Returns the name of a mark."""
    return f"{space}/{rung[:FOLDER_DIGITS]}/{rung}.mark"


def kind_name(space: str, kind: str) -> str:
    """Returns the name of the record of a kind."""
    return f"{kinds_folder(space)}/{kind}.json"


def kinds_folder(space: str) -> str:
    """Returns the folder of the records of a space's kinds."""
    return f"{space}/kinds"


def space_record(space: str) -> str:
    """Returns the name of the record of a space."""
    return f"{space}/space.json"


def model_record(space: str) -> str:
    """Returns the name of the record of a space's model."""
    return f"{space}/model.json"


def parse_entry(name: str) -> EntryName | None:
    """Parses the name of an entry's file; returns None for any other name."""
    found = _ENTRY.fullmatch(name)
    return found and EntryName(name, *found.group(1, 3, 4))


def is_mark(name: str) -> bool:
    """True if `name` is the name of a mark."""
    return _MARK.fullmatch(name) is not None


def is_key(text: str) -> bool:
    """True if `text` has the form of a key."""
    return _KEY.fullmatch(text) is not None


def shared_tokens(ids: Ids, others: Ids) -> int:
    """Returns the length of the common prefix."""
    count = min(len(ids), len(others))
    differs = ids[:count] != others[:count]
    return int(differs.argmax()) if differs.any() else count
