"""Keys of a store change while engines run: nothing is computed twice, and nothing stays behind."""

from __future__ import annotations

from typing import Any, BinaryIO

import pytest

from kvx_core import PrefixStore, StoreError
from kvx_core.snapshot.secrets import Key
from tests.stores.engine import Engine, save, store_in
from tests.stores_memory import InMemory

OLD, NEW, OTHER = b"o" * 32, b"n" * 32, b"x" * 32
PROMPT = [i * 7 % 1009 for i in range(70)]  # four chunks of 16, and 6 tokens
LATER = [*PROMPT, *range(10)]


@pytest.fixture(params=["signing", "encryption", "both"])
def sort(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def blobs() -> InMemory:
    return InMemory()


def engine(blobs: InMemory, sort: str, *keys: bytes) -> PrefixStore:
    """The store of an engine that has just started with these keys."""
    given: dict[str, Any] = {"key": keys, "encryption_key": keys}
    if sort != "both":
        del given["encryption_key" if sort == "signing" else "key"]
    return store_in(blobs, **given)


def found(store: PrefixStore, tokens: list[int] = PROMPT) -> int:
    """How many tokens are found; all of them are loaded and compared."""
    match, cache = store.lookup(tokens), Engine(seed=1)
    if match.num_tokens:
        store.load(match, 0, match.num_tokens, cache.sections())
    cache.check(tokens, 0, match.num_tokens)
    return match.num_tokens


def ending(blobs: InMemory, end: str) -> dict[str, bytes]:
    """The files whose names end so."""
    return {name: raw for name, raw in blobs.files.items() if name.endswith(end)}


def has(raw: bytes, key: bytes) -> bool:
    """Whether a file names a key."""
    id = Key(key).id.to_bytes(8, "little")
    return id in raw or id.hex().encode() in raw


def test_while_keys_change_every_engine_finds_all(sort: str, blobs: InMemory) -> None:
    """First all can read the new key, then all write it, then the old one goes."""
    save(engine(blobs, sort, OLD), PROMPT)
    for keys in ([OLD, NEW], [NEW, OLD]):
        assert found(engine(blobs, sort, *keys)) == 70
    writer = engine(blobs, sort, NEW, OLD)
    save(writer, LATER)
    for keys in ([OLD, NEW], [NEW, OLD]):
        assert found(engine(blobs, sort, *keys), LATER) == 80
    files = ending(blobs, ".safetensors").values()
    assert {(has(raw, OLD), has(raw, NEW)) for raw in files} == {(True, False), (False, True)}


def test_an_engine_that_reads_the_new_key_too_late_computes_and_breaks_nothing(
    sort: str, blobs: InMemory
) -> None:
    late = engine(blobs, sort, OLD)
    early = engine(blobs, sort, NEW, OLD)
    save(early, PROMPT)
    assert found(late) == 0
    save(late, PROMPT)
    for store in (late, early, engine(blobs, sort, OLD), engine(blobs, sort, NEW, OLD)):
        assert found(store) == 70


def test_what_the_old_key_has_written_is_replaced_once_it_is_gone(
    sort: str, blobs: InMemory
) -> None:
    """Prompts that are computed again are stored again, under the same names, in one save."""
    save(engine(blobs, sort, OLD), PROMPT)
    save(engine(blobs, sort, NEW, OLD), PROMPT)
    files = ending(blobs, ".safetensors")
    assert all(has(raw, OLD) for raw in files.values())
    store = engine(blobs, sort, NEW)
    assert found(store) == 0
    assert store.missing(PROMPT, 16, 32, range(3), (0, 4))
    save(store, PROMPT)
    assert not store.missing(PROMPT, 16, 32, range(3), (0, 4))
    assert found(store) == found(engine(blobs, sort, NEW)) == 70
    now, marks = ending(blobs, ".safetensors"), ending(blobs, ".mark")
    assert set(now) == set(files)
    assert marks
    assert not any(has(raw, OLD) for raw in (*now.values(), *marks.values()))


def test_a_key_that_the_store_does_not_have_is_refused(sort: str, blobs: InMemory) -> None:
    save(engine(blobs, sort, OLD), PROMPT)
    files = dict(blobs.files)
    for keys in ([OTHER], [OTHER, NEW]):
        with pytest.raises(StoreError, match=r"kvx-store\.json is not authenticated by the "):
            engine(blobs, sort, *keys)
    assert blobs.files == files


def test_files_that_cannot_be_read_now_are_not_replaced(sort: str) -> None:
    class Failing(InMemory):
        fails = False

        def open(self, name: str) -> BinaryIO | None:
            if self.fails and name.endswith(".safetensors"):
                raise StoreError(f"{name} cannot be read: Input/output error")
            return super().open(name)

    blobs = Failing()
    save(engine(blobs, sort, OLD), PROMPT)
    files = ending(blobs, ".safetensors")
    engine(blobs, sort, NEW, OLD)
    blobs.fails = True
    store = engine(blobs, sort, NEW)
    assert store.lookup(PROMPT).num_tokens == 0
    save(store, PROMPT)
    assert ending(blobs, ".safetensors") == files


@pytest.mark.parametrize("wrong", [b"", b"{}", bytes(2 << 20)], ids=["empty", "other", "large"])
def test_records_that_a_disk_has_damaged_are_mended_by_the_next_save(
    sort: str, wrong: bytes, blobs: InMemory
) -> None:
    save(engine(blobs, sort, OLD), PROMPT)
    records = {n: r for n, r in blobs.files.items() if n.endswith((".json", ".mac")) and "/" in n}
    assert len(records) == 4  # of the space and the kind, and their MACs
    for name in records:
        blobs.files[name] = wrong
    assert found(engine(blobs, sort, OLD)) == 0
    save(engine(blobs, sort, OLD), PROMPT)
    assert {name: blobs.files[name] for name in records} == records
    assert found(engine(blobs, sort, OLD)) == 70
