"""Marks: their bytes, what hostile ones cost, who gets a rung, and what lookups lose by them."""

from __future__ import annotations

import hashlib
import itertools
import multiprocessing
import struct
import threading
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from xxhash import xxh3_128_digest

from kvx_core import Directory
from kvx_core.snapshot import CorruptError, StoreError, UnsignedError
from kvx_core.snapshot.secrets import Secrets
from kvx_core.stores.blob_store import BlobStore, Write
from kvx_core.stores.index import Index, NotCached
from kvx_core.stores.marks import KnownMarks, Mark, Marks, mark_bytes, most_bytes, parse_mark
from kvx_core.stores.names import Ids, entry_name, key_of, mark_name, rung_of, rungs
from kvx_core.stores.stale_entries import StaleEntries
from tests.prompts import CHUNK, SHAPES, Best, Draw, Prompts, small_edits
from tests.stores_memory import InMemory

SPACE = hashlib.sha256(b"a space").hexdigest()
KIND, OTHER_KIND = "cd" * 16, "ef" * 16
SIGN, ENCRYPT = b"sign" * 8, b"hide" * 8
WAYS = {
    "plain": Secrets(),
    "signed": Secrets.of(SIGN),
    "encrypted": Secrets.of(None, ENCRYPT),
    "both": Secrets.of(SIGN, ENCRYPT),
}


class Quick(InMemory):
    """In memory, without a handle for each file; counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, str]] = []

    def put(self, name: str, write: Write, *, durable: bool = True) -> bool:
        self.calls.append(("durable put" if durable else "put", name))
        file = BytesIO()
        write(file)
        with self._lock:
            is_new = name not in self.files
            self.files.setdefault(name, file.getvalue())
        return is_new

    def read(self, name: str, most_bytes: int) -> bytes | None:
        self.calls.append(("read", name))
        raw = self.files.get(name)
        if raw is not None and len(raw) > most_bytes:
            raise CorruptError(f"{name} is too long")
        return raw

    def is_there(self, name: str) -> bool:
        self.calls.append(("is_there", name))
        return name in self.files

    def names(self, folder: str) -> list[str]:
        raise AssertionError(f"{folder} was listed")


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Node:
    """Entries below one parent, and a writer's and a reader's view of their marks."""

    def __init__(self, blobs: BlobStore | None = None, secrets: Secrets | None = None) -> None:
        self.blobs = Quick() if blobs is None else blobs
        self.clock, self.index = Clock(), Index()
        secrets = Secrets() if secrets is None else secrets
        self.marks = Marks(self.blobs, secrets, self.index, self.kinds, self.clock)
        self.stale_entries = StaleEntries(self.blobs, self.marks, self.index, 30.0, self.clock)

    def kinds(self, space: str, *, lists: bool = False) -> list[str]:
        assert space == SPACE
        return [KIND, OTHER_KIND]

    def store(self, ids: Ids, kind: str = KIND) -> None:
        """An entry, without a mark."""
        self.blobs.put(entry_name(SPACE, key_of(SPACE, ids), kind), nothing)

    def has(self, ids: Ids, kind: str = KIND) -> bool:
        return self.blobs.is_there(entry_name(SPACE, key_of(SPACE, ids), kind))

    def publish(self, ids: Ids, **options: bool) -> Mark | None:
        return self.marks.publish(SPACE, SPACE, ids, CHUNK, **options)

    def save(self, ids: Ids) -> None:
        """As a writer does."""
        self.store(ids)
        shorter = self.publish(ids)
        if shorter is not None:
            self.stale_entries.found(SPACE, shorter, Mark(SPACE, ids), CHUNK)
        self.stale_entries.drop()

    def found(self, ids: Ids) -> list[tuple[int, list[int]]]:
        found = self.marks.candidates(SPACE, SPACE, ids, CHUNK)
        return [(shared, mark.ids.tolist()) for shared, mark in found]

    def held(self) -> list[tuple[int, int]]:
        """Of each mark the tokens of its rung and of its entry."""
        assert isinstance(self.blobs, InMemory)
        found = []
        for name, raw in self.blobs.files.items():
            if name.endswith(".mark"):
                mark = parse_mark(raw, name, self.marks._secrets, CHUNK)
                own = {r: d for d, r in rungs(SPACE, mark.ids, CHUNK)}
                found.append((own[name[-69:-5]], len(mark.ids)))
        return sorted(found)

    def later(self, seconds: float) -> None:
        self.clock.now += seconds


def nothing(file: Any) -> None:
    """Writes an empty file."""


def prompt(*parts: int | range) -> Ids:
    """Tokens, and ranges of them."""
    each = [[part] if isinstance(part, int) else list(part) for part in parts]
    return np.array([token for part in each for token in part], np.int64)


def mac(secret: bytes, purpose: bytes, data: bytes) -> bytes:
    key = hashlib.blake2b(secret, digest_size=64, person=b"kvx key").digest()
    return hashlib.blake2b(data, key=key, digest_size=32, person=purpose).digest()


def written(
    way: str, ids: list[int], parent: str = SPACE, raw_head: bytes | None = None, **fields: Any
) -> bytes:
    """A mark with any field wrong, and good checks. Nothing of the package makes it."""
    signed, encrypted = way in ("signed", "both"), way in ("encrypted", "both")
    key_id = int.from_bytes(mac(SIGN, b"kvx name", b"")[:8], "little") if signed else 0
    hide_id = int.from_bytes(mac(ENCRYPT, b"kvx name", b"")[:8], "little") if encrypted else 0
    random = fields.get("random", b"r" * 32 if encrypted else bytes(32))
    raw = struct.pack(
        f"<8sIIQQ32s32s{len(ids)}q",
        fields.get("magic", b"KVXMARK3"),
        fields.get("flags", signed | encrypted << 1),
        fields.get("n", len(ids)),
        fields.get("key_id", key_id),
        fields.get("hide_id", hide_id),
        random,
        bytes.fromhex(parent),
        *ids,
    )
    raw += mac(SIGN, b"kvx mark", raw) if signed else xxh3_128_digest(raw)
    if encrypted:
        cipher = AESGCM(mac(ENCRYPT, b"kvx file key", random))
        raw = raw[:64] + cipher.encrypt(bytes(12), raw[64:], raw[:64])
    return raw


# ---- bytes ----


def test_marks_that_are_published_together() -> None:
    """They are those of entries that are published one after another, with one call of the store
    where the first rungs are free.
    """
    ways = [prompt(range(20)), prompt(7, range(40)), prompt(range(3, 30)), prompt(9, range(50))]
    other = key_of(SPACE, prompt(range(CHUNK)))
    parents = [SPACE, SPACE, other, other]
    together, alone = Node(), Node()
    entries = [Mark(parent, ids) for parent, ids in zip(parents, ways, strict=True)]
    for own in entries:
        for node in (together, alone):
            node.blobs.put(entry_name(SPACE, own.key, KIND), nothing)
            node.blobs.put(entry_name(SPACE, own.key, OTHER_KIND), nothing)
    found = together.marks.publish_all(SPACE, entries, CHUNK)
    assert found == [alone.marks.publish(SPACE, own.parent, own.ids, CHUNK) for own in entries]
    assert isinstance(together.blobs, InMemory)
    assert isinstance(alone.blobs, InMemory)
    assert together.blobs.files == alone.blobs.files
    assert len([name for name in alone.blobs.files if name.endswith(".mark")]) == len(entries)


def test_marks_of_other_writers_are_not_replaced_together() -> None:
    writer = Node()
    reader = Node(writer.blobs)
    first, second = prompt(range(40)), prompt(3, range(1, 40))
    writer.save(first)
    reader.store(second)
    assert reader.marks.publish_all(SPACE, [Mark(SPACE, second)], CHUNK) == [None]
    assert writer.held() == [(0, 40), (CHUNK // 8, 40)]
    assert reader.marks.publish_all(SPACE, [], CHUNK) == []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("count", [1, 16, 17, CHUNK])
def test_bytes(way: str, count: int) -> None:
    ids = prompt(-(2**63), range(2, count), 2**63 - 1)[:count]
    raw = mark_bytes(Mark(SPACE, ids), WAYS[way])
    random = raw[32:64]
    assert any(random) == (way in ("encrypted", "both"))
    assert raw == written(way, ids.tolist(), random=random)
    assert len(raw) <= most_bytes(count)
    for length, rung in rungs(SPACE, ids, CHUNK):
        for known in (length, None):
            mark = parse_mark(raw, mark_name(SPACE, rung), WAYS[way], CHUNK, known)
            assert (mark.parent, mark.ids.tolist()) == (SPACE, ids.tolist())
            assert mark.key == key_of(SPACE, ids)
    assert len(mark_bytes(Mark(SPACE, ids), WAYS["both"])) == most_bytes(count)


def test_exact_bytes() -> None:
    """A plain one, digit by digit."""
    raw = mark_bytes(Mark("ab" * 32, prompt(1, 258)), Secrets())
    assert raw[:-16].hex() == (
        "4b56584d41524b33"  # KVXMARK3
        "00000000" + "02000000" + "00" * 48 + "ab" * 32 + "0100000000000000" + "0201000000000000"
    )
    assert raw[-16:] == xxh3_128_digest(raw[:-16])


def test_random_bytes_are_of_one_file() -> None:
    one, other = (mark_bytes(Mark(SPACE, prompt(1)), WAYS["encrypted"]) for _ in range(2))
    assert one[32:64] != other[32:64]


def test_all_keys_read() -> None:
    """A process with a new key, and the old one beside it, reads what others have written."""
    ids, new = prompt(1, 2, 3), b"new!" * 8
    name = mark_name(SPACE, rung_of(SPACE, ids[:0]))
    both = Secrets.of([new, SIGN], [new, ENCRYPT])
    assert parse_mark(written("both", [1, 2, 3]), name, both, CHUNK).ids.tolist() == [1, 2, 3]
    with pytest.raises(UnsignedError, match="keys that this process does not have"):
        parse_mark(mark_bytes(Mark(SPACE, ids), both), name, WAYS["both"], CHUNK)


# ---- hostile files ----

IDS = list(range(20))
RUNG = rung_of(SPACE, prompt(range(16)))
NAME = mark_name(SPACE, RUNG)


def refused(way: str, raw: bytes) -> type[StoreError]:
    """How a file is refused: alone, and by a lookup and a writer, which it costs one read.

    Lookups leave what may be the beginning of a mark, and delete all other bad ones.
    """
    with pytest.raises(StoreError) as error:
        parse_mark(raw, NAME, WAYS[way], CHUNK)
    node = Node(secrets=WAYS[way])
    assert isinstance(node.blobs, Quick)
    node.blobs.files[NAME] = raw
    assert node.marks.read(SPACE, RUNG, CHUNK, 16) is None
    assert node.blobs.calls == [("read", NAME)]
    is_corrupt = error.type is CorruptError
    assert (NAME not in node.blobs.files, node.index.num_corrupt) == (is_corrupt, is_corrupt)
    assert not node.index.take_failures()
    return error.type


@pytest.mark.parametrize("way", WAYS)
def test_each_byte_counts(way: str) -> None:
    raw = written(way, IDS)
    parse_mark(raw, NAME, WAYS[way], CHUNK)
    for i in range(len(raw)):
        for flip in (1, 128, 255):
            refused(way, raw[:i] + bytes([raw[i] ^ flip]) + raw[i + 1 :])


@pytest.mark.parametrize("way", WAYS)
def test_each_length_counts(way: str) -> None:
    raw = written(way, IDS)
    for wrong in (*(raw[:i] for i in range(len(raw))), raw + b"\0", raw + raw, raw + bytes(9999)):
        assert refused(way, wrong) is CorruptError


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("ids", "fields"),
    [
        (IDS, {"magic": b"KVXMARK4"}),
        (IDS, {"n": 19}),
        (IDS, {"n": 21}),
        (IDS, {"n": 0}),
        (IDS, {"n": 2**32 - 1}),
        ([], {}),
        (list(range(CHUNK + 1)), {}),
        (IDS[:16], {}),  # its rungs are shorter
        ([*IDS[:15], 99, *IDS[16:]], {}),  # others
        (IDS, {"parent": "ab" * 32}),
    ],
)
def test_resealed(way: str, ids: list[int], fields: dict[str, Any]) -> None:
    """Whoever has the keys, or needs none, has written it."""
    assert refused(way, written(way, ids, **fields)) is CorruptError


def test_flags_and_fields_that_are_not_used() -> None:
    assert refused("plain", written("plain", IDS, flags=4)) is CorruptError
    for fields in ({"key_id": 1}, {"hide_id": 1}, {"random": b"r" * 32}):
        assert refused("plain", written("plain", IDS, **fields)) is CorruptError
    assert refused("signed", written("signed", IDS, hide_id=1)) is CorruptError
    assert refused("encrypted", written("encrypted", IDS, key_id=1)) is CorruptError


@pytest.mark.parametrize("own", WAYS)
@pytest.mark.parametrize("other", WAYS)
def test_other_ways_of_writing(own: str, other: str) -> None:
    """An unsigned mark in a signed store, say: it does not count, and stays for others."""
    raw = written(other, IDS)
    if own != other:
        assert refused(own, raw) is UnsignedError
    assert refused(own, written(own, IDS, n=5)) is CorruptError


@pytest.mark.parametrize("way", ["signed", "encrypted", "both"])
def test_keys_of_others(way: str) -> None:
    raw = mark_bytes(
        Mark(SPACE, prompt(range(20))),
        Secrets.of(
            b"evil" * 8 if WAYS[way].is_keyed else None,
            b"evil" * 8 if WAYS[way].is_encrypted else None,
        ),
    )
    assert refused(way, raw) is UnsignedError
    if way == "signed":  # with the id of the right key
        own = WAYS[way].signing[0].id
        assert refused(way, raw[:16] + struct.pack("<Q", own) + raw[24:]) is CorruptError


def test_a_large_file_is_not_read(tmp_path: Path) -> None:
    node = Node(Directory(tmp_path))
    node.blobs.put(NAME, lambda file: file.truncate(1 << 40) and None)
    assert node.marks.read(SPACE, RUNG, CHUNK) is None
    assert not node.blobs.is_there(NAME)
    assert node.index.num_corrupt == 1


def test_marks_of_other_keys_hold_no_rung() -> None:
    node = Node(secrets=WAYS["signed"])
    assert isinstance(node.blobs, Quick)
    first = rung_of(SPACE, prompt())
    node.blobs.files[mark_name(SPACE, first)] = written("plain", IDS)
    assert node.publish(prompt(range(20))) is None
    assert node.found(prompt(range(20))) == [(20, IDS)]


def test_a_store_that_cannot_be_read() -> None:
    class Broken(Quick):
        def read(self, name: str, most_bytes: int) -> bytes | None:
            try:
                raise PermissionError(13, "Permission denied")
            except OSError as error:
                raise StoreError(f"{name} cannot be read") from error

    node = Node(Broken())
    assert node.found(prompt(1, 2)) == []
    assert node.publish(prompt(1, 2)) is None
    failures = [str(error).rpartition("mark ")[2] for error in node.index.take_failures()]
    assert failures == ["cannot be read"] * 2


def test_a_mark_that_a_failing_machine_has_cut() -> None:
    """Whoever meets it deletes it: a lookup, or a writer, which takes its place."""
    ids = prompt(range(40))
    rung = rung_of(SPACE, ids[:0])
    name, raw = mark_name(SPACE, rung), mark_bytes(Mark(SPACE, ids), Secrets())
    for size, is_read in itertools.product((0, 7, 95, 96, len(raw) - 1), (True, False)):
        node = Node()
        assert isinstance(node.blobs, Quick)
        node.blobs.files[name] = raw[:size]
        if is_read:
            assert node.marks.read(SPACE, rung, CHUNK, 0) is None
            assert name not in node.blobs.files
        assert node.publish(prompt(range(20))) is None
        assert (node.held(), node.index.num_corrupt) == ([(0, 20)], 1)


# ---- who gets a rung ----


def test_the_first_free_rung() -> None:
    node = Node()
    for last in range(5):
        node.save(prompt(range(40), last))
    assert node.held() == [(0, 41), (16, 41), (32, 41)]
    assert node.found(prompt(range(40), 0))[0] == (41, [*range(40), 0])
    assert node.found(prompt(range(40), 4))[0][0] == 40
    assert [shared for shared, _ in node.found(prompt(range(20), 77))] == [20, 20]
    assert node.found(prompt(99)) == []


def test_nothing_is_synced_and_one_entry_has_one_mark() -> None:
    node = Node()
    assert isinstance(node.blobs, Quick)
    node.save(prompt(range(40)))
    node.save(prompt(range(40)))
    assert node.held() == [(0, 40)]
    assert [call for call, name in node.blobs.calls if name.endswith(".mark")] == ["read", "put"]


def test_a_busy_template_costs_no_files() -> None:
    node = Node()
    assert isinstance(node.blobs, Quick)
    for last in range(10):
        node.save(prompt(range(40), last))
    node.blobs.calls.clear()
    for last in range(10, 20):
        node.publish(prompt(range(40), last))
    assert node.blobs.calls == []
    node.later(31)
    node.publish(prompt(range(40), 20))
    assert [call for call, _ in node.blobs.calls] == ["read", "is_there"] * 3


def test_another_process_sees_what_is_held() -> None:
    one = Node()
    one.save(prompt(range(40), 1))
    other = Node(one.blobs)
    other.save(prompt(range(40), 2))
    assert one.held() == [(0, 41), (16, 41)]


def test_the_mark_of_an_entry_that_has_gone_is_free() -> None:
    node = Node()
    node.save(prompt(range(40), 1))
    node.blobs.delete(entry_name(SPACE, key_of(SPACE, prompt(range(40), 1)), KIND))
    node.save(prompt(range(40), 2))
    assert node.held() == [(0, 41), (16, 41)]  # it was seen lately
    node.later(31)
    node.save(prompt(range(40), 3))
    assert node.found(prompt(range(40)))[0][1][-1] == 3
    assert node.held() == [(0, 41), (16, 41)]


def test_kinds_that_are_not_known_yet_cost_no_mark() -> None:
    one = Node()
    one.save(prompt(range(40), 1))
    other = Node(one.blobs)
    other.marks._kinds = lambda space, lists: []
    other.publish(prompt(range(40), 2))
    assert one.held() == [(0, 41), (16, 41)]


def test_a_longer_entry_takes_the_mark_of_a_shorter_one() -> None:
    node = Node()
    for length in (9, 12, 40):
        node.save(prompt(range(length)))
    assert node.held() == [(0, 40)]
    node.store(prompt(range(50)))
    shorter = node.publish(prompt(range(50)))
    assert shorter is not None
    assert shorter.ids.tolist() == [*range(40)]
    assert node.publish(prompt(range(45))) is None  # shorter than the one that holds it
    assert node.held() == [(0, 50), (16, 45)]


def test_ids_of_a_larger_array_are_not_kept() -> None:
    node, large = Node(), np.arange(1 << 20)
    node.save(large[:40])
    mark = node.marks.known.known(SPACE, rung_of(SPACE, prompt()))
    assert mark is not None
    assert mark.ids.base is None


# ---- the useless ----


def lengths(node: Node, *kinds: str) -> list[int]:
    each = range(1, CHUNK + 1)
    return [n for n in each for kind in kinds or (KIND,) if node.has(prompt(range(n)), kind)]


def test_a_conversation_keeps_its_longest_end() -> None:
    node = Node()
    for length in (9, 12, 15):
        node.save(prompt(range(length)))
        node.later(10)
    assert lengths(node) == [9, 12, 15]
    node.stale_entries.drop()
    assert lengths(node) == [9, 12, 15]
    node.later(11)
    node.stale_entries.drop()
    assert lengths(node) == [12, 15]
    node.later(10)
    node.stale_entries.drop()
    assert lengths(node) == [15]
    assert node.found(prompt(range(12)))[0] == (12, [*range(15)])


def test_nothing_goes_before_all_ranks_have_written() -> None:
    node = Node()
    for kind in (KIND, OTHER_KIND):
        node.store(prompt(range(9)), kind)
    node.save(prompt(range(9)))
    node.save(prompt(range(20)))
    assert node.held() == [(0, 9), (16, 20)]  # the shorter one is still needed
    node.later(31)
    node.store(prompt(range(20)), OTHER_KIND)
    node.save(prompt(range(20)))
    assert node.held() == [(0, 20), (16, 20)]
    assert lengths(node, KIND, OTHER_KIND) == [9, 9, 20, 20]
    node.later(31)
    node.stale_entries.drop()
    assert lengths(node, KIND, OTHER_KIND) == [20, 20]


def test_what_a_rank_has_not_written_yet_is_looked_for_again() -> None:
    """Just before the shorter entry goes."""
    node = Node()
    node.save(prompt(range(9)))
    node.save(prompt(range(12)))
    node.store(prompt(range(9)), OTHER_KIND)
    node.later(31)
    node.stale_entries.drop()
    assert lengths(node, KIND, OTHER_KIND) == [9, 9, 12]


def test_all_kinds_go_together() -> None:
    node = Node()
    for length in (9, 12):
        node.store(prompt(range(length)), OTHER_KIND)
        node.save(prompt(range(length)))
    node.later(31)
    node.stale_entries.drop()
    assert lengths(node, KIND, OTHER_KIND) == [12, 12]


def test_a_longer_entry_that_has_gone_costs_nothing() -> None:
    node = Node()
    node.save(prompt(range(9)))
    node.save(prompt(range(12)))
    node.blobs.delete(entry_name(SPACE, key_of(SPACE, prompt(range(12))), KIND))
    node.later(31)
    node.stale_entries.drop()
    assert lengths(node) == [9]


def test_a_longer_entry_gets_its_mark_again_before_the_shorter_one_goes() -> None:
    node = Node()
    node.save(prompt(range(9)))
    node.save(prompt(range(12)))
    node.blobs.delete(mark_name(SPACE, rung_of(SPACE, prompt())))
    node.later(31)
    node.stale_entries.drop()
    assert lengths(node) == [12]
    assert node.held() == [(0, 12)]


def test_a_store_that_may_only_be_read() -> None:
    class ReadOnly(Quick):
        def delete(self, name: str) -> None:
            if KIND in name:
                raise StoreError("Read-only file system")
            super().delete(name)

    node = Node(ReadOnly())
    node.save(prompt(range(9)))
    node.save(prompt(range(12)))
    node.later(31)
    node.stale_entries.drop()
    assert lengths(node) == [9, 12]


def test_what_is_remembered_is_bounded() -> None:
    node = Node()
    for i in range(5000):
        node.stale_entries.found(SPACE, Mark(SPACE, prompt(i)), Mark(SPACE, prompt(i, i)), CHUNK)
    assert len(node.stale_entries._found) == 4096


# ---- what memory knows ----


def test_memory_answers_for_a_while() -> None:
    node = Node()
    node.save(prompt(range(40)))
    known = node.marks.known

    def remembered(ids: Ids) -> list[int]:
        return [shared for shared, _ in known.candidates(SPACE, SPACE, ids, CHUNK)]

    with pytest.raises(NotCached):
        remembered(prompt(range(30)))
    assert node.found(prompt(range(30)))[0][0] == 30
    assert remembered(prompt(range(30))) == [30]
    node.later(0.3)
    with pytest.raises(NotCached):
        remembered(prompt(range(30)))
    with pytest.raises(NotCached):
        known.candidates("ab" * 32, SPACE, prompt(range(30)), CHUNK)


def test_a_new_mark_is_found_where_there_was_none() -> None:
    """By a lookup that asks the disk: that another process has written meanwhile."""
    node = Node()
    assert node.found(prompt(range(30))) == []
    Node(node.blobs).save(prompt(range(40)))
    assert node.marks.known.candidates(SPACE, SPACE, prompt(range(30)), CHUNK) == []
    assert node.found(prompt(range(30)))[0][0] == 30


def test_a_lookup_that_finds_nothing_reads_two_marks() -> None:
    node = Node()
    assert isinstance(node.blobs, Quick)
    assert node.found(prompt(range(CHUNK))) == []
    assert len(node.blobs.calls) == 2


def test_memory_is_bounded() -> None:
    known = KnownMarks(lambda: 10.0)
    for i in range(20_000):
        known.saw(SPACE, f"{i}", Mark(SPACE, np.arange(CHUNK)))
    assert known._num_held <= 1 << 21
    assert known._num_held == sum(64 + CHUNK for _ in known._seen)
    with pytest.raises(NotCached):
        known.known(SPACE, "0")
    assert known.known(SPACE, "19999") is not None
    for i in range(40_000):
        known.saw(SPACE, f"none {i}", None)
    assert known._num_held <= 1 << 21
    known.forget(SPACE, "none 39999")
    with pytest.raises(NotCached):
        known.known(SPACE, "none 39999")


# ---- races ----


def in_threads(work: Callable[[int], None], count: int = 4) -> None:
    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def check_all(root: Path, entries: list[Ids]) -> None:
    """All marks are good, each rung on the way of an entry is held before a longer one is, and no
    entry loses more than it may.
    """
    node = Node(Directory(root))
    best = Best(entries)
    for name in (path.relative_to(root) for path in root.rglob("*.mark")):
        raw = (root / name).read_bytes()
        parse_mark(raw, str(name), Secrets(), CHUNK)
    for ids in entries:
        found = node.found(ids)
        assert best.shared(ids) == len(ids)
        assert found[0][0] >= len(ids) - CHUNK // 8
    assert not node.index.num_corrupt
    assert not node.index.take_failures()


def entries_of(writer: int) -> list[Ids]:
    """Those of a writer: turns of a conversation that all have, and ends of their own."""
    own = [prompt(range(30 + i)) for i in range(0, 60, 2)]
    return own + [prompt(range(3 * i), 1000 + writer, range(20)) for i in range(30)]


def test_threads_of_one_process(tmp_path: Path) -> None:
    node = Node(Directory(tmp_path))

    def write(writer: int) -> None:
        for ids in entries_of(writer):
            node.save(ids)

    in_threads(write)
    check_all(tmp_path, [ids for writer in range(4) for ids in entries_of(writer)])


def _write(root: Path, writer: int, begin: Any) -> None:
    node = Node(Directory(root))
    begin.wait()
    for ids in entries_of(writer):
        node.save(ids)


def test_two_processes(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    begin = context.Barrier(2)
    processes = [context.Process(target=_write, args=(tmp_path, i, begin)) for i in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    check_all(tmp_path, [ids for writer in range(2) for ids in entries_of(writer)])


def test_only_one_of_two_writers_gets_a_rung() -> None:
    """The other one takes the next rung, whenever it comes to know."""

    class Late(Quick):
        def read(self, name: str, most_bytes: int) -> bytes | None:
            raw = super().read(name, most_bytes)
            if raw is None and writers:
                writers.pop()()
            return raw

    blobs = Late()
    one, other = Node(blobs), Node(blobs)
    writers = [lambda: other.save(prompt(range(40), 2))]
    one.save(prompt(range(40), 1))
    assert one.held() == [(0, 41), (16, 41)]
    assert one.found(prompt(range(40), 1))[0][0] == 41
    assert one.found(prompt(range(40), 2))[0][0] == 41


def test_two_writers_that_replace_the_same_mark() -> None:
    """The one that loses its mark gets another one before the shorter entry goes."""

    class Late(Quick):
        def delete(self, name: str) -> None:
            if name.endswith(".mark") and writers:
                writers.pop()()
            super().delete(name)

    blobs = Late()
    one, other = Node(blobs), Node(blobs)
    one.save(prompt(range(9)))
    writers = [lambda: other.save(prompt(range(40), 2))]
    one.save(prompt(range(40), 1))
    assert one.held() == [(0, 41)]
    assert one.found(prompt(range(40), 2))[0][0] == 40
    for node in (one, other):
        node.later(31)
        node.stale_entries.drop()
    assert one.held() == [(0, 41), (16, 41)]
    assert one.found(prompt(range(40), 2))[0][0] == 41
    assert lengths(one) == []


# ---- what lookups lose ----


def loss_of(draw: Draw, seed: int, count: int, queries: int) -> list[int]:
    """Tokens that lookups by exact names and marks lose against the best entry."""
    node, prompts = Node(), Prompts(draw, seed)
    entries = [prompts.entry() for _ in range(count)]
    for i, ids in enumerate(entries):
        node.store(ids)
        shorter = node.publish(ids)
        if shorter is not None:
            node.stale_entries.found(SPACE, shorter, Mark(SPACE, ids), CHUNK)
        if i % 100 == 0:
            node.later(10)
            node.stale_entries.drop()
    node.index.fresh_seconds = 0
    best, losses = Best(entries), []
    for _ in range(queries):
        ids = prompts.query()
        shared = len(ids)
        if not node.has(ids):
            found = node.found(ids)
            assert len(found) <= 8
            while found and not node.has(np.array(found[0][1])):
                found.pop(0)  # superseded: a longer one is there
            shared = found[0][0] if found else 0
        losses.append(best.shared(ids) - shared)
    return losses


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", SHAPES)
def test_little_is_lost(shape: str, seed: int) -> None:
    losses = loss_of(SHAPES[shape], seed, 1500, 300)
    assert min(losses) >= 0
    assert max(losses) <= CHUNK // 8
    assert sum(losses) / len(losses) < 1


@pytest.mark.parametrize("seed", range(3))
def test_at_most_an_eighth_of_a_chunk_is_lost(seed: int) -> None:
    """Where every prompt is an edit of others, in few words, too: the mean is then 2."""
    losses = loss_of(small_edits, seed, 1500, 300)
    assert 0 <= min(losses) <= max(losses) <= CHUNK // 8


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_little_is_lost_of_many_entries(shape: str) -> None:
    losses = loss_of(SHAPES[shape], 0, 100_000, 1000)
    assert 0 <= min(losses) <= max(losses) <= CHUNK // 8
    assert sum(losses) / len(losses) < 1
