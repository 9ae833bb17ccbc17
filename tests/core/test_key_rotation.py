"""Keys of a store change while engines run: nothing is computed twice, and nothing stays behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvx_core import Directory, PrefixStore, StoreError
from kvx_core.snapshot.signing import Key
from tests.core.test_stores import Engine, save, store_in
from tests.store_files import entry_files, mark_files
from tests.stores_memory import InMemory

OLD, NEW, OTHER = b"o" * 32, b"n" * 32, b"x" * 32
PROMPT = [i * 7 % 1009 for i in range(70)]  # four chunks of 16, and 6 tokens
LATER = [*PROMPT, *range(10)]


@pytest.fixture(params=["signing", "encryption", "both"])
def sort(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def engine(root: Path | InMemory, sort: str, *keys: bytes) -> PrefixStore:
    """The store of an engine that has just started with these keys."""
    given: dict[str, Any] = {"key": keys, "encryption_key": keys}
    if sort != "both":
        del given["encryption_key" if sort == "signing" else "key"]
    return store_in(root, **given)


def found(store: PrefixStore, tokens: list[int] = PROMPT) -> int:
    """How many tokens are found; all of them are loaded and compared."""
    match, cache = store.lookup(tokens), Engine(seed=1)
    if match.num_tokens:
        store.load(match, 0, match.num_tokens, cache.sections())
    cache.check(tokens, 0, match.num_tokens)
    return match.num_tokens


def has(path: Path, key: bytes) -> bool:
    """Whether a file names a key."""
    raw = path.read_bytes()
    id = Key(key).id.to_bytes(8, "little")
    return id in raw or id.hex().encode() in raw


def test_while_keys_change_every_engine_finds_all(sort: str, tmp_path: Path) -> None:
    """First all can read the new key, then all write it, then the old one goes."""
    save(engine(tmp_path, sort, OLD), PROMPT)
    for keys in ([OLD, NEW], [NEW, OLD]):
        assert found(engine(tmp_path, sort, *keys)) == 70
    writer = engine(tmp_path, sort, NEW, OLD)
    save(writer, LATER)
    for keys in ([OLD, NEW], [NEW, OLD]):
        assert found(engine(tmp_path, sort, *keys), LATER) == 80
    files = entry_files(tmp_path)
    assert {(has(path, OLD), has(path, NEW)) for path in files} == {(True, False), (False, True)}


def test_an_engine_that_reads_the_new_key_too_late_computes_and_breaks_nothing(
    sort: str, tmp_path: Path
) -> None:
    late = engine(tmp_path, sort, OLD)
    early = engine(tmp_path, sort, NEW, OLD)
    save(early, PROMPT)
    assert found(late) == 0
    save(late, PROMPT)
    for store in (late, early, engine(tmp_path, sort, OLD), engine(tmp_path, sort, NEW, OLD)):
        assert found(store) == 70


def test_what_the_old_key_has_written_is_replaced_once_it_is_gone(
    sort: str, tmp_path: Path
) -> None:
    """Prompts that are computed again are stored again, under the same names, in one save."""
    save(engine(tmp_path, sort, OLD), PROMPT)
    save(engine(tmp_path, sort, NEW, OLD), PROMPT)
    files = entry_files(tmp_path)
    assert all(has(path, OLD) for path in files)
    store = engine(tmp_path, sort, NEW)
    assert found(store) == 0
    assert store.missing(PROMPT, 16, 32, range(3), (0, 4))
    save(store, PROMPT)
    assert not store.missing(PROMPT, 16, 32, range(3), (0, 4))
    assert found(store) == found(engine(tmp_path, sort, NEW)) == 70
    assert entry_files(tmp_path) == files
    marks = mark_files(tmp_path)
    assert marks
    assert not any(has(path, OLD) for path in (*files, *marks))


def test_a_key_that_the_store_does_not_have_is_refused(sort: str, tmp_path: Path) -> None:
    save(engine(tmp_path, sort, OLD), PROMPT)
    files = {path: path.read_bytes() for path in entry_files(tmp_path)}
    for keys in ([OTHER], [OTHER, NEW]):
        with pytest.raises(StoreError, match=r"kvx-store\.json is not authenticated by the "):
            engine(tmp_path, sort, *keys)
    assert {path: path.read_bytes() for path in entry_files(tmp_path)} == files


def test_files_that_cannot_be_read_now_are_not_replaced(
    sort: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(Directory):
        def open(self, name: str) -> Any:
            if name.endswith(".safetensors"):
                raise StoreError(f"{name} cannot be read: Input/output error")
            return super().open(name)

    save(engine(tmp_path, sort, OLD), PROMPT)
    files = {path: path.stat().st_ino for path in entry_files(tmp_path)}
    store = engine(Failing(tmp_path), sort, NEW, OLD)  # type: ignore[arg-type]
    assert store.lookup(PROMPT).num_tokens == 0
    save(store, PROMPT)
    assert {path: path.stat().st_ino for path in entry_files(tmp_path)} == files
