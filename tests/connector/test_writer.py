"""Chunks that wait to be written: together, in order, and each with its own error."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import pytest

from kvx_core import BlockTable, Directory, PrefixStore, Section, Snapshot, StoreError
from kvx_core.connector import writer as writer_module
from kvx_core.connector.boundary import Boundary
from kvx_core.connector.counts import Counts
from kvx_core.connector.settings import StoreSettings
from kvx_core.connector.writer import Writer
from kvx_core.snapshot import Precision
from kvx_core.stores.blobs import Put
from tests.connector.serving import prompt, store_in
from tests.connector.toy_connector import view_of
from tests.connector.toy_engine import BLOCK_SIZE, DIM, HEADS, LAYERS, Engine

CHUNK = 16


class Gated(Directory):
    """Writes nothing before it is told to; the files of each call."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.go, self.begun = threading.Event(), threading.Event()
        self.calls: list[int] = []
        self.refused = ""

    def _wait(self, names: Sequence[str]) -> None:
        self.begun.set()
        assert self.go.wait(60)
        self.calls.append(len(names))

    def put(self, name: str, write: Callable[[BinaryIO], None], *, durable: bool = True) -> bool:
        if name.endswith(".safetensors"):
            self._wait([name])
        return super().put(name, write, durable=durable)

    def put_all(
        self,
        files: Sequence[tuple[str, Callable[[BinaryIO], None]]],
        num_bytes: int = 0,
        *,
        durable: bool = True,
    ) -> list[Put]:
        if not durable:  # marks
            return super().put_all(files, num_bytes, durable=durable)
        self._wait([name for name, _ in files])
        return [
            StoreError(f"{name} is refused") if name == self.refused else Directory.put(self, *file)
            for file in files
            for name in file[:1]
        ]


class Writing:
    """A Writer of one thread, which waits, and a prompt in chunks."""

    def __init__(self, path: Path, num_chunks: int, seed: int = 0) -> None:
        self.blobs, self.log, self.counts = Gated(path), list[str](), Counts()
        self.store = store_in(self.blobs)
        settings = StoreSettings(path=path, writer_threads=1)
        boundary = Boundary(self.log.append)
        self.boundary = boundary
        self.writer = Writer(settings, boundary, self.counts, lambda store, chunk: False)
        self.chunks = chunks_of(self.store, prompt(num_chunks * CHUNK, seed))

    def add_all(self) -> None:
        """The first chunk is being written while the others wait."""
        for chunk in self.chunks:
            self.writer.add(self.store, chunk)
            self.writer.start()
            assert self.blobs.begun.wait(60)

    def finish(self) -> None:
        self.blobs.go.set()
        assert self.writer.threads.wait(60)

    def names(self) -> list[str]:
        return [self.store.name_of(chunk) for chunk in self.chunks]


def chunks_of(store: PrefixStore, tokens: list[int]) -> list[Snapshot]:
    engine = Engine()
    engine.decoder.caches.normal_()
    blocks = list(range(1, 1 + -(-len(tokens) // BLOCK_SIZE)))
    section = Section(tuple(range(LAYERS)), view_of(engine), BlockTable.packed([blocks]))
    found = [store.capture(tokens, *span, [section]) for span in store.spans(len(tokens))]
    return [chunk for chunk in found if chunk is not None]


@pytest.fixture
def writing(tmp_path: Path) -> Iterator[Writing]:
    made = Writing(tmp_path, 8)
    yield made
    made.blobs.go.set()
    made.writer.threads.shutdown(60)


def test_what_waits_is_written_together(writing: Writing) -> None:
    writing.add_all()
    pending = sum(chunk.num_bytes for chunk in writing.chunks)
    assert writing.writer.pending_bytes == pending
    writing.finish()
    assert writing.blobs.calls == [1, 7]
    assert writing.writer.pending_bytes == 0
    files = [writing.blobs.root / name for name in writing.names()]
    assert writing.counts.take()["saved_bytes"] == sum(file.stat().st_size for file in files)
    assert writing.boundary.take_counts() == {}


@pytest.mark.parametrize("refused", [False, True])
def test_a_chunk_is_not_copied_again_while_it_is_written(refused: bool, tmp_path: Path) -> None:
    """Before the write the writer has asked the disk, which does not have it, and so do lookups."""
    writing = Writing(tmp_path, 1)
    store, tokens = writing.store, prompt(CHUNK, 0)

    def is_missing(*, from_memory: bool) -> bool:
        return store.missing(tokens, 0, CHUNK, range(LAYERS), (0, HEADS), from_memory=from_memory)

    writing.writer = Writer(
        StoreSettings(path=tmp_path, writer_threads=1),
        writing.boundary,
        writing.counts,
        lambda store, chunk: not is_missing(from_memory=False),
    )
    if refused:
        (writing.blobs.refused,) = writing.names()
    writing.add_all()
    assert not is_missing(from_memory=True)
    assert store.lookup(tokens).num_tokens == 0
    assert not is_missing(from_memory=True)
    writing.finish()
    assert is_missing(from_memory=True) == is_missing(from_memory=False) == refused
    writing.writer.threads.shutdown(60)


@pytest.mark.parametrize("converts", [False, True])
def test_what_a_format_spares_is_counted(converts: bool, tmp_path: Path) -> None:
    """Files of plain bytes are no larger for what is beside them: that spares nothing."""
    settings = StoreSettings(path=tmp_path, format="f16" if converts else None)
    store = settings.store(
        fingerprint="toy",
        num_layers=LAYERS,
        total_kv_heads=HEADS,
        precision=Precision.of("float32"),
        new_chunk_tokens=64,
    )
    counts = Counts()
    writer = Writer(settings, Boundary(pytest.fail), counts, lambda store, chunk: False)
    assert writer.commit(store, chunks_of(store, prompt(128, 6))) == [None, None]
    found = counts.take()
    assert (found["store_files"], found["store_bytes"]) == store.used[:2]
    in_cache = LAYERS * len("kv") * HEADS * 128 * DIM * 4
    spared = in_cache - found["saved_bytes"]
    assert (spared > 0) == converts
    assert found.get("spared_bytes") == (spared if converts else None)


def test_so_many_at_most(writing: Writing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "TOGETHER", 3)
    writing.add_all()
    writing.finish()
    assert writing.blobs.calls == [1, 3, 3, 1]


def test_stores_of_other_salts_are_written_apart(writing: Writing) -> None:
    salted = writing.store.salted("other")
    others = chunks_of(salted, prompt(2 * CHUNK, 5))
    writing.add_all()
    for chunk in others:
        writing.writer.add(salted, chunk)
    writing.writer.start()
    writing.finish()
    assert writing.blobs.calls == [1, 7, 2]
    assert all((writing.blobs.root / salted.name_of(chunk)).is_file() for chunk in others)


def test_what_others_have_stored_meanwhile_is_not_written(writing: Writing) -> None:
    """Nor does memory answer for it: nobody has read it here, and it may be damaged."""
    stored = set(writing.names()[1::2])  # not the first one, which is written at once
    writing.writer._is_stored = lambda store, chunk: store.name_of(chunk) in stored
    writing.add_all()
    assert all(map(writing.store.index.is_held, writing.names()))
    writing.finish()
    assert sum(writing.blobs.calls) == len(writing.chunks) - len(stored)
    held = {name for name in writing.names() if writing.store.index.is_held(name)}
    assert held == set(writing.names()) - stored
    assert writing.boundary.take_counts() == {}


def test_one_that_fails_costs_no_other(writing: Writing) -> None:
    """And is saved again the next time: memory does not take it for stored."""
    writing.blobs.refused = writing.names()[3]
    writing.add_all()
    writing.finish()
    assert writing.boundary.take_counts() == {"dropped_saves": 1}
    assert len(writing.log) == 1
    assert "KVX could not write to its store" in writing.log[0]
    assert "is refused" in writing.log[0]
    there = [(writing.blobs.root / name).is_file() for name in writing.names()]
    assert there == [True, True, True, False, True, True, True, True]
    assert writing.writer.pending_bytes == 0
    errors = writing.writer.commit(writing.store, writing.chunks[2:5])
    assert [str(error).endswith("is refused") for error in errors] == [False, True, False]


def test_an_error_that_nobody_expects_fails_those_of_one_call(
    writing: Writing, monkeypatch: pytest.MonkeyPatch
) -> None:
    def commit_all(store: PrefixStore, snapshots: Sequence[Snapshot]) -> list[int]:
        raise ZeroDivisionError

    writing.add_all()
    monkeypatch.setattr(PrefixStore, "commit_all", commit_all)
    writing.finish()
    assert writing.boundary.take_counts() == {"dropped_saves": 7}
    assert len(writing.log) == 1
    assert writing.writer.pending_bytes == 0


def test_chunks_that_cannot_be_started_cost_no_others(
    writing: Writing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is being written and two wait for its thread when no more can be handed over."""

    def refuse(job: object) -> None:
        raise RuntimeError("shut down")

    for chunk in writing.chunks[:3]:
        writing.writer.add(writing.store, chunk)
    writing.writer.start()
    assert writing.blobs.begun.wait(60)
    monkeypatch.setattr(writing.writer.threads, "submit", refuse)
    for chunk in writing.chunks[3:5]:
        writing.writer.add(writing.store, chunk)
    with pytest.raises(RuntimeError, match="shut down"):
        writing.writer.start()
    writing.finish()
    there = [(writing.blobs.root / name).is_file() for name in writing.names()[:5]]
    assert there == [True, True, True, False, False]
    assert writing.writer.pending_bytes == 0
    assert not any(map(writing.store.index.is_held, writing.names()[3:5]))


def test_nothing_is_written_after_a_shutdown(writing: Writing) -> None:
    writing.blobs.go.set()
    assert writing.writer.threads.shutdown(60)
    for chunk in writing.chunks[:3]:
        writing.writer.add(writing.store, chunk)
    assert writing.writer.pending_bytes > 0
    with pytest.raises(RuntimeError, match="shut down"):
        writing.writer.start()
    assert writing.writer.pending_bytes == 0
    assert not writing.store.index.is_held(writing.names()[0])  # memory does not take it for stored
