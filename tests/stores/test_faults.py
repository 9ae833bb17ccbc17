"""Temporary faults: a miss, an error of its own kind, and the file stays."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvx_core import StoreError
from kvx_core._c import file_calls
from kvx_core.snapshot import CorruptError, Snapshot, chunk_file, memory
from kvx_core.stores import beneath
from tests.caches import assert_same_bytes
from tests.descriptors import open_files
from tests.stores.engine import Engine, save, store_in
from tests.stores.test_prefix import files_of

TOKENS = range(20)
FAULTS = (errno.EIO, errno.ESTALE, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EACCES)


def failing(error: int, when: Callable[..., bool], real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        if when(*args):
            raise OSError(error, os.strerror(error))
        return real(*args, **options)

    return call


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    save(store_in(tmp_path), TOKENS)
    return tmp_path


@pytest.mark.parametrize("error", FAULTS)
@pytest.mark.parametrize("call", ["open", "read"])
def test_a_fault_that_passes_is_a_miss_and_the_file_stays(
    call: str, error: int, stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, engine = files_of(stored), Engine(seed=1)
    store = store_in(stored)
    match = store_in(stored).lookup(TOKENS)
    before = engine.cache.clone()

    real = beneath._read_file

    def read_file(folder: int, path: bytes, *rest: Any) -> tuple[int, int, int]:
        if b"safetensors" not in path:
            return real(folder, path, *rest)
        if call == "open":
            return -error, 0, 0
        handle, size, _ = real(folder, path, 1, 0, ())
        return handle, size, -error

    with monkeypatch.context() as patcher:
        patcher.setattr(beneath, "_read_file", read_file)
        patcher.setattr(file_calls, "read_chunks", lambda: None)
        assert store.lookup(TOKENS).num_tokens == 0
        with pytest.raises(StoreError, match=os.strerror(error)) as caught:
            store.load(match, 0, 20, engine.sections())
    assert not isinstance(caught.value, CorruptError)
    assert files_of(stored) == files
    assert_same_bytes(engine.cache, before)
    assert store.lookup(TOKENS).num_tokens == 20
    store.load(match, 0, 20, engine.sections())
    engine.check(TOKENS, 0, 20)


@pytest.mark.parametrize(("is_large", "after"), [(True, 0), (True, 1), (False, 0)])
def test_a_disk_block_that_cannot_be_read(
    is_large: bool, after: int, stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever in a file: the reads before it go well. Of a large file the head is read first."""
    if is_large:
        monkeypatch.setattr(chunk_file, "MOST_BYTES", 1)
    files, engine, left = files_of(stored), Engine(seed=1), [after]
    store = store_in(stored)
    match = store.lookup(TOKENS)

    def count(*_: object) -> bool:
        left[0] -= 1
        return left[0] < 0

    real = beneath._read_file

    def read_file(*given: Any) -> tuple[int, int, int]:
        handle, size, num_read = real(*given)
        return handle, size, -errno.EIO if count() else num_read

    with monkeypatch.context() as patcher:
        patcher.setattr(os, "preadv", failing(errno.EIO, count, os.preadv))
        patcher.setattr(beneath, "_read_file", read_file)
        patcher.setattr(file_calls, "read_chunks", lambda: None)
        with pytest.raises(StoreError, match=r"cannot be read: .*Input/output error"):
            store.load(match, 0, 16, engine.sections())
    assert files_of(stored) == files


def test_no_memory_for_the_data(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, engine = files_of(stored), Engine(seed=1)
    store = store_in(stored)
    match = store.lookup(TOKENS)

    def none(*_: object, **options: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patcher:
        patcher.setattr(memory.np, "empty", none)
        with pytest.raises(StoreError, match=r"no memory for \d+ bytes of keys and values"):
            store.load(match, 0, 16, engine.sections())
    assert files_of(stored) == files


def test_a_stack_that_is_nearly_full(stored: Path) -> None:
    """A good file is not taken for one that nests too deep."""
    files = files_of(stored)

    def deeper() -> None:
        with suppress(StoreError, RecursionError, ctypes.ArgumentError):  # of openat2's arguments
            store_in(stored).lookup(TOKENS)
        deeper()

    with pytest.raises(RecursionError):
        deeper()
    assert files_of(stored) == files


def test_loads_leave_no_descriptors(stored: Path) -> None:
    store, engine = store_in(stored), Engine(seed=1)
    match = store.lookup(TOKENS)
    files_of(stored)[0].write_bytes(files_of(stored)[0].read_bytes()[:-1])
    before = open_files()
    for _ in range(3):
        with pytest.raises(StoreError):
            store.load(match, 0, 20, engine.sections())
        store.lookup(TOKENS)
    assert not open_files() - before


def test_a_snapshot_is_read_from_the_file_that_was_opened(tmp_path: Path) -> None:
    """Whatever takes its place: its header was checked, and its data is."""
    path, captured = (
        tmp_path / "file",
        Snapshot.capture(TOKENS, Engine().compute(TOKENS).sections()),
    )
    assert captured is not None
    captured.save(path)
    with Snapshot.open(path) as snapshot:
        expected = snapshot.read(snapshot.header.layers).array("layers.1.k").copy()
        path.unlink()
        path.write_bytes(b"another")
        assert (snapshot.read([1]).array("layers.1.k") == expected).all()
    with pytest.raises(StoreError, match="cannot be read"):
        snapshot.read([1])
