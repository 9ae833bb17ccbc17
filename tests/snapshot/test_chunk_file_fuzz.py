"""Random changes to files and kinds, with checks made good again: a file is read as the reader of
its page reads it, or refused; nothing but StoreError is raised.

Run a million of them with `pytest --slow tests/snapshot/test_chunk_file_fuzz.py`.
"""

from __future__ import annotations

import io
import json
import os
import random
from typing import Any

import numpy as np
import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvx_core import Snapshot
from kvx_core._c.os_files import first_bytes
from kvx_core.snapshot import StoreError
from kvx_core.snapshot.chunk_file import chunk_parts, open_chunk
from kvx_core.snapshot.kind import Kind
from tests.snapshot import store_reader
from tests.snapshot.chunk_files import (
    DECODERS,
    FULL,
    KEYS,
    MAKERS,
    bytes_of,
    kind_of,
    read,
    secrets_of,
)
from tests.snapshot.chunk_files import snapshot_of as random_snapshot

NAMES = ("BF16", "a scale per token and head", "NVFP4", "planes", "lossless", "unequal", "Q8_0")
QUICK, SLOW = 300, 30_000
SEEDS = range(int(os.environ.get("KVX_FUZZ_SEEDS", "3")))  # 34: a million files


class File:
    """A good file, taken apart: changed at random and put together again, with good checks."""

    def __init__(self, name: str, keys: str, n: int) -> None:
        self.n, self.keys = n, keys
        self.signing, self.encryption = KEYS[keys]
        handle = os.memfd_create("kvx")
        with io.FileIO(handle, "r+") as file:
            self.kind = self.written(file, name, random_snapshot(MAKERS[name], n, n))
            self.raw = os.pread(handle, 1 << 24, 0)
        length = 8 + int.from_bytes(self.raw[:8], "little")
        self.head, self.data = self.raw[:length], self.raw[length:]
        self.digits = json.loads(self.head[8:])["__metadata__"]["kvx"]
        record = bytes.fromhex(self.digits)
        self.check_bytes = 32 if self.signing else 16
        if self.encryption:
            record = record[:68] + self._cipher(record).decrypt(bytes(12), record[68:], record[:68])
        self.record = record[: -self.check_bytes]
        self.row_bytes = 4 + 16 * (not self.signing or bool(self.encryption))
        self.row_bytes += 32 * bool(self.signing)

    def written(self, file: io.FileIO, name: str, snapshot: Snapshot) -> Kind:
        kind = kind_of(MAKERS[name], self.keys)
        file.write(b"".join(chunk_parts(snapshot, kind, secrets_of(self.keys))))
        return kind

    def prefix(self, expected: store_reader.Chunk) -> str:
        return expected.parent.hex()

    @property
    def kind_raw(self) -> bytes | None:
        return self.kind.text

    def _cipher(self, record: bytes | bytearray) -> AESGCM:
        assert self.encryption is not None
        key = store_reader.mac(self.encryption, b"kvx file key", bytes(record[36:68]))
        return AESGCM(key)

    def changed(self, dice: random.Random) -> bytes:
        """The bytes of a file that is like it."""
        way = dice.randrange(5)
        if way == 0:  # the checks stay as they are
            raw = bytearray(self.raw)
            for _ in range(dice.randint(1, 3)):
                raw[dice.randrange(len(raw))] = dice.randrange(256)
            return bytes(raw[: dice.choice([len(raw), len(raw), dice.randrange(len(raw))])])
        record, data = bytearray(self.record), bytearray(self.data)
        rows = 140 + 8 * self.n
        if way in (1, 2):  # the record
            for _ in range(dice.randint(1, 3)):
                places = [
                    dice.randrange(len(record)),
                    dice.randrange(140),
                    rows + dice.randrange(4),
                ]
                record[dice.choice(places)] = dice.choice([0, 1, 255, dice.randrange(256)])
        elif way == 3 and not self.encryption:  # a piece, with a good check
            index, at = dice.randrange((len(record) - rows) // self.row_bytes), 0
            sizes = [
                int.from_bytes(record[i : i + 4], "little")
                for i in range(rows, len(record), self.row_bytes)
            ]
            at = sum(sizes[:index])
            piece = data[at : at + sizes[index]]
            for _ in range(dice.randint(1, 3)):
                piece[dice.randrange(len(piece))] = dice.randrange(256)
            data[at : at + sizes[index]] = piece
            check = store_reader.check_of(bytes(piece), self.signing, b"kvx piece")
            at = rows + index * self.row_bytes + 4
            record[at : at + len(check)] = check
        else:  # what the data is
            del data[dice.randrange(len(data)) :]
            data += dice.randbytes(dice.randrange(8))
        return self.sealed(bytes(record), bytes(data), dice)

    def sealed(self, record: bytes, data: bytes, dice: random.Random) -> bytes:
        record += store_reader.check_of(record, self.signing, b"kvx record")
        if self.encryption:
            clear = record[:68]
            record = clear + self._cipher(record).encrypt(bytes(12), record[68:], clear)
        digits = record.hex()
        head = self.head.replace(self.digits.encode(), digits.encode(), 1)
        if dice.random() < 0.05:
            head = head.replace(b"  ", b" \t", 1)
        if dice.random() < 0.9 and b'"pieces"' in head:
            tensors = store_reader.tensors_of(json.loads(self.kind.text), self.n)
            text = store_reader.text_of(json.loads(self.kind.text), tensors, digits, len(data))
            head = head[:8] + text.encode()
        return head + data

    def expected(self, raw: bytes) -> store_reader.Chunk | None:
        """As the page says; None: it is not good."""
        try:
            return store_reader.read(
                raw,
                self.kind_raw,
                signing=self.signing,
                encryption=self.encryption,
                decoders=DECODERS,
            )
        except (AssertionError, ValueError, KeyError, IndexError, TypeError, InvalidTag):
            return None
        except (RuntimeError, OverflowError):
            return None

    def found(self, raw: bytes, dice: random.Random) -> Snapshot | None:
        """As KVX reads it; None: it refuses it."""
        secrets = secrets_of(self.keys)
        with io.FileIO(os.memfd_create("kvx"), "r+") as file:
            file.write(raw)
            try:
                if dice.random() < 0.5:
                    chunk = open_chunk(file, self.kind, secrets, name="it")
                    return Snapshot.of_file(chunk.read(self.kind.layers))
                handle = os.dup(file.fileno())
                return read(
                    lambda _, *rest: first_bytes(handle, *rest), self.kind, self.n, self.keys
                )
            except StoreError:
                return None


class SnapshotFile(File):
    """One of a snapshot."""

    def written(self, file: io.FileIO, name: str, snapshot: Snapshot) -> Kind:
        snapshot.save(file, key=self.signing)
        with Snapshot.open(file, key=self.signing) as opened:
            assert opened.file is not None
            return opened.file.kind

    def prefix(self, expected: store_reader.Chunk) -> str:
        return str(expected.kind["prefix"])

    @property
    def kind_raw(self) -> bytes | None:
        return None

    def found(self, raw: bytes, dice: random.Random) -> Snapshot | None:
        with io.FileIO(os.memfd_create("kvx"), "r+") as file:
            file.write(raw)
            try:
                with Snapshot.open(file, key=self.signing) as opened:
                    return opened.read(opened.header.layers)
            except StoreError:
                return None


def check(file: File, seed: int, count: int) -> None:
    """Files that are changed at random."""
    dice = random.Random(seed)
    accepted = refused = 0
    for _ in range(count):
        raw = file.changed(dice)
        found, expected = file.found(raw, dice), file.expected(raw)
        if found is None:
            refused += 1
            # What the page asks beside what its reader checks.
            if expected is not None and len(expected.tokens) == file.n:
                tokens = {
                    tpe for p in file.kind.parts for k in p.planes if (tpe := k.tokens_per_entry)
                }
                scales = [t for n, t in expected.tensors.items() if n.endswith("scale")]
                assert (
                    expected.start > 1 << 62
                    or any(expected.start % tpe for tpe in tokens)
                    or not all(map(good_scale, scales))
                    or any(t.coding for t in expected.tensors.values())  # its decoder takes more
                )
            continue
        accepted += 1
        if expected is None:  # codes that no writer makes: what they stand for is not said
            assert any(stored.coding for stored in found.tensors.values())
            continue
        assert found.header.prefix == file.prefix(expected)
        assert found.header.start == expected.start
        assert found.tokens.tolist() == expected.tokens
        assert found.tensors.keys() == expected.tensors.keys()
        for name, tensor in expected.tensors.items():
            assert bytes_of(found, name) == tensor.data
    assert refused > count / 10
    assert accepted > count / 50


def good_scale(scale: store_reader.Tensor) -> bool:
    if scale.dtype == "F8_E4M3":
        return max(scale.data) <= 0x7E  # 0 or greater, and no NaN
    floats = np.frombuffer(scale.data, "<f4")
    with np.errstate(invalid="ignore"):
        return bool((np.isfinite(floats) & (floats > 0)).all())


@pytest.mark.parametrize("keys", KEYS)
def test_changed_files(keys: str) -> None:
    for i, name in enumerate(NAMES):
        check(File(name, keys, 5 + i), 1, QUICK)


@pytest.mark.parametrize("keys", ["plain", "signed"])
def test_changed_snapshots(keys: str) -> None:
    for i, name in enumerate(NAMES):
        check(SnapshotFile(name, keys, 5 + i), 1, QUICK // 3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_many_changed_snapshots(seed: int) -> None:
    names = [(name, keys) for name in NAMES for keys in ("plain", "signed")]
    for name, keys in names:
        check(SnapshotFile(name, keys, 1 + seed), 100 + seed, SLOW // len(names))


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_many_changed_files(seed: int) -> None:
    names = [(name, keys) for name in NAMES for keys in KEYS]
    for name, keys in names:
        check(File(name, keys, 1 + seed % 9), 100 + seed, SLOW // len(names))


VALUES: list[Any] = [
    0,
    1,
    -1,
    3,
    4,
    2**31,
    2**63,
    10**30,
    0.5,
    True,
    None,
    "",
    "n",
    "n/4",
    "n/0",
    "k",
]
VALUES += [
    "BF16",
    "F32",
    "Q8_0",
    "F4_E2M1",
    "values",
    "bf16",
    "lossless_bf16",
    "layers.0.k",
    [],
    {},
]


def places(value: Any) -> list[tuple[Any, Any]]:
    """All that is in a JSON value, with what it is in."""
    steps = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for step, each in list(steps):
        found.append((value, step))
        if isinstance(each, (dict, list)):
            found += places(each)
    return found


def check_kinds(seed: int, count: int) -> None:
    """Kinds that are changed at random: those that are taken are laid out as the page says."""
    dice = random.Random(seed)
    texts = [kind_of(MAKERS[name], keys).text for name in MAKERS for keys in KEYS]
    accepted = 0
    for _ in range(count):
        kind = json.loads(dice.choice(texts))
        for _ in range(dice.randint(1, 2)):
            within, step = dice.choice(places(kind))
            way = dice.random()
            if way < 0.6:
                within[step] = dice.choice(VALUES)
            elif way < 0.8:
                other, place = dice.choice(places(kind))
                if not isinstance(other[place], (dict, list)):
                    within[step] = other[place]
            elif isinstance(within, list):
                within.insert(step, within[step])
            else:
                within.pop(step)
            if not places(kind):
                break
        try:
            raw = store_reader.canonical(kind)
            found = Kind.parse(raw, "a kind")
        except StoreError:
            continue
        accepted += 1
        assert found.text == raw
        for n in (1, dice.randint(1, FULL)):
            tensors = store_reader.tensors_of(kind, n)
            layout = found.layout(n)
            assert [(name, t.dtype.name, t.shape) for name, t in layout.tensors.items()] == [
                (name, t.dtype, t.shape) for name, t in tensors.items()
            ]
            pieces = store_reader.pieces_of(tensors)
            assert [list(map(tuple, piece.slices)) for piece in layout.pieces] == pieces
    assert accepted > count / 100


def test_changed_kinds() -> None:
    check_kinds(1, 2000)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_many_changed_kinds(seed: int) -> None:
    check_kinds(100 + seed, SLOW // 5)
