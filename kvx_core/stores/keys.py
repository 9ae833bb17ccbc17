"""The names of files in a prefix store: made and parsed here.

    <space>/<node>/<opening>/<num_tokens>-<entry>.l<layers>.h<heads>.p<precision>.safetensors

space: model, salt, key, and the format if it is lossy; node: all chunks before this one; opening:
two digits for each of the first 8 tokens, so that entries which differ early are in different
folders; layers and KV heads: ranges without their end, several joined by "+"; precision: see
Precision.name.
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kvx_core.snapshot import FORMAT, Header, Key, PlaneKind, Precision
from kvx_core.words import instance

OPENING_TOKENS = 8
# What is remembered: a chunk's name is needed several times while it is copied and stored.
_MAX_PLACES, _MAX_BYTES = 256, 1 << 15
_RANGE = "[0-9]{1,9}-[0-9]{1,9}"
_NAME = re.compile(
    r"(?P<folder>[0-9a-f]{64}/[0-9a-f]{64}/[0-9a-f]{2,16})/"
    r"(?P<num_tokens>[0-9]{1,9})-(?P<entry>[0-9a-f]{64})"
    rf"\.l(?P<layers>{_RANGE}(\+{_RANGE})*)\.h(?P<heads>{_RANGE})"
    r"\.p(?P<precision>[a-z0-9_+-]{1,150})\.safetensors"
)
_NODE = re.compile("[0-9a-f]{64}")

Ids = npt.NDArray[np.int64]
_ID_BYTES = 8


@dataclass(frozen=True, slots=True)
class EntryFile:
    """The parts of a file's name."""

    name: str
    folder: str
    num_tokens: int
    layers: tuple[int, ...]
    heads: tuple[int, int]
    precision: Precision

    @property
    def node(self) -> str:
        """The key of all tokens before the entry's."""
        return self.folder.split("/")[1]

    @property
    def entry(self) -> str:
        """The start of the names of all files of the entry, without their folder."""
        return self.name[len(self.folder) + 1 :].partition(".")[0]


def space_of(
    fingerprint: str,
    shape: tuple[int, int],
    salt: str,
    key: Key | None,
    planes: Iterable[PlaneKind] = (),
    lossy: str = "",
) -> str:
    """The folder of one model, salt and key.

    lossy: the format that rounds what is stored; "": none does
    """
    signed = [] if key is None else [key.name]
    kinds = [[k.layer, k.role, k.tokens_per_entry, k.replicated] for k in sorted(planes)]
    # Without planes and formats nothing, as before there were any.
    beside: list[object] = [{"planes": kinds}] if kinds else []
    beside += [{"lossy": lossy}] if lossy else []
    instance("fingerprint", fingerprint, str, "a string")
    instance("salt", salt, str, "a string")
    text = json.dumps([FORMAT, fingerprint, salt, *shape, *signed, *beside])
    return hashlib.sha256(text.encode()).hexdigest()


def chain(node: str, ids: Ids) -> str:
    """The key of `ids` and all tokens before them; the key of a full chunk is the next node."""
    return _key_of(node, ids.tobytes())


def is_node(text: str) -> bool:
    """Whether it has the form of a key from `chain`."""
    return _NODE.fullmatch(text) is not None


def entry_of(node: str, ids: Ids) -> str:
    """The start of a file's name."""
    return _place_of(node, ids.tobytes())[1]


def opening_of(node: str, ids: Ids) -> str:
    """Two digits for each of the first tokens. Each depends on all tokens up to its own."""
    return _opening_of(node, ids[:OPENING_TOKENS].tobytes())


def name_of(
    space: str,
    node: str,
    ids: Ids,
    layers: Iterable[int],
    heads: tuple[int, int],
    precision: Precision,
) -> str:
    """The name of the file with these layers and heads of an entry."""
    opening, entry = _place_of(node, ids.tobytes())
    end = _end_of(tuple(layers), heads, precision)
    return f"{space}/{node}/{opening}/{entry}{end}"


def heads_of(header: Header) -> tuple[int, int]:
    """The heads that all layers have; (0, 0), which no file has, where they differ."""
    heads = {part.heads for part in header.parts}
    return heads.pop() if len(heads) == 1 else (0, 0)


def _place_of(node: str, ids: bytes) -> tuple[str, str]:
    """The opening of an entry and the start of its files' names."""
    return (_known_place if len(ids) <= _MAX_BYTES else _new_place)(node, ids)


def _new_place(node: str, ids: bytes) -> tuple[str, str]:
    entry = f"{len(ids) // _ID_BYTES}-{_key_of(node, ids)}"
    return _opening_of(node, ids[: OPENING_TOKENS * _ID_BYTES]), entry


_known_place = lru_cache(_MAX_PLACES)(_new_place)


def _key_of(node: str, ids: bytes) -> str:
    return hashlib.sha256(bytes.fromhex(node) + ids).hexdigest()


def _opening_of(node: str, ids: bytes) -> str:
    crc, opening = zlib.crc32(node.encode()), bytearray()
    for at in range(0, len(ids), _ID_BYTES):
        crc = zlib.crc32(ids[at : at + _ID_BYTES], crc)
        opening.append(crc & 0xFF)
    return opening.hex()


@lru_cache(maxsize=64)
def _end_of(layers: tuple[int, ...], heads: tuple[int, int], precision: Precision) -> str:
    """The end of a file's name."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][1] == layer:
            runs[-1][1] += 1
        else:
            runs.append([layer, layer + 1])
    ranges = "+".join(f"{lo}-{hi}" for lo, hi in runs)
    return f".l{ranges}.h{heads[0]}-{heads[1]}.p{precision.name}.safetensors"


def parse_name(name: str, shape: tuple[int, int]) -> EntryFile | None:
    """Parses a name; None if it is not one of a model with so many layers and heads."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    num_layers, total_kv_heads = shape
    ranges = [_range(text) for text in found["layers"].split("+")]
    heads = _range(found["heads"])
    if not 0 <= heads[0] < heads[1] <= total_kv_heads or any(
        not 0 <= lo < hi <= num_layers for lo, hi in ranges
    ):
        return None
    try:
        precision = Precision.parse(found["precision"])
    except ValueError:
        return None
    layers = tuple(layer for lo, hi in ranges for layer in range(lo, hi))
    return EntryFile(name, found["folder"], int(found["num_tokens"]), layers, heads, precision)


def common_tokens(opening: str, other: str) -> int:
    """The most first tokens that entries in the folders of two openings can share."""
    count = min(len(opening), len(other)) // 2
    differs = (i for i in range(count) if opening[2 * i : 2 * i + 2] != other[2 * i : 2 * i + 2])
    return next(differs, count)


def shared_tokens(ids: Ids, others: Ids) -> int:
    """The length of the common prefix."""
    count = min(len(ids), len(others))
    differs = ids[:count] != others[:count]
    return int(differs.argmax()) if differs.any() else count


def _range(text: str) -> tuple[int, int]:
    lo, hi = text.split("-")
    return int(lo), int(hi)
