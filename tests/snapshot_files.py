"""Files of snapshots, taken apart and put together again with good checks, as anyone could do.

Format: docs/store_format.md, "Snapshots". It shares nothing with kvx_core.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.snapshot import store_reader

RECORD = struct.Struct("<8sIIIQQ32s32s32sQ")


@dataclass
class SnapshotFile:
    """The parts of a file, which is not encrypted."""

    kind: dict[str, Any]
    ids: bytes
    start: int
    data: bytes
    sizes: list[int]  # of the pieces
    checks: list[bytes]
    entries: str  # what its header says of the tensors
    parent: bytes = bytes(32)
    key: bytes | None = None

    @classmethod
    def of(cls, raw: bytes, key: bytes | None = None) -> SnapshotFile:
        stop = 8 + int.from_bytes(raw[:8], "little")
        found = json.loads(raw[8:stop])["__metadata__"]
        record = bytes.fromhex(found["kvx"])[: -32 if key else -16]
        _, _, n, _, _, _, _, parent, _, start = RECORD.unpack_from(record)
        ids, rows = record[140 : 140 + 8 * n], record[140 + 8 * n :]
        size = 36 if key else 20
        each = [rows[i : i + size] for i in range(0, len(rows), size)]
        sizes = [int.from_bytes(row[:4], "little") for row in each]
        text, kind = raw[8:stop].decode(), json.loads(found["kvx_kind"])
        _, _, entries = text.rstrip()[:-1].partition(store_reader.kind_text(kind) + "}")
        return cls(kind, ids, start, raw[stop:], sizes, [r[4:] for r in each], entries, parent, key)

    def laid_out(self) -> SnapshotFile:
        """The same with the pieces, and the text of the tensors, that its kind asks for."""
        tensors = store_reader.tensors_of(self.kind, len(self.ids) // 8)
        is_coded = any(tensor.coding for tensor in tensors.values())
        pieces = store_reader.pieces_of(tensors)
        if not is_coded:
            self.sizes = [sum(end - at for _, at, end in piece) for piece in pieces]
        self.entries = store_reader.entries_of(self.kind, tensors, len(self.data))
        return self.checked()

    def checked(self) -> SnapshotFile:
        """The same with good checks of the pieces."""
        at, self.checks = 0, []
        for size in self.sizes:
            piece = self.data[at : at + size]
            self.checks.append(store_reader.check_of(piece, self.key, b"kvx piece"))
            at += size
        return self

    def piece(self, name: str) -> tuple[int, int]:
        """Where the first piece with bytes of a tensor lies in the data."""
        tensors = store_reader.tensors_of(self.kind, len(self.ids) // 8)
        for i, piece in enumerate(store_reader.pieces_of(tensors)):
            if any(tensor == name for tensor, _, _ in piece):
                return sum(self.sizes[:i]), sum(self.sizes[: i + 1])
        raise KeyError(name)

    def bytes(self, kind: bytes | None = None, literal: str | None = None) -> bytes:
        """The file, with a good check of its record.

        kind:    the text that is checked in the place of that of its kind
        literal: what the header has behind the record, in the place of a text of the kind
        """
        text = store_reader.canonical(self.kind) if kind is None else kind
        record = RECORD.pack(
            b"KVXCHNK3",
            1 if self.key else 0,
            len(self.ids) // 8,
            len(self.sizes),
            store_reader.key_id(self.key) if self.key else 0,
            0,
            bytes(32),
            self.parent,
            hashlib.sha256(text).digest(),
            self.start,
        )
        rows = zip(self.sizes, self.checks, strict=True)
        record += self.ids + b"".join(size.to_bytes(4, "little") + check for size, check in rows)
        record += store_reader.check_of(record, self.key, b"kvx record")
        if literal is None:
            literal = f',"kvx_kind":{json.dumps(text.decode("latin-1"), ensure_ascii=False)}'
        entries = self.entries.encode("utf-8", "surrogatepass").decode("latin-1")
        header = store_reader.header_of(record.hex(), literal, entries).encode("latin-1")
        return len(header).to_bytes(8, "little") + header + self.data


def kind_in(path: Path) -> dict[str, Any]:
    """The kind in a file."""
    return SnapshotFile.of(path.read_bytes()).kind


def row_of(kind: dict[str, Any], name: str) -> list[Any]:
    """[name, dtype, shape, original, coding] of a tensor."""
    (found,) = (row for row in kind["tensors"] if row[0] == name)
    return list(found)


def with_row(kind: dict[str, Any], name: str, **fields: Any) -> dict[str, Any]:
    """The kind with other fields of a tensor."""
    words = ("name", "dtype", "shape", "original", "coding")
    rows = [
        [fields.get(word, value) for word, value in zip(words, row, strict=True)]
        if row[0] == name
        else row
        for row in kind["tensors"]
    ]
    return kind | {"tensors": rows}


def rewritten(path: Path, kind: dict[str, Any] | None = None, **fields: Any) -> Path:
    """The file again with another kind, or other fields of SnapshotFile, and good checks.

    Where nothing can be laid out as the kind says, pieces and text stay as they were.
    """
    file = SnapshotFile.of(path.read_bytes())
    file.kind = file.kind if kind is None else kind
    for name, value in fields.items():
        setattr(file, name, value)
    try:
        num_bytes = sum(
            tensor.num_bytes
            for tensor in store_reader.tensors_of(file.kind, len(file.ids) // 8).values()
        )
    except (KeyError, TypeError, ValueError):
        num_bytes = 1 << 62
    if num_bytes < 1 << 28 and not any(row[4] for row in file.kind["tensors"]):
        file.data = file.data[:num_bytes].ljust(num_bytes, b"\0")
    if num_bytes < 1 << 28:
        file.laid_out()
    else:
        file.checked()
    path.write_bytes(file.bytes())
    return path
