"""Files of entries that a store may hold: broken, foreign, or written to deceive, each made from a
good one that is not signed.

hostile_chunks yields the same files every time. Checks are recomputed where an attacker could, so
that what is behind them is reached. Files whose name begins with "forged" are well formed, and hold
other keys and values: only a key detects them.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from itertools import chain

from xxhash import xxh3_128_digest

from tests.hostile import CONTROLS

_FIELDS = {  # of the record: the offset and the bytes of each, see docs/store_format.md
    "magic": (0, 8), "flags": (8, 4), "tokens": (12, 4), "pieces": (16, 4), "signer": (20, 8),
    "encrypter": (28, 8), "random bytes": (36, 32), "parent": (68, 32), "kind": (100, 32),
    "start": (132, 8),
}  # fmt: skip


class _File:
    """The parts of a file, to be changed and put together again."""

    def __init__(self, good: bytes) -> None:
        self.first = 8 + int.from_bytes(good[:8], "little")
        self.head, self.data = good[: self.first], good[self.first :]
        self.digits = json.loads(self.head[8:])["__metadata__"]["kvx"]
        self.record = bytearray.fromhex(self.digits)[:-16]
        self.num_tokens = int.from_bytes(self.record[12:16], "little")

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """The offset of each row of the record, and the bytes that its piece has."""
        rows = range(140 + 8 * self.num_tokens, len(self.record), 20)
        return [(at, int.from_bytes(self.record[at : at + 4], "little")) for at in rows]

    def check_pieces(self) -> None:
        """Makes all checks of pieces right."""
        begin = 0
        for at, size in self.pieces:
            self.record[at + 4 : at + 20] = xxh3_128_digest(self.data[begin : begin + size])
            begin += size

    def bytes(self) -> bytes:
        """The file; the check of its record is right."""
        whole = bytes(self.record) + xxh3_128_digest(self.record)
        return self.head.replace(self.digits.encode(), whole.hex().encode(), 1) + self.data


def hostile_chunks(good: bytes, mutations: int = 300) -> Iterator[tuple[str, bytes]]:
    """Name and content of each file.

    good:      a file of an entry, neither signed nor encrypted
    mutations: how many files with random changes there are at the end
    """
    seen: Counter[str] = Counter()
    groups = (make(good) for make in (_lengths, _headers, _records, _pieces, _forged))
    for name, data in chain(*groups, _mutated(good, mutations)):
        if data != good:
            seen[name] += 1
            yield name if seen[name] == 1 else f"{name} ({seen[name]})", data


def _lengths(good: bytes) -> Iterator[tuple[str, bytes]]:
    first, size = _File(good).first, len(good)
    for cut in (0, 1, 7, 8, 9, first // 2, first - 1, first, first + 1, (first + size) // 2,
                size - 1):  # fmt: skip
        yield f"cut to {cut} bytes", good[:cut]
    for more in (b"\0", b"\0" * 4096, good):
        yield f"{len(more)} bytes more", good + more
    for length in (0, 1, first - 9, first - 7, size - 8, size, 1 << 31, 1 << 63, (1 << 64) - 1):
        yield f"header of {length} bytes", length.to_bytes(8, "little") + good[8:]
    yield "all zeros", b"\0" * size
    yield "all ones", b"\xff" * size
    yield "random bytes", random.Random(1).randbytes(size)
    yield "nothing but spaces", good[:8] + b" " * (size - 8)


def _headers(good: bytes) -> Iterator[tuple[str, bytes]]:
    """Other text around the record, of the same length where that can be."""
    file = _File(good)
    text, digits = file.head[8:].rstrip(), file.digits.encode()
    for name, other in {
        "a list": b"[]",
        "null": b"null",
        "an open string": b'{"tokens',
        "deep lists": b"[" * 2000,
        "no metadata": text.replace(b"__metadata__", b"__metadatb__"),
        "another field": text.replace(b'"kvx"', b'"kvy"'),
        "no record": text.replace(digits, b""),
        "half a record": text.replace(digits, digits[: len(digits) // 2]),
        "capital digits": text.replace(digits, digits.upper()),
        "no digits": text.replace(digits, b"z" * len(digits)),
        "two records": text.replace(digits, digits * 2),
        "a NUL": text.replace(b'"dtype"', b'"dtyp\0"', 1),
        "no UTF-8": text.replace(b'"dtype"', b'"dtyp\xff"', 1),
        "other dtypes": text.replace(b'"dtype":"', b'"dtype":"X'),
        "another tensor": text.replace(b'"layers.0.k"', b'"layers.9.k"'),
        "controls": text.replace(b"layers.0.k", CONTROLS.encode(errors="replace")),
        "negative offsets": text.replace(b'"data_offsets":[', b'"data_offsets":[-'),
        "huge offsets": text.replace(b'"data_offsets":[', b'"data_offsets":[9999999999999999999'),
        "PyTorch's": b'{"__metadata__":{"format":"pt"}}',
        "a snapshot's": b'{"__metadata__":{"kvx_snapshot":"2","tokens":"8","bytes":"64"}}',
        "braces behind it": text + b"}",
    }.items():
        for size in (len(other), max(file.first - 8, len(other))):
            head = size.to_bytes(8, "little") + other.ljust(size)
            yield f"{name} as a header", head + file.data


def _records(good: bytes) -> Iterator[tuple[str, bytes]]:
    """The check of the record is right."""
    for field, (at, size) in _FIELDS.items():
        old = int.from_bytes(_File(good).record[at : at + size], "little")
        values = (0, 1, 2, 3, old + 1, old - 1, old ^ 1, 2 * old, (1 << 8 * size) - 1, 1 << 31)
        for value in dict.fromkeys(n % (1 << 8 * size) for n in values):
            file = _File(good)
            file.record[at : at + size] = value.to_bytes(size, "little")
            yield f"{field} {value:x}"[:60], file.bytes()
    for at in (0, 1, _File(good).num_tokens - 1):
        for token in (0, -1, 1 << 40, -(1 << 63)):
            file = _File(good)
            file.record[140 + 8 * at : 148 + 8 * at] = token.to_bytes(8, "little", signed=True)
            yield f"token {at} is {token}", file.bytes()
    for name, cut in {"a token less": slice(140, 148), "a piece less": slice(-20, None)}.items():
        file = _File(good)
        del file.record[cut]
        yield f"a record with {name}", file.bytes()
    file = _File(good)
    file.record += bytes(20)
    yield "a record with a piece more", file.bytes()


def _pieces(good: bytes) -> Iterator[tuple[str, bytes]]:
    """The check of the record is right, and in the second file of a name those of pieces are."""
    for index, (at, size) in enumerate(_File(good).pieces):
        for other in (0, 1, size - 1, size + 1, size // 2, 2 * size, (1 << 32) - 1):
            for right in (False, True):
                file = _File(good)
                file.record[at : at + 4] = (other % (1 << 32)).to_bytes(4, "little")
                if right:
                    file.check_pieces()
                yield f"piece {index} has {other} bytes", file.bytes()
        file = _File(good)
        file.record[at + 4] ^= 1
        yield f"piece {index} has another check", file.bytes()
    file = _File(good)
    file.data = bytes([file.data[0] ^ 1]) + file.data[1:]
    yield "a changed value", file.bytes()
    file = _File(good)
    file.data += bytes(4096)
    yield "more data", file.bytes()


def _mutated(good: bytes, count: int) -> Iterator[tuple[str, bytes]]:
    """Random changes: of bytes, and in each second file of the record, whose check is right."""
    dice = random.Random(2)
    first = _File(good).first
    for number in range(count):
        if number % 2:
            data = bytearray(good)
            for _ in range(dice.randint(1, 3)):
                at = dice.randrange(first if dice.random() < 0.8 else len(data))
                change = dice.randrange(3)
                if change == 0:
                    data[at] ^= 1 << dice.randrange(8)
                elif change == 1:
                    del data[at : at + dice.randint(1, 8)]
                else:
                    data[at:at] = dice.randbytes(dice.randint(1, 8))
            yield f"mutation {number} of bytes", bytes(data)
        else:
            file = _File(good)
            for _ in range(dice.randint(1, 4)):
                at = dice.choice((dice.randrange(140), dice.randrange(len(file.record))))
                file.record[at] = dice.choice((0, 1, 127, 255, file.record[at] ^ 1))
            yield f"mutation {number} of the record", file.bytes()


def _forged(good: bytes) -> Iterator[tuple[str, bytes]]:
    """All checks are right."""
    size = len(_File(good).data)
    for at in (0, size // 2, size - 1):
        file = _File(good)
        file.data = file.data[:at] + bytes([file.data[at] ^ 1]) + file.data[at + 1 :]
        file.check_pieces()
        yield f"forged value at byte {at}", file.bytes()
    file = _File(good)
    file.data = file.data[::-1]
    file.check_pieces()
    yield "forged values", file.bytes()
