"""Entries that a store may hold: broken, foreign, or written to deceive, each made from a good one.

hostile_entries yields the same files every time. Checks are recomputed where an attacker could, so
that what is behind them is reached. Files whose name begins with "forged" are well formed and hold
other keys and values: only a signature detects them. Format: docs/store_format.md, "Entries".
"""

from __future__ import annotations

import random
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain

from xxhash import xxh3_128_digest

_FIELDS = {  # offset, struct
    "magic": (0, "<Q"), "flags": (8, "<I"), "n": (12, "<I"), "p": (16, "<I"), "signer": (20, "<Q"),
    "encrypter": (28, "<Q"), "random": (36, "<Q"), "parent": (68, "<Q"), "kind": (100, "<Q"),
    "start": (132, "<Q"),
}  # fmt: skip
_IDS, _CHECK_BYTES, _ROW_BYTES = 140, 16, 20
_BEGIN = b'{"__metadata__":{"kvx":"'


@dataclass(frozen=True)
class _Entry:
    """The parts of a plain entry's file."""

    record: bytes  # without its check
    text: bytes  # of the header, behind the hex of the record
    data: bytes
    rows: int  # where they begin in the record

    @classmethod
    def of(cls, good: bytes) -> _Entry:
        stop = 8 + int.from_bytes(good[:8], "little")
        assert good[8:].startswith(_BEGIN)
        digits, _, text = good[8 + len(_BEGIN) : stop].partition(b'"')
        record = bytes.fromhex(digits.decode())[:-_CHECK_BYTES]
        (count,) = struct.unpack_from("<I", record, 12)
        return cls(record, b'"' + text, good[stop:], _IDS + 8 * count)

    def bytes(self, *, sealed: bool = True) -> bytes:
        """The file; sealed: with a good check of the record."""
        check = xxh3_128_digest(self.record) if sealed else bytes(_CHECK_BYTES)
        header = _BEGIN + (self.record + check).hex().encode() + self.text
        return len(header).to_bytes(8, "little") + header + self.data

    def with_data(self, data: bytes) -> _Entry:
        """The same with other data, and good checks of all pieces."""
        record, at = bytearray(self.record), 0
        for row in range(self.rows, len(record), _ROW_BYTES):
            (size,) = struct.unpack_from("<I", record, row)
            record[row + 4 : row + _ROW_BYTES] = xxh3_128_digest(data[at : at + size])
            at += size
        return replace(self, record=bytes(record), data=data)

    def with_bytes(self, at: int, found: bytes) -> _Entry:
        """The same with other bytes in the record."""
        record = self.record[:at] + found + self.record[at + len(found) :]
        return replace(self, record=record)


def hostile_entries(good: bytes, *, mutations: int = 300) -> Iterator[tuple[str, bytes]]:
    """Name and content of each file.

    good:      a plain entry
    mutations: how many files with random changes there are at the end
    """
    seen: Counter[str] = Counter()
    entry = _Entry.of(good)
    groups = (_lengths(good), _texts(entry), _records(entry), _forged(entry))
    for name, data in chain(*groups, _changed(good, mutations)):
        if data != good:
            seen[name] += 1
            yield name if seen[name] == 1 else f"{name} ({seen[name]})", data


def _lengths(good: bytes) -> Iterator[tuple[str, bytes]]:
    size, stop = len(good), 8 + int.from_bytes(good[:8], "little")
    middle = (stop + size) // 2
    for cut in (0, 1, 7, 8, 9, 31, 32, 200, stop // 2, stop - 1, stop, stop + 1, middle, size - 1):
        yield f"cut to {cut} bytes", good[:cut]
    for more in (b"\0", b"\0" * 4096, good):
        yield f"{len(more)} bytes more", good + more
    large = [1 << 20, 1 << 31, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 8, (1 << 64) - 1]
    for length in (0, 1, 2, stop - 9, stop - 7, stop + 56, size - 8, size - 7, size, *large):
        yield f"header of {length} bytes", length.to_bytes(8, "little") + good[8:]
    yield "all zeros", b"\0" * size
    yield "all ones", b"\xff" * size
    yield "random bytes", random.Random(1).randbytes(size)


def _texts(entry: _Entry) -> Iterator[tuple[str, bytes]]:
    """Other text around a good record, of the same length."""
    old = entry.text
    for before, after in (
        (b"layers.0.k", b"layers.9.k"), (b"layers.0.k", b"layers.0.v"), (b'"F32"', b'"F16"'),
        (b'"F32"', b'"\x1b[2"'), (b"[0,", b"[1,"), (b"dtype", b"DTYPE"), (b"shape", b"\xff\xfehap"),
        (b"{", b"["), (b"}", b" "), (b":", b","), (b" ", b"}"), (b'"}', b'"\0'),
    ):  # fmt: skip
        yield f"{before!r} is {after!r}", replace(entry, text=old.replace(before, after)).bytes()
        once = old.replace(before, after, 1)
        yield f"the first {before!r} is {after!r}", replace(entry, text=once).bytes()
    deep = b'"' + b"[" * (len(old) - 1)
    yield "brackets", replace(entry, text=deep).bytes()
    for name, change in (
        ("upper case", bytes.upper),
        ("spaces", lambda raw: raw.replace(b"0", b" ")),
    ):
        data = entry.bytes()
        stop = len(_BEGIN) + 8 + 2 * (len(entry.record) + _CHECK_BYTES)
        yield f"digits in {name}", data[:32] + change(data[32:stop]) + data[stop:]


def _records(entry: _Entry) -> Iterator[tuple[str, bytes]]:
    """Every field of the record changed; with a good check, and with the old one."""
    for name, (at, form) in _FIELDS.items():
        (value,) = struct.unpack_from(form, entry.record, at)
        most = (1 << 8 * struct.calcsize(form)) - 1
        for other in (0, 1, 2, 3, value + 1, value - 1, value ^ 1, value << 8, 1 << 31, most):
            if other & most != value:
                changed = entry.with_bytes(at, struct.pack(form, other & most))
                yield f"{name} is {other & most}", changed.bytes()
                yield f"{name} is {other & most}, unsealed", changed.bytes(sealed=False)
    for at in range(_IDS, entry.rows, 8):
        for other in (-1, 0, 1 << 62, -(1 << 63)):
            yield "another token", entry.with_bytes(at, struct.pack("<q", other)).bytes()
    for at in range(entry.rows, len(entry.record), _ROW_BYTES):
        for size in (0, 1, 1 << 20, (1 << 32) - 1):
            yield "a piece of another size", entry.with_bytes(at, struct.pack("<I", size)).bytes()
        yield "a piece of another check", entry.with_bytes(at + 4, bytes(16)).bytes()
    ids = entry.record[_IDS : entry.rows]
    more = entry.record[: entry.rows] + ids + entry.record[entry.rows :]
    yield "more tokens", replace(entry, record=more).bytes()
    fewer = entry.record[:_IDS] + ids[8:] + entry.record[entry.rows :]
    yield "fewer tokens", replace(entry, record=fewer).bytes()
    yield "no tokens", replace(entry, record=entry.record[:_IDS]).bytes()


def _forged(entry: _Entry) -> Iterator[tuple[str, bytes]]:
    size = len(entry.data)
    for seed in range(4):
        yield "forged numbers", entry.with_data(random.Random(seed).randbytes(size)).bytes()
    yield "forged zeros", entry.with_data(bytes(size)).bytes()
    yield "forged NaN", entry.with_data(b"\xff" * size).bytes()


def _changed(good: bytes, count: int) -> Iterator[tuple[str, bytes]]:
    """Files with random changes: bits, bytes, and parts that are moved, doubled or gone."""
    rng = random.Random(2)
    for i in range(count):
        data, at = bytearray(good), rng.randrange(len(good))
        size = rng.randrange(1, 64)
        if i % 4 == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif i % 4 == 1:
            data[at : at + size] = rng.randbytes(len(data[at : at + size]))
        elif i % 4 == 2:
            del data[at : at + size]
        else:
            data[at:at] = data[at : at + size]
        yield "changed at random", bytes(data)
