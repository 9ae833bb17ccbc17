"""Loads in batches that helpers read ahead, and commits that several threads write.

Files of a few KiB are handed to threads as large ones are; batches have one to three files.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from kvx_core import Directory, PrefixStore, StoreError
from kvx_core._c.os_files import OpenFile
from kvx_core.snapshot import threaded
from kvx_core.stores import loads, new_files
from kvx_core.stores.loads import Progress
from kvx_core.stores.match import Match
from tests.stores.engine import HEADS, LAYERS, Engine, ranks, save, store_in

CHUNK = 16
LENGTH = 9 * CHUNK + 6
PROMPT = range(5000, 5000 + LENGTH)
FILE_BYTES = CHUNK * LAYERS * 2 * HEADS * 8 * 4


@pytest.fixture(params=[1, 3], autouse=True)
def files_together(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Files of a batch, more or less: memory of a room is counted in pages."""
    together: int = request.param
    monkeypatch.setattr(threaded, "_num_threads", lambda: 4)
    monkeypatch.setattr(threaded, "_LEAST_BYTES", 0)
    for module in (loads, new_files):
        monkeypatch.setattr(module, "_LARGE", 0)
    monkeypatch.setattr(loads, "_TOGETHER", together * FILE_BYTES + 4096)
    return together


@dataclass
class Watched(Progress):
    """Remembers how far the load was, and cancels it there."""

    seen: tuple[int, ...] = ()
    cancel_at: int = LENGTH + 1

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "stop" and value:
            self.seen = (*self.seen, value)
            if value >= self.cancel_at:
                self.is_cancelled = True


def engine_of(seed: int = 1) -> Engine:
    return Engine(seed=seed, num_tokens=LENGTH)


def stored(blobs: Path | Directory) -> tuple[PrefixStore, Match]:
    store = store_in(blobs)
    save(store, PROMPT, engine_of(0))
    match = store.lookup(PROMPT)
    assert match.num_tokens == LENGTH
    return store, match


@pytest.mark.parametrize(("start", "stop"), [(0, LENGTH), (5, 7), (17, LENGTH - 1), (64, 128)])
def test_any_part_of_a_prompt(start: int, stop: int, tmp_path: Path) -> None:
    store, match = stored(tmp_path)
    for parts in (1, 2):
        engine, progress = engine_of(), Watched()
        num_bytes = store.load(match, start, stop, engine.sections(parts), progress=progress)
        assert num_bytes == (stop - start) * FILE_BYTES // CHUNK
        engine.check(PROMPT, start, stop)
        assert list(progress.seen) == sorted(progress.seen)
        assert progress.stop == stop
        assert all(each in (start, stop) or each % CHUNK == 0 for each in progress.seen)


def test_files_of_ranks(tmp_path: Path) -> None:
    """A span has a file of each rank, and another rank takes parts of both."""
    store = store_in(tmp_path)
    halves = ((range(LAYERS), range(2)), (range(LAYERS), range(2, 4)))
    for rank in ranks(*halves, num_tokens=LENGTH):
        save(store, PROMPT, rank)
    (middle,) = ranks((range(1, 3), range(1, 3)), seed=1, num_tokens=LENGTH)
    match = store.lookup(PROMPT)
    store.load(match, 3, LENGTH, middle.sections())
    middle.check(PROMPT, 3, LENGTH)


@pytest.mark.parametrize("bad", [(0,), (4,), (9,), (3, 4), (1, 8), (2, 5, 9)])
def test_bad_files(bad: tuple[int, ...], tmp_path: Path) -> None:
    """What is before the first is loaded, and all of them are deleted."""
    store, match = stored(tmp_path)
    paths = [tmp_path / match.spans[i].names[0] for i in bad]
    for path in paths:
        data = path.read_bytes()
        path.write_bytes(data[:-9] + bytes([data[-9] ^ 4]) + data[-8:])
    engine, progress = engine_of(), Watched()
    with pytest.raises(StoreError, match="have changed since") as found:
        store.load(match, 0, LENGTH, engine.sections(), progress=progress)
    assert match.spans[bad[0]].names[0] in str(found.value)
    assert progress.stop == bad[0] * CHUNK
    engine.check(PROMPT, 0, progress.stop)
    assert not any(path.exists() for path in paths)
    save(store, PROMPT, engine_of(0))
    store.load(store.lookup(PROMPT), 0, LENGTH, engine.sections())
    engine.check(PROMPT, 0, LENGTH)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    store, match = stored(tmp_path)
    (tmp_path / match.spans[5].names[0]).unlink()
    engine, progress = engine_of(), Progress()
    with pytest.raises(StoreError, match="is not in the store"):
        store.load(match, 0, LENGTH, engine.sections(), progress=progress)
    assert progress.stop == 5 * CHUNK
    engine.check(PROMPT, 0, 5 * CHUNK)


@pytest.mark.parametrize("cancel_at", [1, 4 * CHUNK, 8 * CHUNK])
def test_a_load_that_is_cancelled(cancel_at: int, tmp_path: Path) -> None:
    store, match = stored(tmp_path)
    engine, progress = engine_of(), Watched(cancel_at=cancel_at)
    with pytest.raises(StoreError, match="cancelled after") as found:
        store.load(match, 0, LENGTH, engine.sections(), progress=progress)
    assert cancel_at <= progress.stop < LENGTH
    assert str(found.value) == f"the load was cancelled after {progress.stop} tokens"
    engine.check(PROMPT, 0, progress.stop)
    store.load(match, 0, LENGTH, engine.sections())
    engine.check(PROMPT, 0, LENGTH)


class Faulty(Directory):
    """Raises an error for one file; remembers who has asked for which."""

    fault: tuple[str, BaseException] | None = None

    def fetch(
        self, name: str, views: tuple[Any, ...], least: int = 0, most: int = -1
    ) -> OpenFile | None:
        self.threads.add(threading.get_ident())
        if self.fault is not None and name == self.fault[0]:
            raise self.fault[1]
        return super().fetch(name, views, least, most)

    threads: set[int]


@pytest.mark.parametrize("error", [ValueError("a bug"), MemoryError(), KeyboardInterrupt()])
def test_an_error_that_is_none_of_a_store(error: BaseException, tmp_path: Path) -> None:
    blobs = Faulty(tmp_path)
    blobs.threads = set()
    store, match = stored(blobs)
    blobs.fault = match.spans[5].names[0], error
    engine, progress = engine_of(), Progress()
    with pytest.raises(type(error)):
        store.load(match, 0, LENGTH, engine.sections(), progress=progress)
    assert progress.stop <= 5 * CHUNK
    engine.check(PROMPT, 0, progress.stop)
    blobs.fault = None
    blobs.threads.clear()
    end = time.monotonic() + 60
    while len(blobs.threads) < 2 and time.monotonic() < end:  # a helper may wake up too late
        store.load(match, 0, LENGTH, engine.sections())
        engine.check(PROMPT, 0, LENGTH)
    assert len(blobs.threads) > 1


def test_many_loads_at_once(tmp_path: Path) -> None:
    store, match = stored(tmp_path)
    engines = [engine_of(seed) for seed in range(6)]
    with ThreadPoolExecutor(3) as pool:
        for _ in range(3):
            list(pool.map(lambda e: store.load(match, 0, LENGTH, e.sections()), engines))
    for engine in engines:
        engine.check(PROMPT, 0, LENGTH)


def test_a_forked_child_loads(tmp_path: Path) -> None:
    """It has threads of its own. Not torch's: a child of a process that has used them waits."""
    store, match = stored(tmp_path)
    first, second = engine_of(), engine_of()
    sections = second.sections()
    store.load(match, 0, LENGTH, first.sections())
    child = os.fork()
    if not child:
        code = 1
        try:
            signal.alarm(60)
            store.load(match, 0, LENGTH, sections)
            pairs = zip(first.cache.storages, second.cache.storages, strict=True)
            code = int(not all((one.numpy() == other.numpy()).all() for one, other in pairs))
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# ---- commits ----


@pytest.fixture
def memory_folder(tmp_path: Path) -> Iterator[Path]:
    """On a file system whose files are synced together."""
    folder = Path("/dev/shm") / f"kvx-{tmp_path.name}-{os.getpid()}"
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def test_a_commit_of_many(memory_folder: Path) -> None:
    """Every file is as if it were committed alone; one is there already."""
    engine, store = engine_of(0).compute(PROMPT), store_in(memory_folder / "a")
    alone = store_in(memory_folder / "b")
    written = save(alone, PROMPT, engine)
    captured = [store.capture(PROMPT, *span, engine.sections()) for span in store.spans(LENGTH)]
    snapshots = [snapshot for snapshot in captured if snapshot is not None]
    assert store.commit(snapshots[3]) == written[3]
    written[3] = 0
    assert store.commit_all(snapshots) == written

    def files(root: Path) -> dict[str, bytes]:
        paths = root.rglob("*.safetensors")
        return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}

    assert files(memory_folder / "a") == files(memory_folder / "b")
    assert len(files(memory_folder / "a")) == len(written)


def test_files_are_written_by_threads_and_named_in_order(
    memory_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs, threads, named = Directory(memory_folder), set[int](), list[str]()
    together = threading.Barrier(4, timeout=60)
    link = os.link

    def write(file: BinaryIO) -> None:
        threads.add(threading.get_ident())
        together.wait()
        file.write(b"x")

    def linked(src: Any, dst: Any, **options: Any) -> None:
        named.append(dst)
        link(src, dst, **options)

    monkeypatch.setattr(os, "link", linked)
    names = [f"{i}.a" for i in range(8)]
    assert blobs.put_all([(f"f/{name}", write) for name in names], 1 << 40) == [True] * 8
    assert len(threads) == 4
    assert named == names


@pytest.mark.parametrize("error", [StoreError("no more"), ValueError("a bug")])
def test_a_write_that_fails(error: Exception, memory_folder: Path) -> None:
    """Of a StoreError the others are put; after any other no file has a name, and none stays."""
    blobs = Directory(memory_folder)

    def fail(file: BinaryIO) -> None:
        file.write(b"half")
        raise error

    files = [(f"f/{i}", fail if i == 5 else lambda file: file.write(b"x")) for i in range(9)]
    if isinstance(error, StoreError):
        found = blobs.put_all(files, 1 << 40)
        assert [str(each) for each in found] == ["True"] * 5 + ["no more"] + ["True"] * 3
    else:
        with pytest.raises(ValueError, match="a bug"):
            blobs.put_all(files, 1 << 40)
    names = sorted(path.name for path in memory_folder.rglob("*") if path.is_file())
    assert names == ([str(i) for i in range(9) if i != 5] if isinstance(error, StoreError) else [])


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_written_once_cancel_has_returned(seed: int, tmp_path: Path) -> None:
    """Whenever it is called: the blocks may be another request's then."""
    store, match = stored(tmp_path)
    chance = random.Random(seed)
    stops = set[int]()
    for _ in range(30):
        engine, progress = engine_of(), Progress()
        failed: list[StoreError] = []

        def load(engine: Engine = engine, progress: Progress = progress) -> None:
            try:
                store.load(match, 0, LENGTH, engine.sections(), progress=progress)
            except StoreError as error:
                failed.append(error)  # noqa: B023

        thread = threading.Thread(target=load)
        thread.start()
        time.sleep(chance.uniform(0, 0.008))
        progress.cancel()
        held, stop = [one.clone() for one in engine.cache.storages], progress.stop
        thread.join()
        for storage, before in zip(engine.cache.storages, held, strict=True):
            assert storage.equal(before)
        assert progress.stop == stop
        engine.check(PROMPT, 0, stop)
        stops.add(stop)
    assert len(stops) > 1
