"""Entries that a longer one makes useless are dropped, and no others."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch

from kvx_core import Directory, PrefixStore
from kvx_core.snapshot import Precision, StoreError
from kvx_core.stores.stale_entries import StaleEntries
from tests.stores.engine import HEADS, Engine, save, store_in


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def timed(store: PrefixStore, clock: Clock) -> PrefixStore:
    """The store, whose longer entries and marks have the test's clock."""
    marks = store._entries.marks
    marks._taken._clock = clock
    store._stale_entries = StaleEntries(store._blobs, marks, store.index, 30.0, clock)
    return store


def length_of(path: Path) -> int:
    """Tokens of an entry, by its record."""
    raw = path.read_bytes()
    header = json.loads(raw[8 : 8 + struct.unpack_from("<Q", raw)[0]])
    record = bytes.fromhex(header["__metadata__"]["kvx"])
    return int(struct.unpack_from("<I", record, 12)[0])


def lengths(root: Path) -> list[int]:
    """Tokens of the entries in a store."""
    return sorted(map(length_of, root.rglob("*.safetensors")))


def later(store: PrefixStore, clock: Clock, seconds: float = 31) -> None:
    clock.now += seconds
    store._stale_entries.drop()


def test_a_conversation_keeps_its_longest_end(tmp_path: Path, clock: Clock) -> None:
    store = timed(store_in(tmp_path), clock)
    for length in (9, 12, 15):
        save(store, range(length))
    assert lengths(tmp_path) == [9, 12, 15]  # readers that have found them load them
    later(store, clock, 29)
    assert lengths(tmp_path) == [9, 12, 15]
    later(store, clock)
    assert lengths(tmp_path) == [15]
    save(store, range(16 + 10))
    later(store, clock)
    assert lengths(tmp_path) == [10, 16]  # a full chunk, and the next end

    for length in (9, 12, 15, 16, 26):
        engine = Engine(seed=length)
        match = store.lookup(range(length))
        assert match.num_tokens == length
        store.load(match, 0, length, engine.sections())
        engine.check(range(length), 0, length)


def test_other_continuations_stay(tmp_path: Path, clock: Clock) -> None:
    store = timed(store_in(tmp_path), clock)
    save(store, [*range(10), 77])
    save(store, [*range(10), 88, 99])
    save(store, range(9))  # written after the longer ones: nothing is dropped for it
    later(store, clock)
    assert lengths(tmp_path) == [9, 11, 12]
    save(store, range(14))
    later(store, clock)
    assert lengths(tmp_path) == [11, 12, 14]
    for tokens in ([*range(10), 77], [*range(10), 88, 99]):
        assert store.lookup(tokens).num_tokens == len(tokens)


def test_nothing_goes_before_all_ranks_have_written(tmp_path: Path, clock: Clock) -> None:
    store = timed(store_in(tmp_path), clock)
    ranks = [Engine(heads=range(i, i + 1)) for i in range(HEADS)]
    for rank in ranks:
        save(store, range(9), rank)
    for rank in ranks[:-1]:
        save(store, range(13), rank)
    later(store, clock)
    assert lengths(tmp_path) == [9] * HEADS + [13] * (HEADS - 1)
    save(store, range(13), ranks[-1])
    later(store, clock)
    assert lengths(tmp_path) == [13] * HEADS
    assert store.lookup(range(13)).num_tokens == 13


def test_nothing_goes_before_ranks_of_other_processes_have_written(
    tmp_path: Path, clock: Clock
) -> None:
    """A rank looks nothing up: it learns of the kinds of others from the folder alone."""
    ranks = [
        (timed(store_in(tmp_path), clock), Engine(heads=range(i, i + 1))) for i in range(HEADS)
    ]
    for store, rank in ranks:
        save(store, range(9), rank)
    for store, rank in ranks[:-1]:
        save(store, range(13), rank)
    for store, _ in ranks:
        later(store, clock)
    assert lengths(tmp_path) == [9] * HEADS + [13] * (HEADS - 1)
    assert store_in(tmp_path).lookup(range(13)).num_tokens == 9


def test_the_mark_of_an_entry_of_a_kind_that_is_new_stays(tmp_path: Path) -> None:
    """Writers whose files are laid out otherwise, and who look nothing up."""
    other = store_in(tmp_path)
    save(other, range(13))
    one = store_in(tmp_path)
    for half in (range(2), range(2, HEADS)):
        save(one, range(3), Engine(heads=half))
    assert store_in(tmp_path).lookup([*range(12), 99]).num_tokens == 12


def test_a_longer_entry_that_has_gone_costs_nothing(tmp_path: Path, clock: Clock) -> None:
    """The shorter one stays, and gets its mark again."""
    store = timed(store_in(tmp_path), clock)
    save(store, range(9))
    save(store, range(13))
    (longer,) = (path for path in tmp_path.rglob("*.safetensors") if length_of(path) == 13)
    longer.unlink()
    later(store, clock)
    assert lengths(tmp_path) == [9]
    assert store_in(tmp_path).lookup([*range(8), 77]).num_tokens == 8


def test_entries_of_another_precision_stay(tmp_path: Path, clock: Clock) -> None:
    exact = timed(store_in(tmp_path), clock)
    save(exact, range(9))
    coarse = store_in(tmp_path, precision=Precision.of(torch.bfloat16))
    save(timed(coarse, clock), range(13), Engine(dtype=torch.bfloat16))
    later(coarse, clock)
    assert lengths(tmp_path) == [9, 13]
    assert exact.lookup(range(13)).num_tokens == 9


def test_a_store_that_cannot_be_written(tmp_path: Path, clock: Clock) -> None:
    class ReadOnly(Directory):
        def delete(self, name: str) -> None:
            raise self._failure(name, "deleted", OSError(30, "Read-only file system"))

    store = timed(store_in(ReadOnly(tmp_path)), clock)
    save(store, range(9))
    save(store, range(13))
    later(store, clock)
    assert lengths(tmp_path) == [9, 13]


def test_no_folder_of_entries_is_listed(tmp_path: Path, clock: Clock) -> None:
    class Unlisted(Directory):
        def names(self, folder: str) -> list[str]:
            if not folder.endswith("/kinds"):
                raise StoreError(f"{folder} cannot be listed")
            return super().names(folder)

    store = timed(store_in(Unlisted(tmp_path)), clock)
    assert all(save(store, range(9)))
    assert all(save(store, range(13)))
    assert lengths(tmp_path) == [9, 13]
    later(store, clock)
    assert lengths(tmp_path) == [13]
    assert store.lookup(range(11)).num_tokens == 11


def test_other_salts_are_looked_at_apart(tmp_path: Path, clock: Clock) -> None:
    store = timed(store_in(tmp_path), clock)
    other = store.salted("tenant")
    save(store, range(9))
    save(other, range(13))
    later(store, clock)
    assert lengths(tmp_path) == [9, 13]
    save(other, range(15))
    later(store, clock)
    assert lengths(tmp_path) == [9, 15]
